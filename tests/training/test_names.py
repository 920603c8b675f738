"""What models call their inputs and outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.engines.keras.binding import bind_outputs, names_of
from horovod_spark_runner.engines.keras.engine import ENGINE
from horovod_spark_runner.errors import ModelError
from horovod_spark_runner.training.spec import Binding, ModelNames

from ..runs import LABEL, source


def compiled(model: Any, loss: Any = "mse") -> Any:
    model.compile("sgd", loss)
    return model


def functional() -> Any:
    a, b = keras.Input((1,), name="a"), keras.Input((2,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    outputs = [keras.layers.Dense(1, name=name)(joined) for name in ("y", "z")]
    return compiled(keras.Model([a, b], outputs))


def of_dictionaries() -> Any:
    inputs = {key: keras.Input((1,), name=name) for key, name in (("a", "first"), ("b", "second"))}
    output = keras.layers.Add(name="sum")(list(inputs.values()))
    return compiled(keras.Model(inputs, {"y": output}))


def sequential() -> Any:
    layers = [keras.Input((3,), name="x"), keras.layers.Dense(2), keras.layers.Dense(1, name="y")]
    return compiled(keras.Sequential(layers), None)


class Subclass(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)


FUNCTIONAL = ModelNames((("a", "b"),), (("y", "z"),), True)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (functional, FUNCTIONAL),
        (of_dictionaries, ModelNames((("first", "second"), ("a", "b")), (("sum",), ("y",)), True)),
        (sequential, ModelNames((("x",),), (("y",),), False)),
        # These have no names before they see data.
        (lambda: compiled(Subclass()), ModelNames(needs_labels=True)),
        (lambda: compiled(keras.Sequential([keras.layers.Dense(1)])), ModelNames((), (), True)),
    ],
)
def test_names(model: Any, expected: ModelNames) -> None:
    assert names_of(source(model)) == expected


def test_the_output_of_a_sequential_model_has_a_name() -> None:
    model = sequential()
    manifest = Manifest("", (), (LABEL,), (), "")
    column = np.ones(3, np.float32)
    for name in ("y", "prediction"):
        labels = bind_outputs(model, Binding(["y"], (name,)), manifest, model.outputs[0])
        assert labels({"y": column}) is column
    with pytest.raises(ModelError, match=r"\['y'\].*label_cols.*\['z'\]"):
        bind_outputs(model, Binding(["y"], ("z",)), manifest, model.outputs[0])


def test_names_of_model_files(tmp_path: Path) -> None:
    functional().save(tmp_path / "model.keras")
    (tmp_path / "model.json").write_text(functional().to_json())
    for name in ("model.keras", "model.json"):
        assert names_of(ENGINE.source(tmp_path / name, None)) == FUNCTIONAL


def test_what_is_no_model_has_no_names() -> None:
    with pytest.raises(ModelError, match="model_fn.*None"):
        names_of(source(lambda: None))
