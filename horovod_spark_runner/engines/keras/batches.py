"""Conversion of column batches to the inputs of the model's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...data.manifest import Column
from ...data.read.decode import classes_of
from ...errors import ModelError
from ...storage.arrays import Arrays
from ...training.sample_rows import made_up_rows, repeat_rows
from ...training.spec import TrainingSpec
from .binding import InputBinding, bind_outputs, needs_labels
from .losses import LabelCheck
from .model import Nest, call_outputs
from .tensors import as_tensor

# In what Keras says of a layer that was given several.
_ONE_INPUT = "expects 1 input(s)"


class BatchBinding:
    """Connects the columns of a training with its model.

    Args:
        model: the compiled model.
        spec: the training.

    Attributes:
        inputs: makes the model's inputs of columns.
        columns: the columns that the arrays of a batch hold.
        sample: a few rows of them.
        filler: a row that fills in where a rank has none of its own.

    Raises:
        ModelError: the model's inputs do not fit the columns.
    """

    def __init__(self, model: keras.Model, spec: TrainingSpec) -> None:
        self._model = model
        self._spec = spec
        self.inputs = InputBinding(model, spec.inputs, spec.train)
        self._labels: Callable[[Arrays], Nest]  # once the model's outputs are known
        self._check_labels: LabelCheck | None = None
        self.columns = spec.columns
        columns = [spec.train.column(name) for name in self.columns]
        self.sample = spec.sample or made_up_rows(columns)
        # Of a rank without rows.
        self.filler = repeat_rows(self.sample, 1)

    def bind_labels(self, outputs: Nest | None) -> None:
        """Bind the label columns to the model's outputs; ``None`` if it has none.

        Raises:
            ModelError: it does not fit the label columns.
        """
        model, spec = self._model, self._spec
        if spec.weight_col is not None:
            _check_weights_of_steps(spec.train.column(spec.weight_col), outputs)
        self._labels = bind_outputs(model, spec.outputs, spec.train, outputs)
        if needs_labels(model):
            of_classes = spec.fit.class_weight or {}
            weighted = spec.weight_col is not None or 0 in of_classes.values()
            columns = spec.outputs.columns
            self._check_labels = LabelCheck(model, outputs, columns, weighted=weighted)

    def outputs_of(self, example: Nest) -> Any | None:
        """Return the model's outputs for an example, or ``None`` if it has no call.

        Raises:
            ModelError: it takes one input, and several columns are given, one for each input.
        """
        try:
            return call_outputs(self._model, example)
        except ValueError as error:
            slots = self._spec.inputs.slots
            if len(slots) > 1 and _ONE_INPUT in str(error):
                names = [name for slot in slots for name in slot]
                raise ModelError(
                    f"the model takes one input, but feature_cols gives {len(slots)}; join the "
                    f"columns into one, feature_cols=[{names!r}], or with "
                    "pyspark.ml.feature.VectorAssembler"
                ) from error
            raise

    def data(self, arrays: Arrays) -> Any:
        """Return the data for the model's ``test_step``.

        Raises:
            ModelError: there are labels that the model's loss cannot be meant for.
        """
        # One of its own may make other labels of them.
        return self._data(arrays, check=type(self._model).test_step is keras.Model.test_step)

    def _data(self, arrays: Arrays, *, check: bool) -> Any:
        x, y = self.inputs(arrays), self._labels(arrays)
        if check and self._check_labels is not None:
            self._check_labels(y)
        weight = None if self._spec.weight_col is None else arrays[self._spec.weight_col]
        values = keras.utils.pack_x_y_sample_weight(x, y, weight)
        return tf.nest.map_structure(as_tensor, values)

    def training_data(self, arrays: Arrays) -> Nest:
        """Return the data for the model's ``train_step``, with the weights of classes.

        Raises:
            ModelError: there are labels that the model's loss cannot be meant for.
        """
        data = self._data(arrays, check=True)
        if self._spec.fit.class_weight is None:
            return data
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        weight = class_weights(np.asarray(keras.tree.flatten(y)[0]), self._spec.fit.class_weight)
        return (x, y, tf.convert_to_tensor(weight))


def _check_weights_of_steps(weight: Column, outputs: Nest | None) -> None:
    """Check that each output has the steps that a column weighs, if it does not weigh whole rows.

    Raises:
        ModelError: one has others.
    """
    steps = weight.shape
    for output in keras.tree.flatten(outputs) if steps and outputs is not None else ():
        output_shape = tuple(output.shape[1:])
        if len(output_shape) < 2 or output_shape[0] not in (None, *steps):
            raise ModelError(
                f"sample_weight_col {weight.name!r} holds {steps[0]} weights for each row, which "
                "are those of the steps of a sequence, but the model gives an output of shape "
                f"{output_shape} for a row; give one weight per row, or one for each step of the "
                "output"
            )


def class_weights(labels: np.ndarray, weights: Mapping[int, float]) -> np.ndarray:
    """Return the weight of each row's class. Pure.

    Args:
        labels: whole numbers, or one-hot rows.
        weights: by class; 1 for those not in it.
    """
    of_rows = classes_of(labels)
    classes, indices = np.unique(of_rows, return_inverse=True)
    by_class = np.array([weights.get(int(c), 1.0) for c in classes], keras.config.floatx())
    return by_class[indices.reshape(of_rows.shape)]
