"""`HorovodEstimator` before any training: bad input, saving, loading, alone and within others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit

from horovod_spark_runner import (
    DataError,
    HorovodEstimator,
    InvalidInputError,
    NotEnoughSlotsError,
    RunDirectoryError,
)

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]


def make_model(width: int = 2, units: int = 1) -> Any:
    import keras

    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(units)])
    model.compile("sgd", "mse")
    return model


def make_wide_model() -> Any:
    return make_model(2, 4)


def make_callbacks() -> list[Any]:
    from keras.callbacks import TerminateOnNaN

    return [TerminateOnNaN()]


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    values = [([float(i), 1.0], float(i), i % 2 == 0, str(i)) for i in range(8)]
    return spark.createDataFrame(
        values, "features array<float>, label double, even boolean, s string"
    )


@pytest.fixture
def estimator(tmp_path: Path) -> HorovodEstimator:
    return HorovodEstimator(
        modelFn=make_model, numWorkers=1, runDir=str(tmp_path / "runs"), streamLogs=False
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"featuresCol": "x"}, DataError, "'x'.*'features'.*'label'"),
        ({"labelCol": "y"}, DataError, "'y'"),
        ({"weightCol": "w"}, DataError, "'w'"),
        ({"featureCols": ["s", "x"]}, DataError, "'x'"),
        ({"labelCols": ["s"]}, DataError, "'s'"),
        ({"validationIndicatorCol": "v"}, DataError, "validation='v'"),
        ({"validationIndicatorCol": "s"}, DataError, "string.*boolean"),
        (
            {"validationIndicatorCol": "even", "validationFraction": 0.5},
            InvalidInputError,
            "validat",
        ),
        (
            {"labelCol": "label", "labelCols": ["label"]},
            InvalidInputError,
            "label",
        ),
        (
            {"featuresCol": "features", "featureCols": ["features"]},
            InvalidInputError,
            "feature",
        ),
        ({"modelArgs": {"depth": 3}}, InvalidInputError, "modelFn.*'depth'"),
        ({"modelFn": "no.such:function"}, InvalidInputError, "import"),
        ({"modelFn": "no.keras"}, InvalidInputError, "file.*no.keras"),
        ({"callbacks": ["early"]}, InvalidInputError, "callbacks.*'early'"),
        ({"warmupEpochs": 2}, InvalidInputError, "lr_scaling='linear'"),
        ({"predictionCol": "even"}, DataError, "'even'.*predict"),
        ({"predictionCol": "LABEL"}, DataError, "'label'"),
        ({"predictionCol": ["s"]}, DataError, "'s'"),
        ({"probabilityCol": "s"}, DataError, "'s'"),
        ({"rawPredictionCol": {"out": "s"}}, DataError, "'s'"),
        ({"outputForm": "struct", "predictionCol": "s"}, DataError, "'s'"),
        ({"resumeFrom": "/nowhere"}, InvalidInputError, "checkpoint|/nowhere|cannot be"),
        ({"numWorkers": 99}, NotEnoughSlotsError, r"\b99 slots"),
    ],
)
def test_what_cannot_be_right_is_refused_before_the_job(
    estimator: HorovodEstimator, rows: Any, params: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        estimator.setParams(**params).fit(rows)


def test_a_column_of_the_default_name_is_in_the_way(estimator: HorovodEstimator, rows: Any) -> None:
    taken = rows.withColumnRenamed("s", "prediction")
    with pytest.raises(DataError, match="'prediction'.*prediction_col="):
        estimator.fit(taken)
    # Of several outputs, no column is called so.
    with pytest.raises(NotEnoughSlotsError):
        estimator.setLabelCols(["label", "even"]).setNumWorkers(99).fit(taken)


def test_a_map_that_cannot_be_right_is_refused_before_any_training(
    estimator: HorovodEstimator, rows: Any
) -> None:
    maps = [{}, {estimator.featuresCol: "x"}]
    with pytest.raises(DataError, match="'x'"):
        estimator.fitMultiple(rows, maps)
    with pytest.raises(InvalidInputError, match="modelArgs.*modelFn"):
        estimator.fit(rows, [{}, {estimator.modelArgs: {"depth": 3}}])
    with pytest.raises(InvalidInputError, match="resumeFrom"):
        estimator.setResumeFrom("/nowhere").fitMultiple(rows, [{}, {}])


@pytest.mark.thorough
def test_no_column_is_guessed(estimator: HorovodEstimator, rows: Any) -> None:
    """Where nothing was named, what `run_training` finds by convention holds, or its refusal."""
    with pytest.raises(DataError, match="feature_cols.*'features'"):
        estimator.fit(rows.drop("features"))
    with pytest.raises(DataError, match="'features'"):
        estimator.setFeaturesCol("features").fit(rows.drop("features"))


def test_without_a_model_there_is_nothing_to_train(rows: Any) -> None:
    with pytest.raises(InvalidInputError, match="modelFn"):
        HorovodEstimator().fit(rows)
    with pytest.raises(DataError, match="Spark DataFrame.* list"):
        HorovodEstimator(modelFn=make_model).fit([1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("validation", "message"),
    [
        (None, "no rows.*train"),
        ("label > 99", "validation.*no rows"),
        ("label < 99", "train.*no rows"),
    ],
)
def test_no_rows(
    estimator: HorovodEstimator, rows: Any, validation: str | None, message: str
) -> None:
    if validation is None:
        rows = rows.filter("label > 99")
    else:
        rows = rows.selectExpr("*", f"{validation} AS held_out")
        estimator.setValidationIndicatorCol("held_out")
    with pytest.raises(DataError, match=message):
        estimator.fit(rows)


def grid(estimator: HorovodEstimator) -> Any:
    builder = ParamGridBuilder().addGrid(estimator.modelArgs, [{"units": 1}, {"units": 2}])
    return builder.addGrid(estimator.epochs, [1, 2]).build()


@pytest.mark.thorough
def test_it_is_saved_and_loaded_alone_and_within_others(
    estimator: HorovodEstimator, tmp_path: Path
) -> None:
    estimator.setParams(
        callbacks=make_callbacks,
        modelArgs={"units": 1},
        labelCols={"out": "label"},
        classWeight={0: 1.0},
        validationFreq=[1, 3],
        data={"shapes": {"features": (2, 1)}},
        launch={"mpi": {"algorithm": "ring"}},
        probabilityCol="p",
        initialWeights="s3://bucket/runs/earlier",
    )
    kept = {param.name: value for param, value in estimator._paramMap.items()}
    named = {**kept, "modelFn": f"{__name__}:make_model", "callbacks": f"{__name__}:make_callbacks"}

    def same(loaded: Any) -> None:
        assert isinstance(loaded, HorovodEstimator)
        assert loaded.uid == estimator.uid
        assert {param.name: value for param, value in loaded._paramMap.items()} == named
        assert loaded.getBatchSize() == 32

    place = str(tmp_path / "a b")
    estimator.save(place)
    estimator.write().overwrite().save(place)
    same(HorovodEstimator.load(place))

    assembler = VectorAssembler(inputCols=["a"], outputCol="features")
    Pipeline(stages=[assembler, estimator]).write().overwrite().save(place)
    same(Pipeline.load(place).getStages()[1])

    for cls in (CrossValidator, TrainValidationSplit):
        tuned = cls(
            estimator=estimator, estimatorParamMaps=grid(estimator), evaluator=RegressionEvaluator()
        )
        tuned.write().overwrite().save(place)
        loaded = cls.load(place)
        same(loaded.getEstimator())
        copies = [loaded.getEstimator().copy(one) for one in loaded.getEstimatorParamMaps()]
        assert [(c.getModelArgs(), c.getEpochs()) for c in copies] == [
            (c.getModelArgs(), c.getEpochs())
            for c in map(estimator.copy, tuned.getEstimatorParamMaps())
        ]

    pipeline = Pipeline(stages=[assembler, estimator])
    tuned = CrossValidator(
        estimator=pipeline, estimatorParamMaps=grid(estimator), evaluator=RegressionEvaluator()
    )
    tuned.write().overwrite().save(place)
    loaded = CrossValidator.load(place)
    same(loaded.getEstimator().getStages()[1])
    assert len(loaded.getEstimatorParamMaps()) == 4


@pytest.mark.thorough
def test_a_search_over_functions_is_saved(estimator: HorovodEstimator, tmp_path: Path) -> None:
    maps = ParamGridBuilder().addGrid(estimator.modelFn, [make_model, make_wide_model])
    for cls in (CrossValidator, TrainValidationSplit):
        search = cls(
            estimator=estimator, estimatorParamMaps=maps.build(), evaluator=RegressionEvaluator()
        )
        search.write().overwrite().save(str(tmp_path / "search"))
        loaded = cls.load(str(tmp_path / "search"))
        again = [loaded.getEstimator().copy(one) for one in loaded.getEstimatorParamMaps()]
        names = [f"{__name__}:make_model", f"{__name__}:make_wide_model"]
        assert [one.getModelFn() for one in again] == names


def test_what_cannot_be_saved_replaces_nothing(estimator: HorovodEstimator, tmp_path: Path) -> None:
    place = str(tmp_path / "saved")
    estimator.save(place)
    with pytest.raises(InvalidInputError, match="callbacks.*lambda"):
        estimator.setCallbacks(lambda: [*make_callbacks()]).write().overwrite().save(place)
    with pytest.raises(InvalidInputError, match=r"callbacks\[0\].*TerminateOnNaN.*function"):
        estimator.setCallbacks(make_callbacks()).write().overwrite().save(place)
    assert HorovodEstimator.load(place).getModelFn() == f"{__name__}:make_model"


def test_what_a_fit_reads_is_named_by_its_whole_path(
    estimator: HorovodEstimator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    estimator.setModelFn("model.keras").setInitialWeights("w.weights.h5").setResumeFrom("~/runs/1")
    estimator.save(str(tmp_path / "saved"))
    loaded = HorovodEstimator.load(str(tmp_path / "saved"))
    assert loaded.getModelFn() == str(tmp_path / "model.keras")
    assert loaded.getInitialWeights() == str(tmp_path / "w.weights.h5")
    assert loaded.getResumeFrom() == str(Path("~/runs/1").expanduser())


def test_what_is_no_estimator_of_this_format_is_refused(
    spark: Any, estimator: HorovodEstimator, tmp_path: Path
) -> None:
    place = str(tmp_path / "saved")
    VectorAssembler(inputCols=["a"], outputCol="b").save(place)
    with pytest.raises(InvalidInputError, match="VectorAssembler.*HorovodEstim"):
        HorovodEstimator.load(place)
    estimator.write().overwrite().save(place)
    (line,) = spark.read.text(f"{place}/metadata").first()
    saved = json.loads(line)
    params = {**saved["paramMap"], "ofLater": 1}
    for metadata, error, message in (
        (
            {**saved, "horovodSparkRunnerFormat": 2},
            InvalidInputError,
            r"format 2\b.*format 1",
        ),
        ({**saved, "paramMap": params}, RunDirectoryError, "ofLater"),
        ([saved], RunDirectoryError, "metadata.*saved"),
    ):
        (part,) = Path(place, "metadata").glob("part-*")
        part.write_text(json.dumps(metadata))
        with pytest.raises(error, match=message):
            HorovodEstimator.load(place)


def test_storage_does_not_say_what_is_called(
    estimator: HorovodEstimator, rows: Any, tmp_path: Path
) -> None:
    """Whoever writes the metadata could have the driver and the ranks run anything."""
    place, proof = str(tmp_path / "saved"), tmp_path / "proof"
    hostile: list[dict[str, Any]] = [
        {"modelFn": "os:system", "modelArgs": {"command": f"touch {proof}"}},
        {"callbacks": "os:getcwd"},
        {"customObjects": {"f": "os:system"}},
        {"data": {"transforms": {"features": "os:system"}}},
        {"launch": {"env": {"LD_PRELOAD": "/planted.so"}}},
        {"launch": {"mpi": {"parameters": {"mca_base_component_path": "/planted"}}}},
    ]
    estimator.save(place)
    (part,) = Path(place, "metadata").glob("part-*")
    saved = json.loads(part.read_text())
    search = CrossValidator(
        estimator=estimator, estimatorParamMaps=[{}, {}], evaluator=RegressionEvaluator()
    )
    for edited in hostile:
        params = {**saved["paramMap"], "modelFn": "/model.keras", **edited}
        part.write_text(json.dumps({**saved, "paramMap": params}))
        loaded = HorovodEstimator.load(place)
        with pytest.raises(InvalidInputError, match=f"(?s){next(iter(edited))}.*storage.*set"):
            loaded.fit(rows)
        defaults = {**saved["defaultParamMap"], **params}
        part.write_text(json.dumps({**saved, "paramMap": {}, "defaultParamMap": defaults}))
        with pytest.raises(InvalidInputError, match="(?s)storage.*set"):
            HorovodEstimator.load(place).copy().setNumWorkers(1).fit(rows)
        # The maps of a search come from storage, too, and Spark sets them.
        maps = [{estimator.getParam(name): value for name, value in edited.items()}]
        with pytest.raises(InvalidInputError, match="storage"):
            search.setEstimatorParamMaps(maps).fit(rows)
    assert not proof.exists()
    # What is given again counts, as text or as itself.
    for given in (make_model, f"{__name__}:make_model"):
        loaded = HorovodEstimator.load(place).setModelFn(given).setLaunch({"env": {"A": "1"}})
        with pytest.raises(NotEnoughSlotsError):
            loaded.setNumWorkers(99).fit(rows)


@pytest.mark.thorough
def test_it_is_loaded_without_the_code_of_its_model(
    estimator: HorovodEstimator, tmp_path: Path
) -> None:
    """Which is imported where the model is built: another process may lack it until then."""
    place = str(tmp_path / "saved")
    estimator.setModelFn("no.such.module:make_model").save(place)
    code = f"""
import sys
from pyspark.sql import SparkSession
SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
from horovod_spark_runner import HorovodEstimator
print(HorovodEstimator.load({place!r}).getModelFn(), "tensorflow" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["no.such.module:make_model", "False"], done.stderr[-2000:]
