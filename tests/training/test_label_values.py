"""Labels that a loss would take for others are refused by name, in training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_spark_runner.config.training import FitOptions
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.engines.keras.binding import BatchBinding
from horovod_spark_runner.engines.keras.losses import LabelCheck
from horovod_spark_runner.engines.keras.model import call_outputs
from horovod_spark_runner.errors import ModelError
from horovod_spark_runner.training.spec import Binding

from ..runs import spec_of

WEIGHTED = {"weighted": True}


def checked(model: Any, labels: Any, columns: Sequence[str] = ("y",), **more: Any) -> None:
    """Check labels as a rank does, once the model's losses are known."""
    outputs = call_outputs(model, None)
    check = LabelCheck(model, outputs, columns, **{"weighted": False, **more})
    check(labels)  # before Keras has made the losses: nothing is known
    model.compute_loss(
        y=keras.tree.map_structure(np.zeros_like, labels),
        y_pred=keras.tree.map_structure(lambda t: np.full((2, *t.shape[1:]), 0.5), outputs),
    )
    check(labels)


def dense(units: int, loss: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)])
    model.compile("sgd", loss)
    return model


class Halved(keras.losses.SparseCategoricalCrossentropy):
    """Has its own way with labels."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return super().call(y_true // 2, y_pred)


class Unlabelled(keras.losses.BinaryCrossentropy):
    """Leaves out labels of -1, before Keras' loss sees them."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        known = keras.ops.cast(y_true >= 0, "float32")
        return super().__call__(keras.ops.maximum(y_true, 0), y_pred, known)


SPARSE = keras.losses.SparseCategoricalCrossentropy
TWO = keras.losses.BinaryCrossentropy


@pytest.mark.parametrize(
    ("units", "loss", "labels", "message"),
    [
        (3, "sparse_categorical_crossentropy", [0, 2.5], "'y'.*2.5"),
        (3, SPARSE(from_logits=True), [0, 3], r"'y'.*\b3\b.*\b3 classes.*\b0\b.*\b2"),
        (3, SPARSE(), [0, -1], r"'y'.*-1\b.*\b3 classes"),
        (3, SPARSE(ignore_class=255), [255, 3], r"'y'.*\b3\b"),
        (1, "binary_crossentropy", [0, 2], r"\b0\b.*\b1\b.*\b2"),
        (1, TWO(from_logits=True), [-1, 1], r"-1\b"),
        (1, "binary_focal_crossentropy", [0, -0.5], "-0.5"),
        (1, "binary_crossentropy", [0, 1.00001], "1.00001"),
    ],
)
def test_labels_that_cannot_be_meant(units: int, loss: Any, labels: Any, message: str) -> None:
    for kind in (np.float32, np.float64):
        with pytest.raises(ModelError, match=message):
            checked(dense(units, loss), np.array(labels, kind))


@pytest.mark.parametrize(
    ("units", "loss", "labels", "more"),
    [
        (3, "sparse_categorical_crossentropy", [0, 2], {}),
        (3, SPARSE(ignore_class=255), [255, 0], {}),
        (3, SPARSE(ignore_class=-1), [-1.0, 2.0], {}),
        (3, Halved(), [4, 5], {}),
        (1, Unlabelled(), [-1, 1], {}),
        (3, lambda y, p: keras.ops.mean(p), [0.5, 9], {}),
        (1, "binary_crossentropy", [0.25, 1], {}),
        # Probabilities, as they are computed.
        (1, "binary_crossentropy", [1 - 0.9 - 0.1, 1.0000001], {}),
        # Rows that do not count may hold anything.
        (1, "binary_crossentropy", [-1, 1], WEIGHTED),
        # No classes, but values between others: Keras' own use of it in autoencoders.
        (2, "binary_crossentropy", [[-1, 1], [2, 0]], {}),
        (1, "mse", [-1, 2.5], {}),
    ],
)
def test_labels_that_can_be_meant(units: int, loss: Any, labels: Any, more: Any) -> None:
    checked(dense(units, loss), np.array(labels, np.float32), **more)


def test_columns_of_one_output() -> None:
    losses = ["binary_crossentropy", "sparse_categorical_crossentropy"]
    for units, loss, labels in zip((1, 4), losses, ([2, 0], [9, 0]), strict=True):
        with pytest.raises(ModelError, match=r"'a'.*'b'.*\b[29]"):
            checked(dense(units, loss), np.array(labels), ["a", "b"])


def test_several_outputs_are_left_to_keras() -> None:
    value = keras.Input((3,))
    model = keras.Model(value, [keras.layers.Dense(1)(value) for _ in range(2)])
    model.compile("sgd", ["binary_crossentropy"] * 2)
    checked(model, [np.array([-1.0, 1.0]), np.array([0.0, 1.0])], ["a", "b"])


class OwnTest(keras.Sequential):
    """Tests by labels of its own: here -1 is as good as 0."""

    def test_step(self, data: Any) -> Any:
        x, y = data
        return super().test_step((x, keras.ops.maximum(y, 0)))


@pytest.mark.parametrize(
    ("kind", "weights", "training", "testing"),
    [
        (keras.Sequential, None, False, False),
        (keras.Sequential, {0: 1.0, 1: 5.0}, False, False),
        # Rows of classes without weight may hold anything.
        (keras.Sequential, {-1: 0.0}, True, True),
        (OwnTest, None, False, True),
    ],
)
def test_labels_that_do_not_count_or_are_made_others(
    kind: Any, weights: dict[int, float] | None, training: bool, testing: bool
) -> None:
    model = kind([keras.Input((3,)), keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "binary_crossentropy")
    fit = FitOptions(batch_size=2, class_weight=weights)
    batches = BatchBinding(model, spec_of([Column("x", "float32", (3,))], fit=fit))
    batches.bind_labels(call_outputs(model, None))
    arrays = {"x": np.zeros((2, 3), np.float32), "y": np.array([0, 1], np.float32)}
    model.test_step(batches.data(arrays))  # Keras knows the loss now
    arrays["y"] -= 1
    for taken, take in ((training, batches.training_data), (testing, batches.data)):
        if taken:
            take(arrays)
        else:
            with pytest.raises(ModelError, match="'y'.*-1"):
                take(arrays)


def test_outputs_of_which_little_is_known() -> None:
    """What takes no shape to see is still seen."""
    for outputs in (None, tf.TensorSpec(None)):
        sparse, two = dense(3, SPARSE()), dense(1, TWO())
        for model, fits in ((sparse, [0, 9]), (two, [-1, 9])):
            model.compute_loss(y=np.zeros(2), y_pred=np.full((2, 3 if model is sparse else 1), 0.5))
            LabelCheck(model, outputs, ["y"], weighted=False)(np.array(fits))
        with pytest.raises(ModelError, match="'y'.*2.5"):
            LabelCheck(sparse, outputs, ["y"], weighted=False)(np.array([0, 2.5]))


def test_no_rows_and_time_steps() -> None:
    steps = keras.Sequential([keras.Input((4, 3)), keras.layers.Dense(5)])
    steps.compile("sgd", SPARSE(from_logits=True))
    checked(steps, np.full((2, 4), 4))
    check = LabelCheck(steps, call_outputs(steps, None), ["y"], weighted=False)
    check(np.zeros((0, 4)))
    with pytest.raises(ModelError, match=r"\b5\b.*\b5 classes"):
        checked(steps, np.full((2, 4), 5))


def test_weights_of_steps_fit_the_steps_of_the_output() -> None:
    columns = [Column("x", "float32", (5, 3)), Column("w", "float32", (5,))]
    label = Column("y", "float32", (5, 1))
    spec = replace(spec_of(columns, (label,), sample_weight_col="w"), inputs=Binding(("x",)))
    model = keras.Sequential([keras.Input((5, 3)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batches = BatchBinding(model, spec)
    batches.bind_labels(call_outputs(model, None))
    arrays = {column.name: np.zeros((2, *column.shape), np.float32) for column in (*columns, label)}
    given: Any = batches.training_data(arrays)
    assert given[2].shape == (2, 5)
    for wrong in (keras.layers.Flatten(), keras.layers.Cropping1D((0, 1))):
        other = keras.Sequential([keras.Input((5, 3)), wrong, keras.layers.Dense(1)])
        other.compile("sgd", "mse")
        with pytest.raises(ModelError, match=r"'w'.*\b5\b.*step"):
            BatchBinding(other, spec).bind_labels(call_outputs(other, None))
