"""Outputs of a PyTorch module by name, however they are nested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ModelError, brief
from ...training.spec import OutputSpec

Path = tuple[str | int, ...]
# The last thing done to an output, as far as modules tell.
_ACTIVATIONS: dict[type, str] = {
    nn.Softmax: "softmax",
    nn.Sigmoid: "sigmoid",
    nn.Linear: "linear",
    nn.LogSoftmax: "log_softmax",
}


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield every tensor of a module's outputs, with the keys and indices of its path.

    Raises:
        ModelError: there is something else in it.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    elif value is not None:
        raise ModelError(
            "a module must return tensors, alone or in tuples, lists and dictionaries, but its "
            f"forward returned {brief(value)}"
        )


def pick(value: Any, path: Path) -> Tensor:
    """Return the tensor at ``path`` of a module's outputs."""
    for key in path:
        value = value[key]
    tensor: Tensor = value
    return tensor


def one_number(value: Any) -> Tensor | float | None:
    """Return a number from a Python or NumPy number, or from a tensor of one element.

    A tensor is float64 and without a gradient then. ``None`` for anything else.
    """
    if isinstance(value, Tensor):
        return value.detach().reshape(()).double() if value.numel() == 1 else None
    return float(value) if isinstance(value, (bool, int, float, np.number)) else None


def _output_name(path: Path) -> str:
    """Return the name of the output at ``path``."""
    if not path:
        return "output"
    if all(isinstance(key, int) for key in path):
        return "_".join(["output", *map(str, path)])
    return "_".join(map(str, path))


def output_specs(module: nn.Module, outputs: Any, rows: int) -> tuple[OutputSpec, ...]:
    """Describe the ``outputs`` that a module gave for ``rows`` rows.

    Raises:
        ModelError: an output has no value for each row.
    """
    specs = []
    for path, tensor in leaves(outputs):
        if not tensor.shape or tensor.shape[0] != rows:
            raise ModelError(
                f"output {_output_name(path)!r} has shape {tuple(tensor.shape)} for {rows} rows; "
                "outputs need a value for each row"
            )
        specs.append(
            OutputSpec(
                _output_name(path),
                tuple(tensor.shape[1:]),
                dtype_name(tensor.dtype),
                path,
                "" if path else _activation(module),
            )
        )
    if not specs:
        raise ModelError("the module's forward returned no tensor")
    return tuple(specs)


def _activation(module: nn.Module) -> str:
    if isinstance(module, nn.Sequential) and len(module):
        return _activation(module[-1])
    return _ACTIVATIONS.get(type(module), "")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a tensor's type, NumPy's where that has it."""
    return str(dtype).removeprefix("torch.")
