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
from horovod_spark_runner.export.network import _packed
from horovod_spark_runner.scoring.bundle import Bundle
from horovod_spark_runner.scoring.inputs import Input
from horovod_spark_runner.scoring.network import SAVED_MODEL, Network
from horovod_spark_runner.scoring.onnx_session import OnnxSession
from horovod_spark_runner.scoring.scorer import Scorer
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.training.keras import onnx_file

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
    counts = keras.ops.sum(keras.ops.one_hot(words, 9), 1)  # which counts nothing below 0
    return keras.Model(words, layers.Dense(1)(layers.Concatenate()([last, counts])))


def attention() -> Any:
    x = keras.Input((6, 4), name="a")
    y = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x)]))
    y = layers.Dense(8, activation="gelu")(y)
    return keras.Model(x, layers.Dense(2, "softmax")(layers.GlobalAveragePooling1D()(y)))


WORDS = np.array([[1, 2, 3, 0, 0, 0], [4, 0, 0, 0, 0, 0], [8, -1, *[8] * 4]] * 3, np.int32)
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


@pytest.mark.parametrize("name", ALL)
def test_onnxruntime_alone_scores_as_transform_does(
    scored: tuple[Path, dict[str, dict[str, Any]]], name: str
) -> None:
    folder, outputs = scored
    expected = predicted(folder / name, ALL[name])
    names = called(name)
    assert sorted(outputs[name]) == sorted(names)
    for output, value in zip(names, expected, strict=True):
        np.testing.assert_allclose(outputs[name][output], value, rtol=1e-5, atol=1e-6)
        assert outputs[name][output].dtype == value.dtype


def test_an_index_that_an_embedding_does_not_have_is_no_prediction(
    scored: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    """Keras counts one below 0 from the end, once; ONNX would, again."""
    folder, _ = scored
    session = OnnxSession((folder / f"{[*ALL].index('masked LSTM')}.onnx").read_bytes())
    assert session.facts["bounds"] == {"a": [-9, 8]}
    right = np.array([[-9, 8, 1, 1, 1, 1], [0, 8, 1, 1, 1, 1]], np.int32)
    assert np.isfinite(session({"a": right})["prediction"]).all()
    for index in (-10, 9):
        wrong = np.array([[1, 2, 3, 4, 5, index]], np.int32)
        with pytest.raises(DataError, match="a row holds an index.* below 0 or beyond"):
            session({"a": wrong})


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
        with pytest.raises(RunDirectoryError, match="is there already; mode='overwrite'"):
            transformer.export(place, format=form)
        assert place.read_text() == "of mine"
        transformer.export(place, format=form, mode="overwrite")
        assert place.stat().st_size > 500
        folder = tmp_path / f"folder.{form}"
        folder.mkdir()
        with pytest.raises(RunDirectoryError, match="is a folder"):
            transformer.export(folder, format=form, mode="overwrite")
        with pytest.raises(InvalidInputError, match=rf"ends in \.{form}; got .*model"):
            transformer.export(tmp_path / "model", format=form)
    # Nothing is left beside them.
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run", "out.keras", "out.onnx", "folder.keras", "folder.onnx"}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Location]:
    with s3_server() as server:
        yield empty_folder(server, "s3://exports/models", monkeypatch)


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
    with pytest.raises(RunDirectoryError, match="is there already"):
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
    with pytest.raises(ModelError, match=f"(?s)an ONNX file cannot hold.*({told})"):
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
    told = "column x holds what the model.* input does not, which takes 0 to 255"
    with pytest.raises(tf.errors.InvalidArgumentError, match=told):
        predict(x=tf.constant([[0, 256]], tf.int16))
    given.export(tmp_path / "m.onnx", format="onnx")  # raises no errors: whoever calls it is told
    assert OnnxSession((tmp_path / "m.onnx").read_bytes()).facts["bounds"] == {"x": [0, 255]}
    stage = Network(
        inputs=("given",),
        arguments=("x",),
        dtypes=("int16",),
        shapes=((2,),),
        outputs=("prediction",),
        added=(("p", 0, "plain", False, False, "float32", "float32"),),
        handle_invalid="error",
        batch_size=2,
        format=SAVED_MODEL,
        contents=_packed(tmp_path / "m"),
    )
    scorer = Scorer(Bundle((Input("given", "array", 2),), (stage,)))
    assert scorer.score({"given": [[0, 255]]})["p"].tolist() == [[0.0, 255.0]]
    told = told.replace("x", "'given'", 1)
    with pytest.raises(DataError, match=f"the network does not take the rows: .{told}"):
        scorer.score_row({"given": [-1, 0]})


def test_a_saved_model_calls_no_function_of_this_process(tmp_path: Path) -> None:
    given = TFTransformer.from_keras(single(Doubled), ["x"], custom_objects={"Doubled": Doubled})
    with pytest.raises(ModelError, match=r"cannot hold the model '[^']*': it calls .* .PyFun"):
        given.export(tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_file_that_gives_something_else_is_refused(
    transformer: TFTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one would be whose conversion went wrong: here the weights are changed after it."""
    converted = onnx_file._converted

    def wrong(served: Any, *arguments: Any) -> Any:
        model = converted(served, *arguments)
        for weight in served.model.trainable_weights:
            weight.assign(weight * 1.01)
        return model

    monkeypatch.setattr(onnx_file, "_converted", wrong)
    with pytest.raises(ModelError, match="for 1 rows it does not give what Keras gives: .*differ"):
        transformer.export(tmp_path / "m.onnx", format="onnx")
    assert not (tmp_path / "m.onnx").exists()


HOSTILE = np.array(
    [[1, 2, 3, 4], [1, np.nan, 3, 4], [np.nan] * 4, [np.inf, 1, 2, 3], [1, 2, 3, -np.inf]],
    "float32",
)
PER_ROW = [layers.Reshape((4, 1))]


@pytest.mark.parametrize(
    ("name", "inner", "blank"),
    [
        ("lstm", lambda: [*PER_ROW, layers.LSTM(3), layers.Dense(1)], ["nan", "infinite"]),
        ("gru", lambda: [*PER_ROW, layers.GRU(3)], []),
        ("pooling", lambda: [*PER_ROW, layers.MaxPooling1D(2)], ["nan", "infinite"]),
        ("relu", lambda: [layers.Dense(3, "relu"), layers.Dense(1)], ["nan", "infinite"]),
        ("softmax", lambda: [layers.Dense(3, "softmax")], ["infinite"]),
        ("linear", lambda: [layers.Dense(3), layers.Dense(1)], []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_number_is_never_made_one(
    name: str, inner: Callable[[], list[Any]], blank: list[str], tmp_path: Path
) -> None:
    """A row with NaN or infinity gives what Keras gives, or NaN; the others are as ever."""
    model = keras.Sequential([keras.Input((4,)), *inner()])
    TFTransformer.from_keras(model, ["x"]).export(tmp_path / "m.onnx", format="onnx")
    session = OnnxSession((tmp_path / "m.onnx").read_bytes())
    facts = session.facts["non_finite"]
    assert facts["compared"] == {"nan": 5, "infinite": 10}
    # Those of activations depend on the processor, for which onnxruntime has kernels of its own.
    assert facts["blank"] == blank or (name in ("relu", "softmax") and not facts["blank"])
    blank = facts["blank"]
    found, expected = session({"x": HOSTILE})["prediction"], model(HOSTILE).numpy()
    for number, row in enumerate(HOSTILE):
        kind = "nan" if np.isnan(row).any() else "infinite" if np.isinf(row).any() else ""
        if kind in blank:
            assert np.isnan(found[number]).all()
        else:
            np.testing.assert_allclose(found[number], expected[number], rtol=1e-5, atol=1e-6)
        alone = session({"x": HOSTILE[number : number + 1]})["prediction"]
        np.testing.assert_allclose(alone[0], found[number], rtol=1e-5, atol=1e-6)
    nothing = session({"x": HOSTILE[:0]})["prediction"]
    assert nothing.shape == (0, *expected.shape[1:])
    assert nothing.dtype == np.float32


def test_infinities_that_meet_make_no_number(tmp_path: Path) -> None:
    """Each alone gives infinity, of which onnxruntime finds the greatest as NumPy does."""
    a, b = (keras.Input((4,), name=name) for name in "ab")
    model = keras.Model([a, b], keras.ops.max(a - b, axis=-1, keepdims=True))
    TFTransformer.from_keras(model, ["a", "b"]).export(tmp_path / "m.onnx", format="onnx")
    session = OnnxSession((tmp_path / "m.onnx").read_bytes())
    given = np.array([[1, np.inf, 1, 1], [1, 2, 1, 1]], "float32")
    found = session({"a": given, "b": given})["prediction"]
    np.testing.assert_array_equal(found, [[np.nan], [0]])


def test_a_class_that_stands_for_no_value_is_the_least_number(tmp_path: Path) -> None:
    x = keras.Input((4,), name="x")
    none = keras.ops.isnan(keras.ops.sum(layers.LSTM(2)(PER_ROW[0](x)), axis=-1))
    given = TFTransformer.from_keras(keras.Model(x, keras.ops.cast(none, "int32")), ["x"])
    given.export(tmp_path / "m.onnx", format="onnx")
    found = OnnxSession((tmp_path / "m.onnx").read_bytes())({"x": HOSTILE})["prediction"]
    assert found.tolist() == [0, *[np.iinfo(np.int32).min] * 4]
    with pytest.raises(ModelError, match="of bool, has no value to tell so"):
        TFTransformer.from_keras(keras.Model(x, none), ["x"]).export(
            tmp_path / "t.onnx", format="onnx"
        )


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
    with pytest.raises(ModelError, match="compared with Keras on rows that are made.*NaN"):
        never.export(tmp_path / "n.onnx", format="onnx")


def test_what_is_missing_is_told_with_what_to_do(
    transformer: TFTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    told = r"pip install 'horovod_spark_runner\[onnx\]'"
    with pytest.raises(EnvironmentProblem, match=told):
        transformer.export(tmp_path / "m.onnx", format="onnx")


def test_a_saved_model_is_no_keras_file_but_may_be_onnx(
    transformer: TFTransformer, tmp_path: Path
) -> None:
    transformer.export(tmp_path / "saved")
    graph = TFTransformer.from_saved_model(tmp_path / "saved")
    with pytest.raises(ModelError, match=r"a \.keras file cannot hold.*a graph without layers"):
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
