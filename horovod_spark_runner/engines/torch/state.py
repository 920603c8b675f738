"""Variables of a PyTorch training by name, its buffers on all ranks, its model's description."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as for_all

from ...checkpoint.config_diff import (
    ModelChanges,
    describe_change,
    diff_optimizer,
    diff_training,
    join_changes,
)
from ...checkpoint.model_state import TrainingVariables, Variable
from ...errors import ModelError, brief
from ...training.epochs import Step
from .losses import loss_named
from .optimizers import Schedulers, describe_optimizer, parameters_of
from .torch_model import TorchModel

if TYPE_CHECKING:
    from mpi4py import MPI

    from .exchange import GradientExchange


# What is trained with as it is now, and warned of; the first also decide what is summed.
_SUMMED = ("loss", "train_step")
_SETTINGS = ("schedule", "autocast", "clip_norm", "clip_value")
# Settings that say what they are.
_PLAIN = (bool, int, float, str)


class TorchVariables(TrainingVariables):
    """PyTorch implementation of `TrainingVariables`.

    Args:
        module: the module.
        optimizers: its optimizers.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        held = weights_of(module)
        buffers = saved_buffers(module)
        trained = {name for name, p in module.named_parameters(remove_duplicate=False)}
        self._weights: list[Variable] = [
            _TensorVariable(name, *buffers.get(name, (held, name)), trainable=name in trained)
            for name in held
        ]
        self._optimizers = optimizers
        parameters = list(module.named_parameters())
        self._names = {id(parameter): name for name, parameter in parameters}
        self._parameters = [parameter for _, parameter in parameters]

    @property
    def groups(self) -> dict[str, list[Variable]]:
        groups = {"model": self._weights}
        for number, optimizer in enumerate(self._optimizers):
            groups[f"optimizer{number or ''}"] = list(self._state(optimizer))
        return groups

    def _state(self, optimizer: Optimizer) -> Iterator[Variable]:
        for parameter in parameters_of(optimizer):
            held = optimizer.state.get(parameter, {})
            for key in sorted(held):
                if held[key] is None:
                    continue
                path = f"{self._names[id(parameter)]}/{key}"
                if not isinstance(held[key], (Tensor, bool, int, float)):
                    raise ModelError(
                        f"optimizer {type(optimizer).__name__} keeps {brief(held[key])} for "
                        f"{path!r}: checkpoints hold tensors and numbers only"
                    )
                yield _TensorVariable(path, held, key)

    def trained_by(self) -> list[list[int] | None]:
        groups: list[list[int] | None] = []
        for optimizer in self._optimizers:
            indices = [n for n, p in enumerate(self._parameters) if optimizer.state.get(p)]
            groups.append(indices or None)
        return groups

    def build_optimizers(self, trained: Sequence[Sequence[int] | None]) -> None:
        for optimizer, indices in zip(self._optimizers, trained, strict=False):
            if indices is None or max(indices, default=0) >= len(self._parameters):
                continue
            wanted = [self._parameters[index] for index in indices]
            trained_ids = {id(parameter) for parameter in wanted}
            for parameter in parameters_of(optimizer):
                if id(parameter) not in trained_ids:
                    optimizer.state.pop(parameter, None)
            missing = [p for p in wanted if not optimizer.state.get(p)]
            if missing:
                _make_state(optimizer, missing)

    def likely_cause(self, differing: Sequence[Variable]) -> str:
        return (
            "They are changed outside the optimizers, whose gradients are exchanged, or by what "
            "only their own rank knows (a callback's clock or random numbers, a rate that follows "
            "its own loss, buffers that forward sets); change them by an optimizer's step(), or "
            "alike on all ranks"
        )


class _TensorVariable:
    """A tensor, or a number, that training changes; looked up at every use.

    Args:
        path: its name.
        holder: where it is.
        key: its name there.
        trainable: whether an optimizer may change it.
    """

    def __init__(
        self, path: str, holder: MutableMapping[str, Any], key: str, *, trainable: bool = False
    ) -> None:
        self.path = path
        self.trainable = trainable
        self._holder = holder
        self._key = key

    @property
    def _tensor(self) -> Tensor:
        held = self._holder[self._key]
        # A number of Python's has as many digits; PyTorch would take it for one of float32.
        dtype = torch.float64 if isinstance(held, float) else None
        return torch.as_tensor(held, dtype=dtype).detach()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    @property
    def dtype(self) -> object:
        return str(self._tensor.dtype).removeprefix("torch.")

    def numpy(self) -> np.ndarray:
        """Return the value; that of a tensor on a CPU without a copy."""
        return as_array(self._tensor)

    def assign(self, value: np.ndarray) -> None:
        """Set the value."""
        held = self._holder[self._key]
        if isinstance(held, Tensor):
            set_tensor(held, value)
        else:
            self._holder[self._key] = type(held)(np.asarray(value).item())


class ByteVariable(abc.ABC):
    """Bytes of any number that checkpoints hold."""

    path: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numpy().shape

    @property
    def dtype(self) -> object:
        return np.dtype(np.uint8)

    @abc.abstractmethod
    def numpy(self) -> np.ndarray:
        """Return the bytes."""

    @abc.abstractmethod
    def assign(self, value: np.ndarray) -> None:
        """Restore what `numpy` has returned."""


def _make_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Make an optimizer create its state for ``parameters``, which keep their values.

    PyTorch's do so in their first step only; the state's values are to be restored.
    """
    everything = parameters_of(optimizer)
    gradients = [parameter.grad for parameter in everything]
    values = [parameter.detach().clone() for parameter in parameters]
    for parameter in everything:
        parameter.grad = None
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    # The class's own: what is wrapped around the object's is for steps that count, as hooks are.
    with _without_hooks(optimizer):
        type(optimizer).step(optimizer)
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    for parameter, gradient in zip(everything, gradients, strict=True):
        parameter.grad = gradient


@contextlib.contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Remove the hooks before and after an optimizer's steps, or all hooks."""
    places: tuple[MutableMapping[int, Any], ...] = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        for_all._global_optimizer_pre_hooks,
        for_all._global_optimizer_post_hooks,
    )
    held = [dict(place) for place in places]
    for place in places:
        place.clear()
    try:
        yield
    finally:
        for place, hooks in zip(places, held, strict=True):
            place.update(hooks)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's ``state_dict()`` themselves, by name."""
    return {name: t.detach() for name, t in module.state_dict(keep_vars=True).items()}


def saved_buffers(module: nn.Module) -> dict[str, tuple[MutableMapping[str, Any], str]]:
    """Return where each buffer is that ``state_dict()`` has, or would have if it were a tensor.

    A step may set a buffer (``self.mean = …``), which is another tensor from then on.
    """
    saved = weights_of(module)
    places: dict[str, tuple[MutableMapping[str, Any], str]] = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        for key, buffer in each._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            lost = key in each._non_persistent_buffers_set
            if name in saved or (buffer is None and not lost):
                places[name] = (each._buffers, key)
    return places


def trained_in(module: nn.Module) -> dict[str, bool]:
    """Return which parameters of a module require gradients, by name."""
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor's values; those on a CPU without a copy."""
    held = tensor.detach().cpu()
    if held.dtype is not torch.bfloat16:
        return held.numpy()
    import ml_dtypes  # NumPy itself has no such type

    return held.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def as_tensor(array: np.ndarray) -> Tensor:
    """Return a copy of the values from `as_array` as a tensor."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def set_tensor(tensor: Tensor, value: np.ndarray) -> None:
    """Assign a tensor the values from `as_array`, of it or of one of another type."""
    with torch.no_grad():
        tensor.copy_(as_tensor(value).reshape(tensor.shape))


class _GeneratorState(ByteVariable):
    """The state of a generator of PyTorch's."""

    def __init__(self, path: str, generator: torch.Generator) -> None:
        self.path = path
        self._generator = generator

    def numpy(self) -> np.ndarray:
        return self._generator.get_state().numpy()

    def assign(self, value: np.ndarray) -> None:
        self._generator.set_state(torch.from_numpy(np.array(value, np.uint8)))


def generators(device: torch.device) -> dict[str, Variable]:
    """Return the states of the generators of random numbers, by name."""
    states: dict[str, Variable] = {"torch": _GeneratorState("torch", torch.default_generator)}
    if device.type == "cuda":
        current = torch.cuda.default_generators[torch.cuda.current_device()]
        states["cuda"] = _GeneratorState("cuda", current)
    return states


def separate_generators(seed: int, rank: int) -> None:
    """Seed the generators of ranks other than the first by rank."""
    if rank:
        stream = np.random.SeedSequence([seed, rank])
        torch.manual_seed(int(stream.generate_state(1, np.uint64)[0] >> np.uint64(1)))


class Statistics:
    """Buffers of a module, kept equal on all ranks.

    The changes of real numbers are averaged, not their values: what did not change stays as it is,
    to the bit. Counters change alike on all ranks that have rows.

    Args:
        module: the module.
        exchange: connects the ranks' tensors.
        world: communicator of all ranks.
    """

    def __init__(self, module: nn.Module, exchange: GradientExchange, world: MPI.Comm) -> None:
        self._exchange = exchange
        self._world = world
        # By what they are called where they are kept: constants that are not need not be sent.
        self._places = saved_buffers(module)
        self._buffers: dict[str, Tensor] = {
            name: holder[key]
            for name, (holder, key) in self._places.items()
            if holder[key] is not None
        }
        held = list(self._buffers.values())
        self._moments = [b for b in held if b.dtype.is_floating_point]
        self._counters = [b for b in held if not b.dtype.is_floating_point]

    @contextlib.contextmanager
    def averaged(self, step: Step) -> Iterator[None]:
        """Run a step, after which the buffers are the same on all ranks.

        Raises:
            ModelError: a buffer is set to what cannot be kept in its place.
        """
        if self._exchange.size == 1:
            yield
            self._take_set()
            return
        before = [_finite(moment.detach()) for moment in self._moments]
        yield
        self._take_set()
        if before:
            changes = [moment - base for moment, base in zip(self._moments, before, strict=True)]
            with torch.no_grad():
                averaged = self._exchange.changes(changes)
                for moment, base, change in zip(self._moments, before, averaged, strict=True):
                    moment.copy_(base + change)
        if step.rows < self._world.Get_size():
            self._share_counters(step)

    def _take_set(self) -> None:
        """Copy the values of replaced buffers into the original tensors."""
        replaced: dict[str, Tensor] = {}
        for name, (holder, key) in self._places.items():
            current, buffer = holder.get(key), self._buffers.get(name)
            if current is buffer:
                continue
            if current is None or buffer is None or _form(current) != _form(buffer):
                raise ModelError(
                    f"buffer {name!r} was {_form(buffer)} when the training began, and a step has "
                    f"set it to {_form(current)}: checkpoints and other ranks could not keep it. "
                    "Register it with the shape and type that it will have, or keep it as a plain "
                    "attribute if training does not depend on it"
                )
            replaced[name] = current.detach().clone()  # it may be the tensor of another buffer
        with torch.no_grad():
            for name, value in replaced.items():
                holder, key = self._places[name]
                holder[key] = self._buffers[name].copy_(value)

    def _share_counters(self, step: Step) -> None:
        """Copy the counters of a rank with rows to the ranks without."""
        from mpi4py import MPI

        candidate = self._world.Get_rank() if step.batch.rows else -1
        root = self._world.allreduce(candidate, op=MPI.MAX)
        values = [as_array(counter) for counter in self._counters]
        shared = self._world.bcast(values, root=root)
        if not step.batch.rows:
            for counter, value in zip(self._counters, shared, strict=True):
                set_tensor(counter, value)


def _finite(value: Tensor) -> Tensor:
    """Return a base of changes: infinity less infinity would be no number."""
    return torch.where(value.isfinite(), value, 0)


def _form(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} of shape {tuple(tensor.shape)} on {tensor.device}"


def describe_model(
    model: TorchModel,
    module: nn.Module,
    optimizers: Mapping[str, Optimizer],
    schedulers: Schedulers,
) -> dict[str, Any]:
    """Return the properties that identify a model, as JSON."""
    return {
        "module": type(module).__qualname__,
        "optimizers": {name: describe_optimizer(one) for name, one in optimizers.items()},
        "schedulers": schedulers.describe(),
        "loss": _named(_losses(model.loss)),
        "train_step": _named(model.train_step),
        "metrics": _named(model.metrics),
        **{name: getattr(model, name) for name in (*_SETTINGS, "sync_batch_norm")},
    }


def _losses(losses: Any) -> Any:
    """Return losses, those of torch.nn looked up by their names."""
    if isinstance(losses, Mapping):
        return {name: _losses(one) for name, one in losses.items()}
    if isinstance(losses, (list, tuple)):
        return [_losses(one) for one in losses]
    return loss_named(losses) if isinstance(losses, str) else losses


def _named(thing: Any) -> Any:
    """Return the name of a loss or a function, and its settings, as JSON."""
    if thing is None or isinstance(thing, str):
        return thing
    if isinstance(thing, Mapping) and not isinstance(thing, nn.Module):
        return {str(name): _named(one) for name, one in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_named(one) for one in thing]
    name = getattr(thing, "__qualname__", None)
    if isinstance(name, str):  # wherever it is defined
        return name.rpartition("<locals>.")[2]
    settings: dict[str, Any]
    if isinstance(thing, functools.partial):
        arguments = {f"argument {number}": each for number, each in enumerate(thing.args)}
        name, settings = _named(thing.func), arguments | thing.keywords
    else:
        name, settings = type(thing).__qualname__, getattr(thing, "__dict__", {})
    fields: dict[str, Any] = {
        key: value
        for key, value in settings.items()
        if isinstance(value, _PLAIN) and key != "training" and not key.startswith("_")
    }
    if isinstance(thing, nn.Module):
        fields.update((key, _named(part)) for key, part in thing.named_children())
        fields.update((key, held.tolist()) for key, held in thing.named_buffers(recurse=False))
    return {"class": name, **fields} if fields else name


def compare_models(
    then: Mapping[str, Any], now: Mapping[str, Any], *, in_epoch: bool
) -> ModelChanges:
    """Compare two results of `describe_model`; see `Trainee.compare`."""
    if not then:
        return ModelChanges(None, record=dict(now))
    before, after = then.get("optimizers", {}), now["optimizers"]
    refused = [
        describe_change(name, then.get(name), now[name])
        for name in ("module", "schedulers", "sync_batch_norm")
        if then.get(name) != now[name]
    ]
    refused += _of_optimizers(before, after)
    if refused:
        return ModelChanges(join_changes(refused))
    refusal, warnings = diff_training(
        then, now, summed=(*_SUMMED, "metrics"), warned=(*_SUMMED, *_SETTINGS), in_epoch=in_epoch
    )
    if refusal is not None:
        return ModelChanges(refusal)
    ignored, changed, optimizers = _of_settings(before, after)
    return ModelChanges(
        None, (*warnings, *ignored), tuple(changed), {**now, "optimizers": optimizers}
    )


def _of_optimizers(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    kinds = [{name: one["class"] for name, one in each.items()} for each in (then, now)]
    if kinds[0] != kinds[1]:
        return [describe_change("optimizer", *(", ".join(kind.values()) for kind in kinds))]
    sizes = [{name: len(one["groups"]) for name, one in each.items()} for each in (then, now)]
    if sizes[0] != sizes[1]:
        return [describe_change("the number of parameter groups", *sizes)]
    return []


def _of_settings(
    then: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Return warnings of overridden settings, all changes, and the new record."""
    ignored: list[str] = []
    changed: list[str] = []
    records = {}
    for name, one in now.items():
        what = f"optimizer {name!r}" if name else f"optimizer {one['class']}"
        groups = []
        for first, last in zip(then[name]["groups"], one["groups"], strict=True):
            messages, every, group = diff_optimizer(what, first, last, _is_rate)
            ignored += [
                f"{text}; begin a new run with initial_weights for another" for text in messages
            ]
            changed += every
            groups.append(group)
        records[name] = {**one, "groups": groups}
    return [*dict.fromkeys(ignored)], [*dict.fromkeys(changed)], records


def _is_rate(path: str, *_: object) -> bool:
    return path == "lr"
