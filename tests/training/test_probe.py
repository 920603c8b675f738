"""What the user wrote, tried on the halves of a batch."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from horovod_spark_runner.errors import ModelError
from horovod_spark_runner.training.keras import probe
from horovod_spark_runner.training.keras.evaluator import KerasEvaluator
from horovod_spark_runner.training.keras.generators import generators
from horovod_spark_runner.training.random_state import capture_random

X = np.random.default_rng(0).random((7, 3)).astype(np.float32)
Y = X.sum(1).astype(np.float32)
DATA = (tf.constant(X), tf.constant(Y))


def built(loss: Any = "mse", metrics: Any = None, *layers: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", loss, metrics=metrics)
    model.test_on_batch(X, Y)
    model.reset_metrics()
    return model


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(probe, "notify", lambda text, warn=False: told.append(text))
    return told


def run(model: Any) -> None:
    probe.Probe(model, DATA).run()


def squares(y: Any, p: Any) -> Any:
    return ops.square(ops.reshape(p, (-1,)) - ops.reshape(y, (-1,)))


class AddsSum(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(ops.sum(x**2))
        return x


class AddsMean(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(ops.mean(x**2))
        return x


class Largest(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.maximum(self.value, ops.max(p)))

    def result(self) -> Any:
        return self.value


def test_means_pass(warnings: list[str]) -> None:
    for loss in (squares, lambda y, p: ops.mean(squares(y, p)), "mae", keras.losses.Huber()):
        run(built(loss, ["mae", lambda y, p: squares(y, p)], AddsMean()))
    run(built(keras.losses.MeanSquaredError(reduction="sum")))
    assert warnings == []


def test_a_list_of_one_output_is_that_output(warnings: list[str]) -> None:
    image = keras.Input((3,))
    model = keras.Model(image, [keras.layers.Dense(1)(image)])
    for loss in ("mse", squares):
        model.compile("sgd", loss)
        for labels in (DATA[1], (DATA[1],), [DATA[1]]):
            model.test_on_batch(X, Y)
            probe.Probe(model, (DATA[0], labels), exact=True).run()
    assert warnings == []
    model.compile("sgd", lambda y, p: ops.sum(squares(y, p)))
    model.test_on_batch(X, Y)
    with pytest.raises(ModelError, match="is a sum over the rows"):
        probe.Probe(model, (DATA[0], (DATA[1],))).run()


def test_a_sum_is_refused() -> None:
    with pytest.raises(ModelError, match="loss .* is a sum over the rows"):
        run(built(lambda y, p: ops.sum(squares(y, p))))
    with pytest.raises(ModelError, match=r"loss 0 that a layer adds \(add_loss\).* is a sum"):
        run(built("mse", None, AddsSum()))


def test_what_is_neither_is_warned_of(warnings: list[str]) -> None:
    ratio, pairs = keras.losses.Dice(), keras.losses.Circle()
    labels = DATA[0], tf.constant([0, 1, 2, 0, 1, 2, 0])
    run(built(lambda y, p: ops.max(squares(y, p))))
    run(built(ratio))
    embedding = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    embedding.compile("sgd", pairs)
    embedding.test_on_batch(*labels)
    probe.Probe(embedding, labels).run()
    assert len(warnings) == 3
    assert all("is no mean over the rows" in warning for warning in warnings)
    # Over each row's own pixels, it is one.
    by_row = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, "sigmoid")])
    by_row.compile("sgd", keras.losses.Dice(axis=1))
    by_row.test_on_batch(X, X)
    probe.Probe(by_row, (X, X)).run()
    assert len(warnings) == 3


def test_what_a_loss_masks_itself_is_no_matter_of_rows(warnings: list[str]) -> None:
    labels = np.array([0, 1, 1, 1, 2, 2, 2])

    def own(y: Any, p: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y, p, ignore_class=1)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", own)
    model.test_on_batch(X, labels)
    probe.Probe(model, (X, labels)).run()
    assert warnings == []
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=1)
    call = KerasEvaluator._checking(cast(Any, SimpleNamespace(_model=model)), type(loss).__call__)
    for rows in (slice(0, 1), slice(0, 7)):  # also where no label is ignored
        with pytest.raises(ModelError, match="is a mean over what is not masked"):
            call(loss, labels[rows], model(X[rows]))
    assert "call" not in vars(loss)


def test_functions_as_metrics_are_tried_too(warnings: list[str]) -> None:
    def rooted(y: Any, p: Any) -> Any:
        return ops.sqrt(ops.mean(squares(y, p)))

    def crossed(y: Any, p: Any) -> Any:  # every label with every prediction: a common slip
        return ops.square(ops.reshape(y, (-1,)) - p)

    for number, metric in enumerate((rooted, crossed)):
        run(built("mse", [metric]))
        assert len(warnings) == number + 1
        assert f"metric '{metric.__name__}' of model" in warnings[-1]
        assert "is no mean over the rows" in warnings[-1]


def test_rows_that_are_equally_wrong_hide_nothing(warnings: list[str]) -> None:
    rows = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    model = keras.Sequential(
        [keras.layers.Input((3,)), keras.layers.Dense(1, "linear", True, "ones", "ones")]
    )
    model.compile("sgd", lambda y, p: ops.sqrt(ops.mean(squares(y, p))))
    labels = rows.sum(1, keepdims=True)  # what the model says, less one
    model.evaluate(rows, labels, verbose=0)
    probe.Probe(model, (rows, labels)).run()
    assert len(warnings) == 1


def test_rows_that_are_predicted_alike_hide_nothing(warnings: list[str]) -> None:
    """A last layer that begins with zeros, and what compares the rows of a batch."""

    def ranked(y: Any, p: Any) -> Any:  # every pair of rows
        order = ops.sign(ops.reshape(y, (-1, 1)) - ops.reshape(y, (1, -1)))
        return ops.mean(ops.softplus(-order * (ops.reshape(p, (-1, 1)) - ops.reshape(p, (1, -1)))))

    class Crossed(keras.losses.Loss):
        def call(self, y: Any, p: Any) -> Any:  # labels (n,) with predictions (n, 1)
            return ops.mean(ops.square(y - p), axis=-1)

    def spread(y: Any, p: Any) -> Any:
        return ops.std(p)

    def zeros(activation: str | None = None) -> Any:
        return keras.layers.Dense(1, activation, kernel_initializer="zeros")

    def guarded(y: Any, p: Any) -> Any:
        tf.debugging.assert_equal(p, tf.fill(tf.shape(p), 0.5))
        return squares(y, p)

    def raises(y: Any, p: Any) -> Any:
        if np.any(np.array(p) != 0.5):
            raise RuntimeError("scores must be one half")
        return squares(y, p)

    cases: list[tuple[Any, Any, Any]] = [
        (ranked, None, zeros()),
        (Crossed(), None, zeros()),
        ("mse", [spread], zeros("sigmoid")),
    ]
    for number, (loss, metrics, last) in enumerate(cases):
        model = keras.Sequential([keras.Input((3,)), last])
        model.compile("sgd", loss, metrics=metrics)
        model.test_on_batch(X, Y)
        probe.Probe(model, DATA).run()
        assert len(warnings) == number + 1, number
        assert "is no mean over the rows" in warnings[-1]
    # What takes none but the model's own predictions is tried on those alone.
    model = keras.Sequential([keras.Input((3,)), zeros("sigmoid")])
    for refusal in (guarded, raises):
        model.compile("sgd", refusal, metrics=[refusal], run_eagerly=True)
        model.test_on_batch(X, Y)
        probe.Probe(model, DATA).run()
    assert len(warnings) == len(cases)
    # What is refused is refused.
    model = keras.Sequential([keras.Input((3,)), zeros()])
    model.compile("sgd", lambda y, p: ops.sum(ops.relu(p)))
    model.test_on_batch(X, Y)
    with pytest.raises(ModelError, match="is a sum over the rows"):
        probe.Probe(model, DATA).run()
    model.compile("sgd", ranked)
    model.test_on_batch(X, Y)
    with pytest.raises(ModelError, match="is no mean over the rows"):
        probe.Probe(model, DATA, exact=True).run()
    model.compile("sgd", "mse", metrics=[Largest()])
    model.test_on_batch(X, Y)
    with pytest.raises(ModelError, match="'largest' .* its variable 'value' is not a sum"):
        probe.Probe(model, DATA).run()


def test_a_metric_that_is_no_sum_is_refused() -> None:
    with pytest.raises(ModelError, match="'largest' .* its variable 'value' is not a sum"):
        run(built("mse", [Largest()]))


def test_nothing_is_left_of_it() -> None:
    class Tracks(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = keras.layers.Dense(1)
            self.seen = keras.metrics.Mean(name="seen")
            self.calls = self.add_weight(name="calls", trainable=False, initializer="zeros")

        def call(self, x: Any) -> Any:
            self.seen.update_state(ops.mean(x))
            self.calls.assign_add(1.0)
            return self.out(x + keras.random.normal((1,)) + np.random.normal() + random.random())

    model = Tracks()
    model.compile("sgd", squares, metrics=[lambda y, p: squares(y, p)])
    model.test_on_batch(X, Y)
    before = [np.array(v) for v in [*model.weights, *model.metrics[-1].variables]]
    drawn = capture_random(generators())
    run(model)
    for now, then in zip(capture_random(generators()), drawn, strict=True):
        np.testing.assert_equal(now, then)
    after = [np.array(v) for v in [*model.weights, *model.metrics[-1].variables]]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
