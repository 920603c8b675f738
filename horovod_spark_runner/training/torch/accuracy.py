"""The metric ``"accuracy"``, as a model's loss tells classes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...errors import ModelError

# What PyTorch's losses of classes leave out if they are told nothing.
_IGNORED = -100


class Accuracy:
    """Whether rows have the right class.

    Args:
        loss: the loss, by which it is known which labels do not count, and from where on one number
            per row is true; something else than one of ``torch.nn`` tells neither.
    """

    def __init__(self, loss: Any = None) -> None:
        made = getattr(nn, loss, None) if isinstance(loss, str) else loss
        kind = made if isinstance(made, type) else type(made)
        self._ignored = getattr(made, "ignore_index", _IGNORED)
        self._least: float | None = None
        if issubclass(kind, (nn.BCEWithLogitsLoss, nn.BCELoss)):
            self._least = 0.5 if issubclass(kind, nn.BCELoss) else 0.0

    def __call__(self, output: Tensor, label: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return how many rows are right, and how many count.

        Raises:
            ModelError: nothing tells a class.
        """
        if output.dim() > 1 and output.shape[1] > 1 and self._least is None:
            found = output.argmax(1)
            if label.shape == output.shape:
                return (found == label.argmax(1)).sum(), float(found.numel())
            label = label.reshape(found.shape)
            counted = label != self._ignored
            right = (found == label) & counted
            return right.sum(), counted.sum()
        if self._least is None or output.numel() != label.numel():
            raise ModelError(
                "metric 'accuracy' compares classes, but the output has one number per row, and no "
                "loss says from where on it is true, as BCEWithLogitsLoss and BCELoss do; give a "
                "function of outputs and labels"
            )
        right = (output > self._least) == (label.reshape(output.shape) > 0.5)
        return right.sum(), float(right.numel())
