"""The transformer as a stage of Spark ML: Params, copies, saved and loaded, streams, pipelines."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    DataError,
    DataOptions,
    InvalidInputError,
    ModelError,
    RunDirectoryError,
    StorageError,
    TFTransformer,
)
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.frameworks import KERAS
from horovod_spark_runner.model.persistence import FORMAT, _location_of
from horovod_spark_runner.storage.checksums import compute_checksum, seal, unseal

from ..faults.disks import memory_disk
from ..runs import save_run, variables_of

pytestmark = pytest.mark.spark

COLUMNS = [Column("x", "float32", (3,)), Column("n", "int32")]
ROWS = [(i, [float(i), 1.0, -float(i)], i % 5) for i in range(20)]


def summing() -> Any:
    """A model that can be computed by hand: the sum of x and n."""
    import keras

    x, n = keras.Input((3,), name="x"), keras.Input((1,), name="n")
    total = keras.layers.Dense(1, kernel_initializer="ones")(x) + n
    model = keras.Model({"x": x, "n": n}, total)
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("run")
    save_run(place, summing(), COLUMNS)
    return str(place)


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    return spark.createDataFrame(ROWS, "id int, x array<float>, n int").repartition(2).cache()


def check(predicted: Any, name: str = "prediction", rows: int = len(ROWS)) -> None:
    found = predicted.collect()
    assert len(found) == rows
    for row in found:
        assert row[name] == pytest.approx(sum(row.x) + row.n)


# -- Params ----------------------------------------------------------------------------------------


def test_params_are_read_set_and_explained(run: str) -> None:
    transformer = TFTransformer.from_run(run, prediction_col="p", handle_invalid="keep")
    names = [param.name for param in transformer.params]
    assert names == [
        "featureCols", "featuresCol", "handleInvalid", "outputForm", "predictBatchSize",
        "predictionCol", "probabilityCol", "rawPredictionCol",
    ]  # fmt: skip
    assert transformer.getPredictionCol() == "p"
    assert transformer.getOrDefault("handleInvalid") == "keep"
    assert transformer.isSet("predictionCol")
    assert not transformer.isSet("outputForm")
    assert transformer.setOutputForm("vector").setPredictBatchSize(np.int64(7)) is transformer
    assert (transformer.getOutputForm(), transformer.getPredictBatchSize()) == ("vector", 7)
    text = transformer.explainParams()
    assert (
        "predictBatchSize: rows per call of the model (1024). (default: 1024, current: 7)" in text
    )
    transformer.setPredictionCol(None)
    assert not transformer.isSet("predictionCol")
    assert transformer.getPredictionCol() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("predictBatchSize", 0),
        ("predictBatchSize", "8"),
        ("handleInvalid", "drop"),
        ("outputForm", "list"),
        ("predictionCol", 3),
        ("probabilityCol", ["p"]),
        ("rawPredictionCol", ""),
        ("featureCols", 3),
        ("featuresCol", ["x"]),
    ],
)
def test_params_are_checked_when_they_are_set(name: str, value: Any, run: str) -> None:
    transformer = TFTransformer.from_run(run)
    with pytest.raises(InvalidInputError, match=name):
        getattr(transformer, f"set{name[0].upper()}{name[1:]}")(value)
    with pytest.raises(ValueError, match=name):
        transformer.set(transformer.getParam(name), value)
    assert not transformer.isSet(name)


@pytest.mark.thorough
def test_params_of_one_call_hold_for_it_alone(run: str, frame: Any) -> None:
    transformer = TFTransformer.from_run(run)
    named = transformer.transform(frame, {transformer.predictionCol: "q"})
    check(named, "q")
    assert transformer.getPredictionCol() is None
    check(transformer.transform(frame))
    with pytest.raises(InvalidInputError, match="outputForm|output_form"):
        transformer.transform(frame, {transformer.outputForm: "list"})
    other = TFTransformer.from_run(run)
    maps: list[tuple[Any, str]] = [
        ({"handleInvalid": "skip"}, r"'handleInvalid'.*\{stage.handleInvalid: …\}"),
        ({TFTransformer.handleInvalid: "skip"}, "handleInvalid.*class"),
        ({other.handleInvalid: "skip"}, f"{other.uid}__handleInvalid"),
        ([transformer.handleInvalid], "Param"),
    ]
    for given, message in maps:
        with pytest.raises(InvalidInputError, match=message):
            transformer.transform(frame, given)


def test_which_feature_columns_are_meant(run: str, frame: Any) -> None:
    transformer = TFTransformer.from_run(run).setFeaturesCol("x").setFeatureCols(["x", "n"])
    with pytest.raises(InvalidInputError):
        transformer.transform(frame)
    check(transformer.setFeaturesCol(None).transform(frame))


def test_a_run_is_named_and_not_its_checkpoint(run: str, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints" / "step-00000042"
    place.mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match="model") as caught:
        TFTransformer.from_run(place)
    assert f"from_run({str(tmp_path)!r}, checkpoint=42)" in str(caught.value)
    with pytest.raises(RunDirectoryError, match=r"signature.json(?!.*checkpoint=)"):
        TFTransformer.from_run(tmp_path)


def test_a_model_fn_that_takes_arguments_is_refused_at_once(run: str) -> None:
    def takes(units: int) -> Any:
        raise NotImplementedError

    build: Any = takes
    with pytest.raises(ModelError, match="units.*partial"):
        TFTransformer.from_run(run, model_fn=build)


def test_a_copy_has_its_own_params_and_the_same_model(run: str, frame: Any) -> None:
    transformer = TFTransformer.from_run(run, prediction_col="p")
    other = transformer.copy({transformer.predictionCol: "q"})
    assert other.uid == transformer.uid
    assert (other.getPredictionCol(), transformer.getPredictionCol()) == ("q", "p")
    assert other._model is transformer._model
    assert other.summary is transformer.summary
    other.setPredictBatchSize(3)
    assert transformer.getPredictBatchSize() == 1024
    check(other.transform(frame), "q")


@pytest.mark.thorough
def test_threads_share_a_transformer(run: str, frame: Any) -> None:
    transformer = TFTransformer.from_run(run)

    def predict(number: int) -> list[Any]:
        extra = {transformer.predictionCol: f"p{number}", transformer.predictBatchSize: number + 1}
        return list(transformer.transform(frame, extra).collect())

    with ThreadPoolExecutor(4) as pool:
        for number, rows in enumerate(pool.map(predict, range(8))):
            assert len(rows) == len(ROWS)
            assert all(row[f"p{number}"] == pytest.approx(sum(row.x) + row.n) for row in rows)
    assert transformer.getPredictionCol() is None


def test_the_summary_tells_of_the_training(run: str) -> None:
    transformer = TFTransformer.from_run(run)
    assert transformer.hasSummary
    assert transformer.summary.run_dir == run
    assert transformer.summary.history == [{"loss": 1.0}]
    assert list(transformer.summary.attempts) == []


def test_the_model_itself_on_the_driver(run: str) -> None:
    import keras

    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = TFTransformer.from_run(run).getModel()
        assert keras.config.dtype_policy().name == "mixed_float16"
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model, keras.Model)
    inputs = {"x": np.ones((2, 3), "float32"), "n": np.array([[1], [2]])}
    assert model.predict(inputs, verbose=0).ravel().tolist() == [4.0, 5.0]


# -- rows ------------------------------------------------------------------------------------------


def test_no_rows_and_empty_partitions(run: str, frame: Any) -> None:
    transformer = TFTransformer.from_run(run)
    empty = transformer.transform(frame.filter("id < 0"))
    assert empty.collect() == []
    assert empty.columns == ["id", "x", "n", "prediction"]
    check(transformer.transform(frame.filter("id < 3").repartition(8)), rows=3)
    check(transformer.transform(frame.coalesce(1)))


def test_a_stream_is_predicted_on(run: str, frame: Any, spark: Any, tmp_path: Path) -> None:
    from pyspark.sql import functions as F

    frame.write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema(frame.schema).parquet(str(tmp_path / "rows"))
    predicted = TFTransformer.from_run(run, prediction_col="p").transform(stream)
    assert predicted.isStreaming
    query = (
        predicted.withColumn("twice", F.col("p") * 2)
        .writeStream.format("memory")
        .queryName("predicted")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    check(spark.table("predicted"), "p")


# -- saving and loading ----------------------------------------------------------------------------


def test_a_saved_transformer_is_the_same(run: str, frame: Any, tmp_path: Path) -> None:
    place = str(tmp_path / "a stage")
    transformer = TFTransformer.from_run(run, prediction_col={"prediction": "p"})
    transformer.setPredictBatchSize(5)
    transformer.save(place)
    loaded = TFTransformer.load(place)
    assert loaded.uid == transformer.uid
    assert loaded.summary == transformer.summary
    assert loaded.extractParamMap() == transformer.extractParamMap()
    assert loaded.isSet("predictBatchSize")
    assert not loaded.isSet("outputForm")
    check(loaded.transform(frame), "p")
    stored = {path.name for path in (tmp_path / "a stage" / "model").iterdir()}
    assert stored == {path.name for path in Path(run, "model").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {"a stage"}


def test_what_is_there_is_replaced_on_request_only(run: str, frame: Any, tmp_path: Path) -> None:
    place = tmp_path / "stage"
    first = TFTransformer.from_run(run, prediction_col="p")
    first.save(str(place))
    with pytest.raises(RunDirectoryError, match=r"write\(\)\.overwrite"):
        first.save(str(place))
    # Also by itself, loaded from there.
    loaded = TFTransformer.load(str(place)).setPredictionCol("q")
    loaded.write().overwrite().save(str(place))
    check(TFTransformer.load(str(place)).transform(frame), "q")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunDirectoryError, match="file.*(folder|directory)"):
        first.write().overwrite().save(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.thorough
def test_a_full_disk_leaves_what_was_saved_before(run: str, frame: Any, tmp_path: Path) -> None:
    with memory_disk(tmp_path / "small", "1m") as disk:
        stage, filling = disk / "stage", disk / "filling"
        TFTransformer.from_run(run).save(str(stage))
        with contextlib.suppress(OSError), filling.open("wb") as file:
            file.write(bytes(2**21))
        before = sorted(path.name for path in disk.iterdir())
        for place in (stage, disk / "new"):
            told = f"{place}.*No space left on device"
            with pytest.raises(StorageError, match=told) as caught:
                TFTransformer.from_run(run).write().overwrite().save(str(place))
            assert isinstance(caught.value.__cause__, OSError)
        assert sorted(path.name for path in disk.iterdir()) == before
        check(TFTransformer.load(str(stage)).transform(frame))


@pytest.mark.parametrize("kind", ["classic", pytest.param("connect", marks=pytest.mark.thorough)])
def test_a_pipeline_in_a_process_that_has_only_the_package(
    kind: str, run: str, spark: Any, frame: Any, tmp_path: Path
) -> None:
    from pyspark.ml import PipelineModel

    transformer = TFTransformer.from_run(run, prediction_col="p")
    PipelineModel([transformer]).save(str(tmp_path / "pipeline"))
    script = Path(__file__).with_name("load_stage.py")
    command = [sys.executable, str(script), kind, *(str(tmp_path / n) for n in ("pipeline", "b"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["predicted"] == [10.0, 10.0]
    assert found["loaded"] == []
    assert (found["uid"], found["loss"]) == (transformer.uid, 1.0)
    assert found["estimator"] == ["no.such:model", 3, {"allow_nan": True}]
    check(PipelineModel.load(str(tmp_path / "b")).transform(frame), "p")


@pytest.mark.thorough
def test_a_pipeline_that_was_loaded_is_saved_over_itself(
    run: str, frame: Any, tmp_path: Path
) -> None:
    """Spark deletes the old files first, also those the model would be copied from."""
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler

    assembler = VectorAssembler(inputCols=["n"], outputCol="v")
    fitted = PipelineModel([assembler, TFTransformer.from_run(run, prediction_col="p")])
    place = str(tmp_path / "pipeline")
    fitted.save(place)
    for _ in range(2):
        loaded = PipelineModel.load(place)
        loaded.write().overwrite().save(place)
    check(PipelineModel.load(place).transform(frame), "p")
    # And among stages that are yet to be fitted.
    Pipeline(stages=[assembler, fitted.stages[1]]).write().overwrite().save(place)
    check(Pipeline.load(place).fit(frame).transform(frame), "p")


def test_a_run_that_is_gone_or_trained_on(run: str, frame: Any, tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(run, place)
    transformer = TFTransformer.from_run(str(place))
    built = TFTransformer.from_run(str(place), model_fn=summing)
    save_run(place, summing(), COLUMNS)
    (place / "model" / "weights.npz").write_bytes(b"other")
    transformer.save(str(tmp_path / "one"))
    shutil.rmtree(place)
    transformer.save(str(tmp_path / "two"))
    for name in ("one", "two"):
        check(TFTransformer.load(str(tmp_path / name)).transform(frame))
    with pytest.raises(RunDirectoryError, match="missing"):
        built.save(str(tmp_path / "three"))
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}


def damage(place: Path) -> None:
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 1
    place.write_bytes(content)


def metadata_of(place: Path) -> tuple[Path, dict[str, Any]]:
    path = place / "metadata" / "part-00000"
    return path, json.loads(path.read_text())


def test_damaged_stages_are_told(run: str, spark: Any, tmp_path: Path) -> None:
    def saved(name: str) -> Path:
        TFTransformer.from_run(run).save(str(tmp_path / name))
        return tmp_path / name

    with pytest.raises(RunDirectoryError, match="metadata"):
        TFTransformer.load(str(tmp_path / "nothing"))
    for file, message in (
        ("model.keras", "model.keras(?!/)"),
        ("signature.json", "signature.json(?!/)"),
    ):
        place = saved(file)
        damage(place / "model" / file)
        with pytest.raises(RunDirectoryError, match=message):
            TFTransformer.load(str(place))
    place = saved("archive missing")
    (place / "model" / "model.keras").unlink()
    with pytest.raises(RunDirectoryError, match="model.keras"):
        TFTransformer.load(str(place))
    path, metadata = metadata_of(saved("other params"))
    metadata["defaultParamMap"]["predictBatchSize"] = 7
    path.write_text(json.dumps(metadata))
    with pytest.raises(RunDirectoryError, match="metadata.*SHA-256"):
        TFTransformer.load(str(tmp_path / "other params"))
    path.write_text("{")
    with pytest.raises(RunDirectoryError, match="metadata.*JSON"):
        TFTransformer.load(str(tmp_path / "other params"))
    path, metadata = metadata_of(saved("newer"))
    metadata["horovod_spark_runner"].update(format=FORMAT + 1, version="9.0")
    path.write_text(json.dumps(metadata))
    with pytest.raises(RunDirectoryError, match=f"horovod_spark_runner 9.0.*format {FORMAT + 1}"):
        TFTransformer.load(str(tmp_path / "newer"))
    mixed, other = saved("mixed"), tmp_path / "run"
    save_run(other, summing(), COLUMNS)
    shutil.rmtree(mixed / "model")
    shutil.copytree(other / "model", mixed / "model")
    with pytest.raises(RunDirectoryError, match="model.*transformer"):
        TFTransformer.load(str(mixed))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["weights.npz", "sample.npz"])
@pytest.mark.parametrize("how", ["flip", "cut", "lose"])
def test_damaged_weights_never_predict(
    run: str, frame: Any, tmp_path: Path, name: str, how: str
) -> None:
    """Where they count, loading checks them; else those of the archive count, by its own sum."""
    TFTransformer.from_run(run).save(str(tmp_path / "stage"))
    file = tmp_path / "stage" / "model" / name
    if how == "flip":
        damage(file)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-20])
    else:
        file.unlink()
    with pytest.raises(RunDirectoryError, match=name):
        TFTransformer.read().modelFn(summing).load(str(tmp_path / "stage"))
    loaded = TFTransformer.load(str(tmp_path / "stage"))
    if how == "flip":
        check(loaded.transform(frame))
    # What is damaged is not handed on under a new sum, either.
    loaded.save(str(tmp_path / "again"))
    assert not (tmp_path / "again" / "model" / name).exists()


def test_other_stages_are_told(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.feature import VectorAssembler

    VectorAssembler(inputCols=["n"], outputCol="v").save(str(tmp_path / "assembler"))
    with pytest.raises(RunDirectoryError, match="org.apache.*VectorAssembler"):
        TFTransformer.load(str(tmp_path / "assembler"))


def own_model() -> Any:
    """A model with a layer of the user's own."""
    import keras

    class Twice(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x * 2

    x = keras.Input((3,), name="x")
    model = keras.Model(x, keras.ops.sum(Twice()(x), axis=1))
    model.compile("sgd", "mse")
    return model, Twice


@pytest.mark.thorough
def test_the_users_own_classes_are_given_again(
    frame: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from pyspark.ml import PipelineModel

    model, twice = own_model()
    save_run(tmp_path / "run", model, COLUMNS[:1])
    objects = {"Twice": twice}
    transformer = TFTransformer.from_run(tmp_path / "run", custom_objects=objects)
    place, pipeline = str(tmp_path / "stage"), str(tmp_path / "pipeline")
    with caplog.at_level(logging.WARNING):
        transformer.save(place)
    assert "'Twice'" in caplog.text
    assert "TFTransformer.read().customObjects(" in caplog.text
    PipelineModel([transformer]).save(pipeline)
    with pytest.raises(RunDirectoryError, match=r"'Twice'.*read\(\)\.customObjects"):
        TFTransformer.load(place)
    with pytest.raises(RunDirectoryError, match=r"TFTransformer\.loading\("):
        PipelineModel.load(pipeline)
    given = TFTransformer.read().customObjects(objects).load(place)
    with TFTransformer.loading(custom_objects=objects):
        inside = PipelineModel.load(pipeline)
    built = TFTransformer.read().modelFn(lambda: own_model()[0]).load(place)
    for stage in (given, inside, built):
        for row in stage.transform(frame).collect():
            assert row.prediction == pytest.approx(2 * sum(row.x))
    with pytest.raises(RunDirectoryError, match="'Twice'"):  # what was given above is over
        PipelineModel.load(pipeline)


@pytest.mark.thorough
def test_transforms_are_given_again(
    frame: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def half(value: Any, generator: Any) -> Any:
        return value / 2

    transforms = {"x": half}
    save_run(tmp_path / "run", summing(), COLUMNS, data=DataOptions(transforms=transforms))
    transformer = TFTransformer.from_run(tmp_path / "run", transforms=transforms)
    with caplog.at_level(logging.WARNING):
        transformer.save(str(tmp_path / "stage"))
    assert "transforms" in caplog.text
    assert "'x'" in caplog.text
    with pytest.raises(DataError, match=r"transforms.*'x'.*\.transforms\("):
        TFTransformer.load(str(tmp_path / "stage"))
    with pytest.raises(InvalidInputError, match="transforms.*'n'"):
        TFTransformer.from_run(tmp_path / "run", transforms={**transforms, "n": half})
    # In a pipeline it may be of another stage.
    reader = TFTransformer.read().transforms({**transforms, "n": half})
    loaded = reader.load(str(tmp_path / "stage"))
    for row in loaded.transform(frame).collect():
        assert row.prediction == pytest.approx(sum(row.x) / 2 + row.n)


# -- other models than a finished run's ------------------------------------------------------------


@pytest.mark.thorough
def test_the_weights_of_a_checkpoint(frame: Any, tmp_path: Path) -> None:
    from horovod_spark_runner.checkpoint.files import CheckpointInfo, save_checkpoint
    from horovod_spark_runner.checkpoint.run_directory import RunDirectory

    model, directory = summing(), RunDirectory(str(tmp_path / "run"))
    directory.location.make_folder()
    directory.write_run_id("this")
    variables = variables_of(model)
    for step, factor in ((4, 2.0), (8, 3.0)):
        model.layers[1].kernel.assign(np.full((3, 1), factor))
        info = CheckpointInfo(step, 1, [], "", variables.describe(), KERAS, run_id="this")
        save_checkpoint(directory, info, {"variables.npz": variables.capture()})
    save_run(tmp_path / "run", model, COLUMNS)

    def check_factor(transformer: TFTransformer, factor: float) -> None:
        for row in transformer.transform(frame).collect():
            assert row.prediction == pytest.approx(factor * sum(row.x) + row.n)

    place = str(tmp_path / "run")
    check_factor(TFTransformer.from_run(place), 3.0)
    earlier = TFTransformer.from_run(place, checkpoint=4)
    check_factor(earlier, 2.0)
    check_factor(TFTransformer.from_run(place, checkpoint=4, model_fn=summing), 2.0)
    assert earlier.getModel().layers[1].kernel.numpy().tolist() == [[2.0]] * 3
    # Saved, and the run deleted: still the checkpoint's, not the archive's.
    earlier.save(str(tmp_path / "one"))
    with pytest.raises(RunDirectoryError, match=r"step-00000005.*\b4\b.*\b8"):
        TFTransformer.from_run(place, checkpoint=5)
    shutil.rmtree(place)
    loaded = TFTransformer.load(str(tmp_path / "one"))
    check_factor(loaded, 2.0)
    shutil.copytree(tmp_path / "one", tmp_path / "damaged")
    damage(tmp_path / "damaged" / "model" / "weights.npz")
    with pytest.raises(RunDirectoryError, match=r"weights\.npz"):
        TFTransformer.load(str(tmp_path / "damaged"))
    shutil.rmtree(tmp_path / "one")
    loaded.save(str(tmp_path / "two"))
    check_factor(TFTransformer.load(str(tmp_path / "two")), 2.0)


@pytest.mark.thorough
def test_a_keras_model_that_was_trained_elsewhere(spark: Any, frame: Any, tmp_path: Path) -> None:
    model = summing()
    model.save(tmp_path / "model.keras")
    renamed = frame.withColumnsRenamed({"x": "a", "n": "b"})
    for given in (model, tmp_path / "model.keras", str(tmp_path / "model.keras")):
        transformer = TFTransformer.from_keras(given)
        check(transformer.transform(frame))
    named = TFTransformer.from_keras(model, feature_cols={"x": "a", "n": "b"})
    rows = named.transform(renamed).collect()
    assert rows
    assert all(row.prediction == pytest.approx(sum(row.a) + row.b) for row in rows)
    assert not named.hasSummary
    with pytest.raises(InvalidInputError, match="summary"):
        named.summary  # noqa: B018
    transformer.save(str(tmp_path / "stage"))
    check(TFTransformer.load(str(tmp_path / "stage")).transform(frame))


@pytest.mark.thorough
def test_a_saved_model_that_another_program_wrote(frame: Any, tmp_path: Path) -> None:
    import tensorflow as tf

    summing().export(str(tmp_path / "exported"), verbose=False)

    class Own(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 3], name="v")])
        def twice(self, v: Any) -> dict[str, Any]:
            return {"twice": v * 2, "first": v[:, 0]}

    module = Own()
    tf.saved_model.save(module, str(tmp_path / "own"), {"double": module.twice})
    exported = TFTransformer.from_saved_model(tmp_path / "exported")
    check(exported.setPredictionCol("p").transform(frame), "p")
    own = TFTransformer.from_saved_model(tmp_path / "own", ["x"], signature="double")
    own.save(str(tmp_path / "stage"))
    for name in ("exported", "own"):
        shutil.rmtree(tmp_path / name)
    for transformer in (own, TFTransformer.load(str(tmp_path / "stage"))):
        assert transformer.output_names == ["first", "twice"]
        for row in transformer.transform(frame).collect():
            assert (row.first, row.twice) == (row.x[0], [2 * one for one in row.x])
    assert "double" in own.getModel().signatures


def test_saved_models_that_cannot_be_taken(tmp_path: Path) -> None:
    summing().export(str(tmp_path / "exported"), verbose=False)
    for place, columns, signature, message in (
        (tmp_path, None, "serving_default", "SavedModel"),
        (tmp_path / "exported", None, "predict", "'predict'.*serving_def"),
        (tmp_path / "exported", ["x", "n"], "serving_default", "column"),
        (tmp_path / "exported", {"x": "x"}, "serving_default", "'n'.*'x'"),
    ):
        with pytest.raises(ModelError, match=message):
            TFTransformer.from_saved_model(place, columns, signature=signature)


@pytest.mark.thorough
def test_vectors_and_joined_columns_of_a_keras_model(spark: Any) -> None:
    import keras
    from pyspark.ml.feature import VectorAssembler

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    plain = spark.createDataFrame([(1.0, 2), (3.0, 4)], "a double, b int")
    vectors = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(plain)
    for transformer, rows in (
        (TFTransformer.from_keras(model), vectors),
        (TFTransformer.from_keras(model, [["a", "b"]]), plain),
        (TFTransformer.from_keras(model, ["v"]), vectors.withColumnRenamed("features", "v")),
    ):
        assert [row.prediction for row in transformer.transform(rows).collect()] == [3.0, 7.0]


@pytest.mark.thorough
def test_a_keras_model_with_the_users_own_layer(frame: Any, tmp_path: Path) -> None:
    model, twice = own_model()
    transformer = TFTransformer.from_keras(model, ["x"])
    transformer.save(str(tmp_path / "stage"))
    for row in transformer.transform(frame).collect():
        assert row.prediction == pytest.approx(2 * sum(row.x))
    given = TFTransformer.read().customObjects({"Twice": twice}).load(str(tmp_path / "stage"))
    assert given.transform(frame).count() == len(ROWS)


def test_keras_models_that_cannot_be_taken(tmp_path: Path) -> None:
    import keras

    class Subclass(keras.Model):
        pass

    open_ended = keras.Sequential([keras.Input((None,)), keras.layers.Lambda(lambda x: x)])
    x = keras.Input((2,))
    mean = keras.Model(x, keras.ops.mean(x))
    carrying = keras.Sequential(
        [keras.Input(batch_shape=(2, 3, 1)), keras.layers.GRU(1, stateful=True)]
    )
    for given, columns, message in (
        (Subclass(), None, "'subclass'.*inputs"),
        (open_ended, None, r"float32.*\(None,\)"),
        (summing(), ["x"], "inputs.*'n'.*columns.*'x'"),
        (summing(), {"x": ["a", "b"], "n": "n"}, r"\(3,\).*\b2\b"),
        (summing(), {"x": "a", "n": "a"}, "inputs"),
        (mean, ["x"], r"'prediction'.*\(\)"),
        (carrying, ["x"], "'gru.*stateful"),
        (lambda: None, None, "keras.Model"),
        (tmp_path / "none.keras", None, "exist"),
        (tmp_path / "model.h5", None, ".keras"),
    ):
        with pytest.raises(ModelError, match=message):
            TFTransformer.from_keras(given, columns)


def test_paths_mean_what_spark_means(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    before = configuration.get("fs.defaultFS")
    assert str(_location_of(spark, "/a/b")) == "/a/b"
    monkeypatch.chdir(tmp_path)  # Spark's JVM does not follow
    folder = spark.sparkContext._jvm.java.lang.System.getProperty("user.dir")
    assert str(_location_of(spark, "b")) == f"{folder}/b"
    configuration.set("fs.defaultFS", "hdfs://name:8020")
    try:
        assert str(_location_of(spark, "/a/b")) == "hdfs://name:8020/a/b"
        assert str(_location_of(spark, "file:///a/b")) == "/a/b"
        assert str(_location_of(spark, "s3a://bucket/b")) == "s3a://bucket/b"
        with pytest.raises(InvalidInputError, match="'b'.*hdfs://name:8020"):
            _location_of(spark, "b")
    finally:
        configuration.set("fs.defaultFS", before)


def test_a_run_of_a_stranger_writes_and_deletes_nothing_elsewhere(run: str, tmp_path: Path) -> None:
    victim, place = tmp_path / "victim.txt", tmp_path / "deep" / "run"
    victim.write_text("precious")
    (tmp_path / "deep").mkdir()
    shutil.copytree(run, place)
    (tmp_path / "deep" / "planted.txt").write_text("planted")
    record = place / "model" / "signature.json"
    facts = unseal(record.read_text())
    for name in (str(victim), "../../planted.txt"):
        sums = {**facts["sums"], name: compute_checksum(b"planted")}
        record.write_text(seal(json.dumps({**facts, "sums": sums})))
        with pytest.raises(RunDirectoryError, match="signature.json.*name of a file"):
            TFTransformer.from_run(str(place)).write().save(str(tmp_path / "a" / "b" / "stage"))
    assert victim.read_text() == "precious"
    assert [str(path) for path in tmp_path.rglob("planted*")] == [
        str(tmp_path / "deep" / "planted.txt")
    ]
