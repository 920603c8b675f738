"""Buffers, numbers and tensors of a module and its functions that no checkpoint holds."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .metrics import is_torchmetrics
from .state import as_array, saved_buffers

# What PyTorch itself keeps in a module.
_OF_TORCH = frozenset(vars(nn.Module()))
# Top-level packages whose objects hold no user state.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    *("torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning", "numpy", "pandas"),
    *("pyarrow", "pyspark", "py4j", "tensorflow", "keras", "horovod", "mpi4py", "transformers"),
    __name__.partition(".")[0],
}
# Larger tensors are data.
_MOST_VALUES = 10_000


def unsaved_buffers(module: nn.Module, functions: Iterable[object]) -> dict[str, Tensor]:
    """Return the buffers that no checkpoint holds, those of losses too, by what to call them."""
    saved = {id(holder[key]) for holder, key in saved_buffers(module).values()}
    holders = [("", module)]
    holders += [(f" of {type(o).__name__}", o) for o in functions if isinstance(o, nn.Module)]
    return {
        f"buffer {name!r}{owner}": buffer
        for owner, each in holders
        for name, buffer in each.named_buffers()
        if id(buffer) not in saved
    }


def unsaved_values(module: nn.Module, functions: Iterable[object]) -> dict[str, np.ndarray]:
    """Return copies of the numbers and small tensors that no checkpoint holds, by name.

    They are the attributes of the user's modules and the variables of functions. What a library
    keeps is its own, and what any other object keeps is not searched for.
    """
    values: dict[str, Any] = dict(unsaved_buffers(module, functions))
    for prefix, part in module.named_modules():
        if not is_torchmetrics(part) and _package(type(part).__module__) not in _LIBRARIES:
            space = {key: value for key, value in vars(part).items() if key not in _OF_TORCH}
            path = f"{prefix}." if prefix else ""
            values.update((f"attribute {path + key!r}", held) for key, held in space.items())
    for each in functions:
        values.update(_variables_of(each))
    return {name: array for name, held in values.items() if (array := _copied(held)) is not None}


def _variables_of(function: Any) -> dict[str, object]:
    """Return the variables in a function's closure, or the attributes of its object."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = function.__self__ if isinstance(function, types.MethodType) else function
    if owner is not function and isinstance(owner, nn.Module):  # the one that is trained
        return {}
    space = {k: v for k, v in getattr(owner, "__dict__", {}).items() if k not in _OF_TORCH}
    if isinstance(owner, types.FunctionType):
        for key, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable that is assigned later
                space[key] = cell.cell_contents
    name = getattr(function, "__name__", type(function).__name__)
    return {f"variable {key!r} of {name}": held for key, held in space.items()}


def _copied(value: object) -> np.ndarray | None:
    """Return a copy of a number, or of a tensor that is neither data nor derived from weights."""
    if isinstance(value, Tensor):
        small = value.layout is torch.strided and value.numel() <= _MOST_VALUES
        if small and not value.requires_grad:
            with contextlib.suppress(Exception):  # NumPy has no such tensors
                return np.array(as_array(value))
    elif isinstance(value, (bool, int, float, np.number)):
        return np.array(value)
    return None


def changed_values(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of values that have others of the same shape."""
    return [
        name
        for name, value in before.items()
        if name in after
        and after[name].shape == value.shape
        and after[name].tobytes() != value.tobytes()
    ]


def _package(module: object) -> str:
    return str(module).partition(".")[0]
