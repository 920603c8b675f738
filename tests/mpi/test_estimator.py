"""`HorovodEstimator` trains: alone, in pipelines and searches, at once, and from where it ended."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import functions as F

from horovod_spark_runner import (
    HorovodEstimator,
    InvalidInputError,
    ModelError,
    TFTransformer,
    run_training,
)
from tests.runs import assert_same_weights

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

ROWS = 48


def make_model(units: int = 4, rate: float = 0.05) -> Any:
    import keras

    layers = [keras.Input((2,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(rate), "mse")
    return model


def meet(folder: str, name: str, other: str) -> Any:
    """Build a model once another one is being built, too."""
    Path(folder, name).touch()
    deadline = time.monotonic() + 60
    while not Path(folder, other).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} is alone")
        time.sleep(0.05)
    return make_model(len(name))


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    """Two columns, the same two as an array and as a vector, what is to be learned, and more."""
    values = [
        (i / ROWS, (i % 5) / 5, 2 * i / ROWS - (i % 5) / 5, 1.0 + i % 2, i % 4 == 0)
        for i in range(ROWS)
    ]
    frame = spark.createDataFrame(
        values, "a double, b double, label double, w double, held boolean"
    )
    frame = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)
    return frame.withColumn("both", vector_to_array("features", "float32")).coalesce(2).cache()


@pytest.fixture
def estimator(tmp_path: Path) -> HorovodEstimator:
    return HorovodEstimator(
        modelFn=make_model,
        numWorkers=1,
        batchSize=8,
        epochs=2,
        runDir=str(tmp_path / "runs"),
        seed=3,
    )


def runs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "runs").iterdir())


def test_it_trains_as_run_training_does(
    rows: Any, estimator: HorovodEstimator, tmp_path: Path
) -> None:
    estimator.setParams(
        numWorkers=2, weightCol="w", validationIndicatorCol="held", predictionCol="p"
    )
    model = estimator.fit(rows)
    assert isinstance(model, TFTransformer)
    run_training(
        rows,
        make_model,
        sample_weight_col="w",
        validation="held",
        num_workers=2,
        batch_size=8,
        epochs=2,
        seed=3,
        run_dir=str(tmp_path / "plain"),
        stream_logs=False,
    )
    assert_same_weights(Path(model.summary.run_dir), tmp_path / "plain")
    assert [sorted(logs) for logs in model.summary.history] == [["loss", "val_loss"]] * 2
    assert len(model.summary.placement) == 2
    assert runs(tmp_path) == [Path(model.summary.run_dir)]
    predicted = model.transform(rows)
    assert predicted.columns == [*rows.columns, "p"]
    assert model.getPredictionCol() == "p"
    assert predicted.select("p").dropna().count() == ROWS
    # As with Spark's own models, the estimator's Params are the model's.
    renamed = PipelineModel([model]).transform(rows, {estimator.predictionCol: "q"})
    assert renamed.columns == [*rows.columns, "q"]


@pytest.mark.thorough
def test_columns_in_all_forms_give_the_same_model(rows: Any, estimator: HorovodEstimator) -> None:
    """A vector, an array, and columns that are joined; one partition, or mostly empty ones."""
    single = rows.coalesce(1)
    forms: list[dict[Any, Any]] = [
        {estimator.featuresCol: "features"},
        {estimator.featuresCol: "both"},
        {estimator.featureCols: [["a", "b"]]},
    ]
    models = estimator.fit(single, forms)
    for model, form in zip(models, forms, strict=True):
        assert_same_weights(Path(model.summary.run_dir), Path(models[0].summary.run_dir))
        # It reads what it was trained on.
        (columns,) = form.values()
        used = ["a", "b"] if isinstance(columns, list) else [columns]
        predicted = model.transform(rows.select(*used))
        assert predicted.where("prediction IS NOT NULL").count() == ROWS
    assert estimator.fit(rows.repartition(9, "held")).summary.history


@pytest.mark.thorough
def test_maps_share_the_rows_and_run_at_once(
    rows: Any, estimator: HorovodEstimator, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The two models of a fold are built at the same time, or neither is."""
    estimator.setModelFn(meet)
    pairs = [("one", "three"), ("three", "one")]
    maps = [
        {estimator.modelArgs: {"folder": str(tmp_path), "name": name, "other": other}}
        for name, other in pairs
    ]
    search = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=maps,
        evaluator=RegressionEvaluator(),
        numFolds=2,
        parallelism=2,
        seed=1,
        collectSubModels=True,
    )
    found = search.fit(rows)
    assert len(found.avgMetrics) == 2
    assert all(np.isfinite(found.avgMetrics))
    assert [[len(models) for models in found.subModels]] == [[2, 2]]
    # For each fold, one of the two writes the rows; and the best once more, on all rows. Spark
    # hands over each fold's rows by themselves, so each row is written for the folds that train on
    # it.
    shown = capfd.readouterr().err
    written = re.findall(r"(?:^|: )(\d+) rows.*written", shown, re.MULTILINE)
    assert len(written) == 3
    assert sum(map(int, written)) == ROWS + ROWS
    assert len(re.findall(r": \d+ rows(?!.*written).* in", shown)) == 2
    assert re.search(r"^fit-01.*: epoch 2/2 ", shown, re.MULTILINE)
    *folds, best = runs(tmp_path)
    for fold in folds:
        assert sorted(path.name for path in fold.iterdir() if any(path.iterdir())) == [
            "fit-00",
            "fit-01",
        ]
    assert found.bestModel.summary.run_dir == str(best)
    assert not list((tmp_path / "runs").rglob("*.parquet"))


@pytest.mark.thorough
def test_no_fit_begins_after_a_search_was_interrupted(
    rows: Any, estimator: HorovodEstimator, tmp_path: Path
) -> None:
    estimator.setParams(epochs=1_000_000)
    search = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=[{estimator.modelArgs: {"units": units}} for units in range(1, 6)],
        evaluator=RegressionEvaluator(),
        numFolds=2,
        parallelism=2,
    )

    def begun() -> list[str]:
        return [path.read_text() for path in (tmp_path / "runs").glob("*/*/attempts.jsonl")]

    def going_on() -> bool:
        return any((tmp_path / "runs").glob("*/*/lock.json"))

    def interrupt() -> None:
        while len(list((tmp_path / "runs").glob("*/*/metrics.jsonl"))) < 2:
            time.sleep(0.05)
        # To this thread itself, which waits: another one would not wake it.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def as_in_a_script(number: int, frame: Any) -> None:
        """What PySpark does on Ctrl-C; pytest has put its own handler in place of that."""
        rows.sparkSession.sparkContext.cancelAllJobs()
        raise KeyboardInterrupt

    pressing = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, as_in_a_script)
    try:
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            search.fit(rows)
        pressing.join()
    finally:
        signal.signal(signal.SIGINT, before)
    # Those that have begun end; then the next ones would begin. Instead, what was prepared for them
    # goes.
    deadline = time.monotonic() + 120
    while going_on() or list((tmp_path / "runs").rglob("*.parquet")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(begun()) == 2
    assert all('"ending": "cancelled"' in told for told in begun())


@pytest.mark.thorough
def test_maps_whose_rows_differ_share_none(
    rows: Any, estimator: HorovodEstimator, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    maps = [
        {estimator.epochs: 1},
        {estimator.validationIndicatorCol: "held"},
        {estimator.modelArgs: {"units": 2}},
    ]
    models = estimator.fit(rows, maps)
    assert [len(model.summary.history) for model in models] == [1, 2, 2]
    assert ["val_loss" in model.summary.history[0] for model in models] == [False, True, False]
    shown = capfd.readouterr().err
    assert len(re.findall(r"(?:^|: )48 rows.*written", shown, re.MULTILINE)) == 1
    assert len(re.findall(r"(?:^|: )48 (?!.*written).*rows", shown, re.MULTILINE)) == 1
    assert len(re.findall(r"(?:^|: )36 rows.* 12 .*written", shown, re.M)) == 1


def test_a_split_into_training_and_validation(rows: Any, estimator: HorovodEstimator) -> None:
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="vector")
    pipeline = Pipeline(stages=[assembler, estimator.setFeaturesCol("vector")])
    search = TrainValidationSplit(
        estimator=pipeline,
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.epochs, [1, 12]).build(),
        evaluator=RegressionEvaluator(),
        parallelism=2,
        seed=1,
    )
    found = search.fit(rows)
    few, many = found.validationMetrics
    assert many < few
    assert len(found.bestModel.stages[1].summary.history) == 12


@pytest.mark.thorough
def test_a_fit_goes_on_where_an_earlier_one_ended(rows: Any, estimator: HorovodEstimator) -> None:
    whole = estimator.fit(rows, {estimator.epochs: 3})
    first = estimator.fit(rows, {estimator.epochs: 1})
    place = first.summary.run_dir
    rest = estimator.fit(rows, {estimator.epochs: 3, estimator.resumeFrom: place})
    assert rest.summary.run_dir == place
    assert rest.summary.history == whole.summary.history
    assert_same_weights(Path(place), Path(whole.summary.run_dir))


def stop_at_once() -> list[Any]:
    import keras

    return [keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)]


@pytest.mark.thorough
def test_what_users_of_other_estimators_rely_on(
    spark: Any, rows: Any, estimator: HorovodEstimator, tmp_path: Path
) -> None:
    """Callbacks, sparse vectors, going on from a model, its Params and itself on the driver."""
    from pyspark.ml.linalg import SparseVector, VectorUDT

    sparse = F.udf(lambda a, b: SparseVector(2, {0: a, 1: b}), VectorUDT())
    frame = rows.withColumn("sparse", sparse("a", "b"))
    set_before = dict(estimator._paramMap)
    own = {estimator.featuresCol: "sparse", estimator.callbacks: stop_at_once, estimator.epochs: 9}
    model = estimator.fit(frame, own)
    assert dict(estimator._paramMap) == set_before
    assert len(model.summary.history) == 2  # stopped after the first that was no better
    assert model.getFeaturesCol() == "sparse"
    # Sparse and dense vectors are the same rows.
    dense = estimator.fit(rows)
    assert dense.summary.history == model.summary.history
    more = {estimator.initialWeights: model.summary.run_dir, estimator.epochs: 1}
    further = estimator.fit(frame, more)
    assert further.summary.history[0]["loss"] < model.summary.history[0]["loss"]
    predicted = further.transform(frame).select("features", "prediction").collect()
    inputs = np.array([row.features.toArray() for row in predicted], np.float32)
    np.testing.assert_allclose(
        further.getModel().predict(inputs, verbose=0)[:, 0],
        [row.prediction for row in predicted],
        rtol=1e-5,
        atol=1e-6,
    )
    place = str(tmp_path / "model")
    model.save(place)
    loaded = TFTransformer.load(place)
    assert (loaded.uid, loaded.getFeaturesCol()) == (estimator.uid, "sparse")
    assert loaded.summary == model.summary
    assert loaded.transform(frame).count() == ROWS


@pytest.mark.thorough
def test_fewer_rows_to_validate_with_than_ranks(rows: Any, estimator: HorovodEstimator) -> None:
    held = rows.selectExpr("*", "a = 0 AS one")
    model = estimator.setParams(numWorkers=2, validationIndicatorCol="one", epochs=1).fit(held)
    error = RegressionEvaluator(metricName="mse").evaluate(model.transform(held.filter("one")))
    assert model.summary.history[0]["val_loss"] == pytest.approx(error, rel=1e-5)


@pytest.mark.thorough
def test_doubles_are_trained_on_as_keras_does(
    rows: Any, estimator: HorovodEstimator, tmp_path: Path
) -> None:
    """Spark's numbers are doubles; a network of float32 takes them rounded to it."""
    model = make_model()
    model.save(tmp_path / "first.keras")
    estimator.setParams(
        initialWeights=str(tmp_path / "first.keras"), featureCols=[["a", "b"]], batchSize=ROWS
    )
    fitted = estimator.fit(rows)
    found = rows.select("a", "b", "label").toPandas()
    x, y = found[["a", "b"]].to_numpy(), found["label"].to_numpy()
    assert x.dtype == y.dtype == np.float64
    assert (x != x.astype(np.float32)).any()
    history = model.fit(x, y, batch_size=ROWS, epochs=2, verbose=0, shuffle=False).history["loss"]
    np.testing.assert_allclose([h["loss"] for h in fitted.summary.history], history, rtol=1e-6)
    predicted = np.array([row.prediction for row in fitted.transform(rows).collect()])
    np.testing.assert_allclose(predicted, model.predict(x, verbose=0)[:, 0], rtol=1e-5, atol=1e-6)


def make_judge() -> Any:
    import keras

    model = keras.Sequential([keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=["AUC"])
    return model


@pytest.mark.thorough
def test_a_fold_of_one_class_and_labels_that_are_none(
    spark: Any, rows: Any, estimator: HorovodEstimator
) -> None:
    """One class is enough, for Spark's own classifiers, too; of sparse vectors in a search."""
    sparse = [(Vectors.sparse(2, {i % 2: 1.0 + i}), float(i % 4 < 2), i % 2) for i in range(16)]
    frame = spark.createDataFrame(sparse, ["features", "label", "fold"])
    single = frame.withColumn("label", F.when(F.col("fold") == 0, 1.0).otherwise(F.col("label")))
    estimator.setParams(modelFn=make_judge, probabilityCol="probability", epochs=1)
    search = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=[{}],
        evaluator=BinaryClassificationEvaluator(rawPredictionCol="probability"),
        foldCol="fold",
        numFolds=2,
    )
    found = search.fit(single)
    assert len(found.avgMetrics) == 1
    predicted = found.transform(single).select("prediction", "probability").collect()
    assert {row.prediction for row in predicted} <= {0.0, 1.0}
    assert all(len(row.probability) == 2 for row in predicted)
    # So is, before the first step, what no output can be.
    with pytest.raises(InvalidInputError, match="raw_prediction_col.*activation.*'sig"):
        estimator.copy({estimator.rawPredictionCol: "raw"}).fit(single)
    # Not known to be scores, a linear output is no probabilities either.
    with pytest.raises(InvalidInputError, match="activation.*'linear'.*scores"):
        estimator.copy({estimator.modelFn: make_model}).fit(single)
    # What its loss is not for is refused, as by Spark's LogisticRegression.
    with pytest.raises(ModelError, match="label column 'label'.*-1"):
        estimator.fit(single.withColumn("label", 1 - 2 * F.col("label")))


@pytest.mark.thorough
def test_folds_by_a_column(rows: Any, estimator: HorovodEstimator) -> None:
    folded = rows.selectExpr("*", "int(a * 48) % 2 AS fold")
    search = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=[{estimator.epochs: 1}],
        evaluator=RegressionEvaluator(),
        foldCol="fold",
        numFolds=2,
    )
    found = search.fit(folded)
    assert np.isfinite(found.avgMetrics).all()
    assert found.transform(folded).where("prediction IS NOT NULL").count() == ROWS


FRESH = """
import sys
from pyspark.ml import Pipeline
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
values = [(i / 9, 1.0, 2.0 * i) for i in range(9)]
rows = spark.createDataFrame(values, "a double, b double, label double")
pipeline = Pipeline.load(sys.argv[1])
estimator = pipeline.getStages()[1]
estimator.setModelFn(estimator.getModelFn())
model = pipeline.fit(rows)
history = model.stages[1].summary.history
print("trained", len(history), model.transform(rows).columns, "tensorflow" in sys.modules)
"""


@pytest.mark.thorough
def test_a_saved_pipeline_trains_in_a_fresh_process(
    rows: Any, estimator: HorovodEstimator, tmp_path: Path
) -> None:
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    place = tmp_path / "saved"
    Pipeline(stages=[assembler, estimator.setModelArgs({"units": 3})]).save(str(place))
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(place)], capture_output=True, text=True, timeout=480
    )
    assert "trained 2 ['a', 'b', 'label', 'features', 'prediction'] False" in done.stdout, (
        done.stderr[-3000:]
    )
    (run,) = runs(tmp_path)
    layers = json.loads((run / "config.json").read_text())
    assert layers["num_workers"] == 1


@pytest.mark.thorough
def test_the_folds_of_a_cross_validation_share_the_rows(
    rows: Any, estimator: HorovodEstimator, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each fold's validation is what its column says, and every row was written once."""
    folded = rows.selectExpr("*", *(f"int(a * 48) % 2 = {n} AS fold{n}" for n in range(2)))
    maps = [
        {estimator.validationIndicatorCol: f"fold{n}", estimator.epochs: epochs}
        for n in range(2)
        for epochs in (1, 8)
    ]
    data = {"data_dir": str(tmp_path / "data")}
    models = estimator.setData(data).fit(folded, maps)
    for n, (few, many) in enumerate(zip(models[::2], models[1::2], strict=True)):
        held_out = folded.filter(f"fold{n}")
        assert many.summary.history[-1]["val_loss"] < few.summary.history[-1]["val_loss"]
        error = RegressionEvaluator(metricName="mse").evaluate(many.transform(held_out))
        assert error == pytest.approx(many.summary.history[-1]["val_loss"], rel=1e-5)
    shown = capfd.readouterr().err
    assert len(re.findall("24 .*rows.* 24 .*written", shown)) == 1
    assert len(re.findall("24 (?!.*written).*rows.* 24 ", shown)) == 3
    assert len(list((tmp_path / "data").glob("data-*"))) == 2


def make_classifier(units: int = 4) -> Any:
    import keras

    layers = [keras.layers.Dense(units, "relu"), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy")
    return model


LOADED = """
import sys
from pyspark.ml.tuning import CrossValidatorModel
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
model = CrossValidatorModel.load(sys.argv[1])
rows = spark.createDataFrame([(0.1, 0.2), (0.9, 0.1)], "a double, b double")
found = model.transform(rows).select("prediction", "p").collect()
print([row.prediction for row in found], [len(row.p) for row in found], len(model.subModels[0]))
print(model.getEstimator().getStages()[1].getModelArgs(), "tensorflow" in sys.modules)
"""


@pytest.mark.thorough
def test_a_search_around_a_pipeline_is_saved_with_all_its_models(
    rows: Any,
    estimator: HorovodEstimator,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Classes are judged by Spark's own evaluator; another process loads all there is."""
    estimator.setParams(
        modelFn=make_classifier,
        labelCol="class",
        probabilityCol="p",
        classWeight={0: 1.0, 2: 2.0, 7: 3.0},
        data={"data_dir": str(tmp_path / "data")},
        modelArgs={"units": 5},
        epochs=4,
    )
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="vector")
    pipeline = Pipeline(stages=[assembler, estimator.setFeaturesCol("vector")])
    search = CrossValidator(
        estimator=pipeline,
        estimatorParamMaps=ParamGridBuilder()
        .addGrid(estimator.modelArgs, [{"units": 4}, {"units": 16}])
        .build(),
        evaluator=MulticlassClassificationEvaluator(labelCol="class", metricName="accuracy"),
        numFolds=2,
        parallelism=2,
        collectSubModels=True,
        seed=2,
    )
    classes = rows.selectExpr("a", "b", "int(a * 2.99) AS class")
    found = search.fit(classes)
    assert len(found.avgMetrics) == 2
    assert re.search(r"column 'class'.*\b7", caplog.text)
    # Threads that want the same rows of a cache directory write them once: two folds, and all rows.
    assert len(list((tmp_path / "data").glob("data-*"))) == 3
    best = found.bestModel.transform(classes).select("prediction").collect()
    place = tmp_path / "saved"
    found.write().overwrite().save(str(place))
    loaded = type(found).load(str(place))
    assert loaded.bestModel.transform(classes).select("prediction").collect() == best
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(place)], capture_output=True, text=True, timeout=480
    )
    assert re.search(r"^\[\d\.0, \d\.0\] \[3, 3\] 2$", done.stdout, re.M), done.stderr[-3000:]
    assert "{'units': 5} False" in done.stdout
