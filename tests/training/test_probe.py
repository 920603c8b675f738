"""Steps, losses, layers and metrics that the user wrote, tried on the halves of a few rows."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import horovod.tensorflow as hvd
import keras
import mpi4py.MPI  # noqa: F401 - it listens from its import on, so before the tests
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from horovod_spark_runner.checkpoint.rank_state import capture_random
from horovod_spark_runner.engines.keras import probe
from horovod_spark_runner.engines.keras.evaluate import KerasEvaluator
from horovod_spark_runner.engines.keras.exchange import TensorCollectives
from horovod_spark_runner.engines.keras.metrics import reduced_by
from horovod_spark_runner.engines.keras.state import generators
from horovod_spark_runner.engines.keras.step import DistributedStep
from horovod_spark_runner.errors import ModelError
from horovod_spark_runner.sync.allreduce import AllreduceSynchroniser

ROWS = 10
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, 6)).astype("float32")
Y = (X.sum(1) + RANDOM.normal(size=ROWS)).astype("float32")
KIND = RANDOM.integers(0, 3, ROWS)
TOKENS = RANDOM.integers(0, 9, (ROWS, 5))
TOKENS[0] = 8  # which counts in `of_sequence`


def squares(y: Any, p: Any) -> Any:
    y, p = (ops.cast(ops.reshape(each, (-1,)), "float32") for each in (y, p))
    return ops.square(p - y)


def stepping(loss: Any, *, clip: bool = False) -> Any:
    """Return a class of models whose ``train_step`` descends a function of labels and outputs."""

    class Stepping(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                value = loss(y, self(x, training=True))
                scaled = self.optimizer.scale_loss(value)
            gradients = tape.gradient(scaled, self.trainable_variables)
            if clip:
                gradients, _ = tf.clip_by_global_norm(gradients, 0.01)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": value}

    return Stepping


def net(
    *middle: Any,
    kind: Any = keras.Model,
    loss: Any = None,
    last: Any = None,
    eager: bool = False,
) -> Any:
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, "relu")(inputs)
    for layer in middle:
        hidden = layer(hidden)
    model = kind(inputs, (last or layers.Dense(1))(hidden))
    model.compile(keras.optimizers.Adam(0.01), loss, run_eagerly=eager)
    return model


def tried(model: Any, *data: Any) -> list[str]:
    """Return what is warned of; check that nothing is left of the trial."""
    hvd.init()
    given = tuple(tf.constant(each) for each in data or (X, Y))
    if not model.built:
        model(given[0])
    exchange = DistributedStep(model, AllreduceSynchroniser("none", TensorCollectives()))
    for optimizer in exchange.optimizers:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
    if not model.run_eagerly and (getattr(model, "_compile_loss", None) or model._compile_metrics):
        model.test_step(given)
        model.reset_metrics()
    kept = [v for o in exchange.optimizers for v in o.variables]
    before = [np.asarray(v).copy() for v in [*model.variables, *kept]]
    drawn = capture_random(generators())
    try:
        return probe.try_model(model, exchange, given, given)
    finally:
        for now, then in zip(capture_random(generators()), drawn, strict=True):
            np.testing.assert_equal(now, then)
        for value, variable in zip(before, [*model.variables, *kept], strict=True):
            np.testing.assert_array_equal(np.asarray(variable), value)


def mean(y: Any, p: Any) -> Any:
    return ops.mean(squares(y, p))


def total(y: Any, p: Any) -> Any:
    return ops.sum(squares(y, p))


def rooted(y: Any, p: Any) -> Any:
    return ops.sqrt(mean(y, p))


def ranked(y: Any, p: Any) -> Any:
    """Compare every pair of rows."""
    order = ops.sign(ops.reshape(y, (-1, 1)) - ops.reshape(y, (1, -1)))
    return ops.mean(ops.softplus(-order * (ops.reshape(p, (-1, 1)) - ops.reshape(p, (1, -1)))))


def contrastive(y: Any, p: Any) -> Any:
    unit, itself = ops.normalize(p, axis=-1), ops.eye(ops.shape(p)[0])
    chances = ops.log_softmax(ops.matmul(unit, ops.transpose(unit)) / 0.1 - 1e9 * itself)
    same = ops.cast((y[:, None] > 0) == (y[None] > 0), "float32") * (1 - itself)
    return -ops.mean(same * ops.where(same > 0, chances, 0.0))


def of_sequence(y: Any, p: Any) -> Any:
    counts = ops.cast(y > 3, "float32")
    return ops.sum(counts * keras.losses.sparse_categorical_crossentropy(y, p)) / ops.sum(counts)


def ignoring(y: Any, p: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(y, p, ignore_class=1)


def listed(loss: Any) -> Any:
    """Return a model that gives a list of one output."""
    inputs = keras.Input((6,))
    model = keras.Model(inputs, [layers.Dense(1)(inputs)])
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def noisy(x: Any) -> Any:
    return x + 0.3 * tf.random.normal(tf.shape(x))


class ComputesLoss(keras.Model):
    reduction: Callable[..., Any] = staticmethod(ops.mean)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return self.reduction(squares(y, y_pred))


class SumsLoss(ComputesLoss):
    reduction = staticmethod(ops.sum)


class InsideFunction(keras.Model):
    @tf.function
    def descend(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = total(y, self(x, training=True))
        gradients = tape.gradient(value, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return value

    def train_step(self, data: Any) -> Any:
        return {"loss": self.descend(*data)}


class Gathers(layers.Layer):
    """Keeps a number of the rows that it has seen."""

    def __init__(self, change: Any, dtype: str = "float32") -> None:
        super().__init__()
        self.change, self.kind = change, dtype

    def build(self, shape: Any) -> None:
        self.kept = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="kept", dtype=self.kind
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.kept.assign(self.change(self.kept, x))
        return x


class Adds(layers.Layer):
    def __init__(self, reduction: Any) -> None:
        super().__init__()
        self.reduction = reduction

    def call(self, x: Any) -> Any:
        self.add_loss(self.reduction(x**2))
        return x


class Spread(layers.Layer):
    """Scales rows by what they have together."""

    def call(self, x: Any) -> Any:
        return x * ops.mean(ops.std(x, 0))


class Rival(keras.Model):
    """A generator and a judge of what it makes, each with its optimizer."""

    def __init__(self, reduction: Any) -> None:
        super().__init__()
        self.reduction = reduction
        self.maker = keras.Sequential(
            [
                keras.Input((3,)),
                layers.Dense(16, "relu"),
                layers.BatchNormalization(),
                layers.Dense(6),
            ]
        )
        self.judge = keras.Sequential(
            [keras.Input((6,)), layers.Dense(16, "relu"), layers.Dropout(0.3), layers.Dense(1)]
        )
        self.draw = keras.random.SeedGenerator(3)
        self.rates = [keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)]

    def call(self, x: Any) -> Any:
        return self.judge(x)

    def train_step(self, data: Any) -> Any:
        x = data[0]
        for part, optimizer in zip((self.judge, self.maker), self.rates, strict=True):
            with tf.GradientTape() as tape:
                made = self.maker(keras.random.normal((ops.shape(x)[0], 3), seed=self.draw))
                scores = [self.judge(made, training=True)]
                if part is self.judge:
                    scores.append(-self.judge(x, training=True))
                value = self.reduction(ops.softplus(ops.concatenate(scores)))
            gradients = tape.gradient(value, part.trainable_variables)
            optimizer.apply_gradients(zip(gradients, part.trainable_variables, strict=True))
        return {"loss": value}


def rival(reduction: Any) -> Any:
    model = Rival(reduction)
    model.compile()
    model.rates[0].build(model.judge.trainable_variables)
    model.rates[1].build(model.maker.trainable_variables)
    return model


def sequence(loss: Any, kind: Any = None) -> Any:
    inputs = keras.Input((5,))
    hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
    hidden = layers.LSTM(6, return_sequences=True, dropout=0.2)(hidden)
    model = (kind or stepping(loss))(inputs, layers.Dense(9, "softmax")(hidden))
    model.compile(keras.optimizers.Adam(0.01))
    return model


def half(loss: Any) -> Any:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return net(layers.Dense(8), layers.BatchNormalization(), kind=stepping(loss))
    finally:
        keras.mixed_precision.set_global_policy("float32")


def sparsity(a: Any) -> Any:
    return ops.sum(ops.square(0.1 - ops.mean(ops.sigmoid(a), 0)))


def zeros() -> Any:
    return layers.Dense(1, kernel_initializer="zeros")


RANDOM_LAYERS = (
    layers.BatchNormalization,
    lambda: layers.GaussianNoise(0.3),
    lambda: layers.Dropout(0.5),
    layers.LayerNormalization,
)
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy()
MEANS: dict[str, Any] = {
    "step": lambda: net(kind=stepping(mean)),
    "random layers": lambda: net(*(layer() for layer in RANDOM_LAYERS), kind=stepping(mean)),
    "own noise": lambda: net(layers.Lambda(noisy), kind=stepping(mean)),
    "compute_loss": lambda: net(kind=ComputesLoss),
    "known sum": lambda: net(
        kind=stepping(lambda y, p: keras.losses.MeanSquaredError("sum")(y[:, None], p))
    ),
    "known mask": lambda: (sequence(lambda y, p: CROSSENTROPY(y, p)), TOKENS, TOKENS),
    "half precision": lambda: half(mean),
    "adversaries": lambda: rival(ops.mean),
    "nothing of the batch": lambda: net(kind=stepping(lambda y, p: 0.0 * ops.sum(p))),
    "rows": lambda: net(loss=squares),
    "ignored class": lambda: (
        net(loss=ignoring, last=layers.Dense(3, "softmax")),
        X,
        KIND,
    ),
    "list of one output": lambda: listed(squares),
    "added": lambda: net(Adds(ops.mean), loss="mse"),
    "moving mean": lambda: net(Gathers(lambda k, x: 0.9 * k + 0.1 * ops.mean(x)), loss="mse"),
    "count of batches": lambda: net(Gathers(lambda k, x: k + 1.0), loss="mse"),
    "regularised": lambda: net(
        layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2"), loss=squares
    ),
}
SUMS: dict[str, Any] = {
    "step": (lambda: net(kind=stepping(total)), "train_step"),
    "random layers": (
        lambda: net(*(layer() for layer in RANDOM_LAYERS), kind=stepping(total)),
        "train_step",
    ),
    "own noise": (lambda: net(layers.Lambda(noisy), kind=stepping(total)), "train_step"),
    "compute_loss": (lambda: net(kind=SumsLoss), "compute_loss"),
    "function": (lambda: net(kind=InsideFunction), "train_step"),
    "half precision": (lambda: half(total), "train_step"),
    "adversaries": (lambda: rival(ops.sum), "train_step"),
    "compiled": (lambda: net(loss=total), "loss 'total'"),
    "list of one output": (lambda: listed(total), "loss 'total'"),
    "eager": (lambda: net(loss=total, eager=True), "loss 'total'"),
    "added": (lambda: net(Adds(ops.sum), loss="mse"), r"loss.*'adds.*add_loss"),
    # Keras divides it by the rows of a batch: so does every rank, by fewer.
    "regularizer": (
        lambda: net(layers.Dense(4, activity_regularizer=sparsity, name="sparse"), loss="mse"),
        r"loss.*'sparse'.*activity_regularizer.*divided",
    ),
    "random regularizer": (
        lambda: net(
            layers.Lambda(noisy), layers.Dense(4, activity_regularizer=sparsity), loss="mse"
        ),
        r"loss.*'dense_\d+'.*activity_regularizer.*divided",
    ),
    "count": (
        lambda: net(Gathers(lambda k, x: k + ops.cast(ops.shape(x)[0], "float32")), loss="mse"),
        "kept'",
    ),
    "whole count": (
        lambda: net(Gathers(lambda k, x: k + ops.shape(x)[0], "int32"), loss="mse"),
        "kept'",
    ),
}
NEITHER: dict[str, Any] = {
    "contrastive step": lambda: net(kind=stepping(contrastive), last=layers.Dense(4)),
    "mask of its own": lambda: (sequence(of_sequence), TOKENS, TOKENS),
    "clipping": lambda: net(kind=stepping(mean, clip=True)),
    "sum beside a mean": lambda: net(kind=stepping(lambda y, p: mean(y, p) + 0.1 * total(y, p))),
    "sum beside a mean, by chance": lambda: net(
        layers.Lambda(lambda x: x + 0.05 * tf.random.normal(tf.shape(x))),
        kind=stepping(lambda y, p: mean(y, p) + 0.03 * total(y, p)),
    ),
    "root": lambda: net(loss=rooted),
    "ratio": lambda: (net(loss=keras.losses.Dice()), X, (Y > 0).astype("float32")[:, None]),
    "circle": lambda: (net(loss=keras.losses.Circle(), last=layers.Dense(4)), X, KIND),
    # Rows that are predicted alike, or are equally wrong, hide nothing.
    "zeros": lambda: net(loss=ranked, last=zeros()),
    "crossed zeros": lambda: net(loss=lambda y, p: ops.mean((ops.reshape(y, (1, -1)) - p) ** 2)),
    "axis": lambda: net(loss=keras.losses.CosineSimilarity(axis=0)),
    "layer": lambda: net(Spread(), loss="mse"),
    "activation": lambda: net(layers.Dense(4, lambda a: a / ops.max(a)), loss="mse"),
    "maximum": lambda: net(Gathers(lambda k, x: ops.maximum(k, ops.max(x))), loss="mse"),
}


def found(case: Any) -> list[str]:
    keras.utils.set_random_seed(1)
    made = case()
    return tried(*made) if isinstance(made, tuple) else tried(made)


@pytest.mark.parametrize("name", MEANS)
def test_means_pass(name: str) -> None:
    assert found(MEANS[name]) == []


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_refused(name: str) -> None:
    case, message = SUMS[name]
    with pytest.raises(ModelError, match=rf"{message}.*\bsum.*rows"):
        found(case)


@pytest.mark.parametrize("name", NEITHER)
def test_what_is_neither_is_warned_of(name: str) -> None:
    (warning,) = found(NEITHER[name])
    assert "batch" in warning


def test_clipping_is_told_from_what_compares_rows() -> None:
    (clipped,), (compared,) = found(NEITHER["clipping"]), found(NEITHER["contrastive step"])
    assert re.search("gradients.*clipped.*optimizer", clipped)
    assert "compares" not in clipped
    assert "compares" in compared


def test_a_step_that_takes_no_part_of_a_batch_is_left_alone() -> None:
    class Fixed(keras.Model):
        def train_step(self, data: Any) -> Any:
            tf.ensure_shape(data[0], (ROWS, 6))
            return super().train_step(data)

    assert found(lambda: net(kind=Fixed, loss="mse")) == []
    # Nor is a model of Keras' own layers and losses tried.
    assert not probe._is_to_be_tried(net(layers.Dropout(0.5), loss="mse"))


def test_a_loss_that_takes_the_models_own_outputs_alone_is_tried_on_these() -> None:
    def guarded(y: Any, p: Any) -> Any:
        tf.debugging.assert_equal(p, tf.zeros_like(p))
        return total(y, p)

    with pytest.raises(ModelError, match=r"'guarded'.*\bsum.*rows"):
        found(lambda: net(loss=guarded, last=zeros()))


def test_an_evaluation_of_a_loss_that_masks_rows_is_refused() -> None:
    model = net(last=layers.Dense(3, "softmax"))
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=1)
    model.compile("sgd", loss)
    evaluator = cast(Any, SimpleNamespace(_model=model))
    for rows in (slice(0, 1), slice(0, 7)):  # also where no label is ignored
        with (
            reduced_by(functools.partial(KerasEvaluator._checking, evaluator)),
            pytest.raises(ModelError, match="mean.*mask"),
        ):
            loss(KIND[rows], model(X[rows]))


class Largest(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.maximum(self.value, ops.max(ops.abs(p))))

    def result(self) -> Any:
        return self.value


class Middle(keras.metrics.Metric):
    """Keeps its rows in an attribute."""

    def __init__(self) -> None:
        super().__init__(name="middle")
        self.rows: list[Any] = []

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.rows.append(np.abs(np.ravel(y) - np.ravel(p)))

    def result(self) -> float:
        return float(np.median(np.concatenate(self.rows)))


class Emptied(Middle):
    def reset_state(self) -> None:
        self.rows.clear()


class Kept(Middle):
    """Keeps all rows, of which its result is not made."""

    def result(self) -> float:
        return 0.0


def measured(metric: Any) -> list[str]:
    def made() -> Any:
        model = net()
        model.compile("sgd", "mse", metrics=[metric])
        return model

    return found(made)


def test_metrics_are_tried_too() -> None:
    def crossed(y: Any, p: Any) -> Any:  # every label with every prediction: a common slip
        return ops.square(ops.reshape(y, (-1,)) - p)

    assert measured(squares) == measured(mean) == []
    correlation = keras.metrics.PearsonCorrelation("correlation", axis=0)
    summed = keras.losses.MeanSquaredError("sum", name="summed")
    metrics = {"rooted": rooted, "crossed": crossed, "correlation": correlation, "summed": summed}
    for name, metric in metrics.items():
        (warning,) = measured(metric)
        assert f"metric '{name}'" in warning
        assert "mean" in warning
    with pytest.raises(ModelError, match="'largest'.*'value'.*sum"):
        measured(Largest())
    for kind in (Middle, Emptied):
        with pytest.raises(ModelError, match=r"'middle'.*variables.*attributes.*add_variable"):
            measured(kind())


class Anneals(keras.Model):
    """Adds a sum whose factor rises by the steps made; counts them in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.penalty = layers.Dense(1), layers.Dense(1)
        self.beta = self.add_weight(name="beta", trainable=False, initializer="zeros")
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x: Any) -> Any:
        self.penalty(x)
        return self.out(x)

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            apart = ops.sum(self.penalty(x) ** 2)
            loss = mean(y, self(x, training=True)) + self.beta * apart
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.beta.assign_add(0.1)
        self.seen.update_state(loss)
        return {"loss": loss, "seen": self.seen.result()}


def test_a_sum_is_found_once_its_factor_is_above_zero() -> None:
    keras.utils.set_random_seed(1)
    model = Anneals()
    model.compile("adam")
    assert tried(model) == []
    model.train_on_batch(X, Y)
    total_before = float(model.seen.total)
    assert total_before > 0
    with pytest.raises(ModelError, match=r"train_step.*\bsum.*rows"):
        tried(model)
    assert float(model.seen.total) == total_before, "an epoch's sums are left alone"


def test_nothing_is_left_of_it() -> None:
    class Tracks(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = layers.Dense(1)
            self.seen = keras.metrics.Mean(name="seen")
            self.calls = self.add_weight(name="calls", trainable=False, initializer="zeros")
            self.steps = 0

        def call(self, x: Any) -> Any:
            self.seen.update_state(ops.mean(x))
            self.calls.assign_add(1.0)
            return self.out(x + keras.random.normal((1,)) + np.random.normal() + random.random())

        def train_step(self, data: Any) -> Any:
            self.steps += 1
            self.since = self.steps
            return super().train_step(data)

    model = Tracks()
    kept = Kept()
    model.compile("sgd", squares, metrics=[squares, kept], run_eagerly=True)
    assert tried(model) == []
    assert len(kept.rows) == 1  # of the step that made its model's loss
    assert model.steps == 0
    assert "since" not in vars(model)
