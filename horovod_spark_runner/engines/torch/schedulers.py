"""Learning rate schedulers: created, stepped, and saved as JSON."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...errors import InvalidInputError, ModelError, brief
from .losses import LOSS
from .optimizers import COUNTER, as_json
from .torch_model import TorchModel

# A scheduler that was sent to a rank watched another object of its optimizer.
warnings.filterwarnings("ignore", "Seems like `optimizer.step\\(\\)` has been overridden")


@dataclass(frozen=True)
class Planned:
    """A scheduler, and when it steps.

    Attributes:
        scheduler: the scheduler.
        every: ``"epoch"`` or ``"step"``.
        monitor: the result that it looks at; ``None`` for the validation's loss, or else the
            training's.
    """

    scheduler: Any
    every: str = "epoch"
    monitor: str | None = None

    @property
    def watches(self) -> bool:
        """True if it reads a result."""
        return isinstance(self.scheduler, ReduceLROnPlateau)


def planned_schedulers(
    model: TorchModel, optimizers: Mapping[str, Optimizer]
) -> dict[str, Planned]:
    """Return the schedulers of a `TorchModel`, by the names of their optimizers.

    Raises:
        ModelError: one cannot be used.
    """
    scheduler = model.scheduler
    if scheduler is None:
        named: Mapping[str, Any] = {}
    elif isinstance(scheduler, Mapping):
        named = scheduler
    else:
        named = {next(iter(optimizers)): scheduler}
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
    return {
        name: Planned(_made(one, optimizers[name]), model.schedule) for name, one in named.items()
    }


class Schedulers:
    """The schedulers of a training.

    Args:
        planned: what there are, by name.

    Raises:
        ModelError: one cannot be used.
    """

    def __init__(self, planned: Mapping[str, Planned]) -> None:
        self._planned = planned
        self._made = {name: plan.scheduler for name, plan in planned.items()}
        if any(plan.watches and plan.every == "step" for plan in planned.values()):
            raise ModelError("ReduceLROnPlateau looks at results of epochs: schedule='epoch'")
        self.capture()  # fails early if a state cannot be saved

    def __bool__(self) -> bool:
        return bool(self._made)

    @property
    def follow_steps(self) -> bool:
        """True if a scheduler steps after each training step instead of each epoch."""
        return any(plan.every == "step" for plan in self._planned.values())

    def after_step(self) -> None:
        """Go on after a step of the optimizers."""
        for plan in self._due("step"):
            plan.scheduler.step()

    def after_epoch(self, results: Mapping[str, object]) -> None:
        """Go on after an epoch, with its results over the rows of all ranks."""
        for plan in self._due("epoch"):
            if plan.watches:
                plan.scheduler.step(_watched(plan, results))
            else:
                plan.scheduler.step()

    def _due(self, every: str) -> list[Planned]:
        return [plan for plan in self._planned.values() if plan.every == every]

    def describe(self) -> dict[str, str]:
        """Return the classes, by name."""
        return {name: type(one).__name__ for name, one in self._made.items()}

    def capture(self) -> dict[str, Any]:
        """Return their state, as JSON."""
        return {
            name: as_json(one.state_dict(), type(one).__name__) for name, one in self._made.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `capture`."""
        for name, one in self._made.items():
            if name in state:
                one.load_state_dict({k: _from_json(v) for k, v in state[name].items()})


def _made(source: Any, optimizer: Optimizer) -> Any:
    kinds = (LRScheduler, ReduceLROnPlateau)
    made = source
    if not isinstance(source, kinds) and callable(source):
        made = source(optimizer)
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


def _watched(plan: Planned, results: Mapping[str, object]) -> float:
    """Return the result that a scheduler looks at.

    Raises:
        InvalidInputError: there is none.
    """
    if plan.monitor is not None:
        value, what = results.get(plan.monitor), repr(plan.monitor)
    else:
        value, what = results.get(f"val_{LOSS}", results.get(LOSS)), "the loss"
    if isinstance(value, float):
        return value
    raise InvalidInputError(
        f"ReduceLROnPlateau looks at {what}, but the epoch gave "
        f"{', '.join(map(repr, results)) or 'nothing'}"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {COUNTER}:
            return collections.Counter(dict(map(tuple, value[COUNTER])))
        return {key: _from_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    return value
