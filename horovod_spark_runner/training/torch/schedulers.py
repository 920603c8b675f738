"""Learning rate schedulers: made, stepped, and kept as JSON."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...errors import InvalidInputError, ModelError, brief
from .losses import LOSS
from .torch_model import TorchModel

# What a scheduler refers to and a checkpoint holds otherwise.
_LEFT_OUT = ("optimizer",)
_COUNTER = "counter"


class Schedulers:
    """The schedulers of a training.

    Args:
        model: says which there are.
        optimizers: what they are for, by name.

    Raises:
        ModelError: one cannot be used.
    """

    def __init__(self, model: TorchModel, optimizers: Mapping[str, Optimizer]) -> None:
        given = model.scheduler
        if given is None:
            named: Mapping[str, Any] = {}
        elif isinstance(given, Mapping):
            named = given
        else:
            named = {next(iter(optimizers)): given}
            if len(optimizers) > 1:
                raise ModelError(
                    "scheduler must be a dictionary by the names of the optimizers, "
                    f"{', '.join(map(repr, optimizers))}"
                )
        unknown = [name for name in named if name not in optimizers]
        if unknown:
            raise ModelError(
                f"scheduler names the optimizer {unknown[0]!r}; there are "
                f"{', '.join(map(repr, optimizers))}"
            )
        self._made = {name: _made(one, optimizers[name]) for name, one in named.items()}
        self._every_step = model.schedule == "step"
        plateau = [s for s in self._made.values() if isinstance(s, ReduceLROnPlateau)]
        if plateau and self._every_step:
            raise ModelError("ReduceLROnPlateau looks at results of epochs: schedule='epoch'")
        self.capture()  # what cannot be kept is told at once

    def __bool__(self) -> bool:
        return bool(self._made)

    def after_step(self) -> None:
        """Go on after a step of the optimizers."""
        if self._every_step:
            for scheduler in self._made.values():
                scheduler.step()

    def after_epoch(self, results: Mapping[str, object]) -> None:
        """Go on after an epoch, with its results over the rows of all ranks."""
        if self._every_step:
            return
        for scheduler in self._made.values():
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(_watched(results))
            else:
                scheduler.step()

    def describe(self) -> dict[str, str]:
        """Return the classes, by the optimizers' names."""
        return {name: type(one).__name__ for name, one in self._made.items()}

    def capture(self) -> dict[str, Any]:
        """Return what they remember, as JSON."""
        return {
            name: {
                key: _as_json(value, f"{type(one).__name__}.{key}")
                for key, value in one.state_dict().items()
                if key not in _LEFT_OUT
            }
            for name, one in self._made.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give them what `capture` returned."""
        for name, one in self._made.items():
            if name in state:
                one.load_state_dict({k: _from_json(v) for k, v in state[name].items()})


def _made(given: Any, optimizer: Optimizer) -> Any:
    kinds = (LRScheduler, ReduceLROnPlateau)
    made = given
    if not isinstance(given, kinds) and callable(given):
        made = given(optimizer)
    if not isinstance(made, kinds):
        raise ModelError(
            "scheduler must be a torch.optim.lr_scheduler of the optimizer, or a function that "
            f"makes one of it, got {brief(made)}"
        )
    if made.optimizer is not optimizer:
        raise ModelError(
            f"scheduler {type(made).__name__} is of another optimizer than the training's; give a "
            "function of the optimizer"
        )
    return made


def _watched(results: Mapping[str, object]) -> float:
    value = results.get(f"val_{LOSS}", results.get(LOSS))
    if not isinstance(value, float):
        raise InvalidInputError(
            f"ReduceLROnPlateau looks at the loss, but the epoch gave {', '.join(results)}"
        )
    return value


def _as_json(value: Any, where: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, collections.Counter):
        return {_COUNTER: sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [_as_json(each, where) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _as_json(each, where) for key, each in value.items() if key not in _LEFT_OUT}
    raise ModelError(
        f"scheduler keeps {where}={brief(value)}, which checkpoints cannot hold: they are arrays "
        "and JSON"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {_COUNTER}:
            return collections.Counter(dict(map(tuple, value[_COUNTER])))
        return {key: _from_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    return value
