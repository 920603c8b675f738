"""Whether a function of outputs and labels pairs each row with its own label.

PyTorch stretches a column of outputs, (n, 1), and a row of labels, (n,), to a square in which every
output meets every label. Functions do so without a word, and train something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError
from .outputs import leaves, one_number

# Rows that are tried, and calls in which they are: the first ones may tell nothing.
_ROWS, _CALLS = 8, 3
_TOLERANCE = 1e-4


class Pairing:
    """Looks at the first calls of a function of the user's own.

    Args:
        name: what it is called in messages.
        function: the function.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function
        self._left = _CALLS

    def check(self, outputs: Any, label: Any, value: Any) -> None:
        """Check what the function gave.

        Raises:
            ModelError: it compared each row with all others.
        """
        if not self._left or not isinstance(label, Tensor):
            return
        found = [tensor for _, tensor in leaves(outputs)]
        if len(found) != 1 or found[0].shape == label.shape or len(label) < 2:
            return
        output, rows = found[0], len(label)
        if not output.numel() == label.numel() == rows:
            return
        self._left -= 1
        if isinstance(value, Tensor) and tuple(value.shape[:2]) == (rows, rows):
            raise self._error(output, label)
        if self._stretches(output.detach()[:_ROWS], label.detach()[:_ROWS]):
            raise self._error(output, label)

    def _stretches(self, output: Tensor, label: Tensor) -> bool:
        """Tell whether rows one by one give what only labels of the outputs' shape do."""
        state = torch.get_rng_state()
        try:
            with torch.no_grad():
                whole = _mean(self._function(output, label))
                fitting = _mean(self._function(output, label.view_as(output)))
                each = [
                    _mean(self._function(output[n : n + 1], label[n : n + 1]))
                    for n in range(len(label))
                ]
        except Exception:  # works on whole batches only, or on labels of its own shape
            return False
        finally:
            torch.set_rng_state(state)
        if whole is None or fitting is None or None in each:
            return False
        alone = sum(value for value in each if value is not None) / len(each)
        return not _close(whole, alone) and _close(fitting, alone)

    def _error(self, output: Tensor, label: Tensor) -> ModelError:
        return ModelError(
            f"{self._name} compares each row with the labels of all: outputs have shape "
            f"{tuple(output.shape)} and labels {tuple(label.shape)}, which PyTorch stretches to a "
            "square. Give both one shape, labels.view_as(outputs) or outputs.squeeze(1)"
        )


def _mean(value: Any) -> float | None:
    """Return what a function gave as a mean over rows: a number, one for each, or a pair."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        total, count = (_mean(each) for each in value)
        return total / count if total is not None and count else None
    if isinstance(value, Tensor):
        return float(value.double().mean())
    number = one_number(value)
    return None if number is None else float(number)


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other), 1e-6)
