"""Whether losses and metrics of the user's own are means over rows, tried on parts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError
from .outputs import leaves, one_number

# How far rounding may be off, relative to the value.
_TOLERANCE = 1e-3


def check_means(
    functions: Sequence[tuple[str, Callable[..., Any]]], outputs: Any, target: Any
) -> Iterator[str]:
    """Yield a warning for each function whose number for a batch is no mean over its rows.

    Args:
        functions: of outputs and labels, or of outputs alone, by their names.
        outputs: what the module gave for some rows.
        target: the labels.

    Raises:
        ModelError: one is a sum over rows, which would count twice on two ranks.
    """
    rows = next(leaves(outputs))[1].shape[0]
    first = max(1, rows // 3)
    for name, function in functions:
        try:
            with torch.no_grad():
                values = [
                    one_number(function(*(_rows(each, part) for each in (outputs, target))))
                    for part in (slice(None), slice(first), slice(first, None))
                ]
        except Exception:  # takes outputs alone, or only works inside its own step
            continue
        numbers = [float(value) for value in values if value is not None]
        if len(numbers) < len(values):  # one value per row, or what is no mean but a pair
            continue
        whole, one, other = numbers
        mean = (first * one + (rows - first) * other) / rows
        if _close(whole, mean):
            continue
        if _close(whole, one + other):
            raise ModelError(
                f"{name!r} is a sum over the rows of a batch, so several ranks would count "
                "differently from one; return the mean, or one value per row"
            )
        yield (
            f"{name!r} is no mean over the rows of a batch: with several ranks it is the mean of "
            "what each gives for its own rows"
        )


def _close(value: float, other: float) -> bool:
    return abs(value - other) <= _TOLERANCE * max(abs(value), abs(other), 1e-6)


def _rows(value: Any, part: slice) -> Any:
    if isinstance(value, Tensor):
        return value[part]
    if isinstance(value, Mapping):
        return {key: _rows(each, part) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_rows(each, part) for each in value)
    return value
