"""Summary of a trained model that its signature records: layers, output shapes, parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np

from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.training.trained_model import ModelSummary, read_model

from ..runs import save_run

X = Column("x", "float32", (4,))


@keras.saving.register_keras_serializable()
class Subclassed(keras.Model):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.first = keras.layers.Dense(3, name="first")
        self.second = keras.layers.Dense(2, name="second")

    def call(self, inputs: Any) -> Any:
        return self.second(self.first(inputs))


def summary_of(place: Path, model: keras.Model) -> ModelSummary:
    save_run(place, model, [X])
    summary = read_model(RunDirectory(str(place))).signature.summary
    assert summary is not None
    assert summary.parameters == model.count_params()
    return summary


def test_layers_are_those_of_keras(tmp_path: Path) -> None:
    frozen = keras.layers.Dense(8, name="frozen", trainable=False)
    layers = [keras.Input((4,)), frozen, keras.layers.BatchNormalization(name="norm")]
    model = keras.Sequential([*layers, keras.layers.Dense(2, name="out")])
    summary = summary_of(tmp_path, model)
    assert [(one.name, one.kind, one.output, one.parameters) for one in summary.layers] == [
        ("frozen", "Dense", "(None, 8)", 40),
        ("norm", "BatchNormalization", "(None, 8)", 32),
        ("out", "Dense", "(None, 2)", 18),
    ]
    assert (summary.parameters, summary.trainable) == (90, 34)


def test_layers_of_a_subclassed_model_and_of_several_outputs(tmp_path: Path) -> None:
    model = Subclassed()
    model(np.zeros((1, 4), np.float32))
    summary = summary_of(tmp_path / "subclassed", model)
    assert [(one.name, one.parameters) for one in summary.layers] == [("first", 15), ("second", 8)]
    assert [one.output for one in summary.layers] == ["(None, 3)", "(None, 2)"]
    inputs = keras.Input((4,), name="x")
    inner = keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Dense(3)(inputs)])
    first, second = inner(inputs)
    model = keras.Model(inputs, keras.layers.Concatenate(name="both")([first, second]))
    nested = summary_of(tmp_path / "nested", model)
    assert nested.layers[1].output == "[(None, 2), (None, 3)]"
    assert nested.layers[-1].output == "(None, 5)"
