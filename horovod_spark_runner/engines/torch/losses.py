"""Losses of a batch, as sums that can be merged over ranks, tasks and batches.

A loss is a mean over rows, and counts by them, unless it divides by something else: by the weights
of classes, or by what is not ignored. Then a rank's part of the mean follows from the sums of all.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ModelError, brief
from ...storage.arrays import Arrays
from ...training.label_values import check_classes
from ...training.part_comparison import Values, compare_parts
from ...training.spec import Binding
from .binding import plain_label, target_of
from .model import output_leaves, pick, preserve_random

LOSS = "loss"
# Divisors of a loss: the rows, what follows from its labels, or none.
ROWS, LABELS, SUM = "rows", "labels", "sum"
# Losses whose labels are numbers of classes.
CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss)
# Those that take one class per row.
_NUMBERED = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
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
_OF_ROWS = (nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)
# Rows that a function is tried with, and calls in which it is: the first ones may tell nothing.
_TRIED_ROWS, _TRIED_CALLS = 8, 3


@dataclass(frozen=True)
class Term:
    """One loss of a batch on this rank.

    Attributes:
        name: its name in the results.
        kind: `ROWS`, `LABELS` or `SUM`, the same for all batches.
        summed: the sum that the mean is made of, to be differentiated.
        count: its divisor, given that of all ranks; the rows where nothing says otherwise.
    """

    name: str
    kind: str
    summed: Tensor
    count: Tensor | float

    def factor(self, rows: int, count: float) -> float:
        """Return the factor from a mean over ``rows`` to the loss, whose divisor is ``count``.

        Where nothing counts that is 0: the value of PyTorch's loss is no number then, but its
        gradient is 0, and so are the sums it is made of.
        """
        if self.kind == ROWS:
            return 1.0
        if self.kind == SUM:
            return float(rows)
        return rows / count if count else 0.0


class Losses:
    """The losses of a `TorchModel`.

    Args:
        loss: `TorchModel.loss`.
        labels: which label column is compared with which output.

    Raises:
        ModelError: the loss cannot be used; the message names it.
    """

    def __init__(self, loss: Any, labels: Binding) -> None:
        self._labels = labels
        self._several = isinstance(loss, (Mapping, Sequence)) and not isinstance(loss, str)
        # Each with the key of its output, "" for the output in its place.
        if self._several:
            self._parts = _match_losses(loss, labels)
            self._name_columns()
            return
        self._parts = [("", _make_loss(loss, LOSS))]
        if not labels.slots and isinstance(self._parts[0][1], _TorchLoss):
            raise ModelError(
                f"label_cols names no column, but loss={brief(loss)} compares outputs with labels; "
                "name the label columns (for an autoencoder, those of feature_cols), or give a "
                "loss that is a function of the outputs alone"
            )
        self._name_columns()
        if not self.functions() and len(labels.slots) > 1:
            raise ModelError(
                f"loss={brief(loss)} compares one output with one label, but label_cols gives "
                f"{len(labels.slots)}: {'; '.join(labels.describe())}; give a dictionary of "
                "losses by the names of label_cols, or a function of all outputs and labels"
            )

    @property
    def names(self) -> list[str]:
        """Names of the losses in the results."""
        return [loss.name for _, loss in self._parts]

    def to(self, device: torch.device) -> Losses:
        """Move tensors of losses, such as weights of classes, to a device; return these losses."""
        for _, loss in self._parts:
            if isinstance(loss.function, nn.Module):
                loss.function.to(device)  # copies of it hold the same tensors
        return self

    def functions(self) -> list[tuple[str, Callable[..., Any]]]:
        """Return the user's own functions, which may be no means over rows, by their names."""
        return [
            (one.name, one.function) for _, one in self._parts if isinstance(one, _FunctionLoss)
        ]

    def terms(
        self,
        outputs: Any,
        labels: Sequence[Tensor],
        inputs: Sequence[Tensor],
        weights: Tensor | None,
    ) -> list[Term]:
        """Return each loss of a batch.

        Args:
            outputs: what the module gave.
            labels: the label of each output, in the order of ``label_cols``.
            inputs: the inputs, which an output is compared with where there is no label.
            weights: of the rows.

        Raises:
            ModelError: outputs and labels do not fit.
        """
        if self._several:
            return [
                loss(self._output(outputs, key, index), plain_label(labels[index]), weights)
                for index, (key, loss) in enumerate(self._parts)
            ]
        loss = self._parts[0][1]
        compared = outputs if isinstance(loss, _FunctionLoss) else self._output(outputs, "", 0)
        return [loss(compared, target_of(self._labels, labels, inputs), weights)]

    def _name_columns(self) -> None:
        for (_, loss), columns in zip(self._parts, self._labels.slots, strict=False):
            if isinstance(loss, _TorchLoss):
                loss.column = " + ".join(columns)

    def check_labels(self, arrays: Arrays) -> None:
        """Check labels that are numbers of classes, before they are moved to a GPU.

        Raises:
            ModelError: one is out of range; the message names its column.
        """
        for (_, loss), columns in zip(self._parts, self._labels.slots, strict=False):
            if isinstance(loss, _TorchLoss):
                for name in columns:
                    loss.check_classes(arrays[name], name)

    def nothing(self, device: torch.device) -> list[Term]:
        """Return the losses of no rows."""
        zero = torch.zeros((), device=device)
        return [Term(loss.name, loss.kind, zero, 0.0) for _, loss in self._parts]

    def _output(self, outputs: Any, key: str, index: int) -> Tensor:
        by_name = isinstance(outputs, Mapping)
        if by_name and key:
            if key not in outputs:
                raise ModelError(
                    f"loss names the output {key!r}, but the module gives "
                    f"{', '.join(map(repr, outputs))}"
                )
            return pick(outputs, (key,))
        tensors = list(output_leaves(outputs))
        if len(tensors) != len(self._parts) or (by_name and self._several):
            raise ModelError(
                f"{len(self._parts)} losses are given that compare one output each, but the module "
                f"gives {len(tensors)} outputs{' by name' if by_name else ''}: give a dictionary "
                "or list of losses, or a function of all outputs and labels"
            )
        return tensors[index][1]


def _match_losses(losses: Any, labels: Binding) -> list[tuple[str, _Loss]]:
    """Return the key of its output and the loss for each label, in the order of ``label_cols``."""
    names = labels.names
    if isinstance(losses, Mapping):
        if names is None or set(names) != set(losses):
            there = "a list" if names is None else ", ".join(map(repr, names))
            raise ModelError(
                f"loss names the outputs {', '.join(map(repr, losses))}, but label_cols gives "
                f"{there}; give label_cols as a dictionary with the same names"
            )
        losses = [losses[name] for name in names]
    if len(losses) != len(labels.slots):
        raise ModelError(
            f"{len(losses)} losses are given, but label_cols gives {len(labels.slots)} labels"
        )
    keys = names or [""] * len(losses)
    return [
        (key, _make_loss(loss, f"{key or index}_loss"))
        for index, (key, loss) in enumerate(zip(keys, losses, strict=True))
    ]


def _make_loss(loss: Any, name: str) -> _Loss:
    function: Any = loss_named(loss) if isinstance(loss, str) else loss
    if isinstance(function, type) or not callable(function):
        raise ModelError(
            "loss must be the name of a class of torch.nn, a module of one, or a function of "
            f"outputs and labels, got {brief(loss)}"
        )
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        raise ModelError(
            f"loss {type(function).__name__} has weights of its own, which no optimizer "
            "would train; make it a part of the module, which then returns the loss"
        )
    of_torch = type(function).__module__.startswith("torch.nn.")
    if of_torch and isinstance(function, (*CLASSES, *ELEMENTS)):
        return _TorchLoss(name, function)
    return _FunctionLoss(name, function)


def loss_named(name: str) -> nn.Module:
    """Return the loss of torch.nn that is called so.

    Raises:
        ModelError: torch.nn has no loss of that name.
    """
    loss = getattr(nn, name, None)
    names = [cls.__name__ for cls in (*CLASSES, *ELEMENTS)]
    if not isinstance(loss, type) or name not in names:
        raise ModelError(
            f"unknown loss={name!r}; torch.nn has, for an output and a label, "
            f"{', '.join(sorted(names))}; or give a function"
        )
    made: nn.Module = loss()
    return made


class _Loss:
    """A loss of one output, as a sum over this rank's rows and its divisor."""

    kind = ROWS

    def __init__(self, name: str, function: Any) -> None:
        self.name, self.function = name, function

    def __call__(self, output: Any, label: Any, weights: Tensor | None) -> Term:
        raise NotImplementedError


class _TorchLoss(_Loss):
    """A loss of ``torch.nn``, whose divisor is known."""

    def __init__(self, name: str, function: Any) -> None:
        super().__init__(name, function)
        self._reduction = function.reduction
        if self._reduction == "sum":
            self.kind = SUM
        elif isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)):
            self.kind = LABELS
        self.column = ""
        self._number_of_classes: int | None = None
        self._summing, self._by_element = copy.copy(function), copy.copy(function)
        self._summing.reduction, self._by_element.reduction = "sum", "none"

    def __call__(self, output: Tensor, label: Tensor, weights: Tensor | None) -> Term:
        output = _wide(output)  # as autocast does, too: labels would be rounded otherwise
        fit = self._classes if isinstance(self.function, CLASSES) else self._elements
        label = fit(output, label)
        rows = output.shape[0]
        count = self._labelled(label) if self.kind == LABELS else 1.0 if self.kind == SUM else rows
        if weights is not None or self._reduction == "none":
            each = self._by_element(output, label).reshape(rows, -1).sum(1)
            summed = _weighted_sum(each, weights)
        elif self.kind == ROWS:
            return Term(self.name, self.kind, self.function(output, label) * rows, count)
        else:
            summed = self._summing(output, label)
        return Term(self.name, self.kind, summed / self._values(output, label), count)

    def check_classes(self, values: np.ndarray, column: str) -> None:
        """Check labels against the number of classes, once the module's output has shown it."""
        if self._number_of_classes is not None:
            name = type(self.function).__name__
            prefix = f"{name} takes numbers of classes, but the label column {column!r} holds"
            ignored = getattr(self.function, "ignore_index", None)
            check_classes(prefix, values, self._number_of_classes, ignored)

    def _elements(self, output: Tensor, label: Tensor) -> Tensor:
        """Return labels to be compared element by element."""
        if label.shape != output.shape:
            # A column of numbers beside an output of one number for each row.
            ones = 1 in (*label.shape[1:], *output.shape[1:])
            if label.shape.numel() != output.shape.numel() or not ones:
                raise ModelError(
                    f"{type(self.function).__name__} compares element by element, but the output "
                    f"has rows of shape {tuple(output.shape[1:])} and the label rows of shape "
                    f"{tuple(label.shape[1:])}"
                )
            label = label.reshape(output.shape)
        return label.to(output.dtype) if output.dtype.is_floating_point else label

    def _classes(self, output: Tensor, label: Tensor) -> Tensor:
        """Return labels as numbers of classes, or probabilities of all."""
        name = type(self.function).__name__
        probabilities = label.shape == output.shape and output.dim() > 1
        if probabilities and isinstance(self.function, nn.CrossEntropyLoss):
            return label.to(output.dtype)
        if label.dim() == output.dim() == 2 and label.shape[1] == 1 and output.shape[1] != 1:
            label = label[:, 0]
        whole = label.to(torch.int64)
        if label.dtype.is_floating_point and not torch.equal(whole.to(label.dtype), label):
            fraction = label[whole.to(label.dtype) != label].flatten()[0].item()
            raise ModelError(
                f"{name} takes numbers of classes, but the label column holds fractions such as "
                f"{fraction:g}"
            )
        unknown = isinstance(self.function, _NUMBERED) and self._number_of_classes is None
        if unknown and output.dim() > 1:
            self._number_of_classes = output.shape[1]
            self.check_classes(label.detach().cpu().numpy(), self.column)
        wanted = (output.shape[0], *output.shape[2:])
        if isinstance(self.function, (nn.CrossEntropyLoss, nn.NLLLoss)) and label.shape != wanted:
            raise ModelError(
                f"{name} takes labels of shape {wanted} for outputs of shape "
                f"{tuple(output.shape)}, but they have shape {tuple(label.shape)}"
            )
        return whole

    def _values(self, output: Tensor, label: Tensor) -> int:
        """Return how many values of a row the mean is taken of."""
        # "batchmean" is Kullback and Leibler's sum over a row.
        if self._reduction in ("sum", "batchmean") or isinstance(self.function, _OF_ROWS):
            return 1
        if self.kind != LABELS:
            return output[0].numel()
        # Probabilities of all classes make one value.
        real = label.dtype.is_floating_point
        return output[0].numel() // output.shape[1] if real else label[0].numel()

    def _labelled(self, label: Tensor) -> Tensor | float:
        """Return the divisor of a mean over labels, for one label per row."""
        if label.dtype.is_floating_point:  # probabilities of all classes
            return float(len(label))
        counted: Tensor = label != self.function.ignore_index
        weight = self.function.weight
        total = counted.sum() if weight is None else weight[label[counted]].double().sum()
        return total.double() / label[0].numel()


class _FunctionLoss(_Loss):
    """A user's function: a mean over rows, or one value per row."""

    def __init__(self, name: str, function: Any) -> None:
        super().__init__(name, function)
        least, most = _count_parameters(function)
        either = least == 1 and most != 1
        if either and not isinstance(function, nn.Module):
            raise ModelError(
                f"loss {name!r}: {brief(function)} can be given outputs and something else, or "
                "outputs alone, and which is meant does not show; give a function of two "
                "arguments, outputs and labels, or of one, the outputs"
            )
        self._alone = least == 1 and not either
        self._pairing = Pairing(f"loss {name!r}", function)

    def __call__(self, output: Any, label: Any, weights: Tensor | None) -> Term:
        if self._alone:
            value = self.function(output)
        else:
            value = self.function(output, label)
            self._pairing.check(output, label, value)
        rows = next(output_leaves(output))[1].shape[0]
        if not isinstance(value, Tensor):
            raise ModelError(
                f"loss {self.name!r} must return a tensor, the mean over the rows or one value per "
                f"row, but returned {brief(value)}"
            )
        value = _wide(value)
        if value.dim() == 0:
            if weights is not None:
                raise ModelError(
                    f"loss {self.name!r} returns one number for a batch, so rows cannot be "
                    "weighted; return one value per row where sample_weight_col or class_weight "
                    "is given"
                )
            return Term(self.name, ROWS, value * rows, rows)
        if value.shape[0] != rows:
            raise ModelError(
                f"loss {self.name!r} returned shape {tuple(value.shape)} for {rows} rows"
            )
        each = value.reshape(rows, -1).mean(1)
        return Term(self.name, ROWS, _weighted_sum(each, weights), rows)


def _wide(values: Tensor) -> Tensor:
    """Return values of half precision as float32, in which sums over rows are exact enough."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _weighted_sum(each: Tensor, weights: Tensor | None) -> Tensor:
    return each.sum() if weights is None else (each * weights.to(each.dtype)).sum()


def _count_parameters(function: Any) -> tuple[int | None, int | None]:
    """Return how many arguments a function must be given, and can be, by their places.

    ``None`` where that does not show.
    """
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return None, None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None, None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in kinds]
    return len([p for p in positional if p.default is p.empty]), len(positional)


class Pairing:
    """Check of the first calls of a custom function.

    PyTorch stretches a column of outputs, (n, 1), and a row of labels, (n,), to a square in which
    every output meets every label. Functions do so without a word, and train something else.

    Args:
        name: its name in messages.
        function: the function.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function
        self._left = _TRIED_CALLS

    def check(self, outputs: Any, label: Any, value: Any) -> None:
        """Check the function's result.

        Raises:
            ModelError: it compared each row with all others.
        """
        if not self._left or not isinstance(label, Tensor):
            return
        tensors = [tensor for _, tensor in output_leaves(outputs)]
        if len(tensors) != 1 or tensors[0].shape == label.shape or len(label) < 2:
            return
        output, rows = tensors[0], len(label)
        if not output.numel() == label.numel() == rows:
            return
        self._left -= 1
        if isinstance(value, Tensor) and tuple(value.shape[:2]) == (rows, rows):
            raise self._error(output, label)
        if self._stretches(output.detach()[:_TRIED_ROWS], label.detach()[:_TRIED_ROWS]):
            raise self._error(output, label)

    def _stretches(self, output: Tensor, label: Tensor) -> bool:
        """Return whether it is a mean over rows only where labels have the outputs' shape."""

        def differing(label: Tensor) -> bool:
            def compute(rows: np.ndarray, fraction: float) -> Values:
                return {("", ""): _mean(self._function(output[rows], label[rows]))}

            return bool(compare_parts(compute, len(label)))

        try:
            with torch.no_grad(), preserve_random():
                return differing(label) and not differing(label.view_as(output))
        except Exception:  # works on whole batches only, or on labels of its own shape
            return False

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
