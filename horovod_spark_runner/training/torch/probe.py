"""Whether losses and metrics of the user's own are means over rows, tried on parts of a batch.

They are tried a second time with outputs that differ from row to row: a module whose last layer
begins with zeros gives the same for each.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError
from ..parting import parting_shares
from .outputs import leaves, one_number

# How far rounding may be off, relative to the value.
_TOLERANCE = 1e-3


def check_means(
    functions: Sequence[tuple[str, Callable[..., Any]]],
    outputs: Any,
    target: Any,
    *,
    vary: bool = True,
) -> Iterator[str]:
    """Yield a warning for each function whose number for a batch is no mean over its rows.

    Args:
        functions: of outputs and labels, or of outputs alone, by their names.
        outputs: what the module gave for some rows.
        target: the labels.
        vary: try them also on outputs that differ from row to row.

    Raises:
        ModelError: one is a sum over rows, which would count twice on two ranks.
    """
    trials = [outputs]
    with contextlib.suppress(Exception):  # a tensor of another kind
        trials += [_varied(outputs)] if vary else []
    for name, function in functions:
        if not all(_is_mean(name, function, given, target, given is outputs) for given in trials):
            yield (
                f"{name!r} is no mean over the rows of a batch: with several ranks it is the mean "
                "of what each gives for its own rows"
            )


def _is_mean(
    name: str, function: Callable[..., Any], outputs: Any, target: Any, real: bool
) -> bool:
    """Tell whether a function's number for a batch is a mean over its rows, or none is known.

    Args:
        name: of the function.
        function: of outputs and labels.
        outputs: what the module gave, or may give.
        target: the labels.
        real: whether it did: what has no number for other outputs tells nothing.
    """
    rows = next(leaves(outputs))[1].shape[0]
    first = max(1, rows // 3)
    try:
        with torch.no_grad():
            values = [
                one_number(function(*(_rows(each, part) for each in (outputs, target))))
                for part in (slice(None), slice(first), slice(first, None))
            ]
    except Exception:  # takes outputs alone, or only works inside its own step
        return True
    numbers = [float(value) for value in values if value is not None]
    if len(numbers) < len(values):  # one value per row, or what is no mean but a pair
        return True
    whole, one, other = numbers
    if not real and not all(map(math.isfinite, numbers)):
        return True
    if _close(whole, (first * one + (rows - first) * other) / rows):
        return True
    if _close(whole, one + other):
        raise ModelError(
            f"{name!r} is a sum over the rows of a batch, so several ranks would count "
            "differently from one; return the mean, or one value per row"
        )
    return False


def _varied(value: Any) -> Any:
    """Return outputs of which no two are equal, about as large; a probability stays one."""

    def vary(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        shares = torch.as_tensor(parting_shares(tuple(tensor.shape))).to(tensor)
        return torch.where(tensor == 0, shares, tensor * (1 - shares))

    return _mapped(vary, value)


def _close(value: float, other: float) -> bool:
    return abs(value - other) <= _TOLERANCE * max(abs(value), abs(other), 1e-6)


def _rows(value: Any, part: slice) -> Any:
    return _mapped(lambda tensor: tensor[part], value)


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return ``value`` with each tensor in it changed; also a tuple with names stays one."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(change, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_mapped(change, each) for each in value]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    return value
