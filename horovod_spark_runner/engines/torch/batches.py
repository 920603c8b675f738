"""Conversion of column batches to the inputs of a PyTorch module and its losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...data.read.decode import classes_of
from ...errors import ModelError, on_one_line
from ...storage.arrays import Arrays
from ...training.sample_rows import made_up_rows, repeat_rows
from ...training.spec import TrainingSpec
from .feeding import Feed, check_columns, input_feed, to_tensor
from .losses import target_of
from .outputs import dtype_name

# What PyTorch says of types and of shapes that do not go together.
_TYPES = ("dtype", "scalar type")
_SHAPES = ("shapes cannot be multiplied", "size mismatch")


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


class Batches:
    """Connects the columns of a training with its module.

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
        self.feed = input_feed(module, spec.inputs, columns)
        self._labels = Feed(spec.outputs.slots)
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
            self._labels.values(arrays, self._device),
            None if weights is None else to_tensor(weights, self._device).reshape(-1),
            len(inputs[0]),
        )

    def nothing(self) -> TorchBatch:
        """Return two placeholder rows, for a rank without rows."""
        return self.of(repeat_rows(self.sample, 2), training=True)

    def call(self, module: nn.Module, batch: TorchBatch) -> Any:
        """Call ``module`` on a batch."""
        try:
            return self.feed.call(module, batch.inputs)
        except RuntimeError as error:
            if not any(phrase in str(error) for phrase in (*_TYPES, *_SHAPES)):
                raise
            raise self._do_not_fit(module, batch, error) from error

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
        elif any(value.dim() == 1 for value in batch.inputs):
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
