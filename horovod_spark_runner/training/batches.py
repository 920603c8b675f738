"""Batches of columns as what the model's steps take."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ..data.reader import Batch
from ..storage.arrays import Arrays
from .model import InputBinding, averages_by_weight, bind_outputs
from .spec import TrainingSpec
from .tensors import as_tensor


class BatchBinding:
    """Connects the columns of a training with its model.

    Args:
        model: the compiled model.
        spec: the training.

    Raises:
        ModelError: the model does not fit the columns.
    """

    def __init__(self, model: Any, spec: TrainingSpec) -> None:
        self._inputs = InputBinding(model, spec.inputs, spec.train)
        self._labels = bind_outputs(model, spec.outputs)
        self._weight = spec.weight
        # The column that the rows of a batch count by, if they do not all count the same.
        self.counts_by = spec.weight if averages_by_weight(model) else None
        self.columns = [*spec.inputs.columns, *spec.outputs.columns]
        if spec.weight is not None:
            self.columns.append(spec.weight)
        columns = [spec.train.column(name) for name in dict.fromkeys(self.columns)]
        # Stands in where a rank has no row of its own.
        self.blank: Arrays = {c.name: c.blank() for c in columns}

    @property
    def example(self) -> Any:
        """One row of inputs, all zeros."""
        return self._inputs(self.blank)

    def data(self, arrays: Arrays) -> tuple[Any, ...]:
        """Return what the model's ``train_step`` and ``test_step`` take."""
        values: tuple[Any, ...] = (self._inputs(arrays), self._labels(arrays))
        if self._weight is not None:
            values = (*values, arrays[self._weight])
        data: tuple[Any, ...] = tf.nest.map_structure(as_tensor, values)
        return data

    def weight_of(self, batch: Batch) -> float:
        """Return what the batch counts for in the mean over the global batch."""
        if self.counts_by is not None:
            return float(np.sum(batch.arrays[self.counts_by], dtype=np.float64))
        return float(batch.rows)
