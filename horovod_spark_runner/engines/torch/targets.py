"""Labels as losses take them, and whether functions pair each row with its own label."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ModelError
from ...training.part_comparison import Values, compare_parts
from .outputs import leaves

# Losses whose labels are numbers of classes.
CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss)
# Losses that compare element by element.
ELEMENTS = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.HingeEmbeddingLoss,
)
# Losses that give one value for a row by themselves.
OF_ROWS = (nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)
# Rows that a function is tried with, and calls in which it is: the first ones may tell nothing.
_ROWS, _CALLS = 8, 3


def plain_label(label: Tensor) -> Tensor:
    """Return whole numbers as int64, which PyTorch's functions take; others as they are."""
    small = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32)
    return label.to(torch.int64) if label.dtype in small else label


def fitting_label(loss: nn.Module, output: Tensor, label: Tensor) -> Tensor:
    """Return a label as ``loss`` compares it with ``output``.

    Raises:
        ModelError: it cannot be compared.
    """
    name = type(loss).__name__
    if isinstance(loss, CLASSES):
        return _classes(loss, output, label)
    if not isinstance(loss, ELEMENTS):
        return label
    if label.shape != output.shape:
        # A column of numbers beside an output of one number for each row.
        if label.shape.numel() != output.shape.numel() or 1 not in (
            *label.shape[1:],
            *output.shape[1:],
        ):
            raise ModelError(
                f"{name} compares element by element, but the output has rows of shape "
                f"{tuple(output.shape[1:])} and the label rows of shape {tuple(label.shape[1:])}"
            )
        label = label.reshape(output.shape)
    return label.to(output.dtype) if output.dtype.is_floating_point else label


def _classes(loss: nn.Module, output: Tensor, label: Tensor) -> Tensor:
    name = type(loss).__name__
    probabilities = label.shape == output.shape and output.dim() > 1
    if probabilities and isinstance(loss, nn.CrossEntropyLoss):
        return label.to(output.dtype)
    if label.dim() == output.dim() == 2 and label.shape[1] == 1 and output.shape[1] != 1:
        label = label[:, 0]
    if label.dtype.is_floating_point:
        whole = label.to(torch.int64)
        if not torch.equal(whole.to(label.dtype), label):
            raise ModelError(
                f"{name} takes numbers of classes, but the label column holds fractions such as "
                f"{label[whole.to(label.dtype) != label].flatten()[0].item():g}"
            )
        label = whole
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        wanted = (output.shape[0], *output.shape[2:])
        if tuple(label.shape) != wanted:
            raise ModelError(
                f"{name} takes labels of shape {wanted} for outputs of shape "
                f"{tuple(output.shape)}, but they have shape {tuple(label.shape)}"
            )
    return label.to(torch.int64)


class Pairing:
    """Checks the first calls of a custom function.

    PyTorch stretches a column of outputs, (n, 1), and a row of labels, (n,), to a square in which
    every output meets every label. Functions do so without a word, and train something else.

    Args:
        name: what it is called in messages.
        function: the function.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function
        self._left = _CALLS

    def check(self, outputs: Any, label: Any, value: Any) -> None:
        """Check the function's result.

        Raises:
            ModelError: it compared each row with all others.
        """
        if not self._left or not isinstance(label, Tensor):
            return
        tensors = [tensor for _, tensor in leaves(outputs)]
        if len(tensors) != 1 or tensors[0].shape == label.shape or len(label) < 2:
            return
        output, rows = tensors[0], len(label)
        if not output.numel() == label.numel() == rows:
            return
        self._left -= 1
        if isinstance(value, Tensor) and tuple(value.shape[:2]) == (rows, rows):
            raise self._error(output, label)
        if self._stretches(output.detach()[:_ROWS], label.detach()[:_ROWS]):
            raise self._error(output, label)

    def _stretches(self, output: Tensor, label: Tensor) -> bool:
        """Return whether it is a mean over rows only where labels have the outputs' shape."""

        def differing(label: Tensor) -> bool:
            def compute(rows: np.ndarray, fraction: float) -> Values:
                return {("", ""): _mean(self._function(output[rows], label[rows]))}

            return bool(compare_parts(compute, len(label)))

        state = torch.get_rng_state()
        try:
            with torch.no_grad():
                return differing(label) and not differing(label.view_as(output))
        except Exception:  # works on whole batches only, or on labels of its own shape
            return False
        finally:
            torch.set_rng_state(state)

    def _error(self, output: Tensor, label: Tensor) -> ModelError:
        return ModelError(
            f"{self._name} compares each row with the labels of all: outputs have shape "
            f"{tuple(output.shape)} and labels {tuple(label.shape)}, which PyTorch stretches to a "
            "square. Give both one shape, labels.view_as(outputs) or outputs.squeeze(1)"
        )


def _mean(value: Any) -> float:
    """Return a function's result as a mean over rows: from a number, rows, or a pair."""
    if isinstance(value, (tuple, list)):
        total, count = map(_mean, value)
        return total / count
    return float(value.double().mean()) if isinstance(value, Tensor) else float(value)
