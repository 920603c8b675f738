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
from ...training.part_comparison import Values, compare_parts
from ...training.spec import Binding
from .binding import plain_label, target_of
from .model import output_leaves, pick
from .torch_model import Loss

LOSS = "loss"
# What a loss is divided by: the rows, what follows from its labels, or nothing.
ROWS, LABELS, SUM = "rows", "labels", "sum"


@dataclass(frozen=True)
class Term:
    """One loss of a batch on this rank.

    Attributes:
        name: what it is called in the results.
        kind: `ROWS`, `LABELS` or `SUM`, the same for all batches.
        summed: the sum that the mean is made of, to be differentiated.
        count: what it is divided by, given that of all ranks; the rows where nothing says
            otherwise.
    """

    name: str
    kind: str
    summed: Tensor
    count: Tensor | float


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
        several = isinstance(loss, Mapping) or (
            isinstance(loss, Sequence) and not isinstance(loss, str)
        )
        if several:
            self._parts = _matched(loss, labels)
        else:
            self._parts = [(LOSS, (), _RankLoss(loss, LOSS))]
            alone = self._parts[0][2].of_torch
            if alone and len(labels.slots) > 1:
                raise ModelError(
                    f"loss={brief(loss)} compares one output with one label, but label_cols gives "
                    f"{len(labels.slots)}: {'; '.join(labels.describe())}; give a dictionary of "
                    "losses by the names of label_cols, or a function of all outputs and labels"
                )
        self._several = several

    @property
    def names(self) -> list[str]:
        """Names of the losses in the results."""
        return [name for name, _, _ in self._parts]

    def to(self, device: torch.device) -> Losses:
        """Move tensors of losses, such as weights of classes, to a device; return these losses."""
        for _, _, loss in self._parts:
            if isinstance(loss.function, nn.Module):
                loss.function.to(device)  # copies of it hold the same tensors
        return self

    def functions(self) -> list[tuple[str, Callable[..., Any]]]:
        """Return the user's own functions, which may be no means over rows, by their names."""
        return [(name, loss.function) for name, _, loss in self._parts if not loss.of_torch]

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
        if not self._several:
            loss = self._parts[0][2]
            target = target_of(self._labels, labels, inputs)
            return [loss(self._output(outputs, loss), target, weights)]
        terms = []
        for index, (_, key, loss) in enumerate(self._parts):
            output = self._named(outputs, key, index)
            terms.append(loss(output, plain_label(labels[index]), weights))
        return terms

    def nothing(self, device: torch.device) -> list[Term]:
        """Return the losses of no rows."""
        zero = torch.zeros((), device=device)
        return [Term(name, loss.kind, zero, 0.0) for name, _, loss in self._parts]

    def _output(self, outputs: Any, loss: _RankLoss) -> Any:
        if not loss.of_torch:
            return outputs
        tensors = list(output_leaves(outputs))
        if len(tensors) != 1:
            raise ModelError(
                f"loss {loss.name!r} compares one output, but the module gives {len(tensors)}: "
                "give a dictionary or list of losses, or a function of all outputs and labels"
            )
        return tensors[0][1]

    def _named(self, outputs: Any, key: tuple[str, ...], index: int) -> Tensor:
        tensors = list(output_leaves(outputs))
        if isinstance(outputs, Mapping) and key:
            if key[0] not in outputs:
                raise ModelError(
                    f"loss names the output {key[0]!r}, but the module gives "
                    f"{', '.join(map(repr, outputs))}"
                )
            return pick(outputs, key)
        if len(tensors) != len(self._parts) or isinstance(outputs, Mapping):
            raise ModelError(
                f"{len(self._parts)} losses are given, but the module gives {len(tensors)} outputs"
                + (" by name; give a dictionary of losses" if isinstance(outputs, Mapping) else "")
            )
        return tensors[index][1]


def _matched(losses: Any, labels: Binding) -> list[tuple[str, tuple[str, ...], _RankLoss]]:
    """Return name, output and loss for each label, in the order of ``label_cols``."""
    slots = len(labels.slots)
    if not isinstance(losses, Mapping):
        if len(losses) != slots:
            raise ModelError(f"{len(losses)} losses are given, but label_cols gives {slots} labels")
        names = labels.names or tuple(str(index) for index in range(slots))
        return [
            (f"{name}_loss", (name,) if labels.names else (), _RankLoss(loss, f"{name}_loss"))
            for name, loss in zip(names, losses, strict=True)
        ]
    if labels.names is None or set(labels.names) != set(losses):
        there = "a list" if labels.names is None else ", ".join(map(repr, labels.names))
        raise ModelError(
            f"loss names the outputs {', '.join(map(repr, losses))}, but label_cols gives {there}; "
            "give label_cols as a dictionary with the same names"
        )
    return [
        (f"{name}_loss", (name,), _RankLoss(losses[name], f"{name}_loss")) for name in labels.names
    ]


class _RankLoss:
    """A loss of one output, as a sum over this rank's rows and its divisor."""

    def __init__(self, loss: Loss, name: str) -> None:
        self.name = name
        self.function: Any = loss_named(loss) if isinstance(loss, str) else loss
        if isinstance(self.function, type) or not callable(self.function):
            raise ModelError(
                "loss must be the name of a class of torch.nn, a module of one, or a function of "
                f"outputs and labels, got {brief(loss)}"
            )
        self.of_torch = _is_of_torch(self.function)
        if isinstance(self.function, nn.Module) and any(True for _ in self.function.parameters()):
            raise ModelError(
                f"loss {type(self.function).__name__} has weights of its own, which no optimizer "
                "would train; make it a part of the module, which then returns the loss"
            )
        takes, most = (None, None) if self.of_torch else _parameters(self.function)
        either = takes == 1 and most != 1
        if either and not isinstance(self.function, nn.Module):
            raise ModelError(
                f"loss {name!r}: {brief(loss)} can be given outputs and something else, or "
                "outputs alone, and which is meant does not show; give a function of two "
                "arguments, outputs and labels, or of one, the outputs"
            )
        self._alone = takes == 1 and not either
        self._pairing = Pairing(f"loss {name!r}", self.function)
        self.kind = ROWS
        if not self.of_torch:
            return
        if _reduction(self.function) == "sum":
            self.kind = SUM
        elif isinstance(self.function, (nn.CrossEntropyLoss, nn.NLLLoss)):
            self.kind = LABELS
        self._summing = _reducing(self.function, "sum")
        self._by_element = _reducing(self.function, "none")

    def __call__(self, output: Any, label: Any, weights: Tensor | None) -> Term:
        if self._alone:
            return self._of_value(self.function(output), output, weights)
        if not self.of_torch:
            value = self.function(output, label)
            self._pairing.check(output, label, value)
            return self._of_value(value, output, weights)
        output = _wide(output)  # as autocast does, too: labels would be rounded otherwise
        return self._of_loss(output, fitting_label(self.function, output, label), weights)

    def _of_loss(self, output: Tensor, label: Tensor, weights: Tensor | None) -> Term:
        """Return the term of a torch.nn loss."""
        rows = output.shape[0]
        count = self._labelled(label) if self.kind == LABELS else 1.0 if self.kind == SUM else rows
        # Of several values per row the mean is taken, but for Kullback and Leibler's sum.
        values = self._values(output, label) if _reduction(self.function) != "sum" else 1
        if weights is not None or _reduction(self.function) == "none":
            each = self._by_element(output, label).reshape(rows, -1).sum(1)
            summed = each.sum() if weights is None else (each * weights.to(each.dtype)).sum()
        elif self.kind == ROWS:
            return Term(self.name, self.kind, self.function(output, label) * rows, count)
        else:
            summed = self._summing(output, label)
        return Term(self.name, self.kind, summed if values == 1 else summed / values, count)

    def _values(self, output: Tensor, label: Tensor) -> int:
        """Return how many values of a row the mean is taken of, where the reduction is one."""
        if _reduction(self.function) == "batchmean" or isinstance(self.function, OF_ROWS):
            return 1
        if self.kind != LABELS:
            return output[0].numel()
        # Probabilities of all classes make one value.
        return output[0].numel() // output.shape[1] if _real(label) else label[0].numel()

    def _labelled(self, label: Tensor) -> Tensor | float:
        """Return the divisor of a mean over labels, for one label per row."""
        if _real(label):  # probabilities of all classes
            return float(len(label))
        loss = self.function
        counted = label != loss.ignore_index
        if loss.weight is None:
            whole: Tensor = counted.sum().double() / label[0].numel()
            return whole
        weighted: Tensor = loss.weight[label[counted]].double().sum() / label[0].numel()
        return weighted

    def _of_value(self, value: Any, output: Any, weights: Tensor | None) -> Term:
        """Return the term of a function's result: a mean over rows, or one value per row."""
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
        summed = each.sum() if weights is None else (each * weights.to(each.dtype)).sum()
        return Term(self.name, ROWS, summed, rows)


def _wide(values: Tensor) -> Tensor:
    """Return values of half precision as float32, in which sums over rows are exact enough."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _reduction(loss: Any) -> str:
    return str(loss.reduction)


def _reducing(loss: Any, reduction: str) -> Any:
    """Return a loss that makes a sum, or nothing, of its elements."""
    made = copy.copy(loss)
    made.reduction = reduction
    return made


def _real(label: Tensor) -> bool:
    return label.dtype.is_floating_point


def _is_of_torch(loss: Any) -> bool:
    return type(loss).__module__.startswith("torch.nn.") and isinstance(loss, (*CLASSES, *ELEMENTS))


def loss_named(name: str) -> nn.Module:
    """Return the loss of torch.nn that is called so.

    Raises:
        ModelError: there is none.
    """
    loss = getattr(nn, name, None)
    names = [cls.__name__ for cls in (*CLASSES, *ELEMENTS)]
    if not isinstance(loss, type) or name not in names:
        raise ModelError(
            f"loss={name!r} is no loss of an output and a label in torch.nn; there are "
            f"{', '.join(sorted(names))}; or give a function"
        )
    made: nn.Module = loss()
    return made


def _parameters(function: Any) -> tuple[int | None, int | None]:
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
_TRIED_ROWS, _TRIED_CALLS = 8, 3


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
