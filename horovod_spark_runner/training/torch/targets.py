"""Labels as the losses of ``torch.nn`` take them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...errors import ModelError

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
        _check_range(loss, output, label)
    return label.to(torch.int64)


def _check_range(loss: nn.CrossEntropyLoss | nn.NLLLoss, output: Tensor, label: Tensor) -> None:
    """Tell of classes that the output does not have; on a GPU PyTorch ends the process."""
    if label.device.type != "cpu" or not label.numel():
        return
    classes = output.shape[1] if output.dim() > 1 else output.shape[0]
    least, most = label.aminmax()
    if int(least) >= 0 and int(most) < classes:  # as nearly always, for which one look suffices
        return
    wrong = label[(label < 0) | (label >= classes)]
    wrong = wrong[wrong != loss.ignore_index]
    if wrong.numel():
        raise ModelError(
            f"{type(loss).__name__} got the label {int(wrong.flatten()[0])}, but the output has "
            f"{classes} classes, 0 to {classes - 1}"
        )
