"""What a finished model leaves behind, and what it takes to load it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.errors import ModelError, RunDirectoryError
from horovod_spark_runner.ml.loading import load_model
from horovod_spark_runner.ml.trained import (
    check_callable,
    read_finished_run,
    read_signature,
    read_trained_model,
)
from horovod_spark_runner.storage.run_directory import RunDirectory
from horovod_spark_runner.training.keras_state import keras_state, using_keras_state
from horovod_spark_runner.training.outputs import output_specs

from ..runs import save_run, source

X = Column("x", "float32", (3,))
VALUES = np.random.default_rng(0).random((7, 3)).astype(np.float32) + 50
layers = keras.layers


def doubled(x: Any) -> Any:
    return keras.ops.tanh(x) * 2


class Shift(layers.Layer):
    """A layer with a weight of its own."""

    def __init__(self, by: float = 0.5, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.by = by

    def build(self, shape: Any) -> None:
        self.offset = self.add_weight(shape=(shape[-1],), initializer="ones", name="offset")

    def call(self, x: Any) -> Any:
        return x + self.offset * self.by

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "by": self.by}


@keras.saving.register_keras_serializable(package="mine")
class Registered(Shift):
    pass


class Whole(keras.Model):
    """A subclass that answers predict in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def predict_step(self, data: Any) -> Any:
        return super().predict_step(data) * 10


class Generator(keras.Model):
    """A model that is trained by its own step and has no call."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(2)
        self.dense.build((None, 3))


def plain() -> Any:
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "relu"), layers.Dense(1)])


def with_parts(*parts: Any) -> Any:
    return keras.Sequential([keras.Input((3,)), *parts, layers.Dense(2)])


def compiled(model: Any, **arguments: Any) -> Any:
    model.compile("sgd", "mse", **arguments)
    if not model.built:
        model.predict(VALUES, verbose=0)
    return model


def adapted() -> Any:
    layer = layers.Normalization()
    layer.adapt(VALUES * [1, 5, 9])
    return with_parts(layer)


SELF_CONTAINED = {
    "plain": plain,
    "normalization": adapted,
    "several": lambda: two_outputs(list),
}
WITH_OBJECTS = {
    "layer": lambda: with_parts(Shift(0.25)),
    "registered": lambda: with_parts(Registered()),
    "activation": lambda: with_parts(layers.Dense(3, activation=doubled)),
    "function in Lambda": lambda: with_parts(layers.Lambda(doubled)),
    "lambda": lambda: with_parts(layers.Lambda(lambda x: keras.ops.abs(x) * 3)),
    "nested": lambda: with_parts(with_parts(Shift(name="inner")), layers.Lambda(lambda x: -x)),
    "subclass": Whole,
}


def two_outputs(kind: Any) -> Any:
    x = keras.Input((3,))
    a, b = layers.Dense(2, name="one")(x), layers.Dense(1, name="two")(x)
    return keras.Model(x, [a, b] if kind is list else {"z": a, "a": b})


def of_run(place: Path, **arguments: Any) -> Any:
    return load_model(read_finished_run(RunDirectory(str(place)), **arguments).recipe)


def never() -> Any:
    raise AssertionError("model_fn was called")


@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_keras_own_layers_need_no_code(name: str, tmp_path: Path) -> None:
    model = compiled(SELF_CONTAINED[name]())
    saved = save_run(tmp_path, model, [X])
    assert saved.loads == "archive"
    assert read_signature(RunDirectory(str(tmp_path))).self_contained
    recipe = read_trained_model(RunDirectory(str(tmp_path)), source(never), saved, {}).recipe
    expected = model.predict(VALUES, verbose=0)
    for predict in (load_model(recipe), of_run(tmp_path)):
        for ours, theirs in zip(
            predict({"x": VALUES}),
            np.atleast_1d(expected)
            if not isinstance(expected, (list, np.ndarray))
            else (expected if isinstance(expected, list) else [expected]),
            strict=True,
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("name", WITH_OBJECTS)
def test_the_users_own_parts_travel_in_memory(name: str, tmp_path: Path) -> None:
    model = compiled(WITH_OBJECTS[name]())
    saved = save_run(tmp_path, model, [X])
    assert saved.loads == "objects"
    directory = RunDirectory(str(tmp_path))
    recipe = read_trained_model(directory, source(never), saved, {}).recipe
    (ours,) = load_model(recipe)({"x": VALUES})
    np.testing.assert_allclose(ours, model.predict(VALUES, verbose=0), rtol=1e-5)
    # Storage holds no code: an earlier run's directory alone does not do.
    with pytest.raises(RunDirectoryError, match="parts that are not Keras' own"):
        read_finished_run(directory)
    (again,) = of_run(tmp_path, model_fn=WITH_OBJECTS[name])({"x": VALUES})
    np.testing.assert_allclose(again, ours, rtol=1e-6)
