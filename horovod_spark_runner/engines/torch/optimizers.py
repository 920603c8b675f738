"""Optimizers, their learning rates and schedulers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
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
    parameter_ids = {id(parameter) for parameter in module.parameters()}
    for name, one in made.items():
        _check(one, f"optimizer {name!r}" if name else "optimizer", parameter_ids)
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


class OptimizerSettings:
    """Optimizers' rates, and their other settings that training has changed.

    Args:
        optimizers: as the model was built with them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._initial = self._read()

    def _read(self) -> list[list[dict[str, Any]]]:
        return [settings_of(optimizer) for optimizer in self._optimizers]

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, those of the beginning and those of now."""
        return {"initial": self._initial, "now": self._read()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the rates, and what had changed."""
        every = zip(self._optimizers, state["initial"], state["now"], strict=True)
        for optimizer, initial, now in every:
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


def _make_schedulers(model: TorchModel, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
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
    return {name: _make_scheduler(one, optimizers[name]) for name, one in named.items()}


def _make_scheduler(source: Any, optimizer: Optimizer) -> Any:
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
        model: the model.
        optimizers: its optimizers, by name.

    Attributes:
        by_name: the schedulers, by the names of their optimizers.
        follow_steps: whether they step after each training step, not after each epoch.

    Raises:
        ModelError: one cannot be used.
    """

    def __init__(self, model: TorchModel, optimizers: Mapping[str, Optimizer]) -> None:
        self.by_name = _make_schedulers(model, optimizers)
        self.follow_steps = bool(self.by_name) and model.schedule == "step"
        if self.follow_steps and any(map(_is_watching, self.objects)):
            raise ModelError("ReduceLROnPlateau looks at results of epochs: schedule='epoch'")

    def __bool__(self) -> bool:
        return bool(self.by_name)

    @property
    def objects(self) -> list[Any]:
        """The schedulers."""
        return list(self.by_name.values())

    def after_step(self) -> None:
        """Step after a step of the optimizers."""
        if self.follow_steps:
            for scheduler in self.objects:
                scheduler.step()

    def after_epoch(self, results: Mapping[str, object], *, complete: bool = True) -> None:
        """Step after an epoch.

        Args:
            results: its results over the rows of all ranks.
            complete: whether they are all that an epoch gives: some lack those of a validation, by
                which a scheduler that watches them does not step.
        """
        if self.follow_steps:
            return
        for scheduler in self.objects:
            if not _is_watching(scheduler):
                scheduler.step()
            elif complete:
                scheduler.step(_watched_loss(results))

    def describe(self) -> dict[str, str]:
        """Return the classes, by name."""
        return {name: type(one).__name__ for name, one in self.by_name.items()}


def _is_watching(scheduler: object) -> bool:
    """Return whether a scheduler reads a result."""
    return isinstance(scheduler, ReduceLROnPlateau)


def _watched_loss(results: Mapping[str, object]) -> float:
    """Return the validation's loss, or else the training's.

    Raises:
        InvalidInputError: the results have no loss.
    """
    value = results.get(f"val_{LOSS}", results.get(LOSS))
    if isinstance(value, float):
        return value
    raise InvalidInputError(
        "ReduceLROnPlateau looks at the loss, but the epoch gave "
        f"{', '.join(map(repr, results)) or 'nothing'}"
    )


def _as_json(value: Any, what: str) -> Any:
    """Return a setting of an optimizer as JSON.

    Args:
        value: the setting.
        what: what it is of, for messages.

    Raises:
        ModelError: it is neither a number nor a text, nor a list or dictionary of these.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_as_json(each, what) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _as_json(each, f"{what}.{key}") for key, each in value.items()}
    raise ModelError(
        f"{what} is {brief(value)}, which checkpoints cannot hold: they are arrays and JSON"
    )
