"""What a module notes of itself while it is called, and is to forget again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..metric_states import is_torchmetrics

# What PyTorch itself keeps in a module.
_OF_TORCH = frozenset(vars(nn.Module()))


@contextlib.contextmanager
def forgetting(module: nn.Module, *, numbers: bool) -> Iterator[None]:
    """Let a module and all in it have the attributes afterwards that they have now.

    Metrics are left alone: what they have seen is more than attributes.

    Args:
        module: the module.
        numbers: whether that is so for all attributes and for buffers, and not for lists and sets
            alone.
    """
    parts = [each for each in module.modules() if not is_torchmetrics(each)]
    kept = [_noted(each, numbers=numbers) for each in parts]
    buffers = [
        (each._buffers, key, buffer, buffer.clone())
        for each in parts
        for key, buffer in each._buffers.items()
        if numbers and buffer is not None
    ]
    try:
        yield
    finally:
        for each, own in zip(parts, kept, strict=True):
            if numbers:
                for name in set(vars(each)) - set(own) - _OF_TORCH:
                    del vars(each)[name]
            for name, (value, contents) in own.items():
                vars(each)[name] = _put_back(value, contents)
        for holder, key, buffer, value in buffers:
            holder[key] = _put_back(buffer, value)


def _noted(part: nn.Module, *, numbers: bool) -> dict[str, tuple[Any, Any]]:
    """Return attributes by name, each with what is in it."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in vars(part).items():
        if name in _OF_TORCH:
            continue
        if isinstance(value, (list, set)) or (numbers and isinstance(value, dict)):
            found[name] = value, value.copy()
        elif numbers:
            found[name] = value, value.detach().clone() if isinstance(value, Tensor) else None
    return found


def _put_back(value: Any, contents: Any) -> Any:
    """Give what can be changed in place what was in it; return it."""
    if isinstance(value, list):
        value[:] = contents
    elif isinstance(value, (set, dict)):
        value.clear()
        value.update(contents)
    elif isinstance(value, Tensor) and not torch.equal(value, contents):
        with torch.no_grad():
            value.copy_(contents)
    return value
