"""Whole pipelines, exported with networks as one ONNX file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
from horovod_spark_runner.export.columns import Input, onnx_inputs
from horovod_spark_runner.export.onnx_builder import Rows
from horovod_spark_runner.export.stages import Scaler
from horovod_spark_runner.training.onnx import OnnxSession

from ..object_store import empty_folder, s3_server

pytestmark = pytest.mark.spark

ROWS: list[tuple[Any, ...]] = [
    (n, ["x", "y", "z"][n % 3], n * 0.7 - 3.0, n % 4, [float(n), -1.0, 0.5]) for n in range(12)
]
ROWS += [(12, "new", 1.0, 2, [1.0, 2.0, 3.0]), (13, None, -1.0, 0, [0.0, 0.0, 0.0])]
SCHEMA = "id int, text string, x double, n int, a array<float>"
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


def run_alone(file: Path, rows: list[dict[str, Any]]) -> Any:
    """Return what a process without Spark and Java makes of rows."""
    environment = {n: v for n, v in os.environ.items() if n != "JAVA_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", WITH_ONNXRUNTIME, str(file)],
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
    file = tmp_path / "pipeline.onnx"
    export_pipeline(fitted, file, frame)
    theirs = fitted.transform(frame).select("id", "prediction", "probability").collect()
    probabilities = np.array([row["probability"].toArray() for row in theirs])
    rows = [dict(zip(SCHEMA.split()[::2], row, strict=True)) for row in ROWS]
    states, classes, shares = run_alone(file, rows)
    assert states == [0] * len(ROWS)
    assert classes == [row["prediction"] for row in theirs]
    np.testing.assert_allclose(shares, probabilities, rtol=0, atol=1e-6)
    _, _, shares = run_alone(file, rows[5:6])
    np.testing.assert_allclose(shares, probabilities[5:6], rtol=0, atol=1e-6)


def in_one_file(
    fitted: Any, frame: Any, place: Path, given: dict[str, list[Any]]
) -> tuple[OnnxSession, dict[str, Any]]:
    """Return a pipeline's ONNX file, loaded, and what it gives."""
    export_pipeline(fitted, place, frame)
    session = OnnxSession(place.read_bytes())
    return session, session(onnx_inputs([Input(**one) for one in session.facts["inputs"]], given))


@pytest.mark.thorough
@pytest.mark.parametrize("handle", ["error", "skip", "keep"])
def test_rows_without_a_prediction_and_scores_of_classes(
    spark: Any, prepared: Any, frame: Any, tmp_path: Path, handle: str
) -> None:
    params = {"probabilityCol": "probability", "rawPredictionCol": "raw_scores"}
    fitted = with_network(prepared, handleInvalid=handle, **params)
    bad = [
        (0, "x", 1.0, 1, [1.0, 2.0, 3.0]),
        (1, "y", 1.0, None, [1.0, 2.0, 3.0]),
        (2, "z", 1.0, 1, None),
        (3, "z", 1.0, 1, [1.0]),
        (4, "z", 1.0, 1, [1.0, None, 3.0]),
        (5, "new", -1.0, 2, [1.0, 5.0, 6.0]),
    ]
    rows = spark.createDataFrame(bad, SCHEMA).coalesce(1)
    # The comparison before writing meets these rows, too.
    session, made = in_one_file(fitted, frame.union(rows), tmp_path / "b.onnx", columns_of(rows))
    if handle == "error":
        assert (made["row_state"] == 0).tolist() == [True, *[False] * 4, True]
        told = session.facts["errors"][made["row_state"][1] - 1]
        assert "'n'" in told
        assert "prediction" in told
        assert np.isnan(made["probability"][1:5]).all()
        return
    states = [0, *[-1 if handle == "skip" else 0] * 4, 0]
    assert made["row_state"].tolist() == states
    wanted = ["prediction", "probability", "raw_scores"]
    theirs = fitted.transform(rows).select("id", *wanted).collect()
    assert [row["id"] for row in theirs] == ([0, 5] if handle == "skip" else list(range(6)))
    for row in theirs:
        for name in wanted:
            ours = made[name][row["id"]]
            if row[name] is None:
                assert np.isnan(ours).all()
            else:
                np.testing.assert_allclose(ours, row[name], rtol=0, atol=1e-6)


def test_what_a_pipeline_cannot_take_is_refused(frame: Any, prepared: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="struct"):
        export_pipeline(with_network(prepared, outputForm="struct"), tmp_path / "b.onnx", frame)
    with pytest.raises(ModelError, match="'[Xx]'"):
        export_pipeline(prepared, tmp_path / "b.onnx", frame.withColumnRenamed("x", "X"))
    decimal = frame.withColumn("x", frame["x"].cast("decimal(10, 2)"))
    with pytest.raises(ModelError, match=r"'x'.*decimal\(10,2\)"):
        export_pipeline(prepared, tmp_path / "b.onnx", decimal)
    with pytest.raises(DataError, match="VectorAssembler.*DataFrame"):
        export_pipeline(prepared, tmp_path / "b.onnx", frame.drop("x"))
    assert not (tmp_path / "b.onnx").exists()


@pytest.mark.thorough
def test_an_object_store_takes_the_file(
    frame: Any, prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as server:
        folder = empty_folder(server, "s3://exports/pipelines", monkeypatch)
        for _ in range(2):  # the second takes the place of the first
            export_pipeline(prepared, f"{folder}/p.onnx", frame, mode="overwrite")
        session = OnnxSession(folder.join("p.onnx").read_bytes())
        inputs = [Input(**one) for one in session.facts["inputs"]]
        made = session(onnx_inputs(inputs, columns_of(frame)))["v"]
        expected = [row["v"].toArray() for row in prepared.transform(frame).collect()]
        np.testing.assert_array_equal(made, expected)
        with pytest.raises(RunDirectoryError, match="already"):
            export_pipeline(prepared, f"{folder}/p.onnx", frame)


def test_a_label_is_no_input_of_what_is_not_made_of_it(frame: Any, tmp_path: Path) -> None:
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import StringIndexer, VectorAssembler

    stages = [
        StringIndexer(inputCols=["text", "id"], outputCols=["t", "label"], handleInvalid="skip"),
        VectorAssembler(inputCols=["t", "x"], outputCol="v"),
    ]
    fitted = Pipeline(stages=stages).fit(frame.where("text is not null"))
    export_pipeline(fitted, tmp_path / "p.onnx", frame)
    session = OnnxSession((tmp_path / "p.onnx").read_bytes())
    assert session.inputs == ["text", "x"]
    assert session.outputs == ["v", "row_state"]
    export_pipeline(fitted, tmp_path / "both.onnx", frame, columns=["label", "v"])
    assert OnnxSession((tmp_path / "both.onnx").read_bytes()).inputs == ["id", "text", "x"]


def test_what_one_onnx_file_cannot_hold_is_refused(
    frame: Any, prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.ml.feature import VectorAssembler

    place = tmp_path / "p.onnx"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"format": "bundle"}, "format.*onnx.*'bundle'"),
        ({"mode": "append"}, "mode.*overwrite"),
        ({"columns": ["nothing"]}, "'nothing'"),
        ({"columns": "v"}, "column"),
    ]
    for arguments, told in wrong:
        with pytest.raises(InvalidInputError, match=told):
            export_pipeline(prepared, place, frame, **arguments)
    with pytest.raises(InvalidInputError, match=r"ONNX.*\.onnx.*bundle"):
        export_pipeline(prepared, tmp_path / "bundle", frame)
    renamed = frame.select("n", frame["x"].alias("n_null"))
    state = VectorAssembler(inputCols=["n", "n_null"], outputCol="row_state")
    with pytest.raises(ModelError, match="'row_state'"):
        export_pipeline(state, place, renamed)
    assert not list(tmp_path.iterdir())


def test_a_file_that_differs_from_spark_is_refused(
    frame: Any, prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "p.onnx"
    null = frame.union(frame.sparkSession.createDataFrame([(14, "x", None, 0, None)], SCHEMA))
    export_pipeline(prepared, place, null)  # the row is an error in both
    place.unlink()

    def check_wrong(told: str, owner: type, name: str, replacement: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, replacement)
            with pytest.raises(ModelError, match=told):
                export_pipeline(prepared, place, null)

    def unscaled(stage: Any, rows: Rows) -> None:
        rows.add_vectors(stage.output, rows.vectors(stage.input).data, stage.size)

    def refusing(stage: Any, rows: Rows) -> None:
        unscaled(stage, rows)
        rows.check("column 'v'", rows.graph.add("Not", rows.live), "never")

    def dropping(stage: Any, rows: Rows) -> None:
        unscaled(stage, rows)
        rows.keep(rows.graph.add("Not", rows.live))

    check_wrong("differs.*column 'v'", Scaler, "add_nodes", unscaled)
    check_wrong("x=None.* in the file and .an error.* in Spark", Rows, "check", lambda *_: None)
    check_wrong("the row is 'an error' in the file", Scaler, "add_nodes", refusing)
    check_wrong("the row is 'no row' in the file", Scaler, "add_nodes", dropping)
    assert not list(tmp_path.iterdir())
