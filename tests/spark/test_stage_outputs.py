"""What a transformer adds: arrays, vectors, structs, classes as Spark's evaluators take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import DataError, InvalidInputError, TFTransformer
from horovod_spark_runner.data.manifest import Column

from ..runs import save_run

pytestmark = pytest.mark.spark

IMAGE = [Column("image", "float32", (64,))]


def digits_model(units: int, activation: Any, images: Any, labels: Any, **fields: Any) -> Any:
    """A model that has learnt something of the digits, in one process."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.Input((64,), name="image"), keras.layers.Dense(units, activation, **fields)]
    model = keras.Sequential(layers)
    logits = activation not in ("softmax", "sigmoid")
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=logits)
    if units == 1:
        loss = keras.losses.BinaryCrossentropy(from_logits=logits)
    model.compile(keras.optimizers.Adam(0.05), loss)
    model.fit(images, labels, epochs=8, batch_size=64, verbose=0)
    return model


@pytest.fixture(scope="module")
def models(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Trained models and their run directories: classes of ten and of two, scores of both."""
    images, labels = digits
    even = (labels % 2 == 0).astype("float32")
    made = {
        "ten": digits_model(10, "softmax", images, labels),
        "ten scores": digits_model(10, None, images, labels),
        "two": digits_model(1, "sigmoid", images, even),
        "two scores": digits_model(1, None, images, even),
    }
    found = {}
    for name, model in made.items():
        place = tmp_path_factory.mktemp("run")
        save_run(place, model, IMAGE)
        found[name] = (str(place), model)
    return found


@pytest.fixture(scope="module")
def labelled(digits_df: Any) -> Any:
    return digits_df.selectExpr(
        "id", "image", "cast(digit as double) label", "cast(digit % 2 = 0 as double) even"
    ).cache()


def by_id(frame: Any, name: str) -> np.ndarray:
    rows = sorted(frame.select("id", name).collect())
    return np.array([getattr(row[1], "toArray", lambda row=row: row[1])() for row in rows])


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ten", "ten scores"])
def test_classes_of_ten(name: str, models: Any, labelled: Any, digits: Any) -> None:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import DoubleType

    place, model = models[name]
    transformer = TFTransformer.from_run(place, probability_col="probability")
    if name == "ten scores":
        transformer.setRawPredictionCol("raw")
    predicted = transformer.transform(labelled).cache()
    types = {field.name: field.dataType for field in predicted.schema}
    assert types["prediction"] == DoubleType()
    assert types["probability"] == VectorUDT()
    images, labels = digits
    expected = model.predict(images, verbose=0)
    if name == "ten scores":
        np.testing.assert_allclose(by_id(predicted, "raw"), expected, atol=1e-4)
        expected = softmax(expected)
    np.testing.assert_allclose(by_id(predicted, "probability"), expected, atol=1e-5)
    classes = by_id(predicted, "prediction")
    assert (classes == expected.argmax(axis=1)).all()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    accuracy = float(np.mean(expected.argmax(axis=1) == labels))
    assert accuracy > 0.8
    assert evaluator.evaluate(predicted) == pytest.approx(accuracy)
    loss = -np.log(np.maximum(expected[np.arange(len(labels)), labels], 1e-15)).mean()
    evaluator = MulticlassClassificationEvaluator(metricName="logLoss")
    assert evaluator.evaluate(predicted) == pytest.approx(loss, rel=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["two", "two scores"])
def test_classes_of_two(name: str, models: Any, labelled: Any, digits: Any) -> None:
    from pyspark.ml.evaluation import BinaryClassificationEvaluator
    from sklearn.metrics import roc_auc_score

    place, model = models[name]
    scores = name == "two scores"
    transformer = TFTransformer.from_run(
        place, probability_col="probability", raw_prediction_col="raw" if scores else None
    )
    predicted = transformer.transform(labelled).cache()
    images, labels = digits
    expected = model.predict(images, verbose=0)[:, 0].astype("float64")
    if scores:
        raw = np.stack([-expected, expected], axis=1)
        np.testing.assert_allclose(by_id(predicted, "raw"), raw, atol=1e-4)
        expected = 1 / (1 + np.exp(-expected))
    shares = np.stack([1 - expected, expected], axis=1)
    np.testing.assert_allclose(by_id(predicted, "probability"), shares, atol=1e-5)
    assert (by_id(predicted, "prediction") == (expected > 0.5)).mean() > 0.999
    column = "raw" if scores else "probability"
    evaluator = BinaryClassificationEvaluator(rawPredictionCol=column, labelCol="even")
    area = roc_auc_score(labels % 2 == 0, expected)
    assert area > 0.8
    # Spark puts scores into 1,000 bins by default.
    assert evaluator.evaluate(predicted) == pytest.approx(area, abs=2e-3)


def test_a_number_is_evaluated_as_it_is(models: Any, labelled: Any, digits: Any) -> None:
    from pyspark.ml.evaluation import RegressionEvaluator

    place, model = models["two scores"]
    predicted = TFTransformer.from_run(place, prediction_col="score").transform(labelled)
    images, labels = digits
    expected = model.predict(images, verbose=0)[:, 0]
    error = np.sqrt(np.mean((expected - (labels % 2 == 0)) ** 2))
    evaluator = RegressionEvaluator(predictionCol="score", labelCol="even", metricName="rmse")
    assert evaluator.evaluate(predicted) == pytest.approx(error, rel=1e-4)


def test_the_model_is_called_once_for_all_columns(models: Any, labelled: Any) -> None:
    transformer = TFTransformer.from_run(
        models["ten scores"][0], probability_col="p", raw_prediction_col="r"
    )
    plan = transformer.transform(labelled)._jdf.queryExecution().executedPlan().toString()
    assert plan.count("predict_arrow(") == 1


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ten scores", {"probability_col": "p"}, "activation.*'linear'.*raw_prediction_col"),
        ("ten", {"raw_prediction_col": "r"}, "activation.*'softmax'.*probabilities"),
        ("two", {"raw_prediction_col": "r"}, "activation.*'sigmoid'.*probabilities"),
        ("ten", {"probability_col": {"digit": "p"}}, "'digit'.*'prediction'"),
        ("ten", {"probability_col": "p", "output_form": "struct"}, "probability_col"),
        ("ten", {"prediction_col": ["a"], "output_form": "struct"}, "column"),
    ],
)
def test_what_the_model_is_not_is_refused_on_the_driver(
    name: str, settings: Any, message: str, models: Any, labelled: Any
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        TFTransformer.from_run(models[name][0], **settings).transform(labelled)


def test_scores_that_are_none_are_refused_when_they_are_asked_for(models: Any) -> None:
    place = models["ten"][0]
    message = "raw_prediction_col.*activation.*'softmax'.*probabilities"
    with pytest.raises(InvalidInputError, match=message):
        TFTransformer.from_run(place, raw_prediction_col="r")
    transformer = TFTransformer.from_run(place, probability_col="p")
    with pytest.raises(InvalidInputError, match=message):
        transformer.setRawPredictionCol("r")
    with pytest.raises(InvalidInputError, match="probability_col.*'digit'"):
        transformer.setProbabilityCol({"digit": "q"})
    assert transformer.getRawPredictionCol() is None
    assert transformer.getProbabilityCol() == "p"
    copied = transformer.copy({transformer.predictionCol: "c"})
    assert (copied.getProbabilityCol(), copied.getPredictionCol()) == ("p", "c")
    # Scores may be named after their probabilities.
    late = TFTransformer.from_run(models["ten scores"][0], probability_col="p")
    assert late.setRawPredictionCol("r").getRawPredictionCol() == "r"


def test_columns_of_classes_replace_nothing(models: Any, labelled: Any) -> None:
    for taken in ("label", "prediction"):
        with pytest.raises(DataError, match=f"'{taken}'"):
            TFTransformer.from_run(models["ten"][0], probability_col=taken).transform(labelled)


def save_unknown(place: Path, values: Any, **run: Any) -> str:
    """Leave a model whose graph does not tell what it gives: one Lambda over its input."""
    import keras

    x = keras.Input((3,), name="x")
    model = keras.Model(x, values(x))
    model.compile("sgd", "mse")
    save_run(place, model, [Column("x", "float32", (3,))], **run)
    return str(place)


@pytest.mark.thorough
def test_probabilities_are_checked_in_every_row(spark: Any, tmp_path: Path) -> None:
    place = save_unknown(tmp_path, lambda x: x * 1.0)
    right = [(0, [0.5, 0.25, 0.25]), (1, [0.0, 1.0, 0.0]), (2, [0.4, 0.2, 0.4])]
    frame = spark.createDataFrame(right, "id int, x array<float>")
    transformer = TFTransformer.from_run(place, probability_col="p")
    assert by_id(transformer.transform(frame), "prediction").tolist() == [0.0, 1.0, 0.0]
    for wrong in ([0.5, 0.5, 0.5], [1.5, -0.5, 0.0], [0.5, 0.5, float("nan")]):
        both = frame.union(spark.createDataFrame([(3, wrong)], "id int, x array<float>"))
        for column in ("prediction", "p"):
            with pytest.raises(Exception, match="'prediction'.*probabilities"):
                transformer.transform(both).select(column).collect()
    scores = TFTransformer.from_run(place, raw_prediction_col="r")
    nan = spark.createDataFrame([(3, [0.5, 0.5, float("nan")])], "id int, x array<float>")
    with pytest.raises(Exception, match="scores.*numbers"):
        scores.transform(nan).select("prediction").collect()


@pytest.mark.thorough
def test_scores_so_large_that_their_powers_are_infinite(spark: Any, tmp_path: Path) -> None:
    place = save_unknown(tmp_path, lambda x: x * 1.0)
    frame = spark.createDataFrame([(0, [1e4, -1e4, 1e4])], "id int, x array<float>")
    transformer = TFTransformer.from_run(place, probability_col="p", raw_prediction_col="r")
    assert by_id(transformer.transform(frame), "p").tolist() == [[0.5, 0.0, 0.5]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with two inputs and three outputs: a vector, a number and classes."""
    import keras

    x, n = keras.Input((3,), name="x"), keras.Input((1,), name="n")
    outputs = {"twice": x * 2, "sum": keras.ops.sum(x, axis=1) + n[:, 0]}
    outputs["kind"] = keras.layers.Softmax()(x)
    model = keras.Model({"x": x, "n": n}, outputs)
    model.compile("sgd", "mse")
    place = tmp_path_factory.mktemp("pair")
    save_run(place, model, [Column("x", "float32", (3,)), Column("n", "int32")])
    return str(place)


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    rows = [(0, [1.0, 2.0, 3.0], 4), (1, [3.0, 2.0, 1.0], 5), (2, None, 6)]
    return spark.createDataFrame(rows, "id int, x array<float>, n int").coalesce(1).cache()


@pytest.mark.thorough
def test_vectors_numbers_and_classes_of_several_outputs(pair: str, frame: Any) -> None:
    transformer = TFTransformer.from_run(
        pair, output_form="vector", handle_invalid="keep", probability_col={"kind": "shares"}
    )
    predicted = transformer.transform(frame)
    assert predicted.columns == ["id", "x", "n", "twice", "sum", "kind", "shares"]
    rows = {row.id: row for row in predicted.collect()}
    assert rows[0].twice.toArray().tolist() == [2, 4, 6]
    assert (rows[0]["sum"], rows[0].kind, rows[1].kind) == (10.0, 2.0, 0.0)
    np.testing.assert_allclose(rows[0].shares.toArray(), softmax(np.array([1, 2, 3])), atol=1e-6)
    assert list(rows[2])[3:] == [None] * 4
    transformer.setHandleInvalid("skip")
    assert transformer.transform(frame).count() == 2
    with pytest.raises(InvalidInputError, match=r"\{'twice': 'p'\}"):
        transformer.setProbabilityCol("p").transform(frame)
    with pytest.raises(InvalidInputError, match="'kind'.*'softmax'"):
        transformer.setProbabilityCol(None).setRawPredictionCol({"kind": "r"}).transform(frame)


def test_all_outputs_in_a_struct(pair: str, frame: Any) -> None:
    transformer = TFTransformer.from_run(pair, output_form="struct", handle_invalid="keep")
    predicted = transformer.transform(frame)
    assert predicted.columns == ["id", "x", "n", "prediction"]
    rows = {row.id: row.prediction for row in predicted.collect()}
    assert rows[1].asDict()["sum"] == 11.0
    assert rows[1].twice == [6.0, 4.0, 2.0]
    assert rows[2] is None


@pytest.mark.thorough
def test_other_columns_may_feed_the_model(pair: str, frame: Any) -> None:
    other = frame.filter("id < 2").withColumnsRenamed({"x": "vector", "n": "number"})
    transformer = TFTransformer.from_run(pair)
    with pytest.raises(DataError, match="'x', 'n'"):
        transformer.transform(other)
    for given in (["vector", "number"], {"n": "number", "x": "vector"}, [["vector"], ["number"]]):
        predicted = transformer.setFeatureCols(given).transform(other)
        assert sorted(row["sum"] for row in predicted.collect()) == [10.0, 11.0]
    for wrong in (["vector"], {"x": "vector"}, [["vector", "number"]], {"a": "x", "b": "n"}):
        with pytest.raises(InvalidInputError, match="feature_cols=.*'x', 'n'"):
            transformer.setFeatureCols(wrong).transform(other)
    with pytest.raises(InvalidInputError, match="featuresCol='x'.*featureCols="):
        transformer.setFeaturesCol("x").transform(frame)
    broken = frame.withColumnsRenamed({"x": "vector"})
    named = TFTransformer.from_run(pair, feature_cols=["vector", "n"])
    with pytest.raises(Exception, match="'vector'.*null"):
        named.transform(broken).collect()


def test_the_only_feature_column_has_spark_mls_name(models: Any, labelled: Any) -> None:
    renamed = labelled.withColumnRenamed("image", "features")
    place, _ = models["two"]
    expected = by_id(TFTransformer.from_run(place).transform(labelled), "prediction")
    found = TFTransformer.from_run(place).setFeaturesCol("features").transform(renamed)
    assert (by_id(found, "prediction") == expected).all()
