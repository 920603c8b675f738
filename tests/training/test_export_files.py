"""Models as single files, ONNX and Keras' own: what they give elsewhere, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from horovod_spark_runner import (
    DataError,
    EnvironmentProblem,
    InvalidInputError,
    ModelError,
    RunDirectoryError,
    TFTransformer,
)
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.data.read.decode import RowDecoder
from horovod_spark_runner.engines.keras import export
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.training.onnx import OnnxSession

from ..object_store import empty_folder, s3_server
from .test_export import CASES, RNG, ROWS, Case, called, fitted, leave, objects, predicted, reals

# Predicts on arrays in files, with onnxruntime and nothing else.
SCORER = """
import json, sys
import numpy as np, onnxruntime
for place in json.load(sys.stdin):
    session = onnxruntime.InferenceSession(place)
    with np.load(place + ".in.npz", allow_pickle=True) as file:
        given = {name: file[name] for name in file.files}
    names = [output.name for output in session.get_outputs()]
    np.savez(place + ".out.npz", **dict(zip(names, session.run(None, given))))
assert not {"horovod_spark_runner", "pyspark", "tensorflow", "keras"} & sys.modules.keys()
"""


def masked() -> Any:
    words = keras.Input((6,), name="a", dtype="int32")
    last = layers.LSTM(3)(layers.Embedding(9, 4, mask_zero=True)(words))
    counts = keras.ops.sum(keras.ops.one_hot(words, 9), 1)
    return keras.Model(words, layers.Dense(1)(layers.Concatenate()([last, counts])))


def attention() -> Any:
    x = keras.Input((6, 4), name="a")
    y = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x)]))
    y = layers.Dense(8, activation="gelu")(y)
    return keras.Model(x, layers.Dense(2, "softmax")(layers.GlobalAveragePooling1D()(y)))


WORDS = np.array([[1, 2, 3, 0, 0, 0], [4, 0, 0, 0, 0, 0], [8] * 6] * 3, np.int32)
ALL = {
    **CASES,
    "masked LSTM": Case(masked, [Column("a", "int32", (6,))], {"a": WORDS}),
    "attention, in a column of any name": Case(
        attention, [Column("a b", "float32", (6, 4))], {"a b": reals(6, 4)}
    ),
}


def arrays(case: Case) -> dict[str, Any]:
    """Return the rows of a case as arrays, decoded."""
    raw = {
        column.name: np.stack(
            [np.frombuffer(row, column.dtype) for row in case.values[column.name]]
        )
        for column in case.columns
        if column.encoding == "raw"
    }
    decoded = RowDecoder(case.columns, {}, allow_nan=True)({**case.values, **raw})
    return {c.name: decoded[c.name].reshape(ROWS, *c.shape) for c in case.columns}


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """All cases, exported and scored by one process that knows onnxruntime only."""
    folder = tmp_path_factory.mktemp("files")
    places = {name: str(folder / f"{number}.onnx") for number, name in enumerate(ALL)}
    for name, case in ALL.items():
        leave(folder / name, fitted(case.make()), case)
        TFTransformer.from_run(folder / name, **case.params).export(places[name], format="onnx")
        names = case.params.get("feature_cols") or [column.name for column in case.columns]
        given = dict(zip(names, arrays(case).values(), strict=True))
        np.savez(f"{places[name]}.in.npz", **given)
    asked = json.dumps(list(places.values()))
    run = subprocess.run(
        [sys.executable, "-c", SCORER],
        input=asked,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    outputs = {}
    for name, place in places.items():
        with np.load(f"{place}.out.npz") as file:
            outputs[name] = dict(file)
    return folder, outputs


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALL)
def test_onnxruntime_alone_scores_as_transform_does(
    scored: tuple[Path, dict[str, dict[str, Any]]], name: str
) -> None:
    folder, outputs = scored
    expected = predicted(folder / name, ALL[name])
    names = called(name)
    assert sorted(outputs[name]) == sorted(names)
    # Single precision, of values up to 255 there.
    most = 5e-5 if name == "image in float32" else 1e-5
    for output, value in zip(names, expected, strict=True):
        np.testing.assert_allclose(outputs[name][output], value, rtol=1e-5, atol=most)
        assert outputs[name][output].dtype == value.dtype


def test_an_index_beyond_an_embedding_is_an_error(
    scored: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    folder, _ = scored
    session = OnnxSession((folder / f"{[*ALL].index('masked LSTM')}.onnx").read_bytes())
    with pytest.raises(DataError, match=r"row.*index.*beyond"):
        session({"a": np.array([[1, 2, 3, 4, 5, 9]], np.int32)})


def test_a_file_tells_what_it_is(scored: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, _ = scored
    place = folder / f"{list(ALL).index('image')}.onnx"
    session = OnnxSession(place.read_bytes())
    assert session.inputs == ["picture"]
    facts = session.facts
    assert facts["format"] == 1
    (column,) = facts["columns"]
    assert (column["name"], column["dtype"], column["shape"]) == ("picture", "uint8", [8, 6, 3])
    (output,) = facts["outputs"]
    assert (output["name"], output["activation"]) == ("prediction", "softmax")


@pytest.fixture
def transformer(tmp_path: Path) -> TFTransformer:
    case = CASES["one vector"]
    leave(tmp_path / "run", fitted(case.make()), case)
    return TFTransformer.from_run(tmp_path / "run")


@pytest.mark.thorough
def test_keras_loads_what_it_has_trained(transformer: TFTransformer, tmp_path: Path) -> None:
    transformer.export(tmp_path / "m.keras", format="keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    values = CASES["one vector"].values["x"]
    expected = transformer.getModel().predict(values, verbose=0)
    np.testing.assert_array_equal(loaded.predict(values, verbose=0), expected)


def test_what_is_there_stays_unless_asked_otherwise(
    transformer: TFTransformer, tmp_path: Path
) -> None:
    for form in ("keras", "onnx"):
        place = tmp_path / f"out.{form}"
        place.write_text("of mine")
        with pytest.raises(RunDirectoryError, match="mode='overwrite'"):
            transformer.export(place, format=form)
        assert place.read_text() == "of mine"
        transformer.export(place, format=form, mode="overwrite")
        assert place.stat().st_size > 500
        folder = tmp_path / f"folder.{form}"
        folder.mkdir()
        with pytest.raises(RunDirectoryError, match=" (folder|directory)"):
            transformer.export(folder, format=form, mode="overwrite")
        with pytest.raises(InvalidInputError, match=rf"\.{form}.*model"):
            transformer.export(tmp_path / "model", format=form)
    # Nothing is left beside them.
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run", "out.keras", "out.onnx", "folder.keras", "folder.onnx"}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Location]:
    with s3_server() as server:
        yield empty_folder(server, "s3://exports/models", monkeypatch)


@pytest.mark.thorough
def test_an_object_store_takes_every_format(transformer: TFTransformer, bucket: Location) -> None:
    values = {"x": CASES["one vector"].values["x"]}
    transformer.export(f"{bucket}/m.onnx", format="onnx")
    transformer.export(f"{bucket}/m.keras", format="keras")
    transformer.export(f"{bucket}/saved")
    session = OnnxSession(bucket.join("m.onnx").read_bytes())
    expected = transformer.getModel().predict(values["x"], verbose=0)
    np.testing.assert_allclose(session(values)["prediction"], expected, rtol=1e-5, atol=1e-6)
    again = TFTransformer.from_saved_model(f"{bucket}/saved")
    assert again.output_names == ["prediction"]
    with pytest.raises(RunDirectoryError, match="already"):
        transformer.export(f"{bucket}/m.onnx", format="onnx")


class Doubled(layers.Layer):
    """Runs Python for every batch, which no graph holds."""

    def call(self, inputs: Any) -> Any:
        import tensorflow as tf

        made = tf.numpy_function(lambda x: x * 2, [inputs], tf.float32)
        made.set_shape(inputs.shape)
        return made


def single(layer: Callable[[], Any]) -> Any:
    x = keras.Input((3,), name="x")
    return keras.Model(x, layer()(x))


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (Doubled, "PyFunc|numpy_function|EagerPyFunc"),
        (lambda: layers.Lambda(lambda x: keras.ops.linalg.svd(x[:, None, :] * 1.0)[1]), "Svd"),
    ],
)
def test_what_onnx_cannot_hold_is_refused(layer: Any, told: str, tmp_path: Path) -> None:
    given = TFTransformer.from_keras(single(layer), ["x"], custom_objects={"Doubled": Doubled})
    with pytest.raises(ModelError, match=f"(?s)ONNX.*({told})"):
        given.export(tmp_path / "m.onnx", format="onnx")
    assert not list(tmp_path.iterdir())


def test_a_saved_model_takes_no_numbers_beyond_its_inputs_type(tmp_path: Path) -> None:
    """As transform takes none; a cast would make 0 of 256."""
    import tensorflow as tf

    x = keras.Input((2,), name="x", dtype="uint8")
    given = TFTransformer.from_keras(keras.Model(x, layers.Rescaling(1.0)(x)), ["x"])
    given.export(tmp_path / "m")
    predict = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"]
    made = predict(x=tf.constant([[0, 255]], tf.int16))["prediction"]
    assert made.numpy().tolist() == [[0.0, 255.0]]
    told = r"column x.*\b0\b.*\b255"
    with pytest.raises(tf.errors.InvalidArgumentError, match=told):
        predict(x=tf.constant([[0, 256]], tf.int16))
    given.export(tmp_path / "m.onnx", format="onnx")  # raises no errors: whoever calls it is told
    assert OnnxSession((tmp_path / "m.onnx").read_bytes()).facts["bounds"] == {"x": [0, 255]}


def test_a_saved_model_calls_no_function_of_this_process(tmp_path: Path) -> None:
    given = TFTransformer.from_keras(single(Doubled), ["x"], custom_objects={"Doubled": Doubled})
    with pytest.raises(ModelError, match="model '[^']*'.*PyFun"):
        given.export(tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_file_that_gives_something_else_is_refused(
    transformer: TFTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one would be whose conversion went wrong: here the weights are changed after it."""
    converted = export._converted

    def wrong(served: Any, *arguments: Any) -> Any:
        model = converted(served, *arguments)
        for weight in served.model.trainable_weights:
            weight.assign(weight * 1.01)
        return model

    monkeypatch.setattr(export, "_converted", wrong)
    with pytest.raises(ModelError, match=r"\b1 row.*Keras"):
        transformer.export(tmp_path / "m.onnx", format="onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_rows_that_the_model_takes_are_found(tmp_path: Path) -> None:
    """Of numbers around zero, a logarithm makes NaN."""
    given = TFTransformer.from_keras(single(lambda: layers.Lambda(keras.ops.log)), ["x"])
    given.export(tmp_path / "m.onnx", format="onnx")
    values = RNG.random((2, 3)).astype(np.float32)
    found = OnnxSession((tmp_path / "m.onnx").read_bytes())({"x": values})
    np.testing.assert_allclose(found["prediction"], np.log(values), rtol=1e-5)
    never = TFTransformer.from_keras(
        single(lambda: layers.Lambda(lambda x: keras.ops.log(x * 0 - 1))), ["x"]
    )
    with pytest.raises(ModelError, match="ONNX.*NaN"):
        never.export(tmp_path / "n.onnx", format="onnx")


def test_what_is_missing_is_told_with_what_to_do(
    transformer: TFTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    told = r"pip install 'horovod_spark_runner\[onnx\]'"
    with pytest.raises(EnvironmentProblem, match=told):
        transformer.export(tmp_path / "m.onnx", format="onnx")


@pytest.mark.thorough
def test_a_saved_model_is_no_keras_file_but_may_be_onnx(
    transformer: TFTransformer, tmp_path: Path
) -> None:
    transformer.export(tmp_path / "saved")
    graph = TFTransformer.from_saved_model(tmp_path / "saved")
    with pytest.raises(ModelError, match=r"\.keras.*graph"):
        graph.export(tmp_path / "m.keras", format="keras")
    graph.export(tmp_path / "m.onnx", format="onnx")
    values = {"x": CASES["one vector"].values["x"]}
    found = OnnxSession((tmp_path / "m.onnx").read_bytes())(values)
    expected = transformer.getModel().predict(values["x"], verbose=0)
    np.testing.assert_allclose(found["prediction"], expected, rtol=1e-5, atol=1e-6)


def test_texts_of_any_alphabet(tmp_path: Path) -> None:
    text = keras.Input((), name="t", dtype="string")
    known = layers.StringLookup(vocabulary=["ä", "b", "日本"], output_mode="one_hot")(text)
    given = TFTransformer.from_keras(keras.Model(text, known), ["t"])
    given.export(tmp_path / "m.onnx", format="onnx")
    rows = objects(["日本", "ä", "", "b", "unseen"])
    found = OnnxSession((tmp_path / "m.onnx").read_bytes())({"t": rows})
    assert found["prediction"].argmax(1).tolist() == [3, 1, 0, 2, 0]
