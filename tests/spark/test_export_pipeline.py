"""Whole pipelines, exported with networks: what is given, what comes back, what is damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    DataError,
    InvalidInputError,
    ModelError,
    RunDirectoryError,
    TFTransformer,
    export_pipeline,
)
from horovod_spark_runner.export import onnx_model as graph_model
from horovod_spark_runner.export.onnx_model import onnx_inputs
from horovod_spark_runner.scoring import load_pipeline
from horovod_spark_runner.scoring.columns import Input
from horovod_spark_runner.storage.checksums import seal, unseal
from horovod_spark_runner.training.onnx import OnnxSession

from ..object_store import empty_folder, s3_server

pytestmark = pytest.mark.spark

ROWS: list[tuple[Any, ...]] = [
    (n, ["x", "y", "z"][n % 3], n * 0.7 - 3.0, n % 4, [float(n), -1.0, 0.5]) for n in range(12)
]
ROWS += [(12, "new", 1.0, 2, [1.0, 2.0, 3.0]), (13, None, -1.0, 0, [0.0, 0.0, 0.0])]
SCHEMA = "id int, text string, x double, n int, a array<float>"
# What a process may import that has installed NumPy and onnxruntime alone, and what these ask for.
WITH_ONNX = ("numpy", "onnxruntime", "flatbuffers", "google", "packaging", "horovod_spark_runner")
# A process that has neither Spark nor Java, nor what it is told that it has not.
ALONE = """
import json, sys
for name in ("pyspark", "pyarrow", "pandas", "py4j", *sys.argv[2:]):
    sys.modules[name] = None
from horovod_spark_runner.scoring import load_pipeline
scorer = load_pipeline(sys.argv[1])
assert not {"tensorflow", "onnxruntime"} & {n for n, m in sys.modules.items() if m}
rows = json.load(sys.stdin)
given = {name: [row[name] for row in rows] for name in rows[0]}
print(json.dumps(scorer.score(given)["probability"].tolist()))
"""
# A process that has nothing but NumPy and onnxruntime.
WITH_ONNXRUNTIME = """
import json, sys
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
dtypes = {"tensor(double)": "f8", "tensor(int32)": "i4", "tensor(string)": object}
rows, given = json.load(sys.stdin), {}
for one in session.get_inputs():
    values = [row[one.name] for row in rows]
    blank = "" if one.type == "tensor(string)" else 0
    filled = [blank if value is None else value for value in values]
    given[one.name] = np.array(filled, dtypes[one.type])
    given[one.name + ".null"] = np.array([value is None for value in values])
found = session.run(["row_state", "prediction", "probability"], given)
print(json.dumps([array.tolist() for array in found]))
assert not {"horovod_spark_runner", "tensorflow", "keras", "pyspark"} & sys.modules.keys()
"""


def in_another_process(script: str, *arguments: str, rows: list[dict[str, Any]]) -> Any:
    """Return what a process without Spark and Java makes of rows."""
    environment = {n: v for n, v in os.environ.items() if n != "JAVA_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        env={**environment, "PATH": "", "ORT_DISABLE_TELEMETRY": "1"},
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def network(kind: str = "softmax") -> Any:
    import keras

    keras.utils.set_random_seed(3)
    vector, whole = keras.Input((5,), name="v"), keras.Input((1,), name="n", dtype="int32")
    array = keras.Input((3,), name="a")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(4, 2)(whole))
    joined = keras.layers.Concatenate()([vector, embedded, array])
    return keras.Model(
        {"v": vector, "n": whole, "a": array},
        keras.layers.Dense(3, activation=kind)(keras.layers.BatchNormalization()(joined)),
    )


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    return spark.createDataFrame(ROWS, SCHEMA).coalesce(1).cache()


@pytest.fixture(scope="module")
def prepared(frame: Any) -> Any:
    """The preparation, as a pipeline in a pipeline."""
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import OneHotEncoder, StandardScaler, StringIndexer, VectorAssembler

    stages = [
        StringIndexer(inputCol="text", outputCol="place", handleInvalid="keep"),
        OneHotEncoder(inputCol="place", outputCol="hot", dropLast=False),
        VectorAssembler(inputCols=["x", "hot"], outputCol="raw"),
        StandardScaler(inputCol="raw", outputCol="v", withMean=True),
    ]
    known = frame.where("id < 12")
    return Pipeline(stages=[Pipeline(stages=stages[:2]), *stages[2:]]).fit(known)


def with_network(prepared: Any, **params: Any) -> Any:
    from pyspark.ml import PipelineModel

    columns = {"v": "v", "n": "n", "a": "a"}
    kind = "linear" if "rawPredictionCol" in params else "softmax"
    model = network(kind)
    transformer = TFTransformer.from_keras(model, feature_cols=columns)
    return PipelineModel([prepared, transformer.copy()._set(**params)])


def columns_of(frame: Any) -> dict[str, list[Any]]:
    rows = frame.collect()
    return {name: [row[name] for row in rows] for name in frame.columns}


def test_the_network_is_scored_as_spark_does_in_a_process_without_it(
    frame: Any, prepared: Any, tmp_path: Path
) -> None:
    fitted = with_network(prepared, probabilityCol="probability")
    place = tmp_path / "bundle"
    export_pipeline(fitted, place, frame)
    theirs = fitted.transform(frame).select("id", "prediction", "probability").collect()
    probabilities = np.array([row["probability"].toArray() for row in theirs])
    scorer = load_pipeline(place)
    assert scorer.output_columns == ("prediction", "probability")
    assert scorer.input_types == {"text": "string", "x": "double", "n": "int", "a": "array"}
    ours = scorer.score(columns_of(frame), ["id", "prediction", "probability"])
    np.testing.assert_allclose(ours["probability"], probabilities, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(ours["prediction"], [row["prediction"] for row in theirs])
    np.testing.assert_array_equal(ours["id"], [row["id"] for row in theirs])
    names = SCHEMA.split()[::2]
    rows = [dict(zip(names, row, strict=True)) for row in ROWS]
    (one,) = [row for row in rows if row["id"] == 5]
    empty = scorer.score({name: [] for name in names})
    assert empty["probability"].shape == (0, 3)
    alone = scorer.score_row(one)
    assert alone is not None
    np.testing.assert_allclose(alone["probability"], probabilities[5], rtol=0, atol=1e-6)
    assert alone["prediction"] == theirs[5]["prediction"]

    found = in_another_process(ALONE, str(place), "onnxruntime", rows=rows)
    np.testing.assert_allclose(found, probabilities, rtol=0, atol=1e-6)
    # With onnxruntime in place of TensorFlow.
    export_pipeline(fitted, place, frame, network="onnx", mode="overwrite")
    others = packages_distributions().keys() - {*WITH_ONNX}
    assert {"cloudpickle", "psutil", "tensorflow"} <= others
    found = in_another_process(ALONE, str(place), *others, rows=rows)
    np.testing.assert_allclose(found, probabilities, rtol=0, atol=1e-6)
    # And all of it as one file.
    file = tmp_path / "pipeline.onnx"
    export_pipeline(fitted, file, frame, format="onnx")
    states, classes, shares = in_another_process(WITH_ONNXRUNTIME, str(file), rows=rows)
    assert states == [0] * len(ROWS)
    assert classes == [row["prediction"] for row in theirs]
    np.testing.assert_allclose(shares, probabilities, rtol=0, atol=1e-6)
    states, classes, shares = in_another_process(WITH_ONNXRUNTIME, str(file), rows=rows[5:6])
    np.testing.assert_allclose(shares, probabilities[5:6], rtol=0, atol=1e-6)


def in_one_file(
    fitted: Any, frame: Any, place: Path, given: dict[str, list[Any]]
) -> tuple[OnnxSession, dict[str, Any]]:
    """Return a pipeline's ONNX file, loaded, and what it gives."""
    export_pipeline(fitted, place, frame, format="onnx")
    session = OnnxSession(place.read_bytes())
    return session, session(onnx_inputs([Input(**one) for one in session.facts["inputs"]], given))


@pytest.mark.thorough
@pytest.mark.parametrize("handle", ["error", "skip", "keep"])
def test_rows_without_a_prediction_and_scores_of_classes(
    spark: Any, prepared: Any, frame: Any, tmp_path: Path, handle: str
) -> None:
    params = {"probabilityCol": "probability", "rawPredictionCol": "raw_scores"}
    fitted = with_network(prepared, handleInvalid=handle, **params)
    export_pipeline(fitted, tmp_path / "b", frame)
    scorer = load_pipeline(tmp_path / "b")
    bad = [
        (0, "x", 1.0, 1, [1.0, 2.0, 3.0]),
        (1, "y", 1.0, None, [1.0, 2.0, 3.0]),
        (2, "z", 1.0, 1, None),
        (3, "z", 1.0, 1, [1.0]),
        (4, "z", 1.0, 1, [1.0, None, 3.0]),
        (5, "new", -1.0, 2, [1.0, 5.0, 6.0]),
    ]
    rows = spark.createDataFrame(bad, SCHEMA).coalesce(1)
    given = columns_of(rows)
    session, made = in_one_file(fitted, frame, tmp_path / "b.onnx", given)
    if handle == "error":
        with pytest.raises(DataError, match="'n'.*null.*row 1"):
            scorer.score(given)
        assert (made["row_state"] == 0).tolist() == [True, *[False] * 4, True]
        told = session.facts["errors"][made["row_state"][1] - 1]
        assert "'n'" in told
        assert "prediction" in told
        assert np.isnan(made["probability"][1:5]).all()
        return
    states = [0, *[-1 if handle == "skip" else 0] * 4, 0]
    assert made["row_state"].tolist() == states
    wanted = ["id", "prediction", "probability", "raw_scores"]
    theirs = fitted.transform(rows).select(*wanted).collect()
    ours = scorer.score(given, wanted)
    assert ours["id"].tolist() == [row["id"] for row in theirs]
    for place, row in enumerate(theirs):
        for name in wanted[1:]:
            also = made[name][row["id"]]
            if row[name] is None:
                assert ours[name][place] is None
                assert np.isnan(also).all()
            else:
                np.testing.assert_allclose(ours[name][place], row[name], rtol=0, atol=1e-6)
                np.testing.assert_allclose(also, row[name], rtol=0, atol=1e-6)


@pytest.mark.thorough
def test_an_lstm_is_never_asked_about_no_rows(spark: Any, tmp_path: Path) -> None:
    """As ONNX, whose LSTM ends the process for no rows."""
    import keras
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import VectorAssembler

    given = [(1.0, [1.0, 2.0]), (None, [1.0, 3.0])]
    rows = spark.createDataFrame(given, "x double, a array<double>").coalesce(1)
    keras.utils.set_random_seed(1)
    v, a = keras.Input((2,), name="v"), keras.Input((2,), name="a")
    steps = keras.layers.Reshape((4, 1))(keras.layers.Concatenate()([v, a]))
    model = keras.Model([v, a], keras.layers.Dense(1)(keras.layers.LSTM(2)(steps)))
    stages = [
        VectorAssembler(inputCols=["x", "x"], outputCol="v", handleInvalid="skip"),
        TFTransformer.from_keras(model, ["v", "a"]),
    ]
    fitted = Pipeline(stages=stages).fit(rows)
    export_pipeline(fitted, tmp_path / "b", rows, network="onnx")
    theirs = [row["prediction"] for row in fitted.transform(rows).collect()]
    scorer = load_pipeline(tmp_path / "b")
    assert scorer.score_row({"x": None, "a": [1.0, 2.0]}) is None
    empty = scorer.score({"x": [None], "a": [[1.0, 2.0]]})["prediction"]
    assert (empty.shape, empty.dtype) == ((0,), np.float32)
    np.testing.assert_allclose(
        scorer.score(columns_of(rows))["prediction"], theirs, rtol=0, atol=1e-6
    )


def test_pandas_and_arrow_come_back_as_they_were_given(
    frame: Any, prepared: Any, tmp_path: Path
) -> None:
    import pandas as pd
    import pyarrow as pa

    export_pipeline(prepared, tmp_path / "b", frame)
    scorer = load_pipeline(tmp_path / "b")
    given = {name: values for name, values in columns_of(frame).items() if name != "a"}
    expected = scorer.score(given)["v"]
    data = pd.DataFrame(given, index=[f"row {n}" for n in range(len(ROWS))])
    framed = scorer.score(data, ["id", "place", "v"])
    assert list(framed.columns) == ["id", "place", "v"]
    assert framed.index.equals(data.index)
    np.testing.assert_array_equal(np.stack(framed["v"].tolist()), expected)
    table = scorer.score(pa.table(given), ["id", "v", "text"])
    assert table["text"].to_pylist() == given["text"]
    np.testing.assert_array_equal(np.array(table["v"].to_pylist()), expected)
    nullable = data.astype({"n": "Int64", "x": "Float64", "text": "string"})
    np.testing.assert_array_equal(np.stack(scorer.score(nullable)["v"].tolist()), expected)


def test_what_does_not_fit_is_refused_by_name(frame: Any, prepared: Any, tmp_path: Path) -> None:
    export_pipeline(prepared, tmp_path / "b", frame)
    scorer = load_pipeline(tmp_path / "b")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"text": 3, "x": 1.0}, r"'text'.*\b3\b.*row 0"),
        ({"text": "x", "x": "1"}, "'x'.*'1'.*row 0"),
        ({"text": "x", "x": True}, "'x'.*True"),
        ({"text": "x", "x": None}, "'x'.*null.*VectorAssembler"),
        ({"text": "x", "x": float("nan")}, "'x'.*nan"),
        ({"text": "x"}, "missing.*'x'|'x'.*missing"),
    ]
    for row, told in wrong:
        with pytest.raises(DataError, match=told):
            scorer.score_row(row)
    with pytest.raises(DataError, match="long|length"):
        scorer.score({"text": ["x"], "x": [1.0, 2.0]})
    with pytest.raises(InvalidInputError, match="'prediction'"):
        scorer.score({"text": ["x"], "x": [1.0]}, ["prediction"])
    with pytest.raises(DataError, match="score_row"):
        scorer.score({"text": "x", "x": 1.0})
    with pytest.raises(InvalidInputError, match="dict"):
        scorer.score([1, 2])


def test_a_bundle_that_is_damaged_or_newer_says_so(
    frame: Any, prepared: Any, tmp_path: Path
) -> None:
    place = tmp_path / "b"
    with pytest.raises(RunDirectoryError, match="pipeline"):
        load_pipeline(place)
    export_pipeline(prepared, place, frame)
    with pytest.raises(RunDirectoryError, match="mode='overwrite'"):
        export_pipeline(prepared, place, frame)
    main, arrays = place / "pipeline.json", place / "arrays.npz"
    text, data = main.read_text(), arrays.read_bytes()
    arrays.write_bytes(data[:-1] + b"?")
    with pytest.raises(RunDirectoryError, match=r"arrays\.npz.*SHA-256"):
        load_pipeline(place)
    arrays.unlink()
    with pytest.raises(RunDirectoryError, match=r"arrays\.npz"):
        load_pipeline(place)
    arrays.write_bytes(data)
    main.write_text(text.replace('"x"', '"y"', 1))
    with pytest.raises(RunDirectoryError, match="SHA-256| damaged"):
        load_pipeline(place)
    facts = unseal(text)
    main.write_text(seal(json.dumps({**facts, "format": 2, "version": "9.1"})))
    with pytest.raises(RunDirectoryError, match=r"horovod_spark_runner 9\.1.*format 2"):
        load_pipeline(place)
    main.write_text(text)
    fitted = with_network(prepared)
    export_pipeline(fitted, place, frame, mode="overwrite")
    (network_file,) = place.glob("*.contents.zip")
    data = network_file.read_bytes()
    network_file.write_bytes(data[:100] + b"?" + data[101:])
    with pytest.raises(RunDirectoryError, match=r"contents\.zip.*SHA-256"):
        load_pipeline(place)
    network_file.unlink()
    with pytest.raises(RunDirectoryError, match=r"contents\.zip"):
        load_pipeline(place)
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "file").write_text("of mine")
    with pytest.raises(RunDirectoryError, match="else"):
        export_pipeline(prepared, tmp_path / "else", frame, mode="overwrite")


def test_what_a_bundle_cannot_hold_is_refused(frame: Any, prepared: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="struct"):
        export_pipeline(with_network(prepared, outputForm="struct"), tmp_path / "b", frame)
    with pytest.raises(ModelError, match="'[Xx]'"):
        export_pipeline(prepared, tmp_path / "b", frame.withColumnRenamed("x", "X"))
    decimal = frame.withColumn("x", frame["x"].cast("decimal(10, 2)"))
    with pytest.raises(ModelError, match=r"'x'.*decimal\(10,2\)"):
        export_pipeline(prepared, tmp_path / "b", decimal)
    with pytest.raises(DataError, match="VectorAssembler.*DataFrame"):
        export_pipeline(prepared, tmp_path / "b", frame.drop("x"))
    assert not (tmp_path / "b").exists()


@pytest.mark.thorough
def test_an_object_store_takes_bundles_and_files(
    frame: Any, prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as server:
        folder = empty_folder(server, "s3://exports/pipelines", monkeypatch)
        for _ in range(2):  # the second takes the place of the first
            export_pipeline(prepared, f"{folder}/b", frame, mode="overwrite")
            export_pipeline(prepared, f"{folder}/p.onnx", frame, format="onnx", mode="overwrite")
        given = columns_of(frame)
        expected = load_pipeline(f"{folder}/b").score(given)["v"]
        session = OnnxSession(folder.join("p.onnx").read_bytes())
        inputs = [Input(**one) for one in session.facts["inputs"]]
        np.testing.assert_array_equal(session(onnx_inputs(inputs, given))["v"], expected)
        with pytest.raises(RunDirectoryError, match="already"):
            export_pipeline(prepared, f"{folder}/p.onnx", frame, format="onnx")


def test_a_label_is_no_input_of_what_is_not_made_of_it(frame: Any, tmp_path: Path) -> None:
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import StringIndexer, VectorAssembler

    stages = [
        StringIndexer(inputCols=["text", "id"], outputCols=["t", "label"], handleInvalid="skip"),
        VectorAssembler(inputCols=["t", "x"], outputCol="v"),
    ]
    fitted = Pipeline(stages=stages).fit(frame.where("text is not null"))
    export_pipeline(fitted, tmp_path / "p.onnx", frame, format="onnx")
    session = OnnxSession((tmp_path / "p.onnx").read_bytes())
    assert session.inputs == ["text", "x"]
    assert session.outputs == ["v", "row_state"]
    export_pipeline(fitted, tmp_path / "both.onnx", frame, format="onnx", columns=["label", "v"])
    assert OnnxSession((tmp_path / "both.onnx").read_bytes()).inputs == ["id", "text", "x"]


def test_what_one_onnx_file_cannot_hold_is_refused(
    frame: Any, prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import Tokenizer, VectorAssembler

    place = tmp_path / "p.onnx"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"format": "pmml"}, "format.*bundle.*onnx"),
        ({"network": "torch"}, "network.*saved_model.*onnx"),
        ({"columns": ["v"]}, "ONNX"),
        ({"format": "onnx", "columns": ["nothing"]}, "'nothing'"),
        ({"format": "onnx", "columns": "v"}, "column"),
    ]
    for arguments, told in wrong:
        with pytest.raises(InvalidInputError, match=told):
            export_pipeline(prepared, place, frame, **arguments)
    with pytest.raises(InvalidInputError, match=r"\.onnx.*bundle"):
        export_pipeline(prepared, tmp_path / "bundle", frame, format="onnx")
    words = Pipeline(stages=[Tokenizer(inputCol="text", outputCol="words")]).fit(frame)
    with pytest.raises(ModelError, match="Tokenizer.*'words'.*ONNX"):
        export_pipeline(words, place, frame, format="onnx")
    renamed = frame.select("n", frame["x"].alias("n_null"))
    state = VectorAssembler(inputCols=["n", "n_null"], outputCol="row_state")
    with pytest.raises(ModelError, match="'row_state'"):
        export_pipeline(state, place, renamed, format="onnx")
    # A stage whose form were wrong.
    monkeypatch.setitem(
        graph_model.WRITERS,
        "Scaler",
        lambda rows, stage: rows.add_vectors(stage.output, rows.vectors(stage.input).data, 5),
    )
    with pytest.raises(ModelError, match="pipeline.*row"):
        export_pipeline(prepared, place, frame, format="onnx")
    assert not list(tmp_path.iterdir())
