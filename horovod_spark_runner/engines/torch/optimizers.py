"""Optimizers, their learning rates and schedulers."""

from __future__ import annotations

import collections
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...config.sync import Allreduce, Compression, Moving, Sync
from ...errors import InvalidInputError, ModelError, brief
from ...sync.codec import notice_late_momentum
from .losses import LOSS
from .torch_model import TorchModel

# A scheduler that was sent to a rank watched another object of its optimizer.
warnings.filterwarnings("ignore", "Seems like `optimizer.step\\(\\)` has been overridden")
# Settings that a resumed run always takes from the checkpoint.
_RATES = ("lr", "initial_lr")
# How a `collections.Counter`, whose keys are numbers, is marked in JSON.
_COUNTER = "counter"


def make_optimizers(model: TorchModel, module: nn.Module) -> dict[str, Optimizer]:
    """Return the optimizers by name; a single one is called ``""``.

    Raises:
        ModelError: one cannot be used.
    """
    optimizer = model.optimizer
    if isinstance(optimizer, Mapping):
        if model.train_step is None:
            raise ModelError(
                f"optimizer is a dictionary of {len(optimizer)}; several optimizers need a "
                "train_step, which says when each of them steps"
            )
        made = {str(name): one for name, one in optimizer.items()}
    else:
        made = {"": _make_optimizer(optimizer, module)}
    check_optimizers(made, module)
    return made


def _make_optimizer(optimizer: Any, module: nn.Module) -> Any:
    if isinstance(optimizer, Optimizer):
        return optimizer
    # Also those that do not require a gradient yet, which optimizers leave alone until then.
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ModelError(f"{type(module).__name__} has no parameter that requires a gradient")
    if isinstance(optimizer, str):
        optimizer_class = getattr(torch.optim, optimizer, None)
        if not (inspect.isclass(optimizer_class) and issubclass(optimizer_class, Optimizer)):
            names = [n for n, c in vars(torch.optim).items() if inspect.isclass(c)]
            raise ModelError(
                f"unknown optimizer={optimizer!r}; torch.optim has "
                f"{', '.join(sorted(n for n in names if n not in ('Optimizer', 'LBFGS')))}"
            )
        optimizer = optimizer_class
    if not callable(optimizer):
        raise ModelError(
            "optimizer must be the name of a class of torch.optim, a function that makes one of "
            f"parameters, or an optimizer, got {brief(optimizer)}"
        )
    return optimizer(parameters)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return all parameters that an optimizer changes, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_optimizers(made: Mapping[str, Any], module: nn.Module) -> None:
    """Check that optimizers, by name, can train a module on several ranks.

    Raises:
        ModelError: one cannot; the message names it.
    """
    parameter_ids = {id(parameter) for parameter in module.parameters()}
    for name, optimizer in made.items():
        _check(optimizer, f"optimizer {name!r}" if name else "optimizer", parameter_ids)


def _check(optimizer: Any, what: str, parameter_ids: set[int]) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ModelError(f"{what} must be a torch.optim.Optimizer, got {brief(optimizer)}")
    kind = type(optimizer).__name__
    if type(optimizer).__module__.startswith("horovod."):
        raise ModelError(
            f"{what} is Horovod's DistributedOptimizer; give the one that it wraps: gradients are "
            "exchanged already"
        )
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise ModelError(
            f"{what} {kind} cannot be used: it computes gradients several times a step"
            if isinstance(optimizer, torch.optim.LBFGS)
            else f"{what} {kind} is for sparse gradients, which are not exchanged"
        )
    if any(id(parameter) not in parameter_ids for parameter in parameters_of(optimizer)):
        raise ModelError(
            f"{what} {kind} was made of parameters that are not the module's: their values would "
            "not be kept. Build module and optimizer in the same call of model_fn, without copying "
            "the module in between"
        )


def check_compression(
    model: TorchModel, optimizers: Mapping[str, Optimizer], compression: Compression
) -> None:
    """Check that a module's gradients can be compressed so.

    Raises:
        ModelError: an optimizer would be given something else than it takes it for.
    """
    groups = [group for one in optimizers.values() for group in one.param_groups]
    if not isinstance(compression, Moving) or not compression.momentum:
        moves = any(group.get("momentum", 0.0) for group in groups)
        notice_late_momentum(compression, moves=moves)
        return
    kind = type(compression).__name__
    clipped = model.clip_norm is not None or model.clip_value is not None
    for name, optimizer in optimizers.items():
        plain = type(optimizer) is torch.optim.SGD and not any(
            group["momentum"] or group["weight_decay"] for group in optimizer.param_groups
        )
        if not plain or clipped:
            what = f"optimizer {name!r}" if name else "optimizer"
            raise ModelError(
                f"{what} ({type(optimizer).__name__}) would see sums of momentum: compression="
                f"{kind}(…, momentum={compression.momentum:g}) applies it on each rank, before it "
                "chooses what to send. Use torch.optim.SGD without momentum and weight_decay, and "
                f"no clip_norm or clip_value; or leave momentum to the optimizer: {kind}(…, "
                "momentum=0)"
            )


def check_gradients(module: nn.Module, *, alone: bool) -> None:
    """Check that no layer gives sparse gradients, or changes its weights otherwise.

    Args:
        module: the module.
        alone: whether a step on this rank is all that changes its weights, until ranks meet.

    Raises:
        ModelError: a layer gives sparse gradients, or changes its weights.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if layer.sparse:
            raise ModelError(
                f"layer {name!r} gives sparse gradients, which are not exchanged; build it with "
                "sparse=False"
            )
        if layer.max_norm is not None and not alone:
            raise ModelError(
                f"layer {name!r} has max_norm={layer.max_norm:g}: with every batch it changes its "
                "weights, those that a rank's own rows use, so that ranks would hold other models. "
                "Limit what it gives, in forward, or train on one rank with sync=Allreduce()"
            )


def check_complex(module: nn.Module, sync: Sync, ranks: int) -> None:
    """Check that complex weights, if there are any, are those of one rank.

    Raises:
        ModelError: several ranks, or a compression, would train complex weights.
    """
    held = [name for name, parameter in module.named_parameters() if parameter.is_complex()]
    if held and (ranks > 1 or sync != Allreduce()):
        raise ModelError(
            f"weight {held[0]!r} is complex, and ranks add up real numbers: make "
            "torch.view_as_real of it the parameter, and take torch.view_as_complex in forward; or "
            "train on one rank with sync=Allreduce(), without compression"
        )


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the properties that identify an optimizer, as JSON."""
    # What schedulers note of the rate says the same as the rate.
    groups = [
        {key: value for key, value in group.items() if key != "initial_lr"}
        for group in settings_of(optimizer)
    ]
    return {"class": type(optimizer).__name__, "groups": groups}


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group of an optimizer's parameters, as JSON.

    Raises:
        ModelError: one is no number, text or list of these.
    """
    return [
        _as_json({k: v for k, v in group.items() if k != "params"}, type(optimizer).__name__)
        for group in optimizer.param_groups
    ]


def restore_settings(
    optimizer: Optimizer, initial: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> None:
    """Restore an optimizer's rates, and its settings that training has changed, from a checkpoint.

    Args:
        optimizer: as this call made it.
        initial: the initial settings of the checkpoint's training.
        now: those when it was taken.
    """
    for group, first, last in zip(optimizer.param_groups, initial, now, strict=True):
        for key, value in last.items():
            if key in _RATES or (key in group and first.get(key) != value):
                _set(group, key, value)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    held = group.get(key)
    if isinstance(held, Tensor):
        held.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(value, list) else value


class LearningRates:
    """The learning rates of all optimizers' groups, to be scaled; see `Rates`."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [group for one in optimizers for group in one.param_groups]

    def read(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups]

    def write(self, values: Sequence[float]) -> None:
        for group, value in zip(self._groups, values, strict=True):
            _set(group, "lr", value)


@dataclass(frozen=True)
class Schedule:
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


def make_schedulers(model: TorchModel, optimizers: Mapping[str, Optimizer]) -> dict[str, Schedule]:
    """Return the schedulers of a `TorchModel`, by the names of their optimizers.

    Raises:
        ModelError: one cannot be used.
    """
    named = model.scheduler
    if named is None:
        return {}
    there = ", ".join(map(repr, optimizers))
    if not isinstance(named, Mapping):
        if len(optimizers) > 1:
            raise ModelError(
                f"scheduler must be a dictionary by the names of the optimizers, {there}"
            )
        named = {next(iter(optimizers)): named}
    unknown = [name for name in named if name not in optimizers]
    if unknown:
        raise ModelError(f"scheduler names the optimizer {unknown[0]!r}; there are {there}")
    return {
        name: Schedule(make_scheduler(one, optimizers[name]), model.schedule)
        for name, one in named.items()
    }


def make_scheduler(source: Any, optimizer: Optimizer) -> Any:
    """Return a scheduler of an optimizer, from one or a function that makes it.

    Raises:
        ModelError: ``source`` is neither.
    """
    kinds = (LRScheduler, ReduceLROnPlateau)
    made = source(optimizer) if callable(source) and not isinstance(source, kinds) else source
    if not isinstance(made, kinds):
        raise ModelError(
            "scheduler must be a torch.optim.lr_scheduler of the optimizer, or a function that "
            f"makes one of it, got {brief(made)}"
        )
    if made.optimizer is not optimizer:
        raise ModelError(
            f"scheduler {type(made).__name__} is of another optimizer than the training's; make it "
            "of the optimizer that is given with it"
        )
    return made


class Schedulers:
    """The schedulers of a training.

    Args:
        schedules: what there are, by name.

    Raises:
        ModelError: one cannot be used.
    """

    def __init__(self, schedules: Mapping[str, Schedule]) -> None:
        self._schedules = schedules
        if any(one.watches and one.every == "step" for one in schedules.values()):
            raise ModelError("ReduceLROnPlateau looks at results of epochs: schedule='epoch'")
        self.capture()  # fails early if a state cannot be saved

    def __bool__(self) -> bool:
        return bool(self._schedules)

    @property
    def objects(self) -> list[object]:
        """The schedulers."""
        return [one.scheduler for one in self._schedules.values()]

    @property
    def follow_steps(self) -> bool:
        """True if a scheduler steps after each training step instead of each epoch."""
        return any(one.every == "step" for one in self._schedules.values())

    def after_step(self) -> None:
        """Step after a step of the optimizers."""
        for one in self._schedules.values():
            if one.every == "step":
                one.scheduler.step()

    def after_epoch(self, results: Mapping[str, object], *, complete: bool = True) -> None:
        """Step after an epoch.

        Args:
            results: its results over the rows of all ranks.
            complete: whether they are all that an epoch gives: some lack those of a validation, by
                which a scheduler that watches them does not step.
        """
        for one in self._schedules.values():
            waits = one.watches and not complete and one.monitor not in results
            if one.every == "epoch" and not waits:
                one.scheduler.step(*([_watched(one, results)] if one.watches else []))

    def describe(self) -> dict[str, str]:
        """Return the classes, by name."""
        return {name: type(one.scheduler).__name__ for name, one in self._schedules.items()}

    def capture(self) -> dict[str, Any]:
        """Return their state, as JSON."""
        return {
            name: _as_json(one.scheduler.state_dict(), type(one.scheduler).__name__)
            for name, one in self._schedules.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `capture`."""
        for name, held in state.items():
            if name in self._schedules:
                restored = {key: _from_json(value) for key, value in held.items()}
                self._schedules[name].scheduler.load_state_dict(restored)


def _watched(schedule: Schedule, results: Mapping[str, object]) -> float:
    """Return the result that a scheduler looks at.

    Raises:
        InvalidInputError: the results do not hold what the scheduler looks at.
    """
    if schedule.monitor is not None:
        value, what = results.get(schedule.monitor), repr(schedule.monitor)
    else:
        value, what = results.get(f"val_{LOSS}", results.get(LOSS)), "the loss"
    if isinstance(value, float):
        return value
    raise InvalidInputError(
        f"ReduceLROnPlateau looks at {what}, but the epoch gave "
        f"{', '.join(map(repr, results)) or 'nothing'}"
    )


def _as_json(value: Any, what: str) -> Any:
    """Return the state of an optimizer or a scheduler as JSON, without the optimizer itself.

    Args:
        value: what it keeps.
        what: what that is, for messages.

    Raises:
        ModelError: something is no number, text, or list or dictionary of these.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, collections.Counter):
        return {_COUNTER: sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [_as_json(each, what) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            key: _as_json(each, f"{what}.{key}")
            for key, each in value.items()
            if key != "optimizer"
        }
    raise ModelError(
        f"{what} is {brief(value)}, which checkpoints cannot hold: they are arrays and JSON"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {_COUNTER}:
            return collections.Counter(dict(map(tuple, value[_COUNTER])))
        return {key: _from_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    return value
