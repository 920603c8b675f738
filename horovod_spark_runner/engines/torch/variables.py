"""The tensors of a PyTorch module and its optimizers, by name."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as for_all

from ...checkpoint.model_state import TrainingVariables, Variable
from ...errors import ModelError, brief

# Types that NumPy has none for, and those of as many bits that it has.
_AS_BITS = {torch.bfloat16: torch.int16}


class _TensorVariable:
    """A tensor, or a number, that training changes; looked up at every use.

    Args:
        path: what it is called.
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

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numpy().shape

    @property
    def dtype(self) -> object:
        return np.dtype(np.uint8)

    @abc.abstractmethod
    def numpy(self) -> np.ndarray:
        """Return the bytes."""


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor's values; those on a CPU without a copy."""
    held = tensor.detach().cpu()
    bits = _AS_BITS.get(held.dtype)
    if bits is None:
        array: np.ndarray = held.numpy()
        return array
    narrow: np.ndarray = held.view(bits).numpy().view(_narrow_type(held.dtype))
    return narrow


def set_tensor(tensor: Tensor, value: np.ndarray) -> None:
    """Assign a tensor the values from `as_array`, of it or of one of another type."""
    bits = _AS_BITS.get(tensor.dtype)
    if bits is not None:
        values = np.array(value, _narrow_type(tensor.dtype))
        source = torch.from_numpy(values.view(f"int{8 * values.dtype.itemsize}")).view(tensor.dtype)
    else:
        # Of the types that NumPy lacks, PyTorch reads no arrays.
        source = torch.from_numpy(np.array(value, np.float32 if value.dtype.kind == "V" else None))
    with torch.no_grad():
        tensor.copy_(source.reshape(tensor.shape))


def _narrow_type(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's stand-in for a type that it lacks."""
    import ml_dtypes

    narrow: np.dtype[Any] = np.dtype(getattr(ml_dtypes, str(dtype).removeprefix("torch.")))
    return narrow


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
                if held[key] is not None:
                    path = f"{self._names[id(parameter)]}/{key}"
                    _check_savable(optimizer, path, held[key])
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
            "only their own rank knows (a callback's clock or random numbers, buffers that forward "
            "sets); change them by an optimizer's step(), or alike on all ranks"
        )


def trained_in(module: nn.Module) -> dict[str, bool]:
    """Return which parameters of a module require gradients, by name."""
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return all parameters that an optimizer changes, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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


def _check_savable(optimizer: Optimizer, path: str, value: object) -> None:
    if not isinstance(value, (Tensor, bool, int, float)):
        raise ModelError(
            f"optimizer {type(optimizer).__name__} keeps {brief(value)} for {path!r}: checkpoints "
            "hold tensors and numbers only"
        )
