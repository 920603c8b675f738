"""Columns and batches as inputs and labels of a PyTorch module."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...data.manifest import Column
from ...data.read.decode import classes_of
from ...errors import ModelError, on_one_line
from ...storage.arrays import Arrays
from ...training.label_values import explain_index
from ...training.sample_rows import made_up_rows, repeat_rows
from ...training.spec import Binding, TrainingSpec
from .model import dtype_name, forward_signature, output_leaves

# Batches are gathered for one step, so a tensor may share their memory, writable or not.
warnings.filterwarnings("ignore", "The given NumPy array is not writable")

# What PyTorch says of types and of shapes that do not go together.
_TYPES = ("dtype", "scalar type", "Input type (")
_SHAPES = ("shapes cannot be multiplied", "size mismatch", "channels, but got")


@dataclass(frozen=True)
class InputBinding:
    """Columns as the arguments of a module, by position or by name.

    Attributes:
        slots: the columns of each input; several are joined along their last axis.
        names: parameters of ``forward`` in the same order; ``None`` to give them by position.
    """

    slots: tuple[tuple[str, ...], ...]
    names: tuple[str, ...] | None = None

    def values(self, arrays: Mapping[str, np.ndarray], device: torch.device) -> list[Tensor]:
        """Return the tensor of each input; those on a CPU share the arrays' memory."""
        return to_tensors(arrays, self.slots, device)

    def call(self, module: nn.Module, values: Sequence[Tensor]) -> Any:
        """Call ``module`` on `values`."""
        if self.names is None:
            return module(*values)
        return module(**dict(zip(self.names, values, strict=True)))


def match_inputs(
    module: nn.Module, binding: Binding, columns: Mapping[str, Column]
) -> InputBinding:
    """Return how columns feed a module.

    A dictionary names parameters of ``forward``. A list is given by position, or by name if each
    column is called as a parameter.

    Raises:
        ModelError: inputs and columns do not fit; the message shows both.
    """
    check_columns(binding.slots, columns)
    signature = forward_signature(module)
    takes = f"{type(module).__name__}.forward takes {str(signature)[1:-1] or 'nothing'}"
    names = binding.names or _by_name(binding, list(signature.parameters), takes)
    try:
        if names is None:
            signature.bind(*binding.slots)
        else:
            signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        hint = ""
        if names is None and len(binding.slots) > len(signature.parameters) == 1:
            flat = [name for slot in binding.slots for name in slot]
            hint = f"; to join the columns into one input, feature_cols=[{flat}]"
        fed = binding.describe() if names is None else map(repr, names)
        raise ModelError(
            f"{takes}, but feature_cols feeds {len(binding.slots)}: {'; '.join(fed)} "
            f"({error}){hint}"
        ) from error
    return InputBinding(binding.slots, None if names is None else tuple(names))


def check_columns(slots: Sequence[Sequence[str]], columns: Mapping[str, Column]) -> None:
    """Check that all columns can be tensors, and those of a slot can be joined.

    Raises:
        ModelError: a column cannot be a tensor, or cannot be joined with the others of its slot.
    """
    for slot in slots:
        for name in slot:
            if columns[name].is_text:
                raise ModelError(
                    f"column {name!r} holds strings, which no tensor can; index it with Spark "
                    "ML's StringIndexer, or give a transform that makes numbers of it"
                )
        shapes = {columns[name].shape[:-1] for name in slot}
        if len(shapes) > 1:
            described = ", ".join(columns[name].describe() for name in slot)
            raise ModelError(f"columns cannot be joined into one: they are {described}")


def _by_name(binding: Binding, names: Sequence[str], takes: str) -> tuple[str, ...] | None:
    """Return the names of inputs where the columns of a list are called as these.

    Raises:
        ModelError: some are, but stand where another is to be.
    """
    columns = [slot[0] if len(slot) == 1 else "" for slot in binding.slots]
    if len(columns) > 1 and set(columns) <= set(names):
        return tuple(columns)
    wrong = [c for i, c in enumerate(columns) if c in names and names.index(c) != i]
    if wrong:
        raise ModelError(
            f"column {wrong[0]!r} is called as an input, but stands where another is fed: {takes}; "
            "say which column feeds which, feature_cols={input: column, …}"
        )
    return None


@dataclass(frozen=True)
class TorchBatch:
    """Some rows.

    Attributes:
        inputs: in the order of ``feature_cols``.
        labels: in the order of ``label_cols``.
        weights: of the rows; ``None`` where there are none.
        rows: their number.
    """

    inputs: list[Tensor]
    labels: list[Tensor]
    weights: Tensor | None
    rows: int


class BatchBinding:
    """Connection of a training's columns with its module.

    Args:
        module: the module.
        spec: the training.
        device: where tensors are computed with.

    Attributes:
        columns: the columns that the arrays of a batch hold.
        feed: how features are fed to the module.
        sample: a few rows of the columns.

    Raises:
        ModelError: the module's inputs do not fit the columns.
    """

    def __init__(self, module: nn.Module, spec: TrainingSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self.columns = spec.columns
        columns = {name: spec.train.column(name) for name in self.columns}
        check_columns(spec.outputs.slots, columns)
        if spec.weight_col is not None and columns[spec.weight_col].shape:
            raise ModelError(
                f"sample_weight_col {spec.weight_col!r} holds arrays of shape "
                f"{columns[spec.weight_col].shape}, which is for Keras; losses of PyTorch weigh "
                "whole rows: give one number per row, or weigh steps in a loss function, to which "
                "the column is given as a label"
            )
        self.feed = match_inputs(module, spec.inputs, columns)
        self.sample = spec.sample or made_up_rows(tuple(columns.values()))

    def of(self, arrays: Arrays, *, training: bool) -> TorchBatch:
        """Return rows as tensors, in a training with the weights of classes."""
        weights = None
        if self._spec.weight_col is not None:
            weights = arrays[self._spec.weight_col]
        elif training and self._spec.fit.class_weight is not None:
            weights = self._class_weights(arrays[self._spec.outputs.columns[0]])
        inputs = self.feed.values(arrays, self._device)
        return TorchBatch(
            inputs,
            to_tensors(arrays, self._spec.outputs.slots, self._device),
            None if weights is None else to_tensor(weights, self._device).reshape(-1),
            len(inputs[0]),
        )

    def nothing(self) -> TorchBatch:
        """Return two placeholder rows, for a rank without rows."""
        return self.of(repeat_rows(self.sample, 2), training=True)

    def call(self, module: nn.Module, batch: TorchBatch) -> Any:
        """Call ``module`` on a batch."""
        try:
            outputs = self.feed.call(module, batch.inputs)
        except RuntimeError as error:
            if not any(phrase in str(error) for phrase in (*_TYPES, *_SHAPES)):
                raise
            raise self._do_not_fit(module, batch, error) from error
        except IndexError as error:
            slots = zip(self.feed.slots, batch.inputs, strict=True)
            values = {" + ".join(slot): value.cpu().numpy() for slot, value in slots}
            raise explain_index(on_one_line(error, 200), values) from error
        if self._spec.fit.class_weight is not None and not _are_classes(outputs, batch.labels[0]):
            raise ModelError(
                f"class_weight weighs rows by their class, but column "
                f"{self._spec.outputs.columns[0]!r} gives labels of shape "
                f"{tuple(batch.labels[0].shape)}, which are neither one class per row nor one-hot "
                "rows of an output's shape; give weights to the loss, CrossEntropyLoss(weight=…)"
            )
        return outputs

    def _do_not_fit(self, module: nn.Module, batch: TorchBatch, error: Exception) -> ModelError:
        fed = ", ".join(
            f"{' + '.join(slot)} {tuple(value.shape)} {dtype_name(value.dtype)}"
            for slot, value in zip(self.feed.slots, batch.inputs, strict=True)
        )
        held = sorted({dtype_name(p.dtype) for p in module.parameters()})
        advice = ""
        if any(phrase in str(error) for phrase in _TYPES):
            column, wanted = self.feed.slots[0][0], held[0] if held else "float32"
            advice = ". Convert it in forward"
            if wanted != "bfloat16":  # which no column is of
                advice += (
                    f", or train it in another type: DataOptions(dtypes={{{column!r}: {wanted!r}}})"
                )
        if any(_is_image(value) for value in batch.inputs):
            advice = (
                ". Images arrive as uint8 (height, width, channels): "
                "x.permute(0, 3, 1, 2) / 255 in forward makes what Conv2d takes"
            )
        elif not advice and any(value.dim() == 1 for value in batch.inputs):
            advice = ". A column of numbers is of one dimension: x[:, None] in forward adds another"
        return ModelError(
            f"{type(module).__name__}.forward cannot compute with what it is fed, {fed}; its "
            f"weights are {', '.join(held) or 'none'} (PyTorch says: {on_one_line(error, 200)})"
            f"{advice}"
        )

    def target(self, batch: TorchBatch) -> Any:
        """Return the labels for functions of all outputs and labels."""
        return target_of(self._spec.outputs, batch.labels, batch.inputs)

    def _class_weights(self, labels: np.ndarray) -> np.ndarray:
        class_weight = self._spec.fit.class_weight or {}
        classes, indices = np.unique(classes_of(labels), return_inverse=True)
        by_class = np.array([class_weight.get(int(c), 1.0) for c in classes], np.float32)
        weights: np.ndarray = by_class[indices.reshape(-1)]
        return weights


def _is_image(value: Tensor) -> bool:
    return value.dtype is torch.uint8 and value.dim() == 4 and value.shape[3] in (1, 3, 4)


def _are_classes(outputs: Any, label: Tensor) -> bool:
    """Return whether labels are one class per row, or one-hot rows; zeros are no rows' labels."""
    if label.dim() == 1 or label.shape[1:] == (1,):
        return True
    fit = label.dim() == 2 and any(label.shape == one.shape for _, one in output_leaves(outputs))
    return fit and bool(((label == 0) | (label == 1)).all() and (label.sum(1) <= 1).all())


def target_of(binding: Binding, labels: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    """Return the labels for a function of all outputs and all labels.

    Args:
        binding: which label column is compared with which output.
        labels: in its order.
        inputs: the inputs, which take the place of labels where there are none.
    """
    if not binding.slots:
        return _pack(inputs, None)
    return _pack([plain_label(label) for label in labels], binding.names)


def _pack(values: Sequence[Any], names: Sequence[str] | None) -> Any:
    """Return a single value itself, several by their names or else as a tuple."""
    if len(values) == 1:
        return values[0]
    return tuple(values) if names is None else dict(zip(names, values, strict=True))


def plain_label(label: Tensor) -> Tensor:
    """Return whole numbers as int64, which PyTorch's functions take; others as they are."""
    small = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32)
    return label.to(torch.int64) if label.dtype in small else label


def to_tensors(
    arrays: Mapping[str, np.ndarray], slots: Sequence[Sequence[str]], device: torch.device
) -> list[Tensor]:
    """Return a tensor for each slot of columns; those on a CPU share the arrays' memory."""
    return [to_tensor(join_columns(arrays, slot), device) for slot in slots]


def to_tensor(values: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor; one on a CPU shares its memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def join_columns(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    """Return a column's values, or those of several columns joined along their last axis."""
    if len(names) == 1:
        return arrays[names[0]]
    parts = [arrays[name] for name in names]
    values = np.concatenate([p[:, None] if p.ndim == 1 else p for p in parts], axis=-1)
    wide = values.dtype == np.float64 and not any(p.dtype == np.float64 for p in parts)
    # float32 beside int32: as everything else that comes from columns.
    return values.astype(np.float32) if wide else values
