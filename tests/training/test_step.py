"""The compiled steps of a Keras model on one rank."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_spark_runner.engines.keras import trainee

from .test_build import build, compiled

layers = keras.layers


def drawing() -> Any:
    """Return what makes a network that draws numbers, in Keras' way and in TensorFlow's."""

    def noise(x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x), stddev=0.1)

    drawn = [layers.BatchNormalization(), layers.Dropout(0.5), layers.Lambda(noise)]
    ends = [layers.Dense(4), *drawn, layers.Dense(2, "softmax")]
    return keras.Sequential([keras.Input((3,)), *ends])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: "adam",
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, global_clipnorm=1.0),
    ],
    ids=["adam", "sgd"],
)
def test_a_step_is_traced_once_and_does_what_it_did(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that are made within it would have it traced twice."""
    traced: list[str] = []

    def loss(labels: Any, given: Any) -> Any:
        traced.append("loss")
        return keras.losses.sparse_categorical_crossentropy(labels, given)

    def trained() -> list[np.ndarray]:
        keras.backend.clear_session()
        keras.utils.set_random_seed(4)
        weighted = ["sparse_categorical_accuracy"]
        more = {"optimizer": optimizer(), "metrics": ["accuracy"], "weighted_metrics": weighted}
        built = build(lambda: compiled(drawing(), loss, **more))
        for number in range(3):
            x = np.random.default_rng(number).normal(size=(8, 3)).astype("float32")
            data = (tf.constant(x), tf.constant(np.arange(8) % 2, tf.float32))
            built.steps.train_full(data, (False,) * 3)
        model = built.model
        found = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
        return [np.array(variable) for variable in found]

    ours = trained()
    assert len(traced) == 1
    monkeypatch.setattr(trainee, "_build_compiled", lambda *_: None)
    theirs = trained()
    assert len(traced) == 3
    assert len(ours) == len(theirs) > 15
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
