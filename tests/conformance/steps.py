"""Models with steps, losses and metrics of their own, as Keras' guides write them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import Input, Model, Sequential, layers, metrics, ops, optimizers

from .models import Plain


def registered(cls: Any) -> Any:
    """Return a class that Keras finds again when it reads a model."""
    return keras.saving.register_keras_serializable("conformance")(cls)


def own(kind: Any, **more: Any) -> Any:
    """Return a functional network whose class is ``kind``."""
    inputs = Input((4,))
    return kind(inputs, layers.Dense(1)(layers.Dense(8, "tanh")(inputs)), **more)


@registered
class TrainStep(Model):
    """The guide's own ``train_step``, with Keras' loss and metrics."""

    def train_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=ops.shape(x)[0])
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


@registered
class GraphTrainStep(TrainStep):
    """The same under ``tf.function``."""

    @tf.function
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@registered
class OwnLogs(Model):
    """A ``train_step`` that returns numbers which are no metrics."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x, training=True)[:, 0] - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"squared": loss, "twice": 2 * loss}


@registered
class OwnTrackers(Model):
    """A ``train_step`` with trackers of its own (Mean, Sum) in ``metrics``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mean = metrics.Mean("mean_error")
        self.sum = metrics.Sum("sum_error")

    @property
    def metrics(self) -> Any:
        return [self.mean, self.sum]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            off = ops.abs(self(x, training=True)[:, 0] - y)
            loss = ops.mean(off)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.mean.update_state(off)
        self.sum.update_state(off)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> Any:
        x, y = data
        off = ops.abs(self(x, training=False)[:, 0] - y)
        self.mean.update_state(off)
        self.sum.update_state(off)
        return {metric.name: metric.result() for metric in self.metrics}


@registered
class TestStep(Model):
    """A ``test_step`` that halves what the network gives."""

    def test_step(self, data: Any) -> Any:
        x, y = data
        predicted = self(x, training=False) / 2
        loss = self.compute_loss(x=x, y=y, y_pred=predicted)
        self._loss_tracker.update_state(loss, sample_weight=ops.shape(x)[0])
        return self.compute_metrics(x, y, predicted)


@registered
class ComputeLoss(Model):
    """A ``compute_loss`` of its own, and a tracker for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = metrics.Mean("own_loss")

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        loss = ops.mean((ops.reshape(y_pred, (-1,)) - y) ** 2) + 0.01 * ops.mean(ops.abs(y_pred))
        self.tracker.update_state(loss, sample_weight=ops.shape(y_pred)[0])
        return loss


@registered
class ComputeMetrics(Model):
    """A ``compute_metrics`` that adds a number."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "thrice": 3 * logs["loss"]}


@registered
class DerivedLogs(Model):
    """Steps that log numbers computed from results of metrics."""

    def train_step(self, data: Any) -> Any:
        return self._derived(super().train_step(data))

    def test_step(self, data: Any) -> Any:
        return self._derived(super().test_step(data))

    def _derived(self, logs: Any) -> Any:
        squared = ops.square(logs["mae"])
        return {"root": ops.sqrt(logs["loss"]), "squared": squared, "share": squared / logs["loss"]}


@registered
class Penalty(layers.Layer):
    """A layer that adds a loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


@registered
class AddsLoss(Plain):
    """A model that adds a loss in its call and is compiled without one."""

    def call(self, inputs: Any) -> Any:
        outputs = super().call(inputs)
        self.add_loss(ops.mean(ops.square(outputs - inputs[:, :1])))
        return outputs


@registered
class TrainingOnly(Model):
    """A model with a layer that only training calls."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.hidden = layers.Dense(5, "tanh")
        self.head = layers.Dense(1)
        self.extra = layers.Dense(5, "tanh")

    def call(self, inputs: Any, training: bool = False) -> Any:
        hidden = self.hidden(inputs)
        if training:
            hidden = self.extra(hidden)
        return self.head(hidden)


@registered
class EagerOnly(Plain):
    """A model whose call needs the values."""

    def call(self, inputs: Any) -> Any:
        if float(ops.max(inputs)) > 1e9:
            raise ValueError("too large")
        return super().call(inputs)


@registered
class Adversaries(Model):
    """Keras' own adversarial pattern: two networks, two optimizers, no ``call``."""

    def __init__(self, keep: str = "attributes", **more: Any) -> None:
        super().__init__(**more)
        self.keep = keep
        self.maker = Sequential([Input((4,)), layers.Dense(6, "tanh"), layers.Dense(2)])
        self.judge = Sequential([Input((2,)), layers.Dense(6, "tanh"), layers.Dense(1)])
        self.maker_loss = metrics.Mean("maker_loss")
        self.judge_loss = metrics.Mean("judge_loss")

    def compile(self, **more: Any) -> None:
        super().compile(**more)
        first, second = optimizers.SGD(0.05, 0.9), optimizers.SGD(0.02)
        if self.keep == "dict":
            self.both: Any = {"maker": first, "judge": second}
        elif self.keep == "list":
            self.both = [first, second]
        elif self.keep == "sub-models":
            self.maker.compile(first)
            self.judge.compile(second)
        else:
            self.maker_optimizer, self.judge_optimizer = first, second

    @property
    def pair(self) -> tuple[Any, Any]:
        if self.keep == "dict":
            return self.both["maker"], self.both["judge"]
        if self.keep == "list":
            return self.both[0], self.both[1]
        if self.keep == "sub-models":
            return self.maker.optimizer, self.judge.optimizer
        return self.maker_optimizer, self.judge_optimizer

    @property
    def metrics(self) -> Any:
        return [self.maker_loss, self.judge_loss]

    def _score(self, values: Any, real: float) -> Any:
        return ops.mean((self.judge(values) - real) ** 2)

    def train_step(self, data: Any) -> Any:
        x, real = data
        maker, judge = self.pair
        with tf.GradientTape() as tape:
            loss = self._score(real, 1.0) + self._score(self.maker(x), 0.0)
        variables = self.judge.trainable_variables
        judge.apply(tape.gradient(loss, variables), variables)
        self.judge_loss.update_state(loss, sample_weight=ops.shape(x)[0])
        with tf.GradientTape() as tape:
            loss = self._score(self.maker(x), 1.0)
        variables = self.maker.trainable_variables
        maker.apply(tape.gradient(loss, variables), variables)
        self.maker_loss.update_state(loss, sample_weight=ops.shape(x)[0])
        return {metric.name: metric.result() for metric in self.metrics}

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "keep": self.keep}


@registered
class CalledAdversaries(Adversaries):
    """The same with a ``call`` and a ``test_step``."""

    def call(self, inputs: Any) -> Any:
        return self.maker(inputs)

    def test_step(self, data: Any) -> Any:
        x, real = data
        self.judge_loss.update_state(self._score(real, 1.0), sample_weight=ops.shape(x)[0])
        self.maker_loss.update_state(self._score(self.maker(x), 1.0), sample_weight=ops.shape(x)[0])
        return {metric.name: metric.result() for metric in self.metrics}


@registered
class NoisyStep(Model):
    """A ``train_step`` that draws from Keras' global generator."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        return super().train_step((x + 0.1 * keras.random.normal(ops.shape(x)), y))


@registered
class Skips(Model):
    """A ``train_step`` that applies gradients under a condition of the data."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x, training=True)[:, 0] - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)

        def apply() -> Any:
            self.optimizer.apply(gradients, self.trainable_variables)
            return ops.cast(1.0, "float32")

        tf.cond(loss > 0.5, apply, lambda: tf.constant(0.0))
        return {"loss": loss}


@registered
class Distiller(Model):
    """A student that learns from a frozen teacher."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.student = Sequential([Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)])
        self.teacher = Sequential([Input((4,)), layers.Dense(8, "tanh"), layers.Dense(1)])
        self.teacher.trainable = False

    def call(self, inputs: Any) -> Any:
        return self.student(inputs)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        given = super().compute_loss(x, y, y_pred, sample_weight)
        return given + 0.5 * ops.mean((self.teacher(x, training=False) - y_pred) ** 2)
