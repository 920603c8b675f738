"""Evaluating on Spark's workers gives what Keras gives in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import DataError, InvalidInputError, ModelError, TFTransformer
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.training.spec import Binding

from ..jobs import descriptions
from ..runs import save_run

pytestmark = pytest.mark.spark

ROWS = 700
X, ONE, KIND = Column("x", "float32", (4,)), Column("one", "float32", (1,)), Column("kind", "int32")
REAL, WEIGHT = Column("real", "float32"), Column("w", "float32")


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    return {
        "x": x,
        "one": (x[:, :1] + rng.normal(size=(ROWS, 1)) > 0).astype(np.float32),
        "kind": rng.integers(0, 3, ROWS).astype(np.int32),
        "real": (x.sum(axis=1) + rng.normal(size=ROWS)).astype(np.float32),
        "w": rng.integers(0, 4, ROWS).astype(np.float32),
    }


@pytest.fixture(scope="module")
def frame(spark: Any, arrays: dict[str, np.ndarray]) -> Any:
    rows = [
        (row.tolist(), one.tolist(), int(kind), float(real), float(w))
        for row, one, kind, real, w in zip(*arrays.values(), strict=True)
    ]
    schema = "x array<float>, one array<float>, kind int, real float, w float"
    # Uneven partitions, one of them empty.
    frame = spark.createDataFrame(rows, schema).repartitionByRange(2, "real")
    return frame.unionAll(frame.filter("false")).cache()


def saved(place: Path, model: Any, labels: list[Column], **fields: Any) -> TFTransformer:
    save_run(place, model, [X], labels=labels, **fields)
    return TFTransformer.from_run(str(place), predict_batch_size=64)


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], np.asarray(value), rtol=1e-6, atol=1e-6, err_msg=name
        )


def classifier(outputs: int, **compiled: Any) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    x = keras.Input((4,), name="x")
    hidden = keras.layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.1))(x)
    activation = "sigmoid" if outputs == 1 else "softmax"
    model = keras.Model(x, keras.layers.Dense(outputs, activation)(hidden))
    model.compile("sgd", **compiled)
    return model


@pytest.mark.thorough
def test_the_compiled_metrics_of_two_classes(
    frame: Any, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    import keras

    metrics = [
        keras.metrics.AUC(name="auc"),
        keras.metrics.AUC(curve="PR", name="pr"),
        keras.metrics.PrecisionAtRecall(0.7, name="at_recall"),
        keras.metrics.F1Score(threshold=0.5, name="f1"),
        keras.metrics.BinaryIoU(name="iou"),
        keras.metrics.Recall(thresholds=[0.2, 0.5], name="recalls"),
        "accuracy",
        "mae",
    ]
    weighted = [keras.metrics.AUC(name="weighted_auc"), "mse"]
    model = classifier(1, loss="binary_crossentropy", metrics=metrics, weighted_metrics=weighted)
    transformer = saved(tmp_path, model, [ONE])
    one, x = arrays["one"], arrays["x"]
    plain = model.evaluate(x, one, return_dict=True, verbose=0)
    by_weight = model.evaluate(x, one, sample_weight=arrays["w"], return_dict=True, verbose=0)
    assert plain["auc"] == plain["weighted_auc"] != by_weight["weighted_auc"]
    check(transformer.evaluate(frame), plain)
    check(transformer.evaluate(frame, sample_weight_col="w"), by_weight)
    check(transformer.evaluate(frame.coalesce(1)), plain)
    objects = {
        "iou": keras.metrics.BinaryIoU(name="iou"),
        "recalls": keras.metrics.Recall(thresholds=[0.2, 0.5], name="recalls"),
    }
    # What Keras makes of their lists can be pickled, but not read again.
    check(transformer.evaluate(frame, list(objects.values())), {n: plain[n] for n in objects})


@pytest.mark.thorough
def test_metrics_by_name_and_object(
    frame: Any, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    import keras

    def near(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.cast(keras.ops.max(y_pred, axis=-1) > 0.5, "float32")

    class Confident(keras.metrics.Metric):
        """The share of rows predicted with more than a given certainty."""

        def __init__(self, above: float, name: str = "confident", **other: Any) -> None:
            super().__init__(name=name, **other)
            self.above = above
            self.hits = self.add_weight((), "zeros", name="hits")
            self.rows = self.add_weight((), "zeros", name="rows")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            sure = keras.ops.cast(keras.ops.max(y_pred, axis=-1) > self.above, "float32")
            weight = keras.ops.ones_like(sure) if sample_weight is None else sample_weight
            self.hits.assign_add(keras.ops.sum(sure * weight))
            self.rows.assign_add(keras.ops.sum(weight))

        def result(self) -> Any:
            return self.hits / self.rows

        def reset_state(self) -> None:
            self.hits.assign(0.0)
            self.rows.assign(0.0)

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "above": self.above}

    def metrics() -> list[Any]:
        return [
            "sparse_categorical_accuracy",
            keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2"),
            keras.metrics.MeanIoU(3, sparse_y_pred=False, name="mean_iou"),
            keras.metrics.MeanMetricWrapper(near, name="wrapped"),
            near,
            Confident(0.6),
        ]

    loss = "sparse_categorical_crossentropy"
    transformer = saved(tmp_path, classifier(3, loss=loss), [KIND])
    compared = classifier(3, loss=loss, metrics=metrics())
    kind, x = arrays["kind"], arrays["x"]
    expected = compared.evaluate(x, kind, return_dict=True, verbose=0)
    check(transformer.evaluate(frame, ["compiled", *metrics()]), expected)
    del expected["loss"]
    check(transformer.evaluate(frame, metrics()), expected)
    check(transformer.evaluate(frame, "acc"), {"acc": expected["sparse_categorical_accuracy"]})
    compared = classifier(3, loss=loss, weighted_metrics=metrics())
    weights = {"sample_weight": arrays["w"]}
    expected = compared.evaluate(x, kind, **weights, return_dict=True, verbose=0)
    found = transformer.evaluate(frame, ["compiled", *metrics()], sample_weight_col="w")
    check(found, expected)


def two_outputs(**compiled: Any) -> Any:
    import keras

    keras.utils.set_random_seed(2)
    x, w = keras.Input((4,), name="x"), keras.Input((1,), name="w")
    hidden = keras.layers.Dense(6, "relu")(keras.layers.Concatenate()([x, w]))
    outputs = {
        "price": keras.layers.Dense(1, name="price")(hidden),
        "class": keras.layers.Dense(3, "softmax", name="class")(hidden),
    }
    model = keras.Model({"x": x, "w": w}, outputs)
    model.compile("sgd", **compiled)
    return model


def test_several_inputs_and_outputs(
    frame: Any, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    losses = {"price": "mse", "class": "sparse_categorical_crossentropy"}
    metrics = {"price": ["mae"], "class": ["accuracy"]}
    compiled = {"loss": losses, "loss_weights": {"price": 0.5, "class": 2.0}}
    labels = Binding(("real", "kind"), ("price", "class"))
    save_run(
        tmp_path,
        two_outputs(**compiled, metrics=metrics),
        [X, WEIGHT],
        labels=[REAL, KIND],
        outputs=labels,
    )
    transformer = TFTransformer.from_run(str(tmp_path), predict_batch_size=64)
    x = {"x": arrays["x"], "w": arrays["w"]}
    y = {"price": arrays["real"], "class": arrays["kind"]}
    by_keras = two_outputs(**compiled, metrics=metrics).evaluate
    by_keras = by_keras(x, y, batch_size=ROWS, return_dict=True, verbose=0)
    assert len(by_keras) == 5
    check(transformer.evaluate(frame), by_keras)
    renamed = frame.withColumnRenamed("kind", "sort")
    check(transformer.evaluate(renamed, label_cols={"class": "sort"}), by_keras)
    check(transformer.evaluate(renamed, label_cols=["real", "sort"]), by_keras)
    others = {"class": ["sparse_top_k_categorical_accuracy", "accuracy"]}
    with pytest.raises(InvalidInputError, match="'sort'.*'price'.*'class'"):
        transformer.evaluate(frame, label_cols={"sort": "kind"})
    found = transformer.evaluate(frame, others)
    assert found["class_accuracy"] == pytest.approx(by_keras["class_accuracy"], abs=1e-6)
    assert found["class_sparse_top_k_categorical_accuracy"] == 1.0
    with pytest.raises(InvalidInputError, match="output"):
        transformer.evaluate(frame, "spark:rmse")


@pytest.mark.thorough
def test_spark_evaluators_see_every_row_once(
    frame: Any, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    from pyspark.ml import evaluation

    two = saved(tmp_path / "two", classifier(1, loss="binary_crossentropy"), [ONE])
    more = saved(tmp_path / "more", classifier(3, loss="sparse_categorical_crossentropy"), [KIND])
    found = two.evaluate(frame, ["compiled", "AUC", "spark:areaUnderROC"])
    assert list(found) == ["loss", "AUC", "spark:areaUnderROC"]
    # Keras cuts the curve at 200 thresholds, Spark at 1000 rows.
    assert found["spark:areaUnderROC"] == pytest.approx(found["AUC"], abs=0.01)
    by_class = evaluation.MulticlassClassificationEvaluator(metricName="recallByLabel")
    given = ["acc", "spark:accuracy", "spark:logLoss", by_class.setMetricLabel(2.0)]
    found = more.evaluate(frame, given, sample_weight_col="w")
    assert found["spark:accuracy"] == pytest.approx(found["acc"], abs=1e-6)
    rows = more.transform(frame).select("prediction", "kind", "w").collect()
    classes = np.array([np.argmax(row.prediction) for row in rows])
    kinds, weights = (np.array([row[name] for row in rows]) for name in ("kind", "w"))
    hit = (classes == kinds) * weights
    assert found["spark:recallByLabel"] == pytest.approx(
        hit[kinds == 2].sum() / weights[kinds == 2].sum()
    )
    chance = np.array([row.prediction[row.kind] for row in rows])
    log_loss = -(np.log(chance) * weights).sum() / weights.sum()
    assert found["spark:logLoss"] == pytest.approx(log_loss, abs=1e-6)
    with pytest.raises(InvalidInputError, match="class.*'spark:areaUnderROC'"):
        two.evaluate(frame, "spark:accuracy")
    with pytest.raises(InvalidInputError, match="'spark:accuracy'.*spark:rmse"):
        more.evaluate(frame, "spark:acuracy")
    with pytest.raises(InvalidInputError, match="RankingEvaluator"):
        more.evaluate(frame, [evaluation.RankingEvaluator()])


@pytest.mark.thorough
def test_an_evaluators_own_columns_are_those_that_are_used(frame: Any, tmp_path: Path) -> None:
    """An evaluator that is told of weights would not be given them."""
    from pyspark.ml import evaluation

    more = saved(tmp_path, classifier(3, loss="sparse_categorical_crossentropy"), [KIND])
    kind = evaluation.MulticlassClassificationEvaluator
    with pytest.raises(InvalidInputError, match="weightCol='w'.* None.*sample_weight_col='w'"):
        more.evaluate(frame, kind(weightCol="w"))
    with pytest.raises(InvalidInputError, match="labelCol='one'.* 'kind'.*label_cols='one'"):
        more.evaluate(frame, kind(labelCol="one"))
    same = kind(labelCol="kind", weightCol="w", metricName="accuracy")
    found = more.evaluate(frame, [same, "acc"], sample_weight_col="w")
    assert found["spark:accuracy"] == pytest.approx(found["acc"], abs=1e-6)


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> TFTransformer:
    import keras

    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return saved(tmp_path_factory.mktemp("regression"), model, [REAL])


@pytest.mark.thorough
def test_jobs_say_in_spark_what_they_are(regression: TFTransformer, frame: Any, spark: Any) -> None:
    regression.evaluate(frame)
    assert "Horovod: evaluating a model" in descriptions(spark)


@pytest.mark.thorough
def test_rows_that_cannot_be_evaluated(regression: TFTransformer, frame: Any) -> None:
    rows = frame.coalesce(1).limit(20)
    holes = rows.unionAll(rows.limit(3).withColumn("real", frame["real"] + None))
    with pytest.raises(DataError, match=r"'real'.*null.*row \d+.*batch.*='skip'"):
        regression.evaluate(holes)
    check(regression.evaluate(holes, handle_invalid="skip"), regression.evaluate(rows))
    # What is kept without a prediction has no part in a metric.
    with pytest.raises(DataError, match="handle_invalid='skip'"):
        regression.copy({regression.handleInvalid: "keep"}).evaluate(holes)
    with pytest.raises(DataError, match="no rows"):
        regression.evaluate(frame.filter("false"))
    with pytest.raises(DataError, match=r"no rows.*\b3\b.*invalid"):
        regression.evaluate(holes.filter("real is null"), handle_invalid="skip")
    with pytest.raises(DataError, match="weight.*-1.0"):
        regression.evaluate(rows.selectExpr("*", "-1 as v"), sample_weight_col="v")
    # The columns are called as in the DataFrame.
    with pytest.raises(DataError, match="'v'.*null.*row 0"):
        regression.evaluate(rows.selectExpr("*", "cast(null as int) v"), sample_weight_col="v")
    with pytest.raises(DataError, match="'other'.*null"):
        regression.evaluate(holes.withColumnRenamed("real", "other"), label_cols="other")


@pytest.mark.thorough
def test_labels_that_are_no_classes_are_refused_by_name(frame: Any, tmp_path: Path) -> None:
    """Spark takes any number for a class: of labels that are all 2, the area would be 1."""
    two = saved(tmp_path / "two", classifier(1, loss="binary_crossentropy"), [REAL])
    message = r"'spark:areaUnderROC'.*\b0\b.*\b1\b.*'v'.* 2.0"
    for metric in ("spark:areaUnderROC", "spark:areaUnderPR"):
        with pytest.raises(DataError, match=message.replace("spark:areaUnderROC", metric)):
            two.evaluate(frame.selectExpr("x", "2f AS v"), metric, label_cols="v")
    more = saved(tmp_path / "more", classifier(3, loss="categorical_crossentropy"), [REAL])
    for value in ("0.5f", "-1f"):
        with pytest.raises(DataError, match="'spark:accuracy'.* 0"):
            more.evaluate(
                frame.selectExpr("x", f"{value} AS v"), "spark:accuracy", label_cols=["v"]
            )
    unknown = frame.selectExpr("x", "3f AS v")
    assert more.evaluate(unknown, "spark:accuracy", label_cols="v") == {"spark:accuracy": 0.0}
    with pytest.raises(DataError, match=r"'spark:logLoss'.*\b0\b.*\b2\b.* 3.0"):
        more.evaluate(unknown, "spark:logLoss", label_cols="v")


@pytest.mark.thorough
def test_outputs_that_are_no_classes_are_refused_by_name(frame: Any, tmp_path: Path) -> None:
    """As for `transform`: the largest of several sigmoids says nothing where several are right."""
    import keras

    def transformer(activation: str, units: int = 3) -> TFTransformer:
        keras.utils.set_random_seed(6)
        x = keras.Input((4,), name="x")
        made = keras.Model(x, keras.layers.Dense(units, activation)(x))
        return TFTransformer.from_keras(made, ["x"])

    logits, sigmoids = transformer("linear"), transformer("sigmoid")
    logits.evaluate(frame, "spark:accuracy", label_cols="kind")
    with pytest.raises(InvalidInputError, match="logLoss'.* probabilities.*'linear'.*logits"):
        logits.evaluate(frame, "spark:logLoss", label_cols="kind")
    for metric in ("spark:accuracy", "spark:f1", "spark:logLoss"):
        with pytest.raises(InvalidInputError, match=f"{metric}'.*'sigmoid'.* 3 "):
            sigmoids.evaluate(frame, metric, label_cols="kind")
    with pytest.raises(InvalidInputError, match="areaUnderPR'.*'sigmoid'.* 2 "):
        transformer("sigmoid", 2).evaluate(frame, "spark:areaUnderPR", label_cols="one")
    # Where the graph does not tell, rows do.
    save_run(tmp_path, unknown(), [X], labels=[KIND])
    other = TFTransformer.from_run(str(tmp_path), model_fn=unknown)
    with pytest.raises(ModelError, match="'spark:logLoss'.*row"):
        other.evaluate(frame, "spark:logLoss")
    several = frame.selectExpr("x", "array(1, 1, 0) AS kinds")
    with pytest.raises(DataError, match=r"'spark:accuracy'.*'kinds'.*\[1.0, 1.0, 0.0\]"):
        logits.evaluate(several, "spark:accuracy", label_cols="kinds")


def unknown() -> Any:
    """A model of three scores whose graph does not tell its last activation."""
    import keras

    keras.utils.set_random_seed(6)

    class Scores(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.inner(x)

    model = Scores()
    model(np.zeros((1, 4), np.float32))  # has its weights from here on
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


@pytest.mark.thorough
def test_two_scores_are_compared_by_their_difference(frame: Any) -> None:
    """Spark reads the second of two numbers only: that is all of probabilities, not of logits."""
    import keras

    keras.utils.set_random_seed(6)
    x = keras.Input((4,), name="x")
    scores = keras.layers.Dense(2)(x)
    classes = frame.selectExpr("x", "int(kind > 0) AS class")
    found = [
        TFTransformer.from_keras(keras.Model(x, output), ["x"]).evaluate(
            classes, "spark:areaUnderROC", label_cols="class"
        )["spark:areaUnderROC"]
        for output in (scores, keras.layers.Softmax()(scores))
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_a_regression_takes_one_label_per_row(
    regression: TFTransformer, frame: Any, tmp_path: Path
) -> None:
    """Of several Spark would be told the place of the largest."""
    pairs = frame.selectExpr("x", "array(real, 2f) AS pair")
    save_run(tmp_path, regression.getModel(), [X], labels=[Column("pair", "float32", (2,))])
    transformer = TFTransformer.from_run(str(tmp_path))
    for metric in ("spark:rmse", "spark:areaUnderROC"):
        with pytest.raises(InvalidInputError, match=f"{metric}'.*'pair'.* 2 "):
            transformer.evaluate(pairs, metric)


def test_a_model_that_was_trained_elsewhere(
    frame: Any, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """By metrics that are given: what it was compiled with is not known."""
    model = classifier(3, loss="sparse_categorical_crossentropy")
    transformer = TFTransformer.from_keras(model, ["x"])
    model.compile(metrics=["acc"], weighted_metrics=["accuracy"])
    x, kind, weight = arrays["x"], arrays["kind"], arrays["w"]
    plain = model.evaluate(x, kind, sample_weight=weight, return_dict=True, verbose=0)
    given = ["sparse_categorical_accuracy", "spark:accuracy"]
    found = transformer.evaluate(frame, given, label_cols="kind")
    check(found, dict.fromkeys(given, plain["acc"]))
    labelled = frame.withColumnRenamed("kind", "label")
    check(transformer.evaluate(labelled, "acc", sample_weight_col="w"), {"acc": plain["accuracy"]})
    # Labels in arrays: as many as the output.
    one_hot = frame.selectExpr("x", "transform(array(0, 1, 2), i -> int(i = kind)) AS classes")
    by_name = {model.output_names[0]: "classes"}
    check(transformer.evaluate(one_hot, "acc", label_cols=by_name), {"acc": plain["acc"]})
    for arguments, message in (
        ({}, r"evaluate\(df, metrics="),
        ({"metrics": ["acc", "compiled"]}, "compiled"),
        ({"metrics": "acc"}, "label_cols"),
        ({"metrics": "acc", "label_cols": ["kind", "one"]}, "column.*output"),
        ({"metrics": "acc", "label_cols": {"y": "kind"}}, "outputs.*label_cols.*'y'"),
        ({"metrics": "acc", "label_cols": "nope"}, "'nope'"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            transformer.evaluate(frame, **arguments)
    with pytest.raises(DataError, match=r"'t'.*array.*\(3,\)"):
        transformer.evaluate(frame.selectExpr("x", "array(x) AS t"), "acc", label_cols="t")
    model.export(tmp_path / "graph", format="tf_saved_model", verbose=False)
    graph = TFTransformer.from_saved_model(tmp_path / "graph", ["x"])
    with pytest.raises(ModelError, match="SavedModel.*Keras"):
        graph.evaluate(frame, "acc", label_cols="kind")


class OnlyHere:
    """Leaves the driver, but cannot be made again on a worker."""

    def __call__(self, y_true: Any, y_pred: Any) -> Any:
        return y_true - y_pred

    def __reduce__(self) -> Any:
        return int, ("only here",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": OnlyHere()}, "worker.*ValueError.*'only here'"),
        ({"metrics": "acuracy"}, "'acuracy'.*'accuracy'.*'spark:"),
        ({"metrics": ["MeanIoU"]}, "'MeanIoU'.*argument"),
        ({"metrics": []}, "metrics.*None"),
        ({"metrics": [3]}, "3.*metric|metric.*3"),
        ({"metrics": ["mae", "compiled"]}, "metric.*'mae'"),
        ({"metrics": "MeanIoU", "handle_invalid": "keep"}, "handle_invalid"),
        ({"label_cols": "target"}, "'target'.*'x'.*'one'"),
        ({"label_cols": ["real", "one"]}, "'real', 'one'.*'real'"),
        ({"label_cols": "x"}, "'x'.*array.*'real'"),
        ({"sample_weight_col": "x"}, "sample_weight_col.*'x'"),
        ({"sample_weight_col": True}, "column.*None.* True"),
    ],
)
def test_wrong_arguments_are_named(
    regression: TFTransformer, frame: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        regression.evaluate(frame, **arguments)


def test_a_frame_that_is_none(regression: TFTransformer, spark: Any) -> None:
    with pytest.raises(InvalidInputError, match="evaluate.*Spark DataFrame.*int"):
        regression.evaluate(3)
    stream = spark.readStream.format("rate").load()
    with pytest.raises(DataError, match="streaming.*evaluat"):
        regression.evaluate(stream)


def refused(name: str) -> tuple[Callable[[], Any], str]:
    """A compiled model whose loss or metrics have no exact value in parts, and why."""
    import keras

    class Largest(keras.metrics.Metric):
        def __init__(self, **other: Any) -> None:
            super().__init__(**other)
            aggregation = "sum" if name == "maximum" else "mean"
            self.most = self.add_variable((), "zeros", aggregation=aggregation, name="most")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.most.assign(keras.ops.maximum(self.most, keras.ops.max(keras.ops.abs(y_true))))

        def result(self) -> Any:
            return self.most

    class Unkept(keras.metrics.Mean):
        """Counts its calls in an attribute."""

        calls = 0.0

        def update_state(self, *_: Any, **__: Any) -> None:
            self.calls += 1

        def reset_state(self) -> None:
            self.calls = 0.0

        def result(self) -> Any:
            return self.calls

    def worst(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.max(keras.ops.abs(y_true - y_pred))

    losses: dict[str, Any] = {
        "sum": keras.losses.MeanSquaredError(reduction="sum"),
        "worst": worst,
        "dice": keras.losses.Dice(),
    }
    metrics: dict[str, list[Any]] = {
        "maximum": [Largest],
        "mean": [Largest],
        "largest": [worst],
        "batches": [by_batches],
        "attribute": [Unkept],
    }
    messages = {
        "sum": "loss.*'mean_squared_error'.*reduction='sum'",
        "worst": "loss 'worst'.*mean.*batch",
        "dice": "loss 'dice'.*mean.*batch",
        "maximum": "metric 'largest'.*Largest.*'most'.*sum",
        "mean": "metric 'largest'.*Largest.*'most'.*sum.*aggregation 'mean'",
        "largest": "metric 'worst'.*mean.*batch",
        "batches": "metric 'by_batches'.*mean.*batch",
        "attribute": "metric.*Unkept.*variables.*attributes",
    }

    def model_fn() -> Any:
        keras.utils.set_random_seed(4)
        x = keras.Input((4,))
        made = keras.Model(x, keras.layers.Dense(1)(x))
        kinds = [
            k() if isinstance(k, type) or k is by_batches else k for k in metrics.get(name, [])
        ]
        eager = name == "attribute"
        made.compile("sgd", losses.get(name, "mse"), metrics=kinds, run_eagerly=eager)
        return made

    return model_fn, messages[name]


def of_batch(y_true: Any, y_pred: Any) -> Any:
    """One number for a whole batch."""
    from keras import ops

    return ops.mean(ops.abs(ops.reshape(y_true, (-1,)) - ops.reshape(y_pred, (-1,))))


def by_batches() -> Any:
    """A metric of a user's own that counts batches, not rows."""
    import keras

    class ByBatches(keras.metrics.Metric):
        def __init__(self, name: str = "by_batches", **other: Any) -> None:
            super().__init__(name=name, **other)
            self.total = self.add_weight((), "zeros", name="total")
            self.batches = self.add_weight((), "zeros", name="batches")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(of_batch(y_true, y_pred))
            self.batches.assign_add(1.0)

        def result(self) -> Any:
            return self.total / self.batches

    return ByBatches()


@pytest.mark.thorough
@pytest.mark.parametrize("rows", [70, 64, 32, 2])
def test_what_gives_one_number_per_batch_counts_by_rows_or_is_refused(
    rows: int, regression: TFTransformer, frame: Any, arrays: dict[str, np.ndarray]
) -> None:
    some = frame.coalesce(1).limit(70).cache()
    transformer = regression.copy()
    transformer.setPredictBatchSize(rows)
    true = transformer.evaluate(some, "mae")["mae"]
    assert transformer.evaluate(some, [of_batch]) == {"of_batch": pytest.approx(true, rel=1e-5)}
    with pytest.raises(ModelError, match="metric 'by_batches'.*mean.*batch"):
        transformer.evaluate(some, [by_batches()])
    with pytest.raises(ModelError, match="'of_batch'.*weight"):
        transformer.evaluate(some, [of_batch], sample_weight_col="w")
    some.unpersist()


CASES = ["sum", "worst", "dice", "maximum", "mean", "largest", "batches", "attribute"]


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_exact_is_refused_by_name(name: str, frame: Any, tmp_path: Path) -> None:
    model_fn, message = refused(name)
    save_run(tmp_path, model_fn(), [X], labels=[REAL])
    transformer = TFTransformer.from_run(str(tmp_path), model_fn=model_fn)
    with pytest.raises(ModelError, match=message):
        transformer.evaluate(frame.coalesce(1))


def cubed(y_true: Any, y_pred: Any) -> Any:
    from keras import ops

    return ops.mean(ops.abs(y_true - y_pred) ** 3, axis=-1)


@pytest.mark.thorough
def test_a_loss_of_the_users_own_is_asked_for(
    frame: Any, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    import keras

    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", cubed, metrics=[cubed])
    place = str(tmp_path)
    save_run(tmp_path, model, [X], labels=[ONE])
    with pytest.raises(ModelError, match="'cubed'.*custom_objects="):
        TFTransformer.from_run(place).evaluate(frame)
    value = model.evaluate(arrays["x"], arrays["one"], return_dict=True, verbose=0)
    transformer = TFTransformer.from_run(place, custom_objects={"cubed": cubed})
    check(transformer.evaluate(frame), value)


@pytest.mark.parametrize("own", ["test_step", "compute_metrics"])
def test_what_a_method_of_the_users_own_gives_is_refused(
    own: str, frame: Any, tmp_path: Path
) -> None:
    import keras

    class Own(keras.Model):
        pass

    def distance(self: Any, *given: Any) -> Any:
        return {"distance": 0.0}

    def model_fn() -> Any:
        x = keras.Input((4,))
        model = type("Own", (Own,), {own: distance})(x, keras.layers.Dense(1)(x))
        model.compile("sgd", "mse")
        return model

    save_run(tmp_path, model_fn(), [X], labels=[REAL])
    transformer = TFTransformer.from_run(str(tmp_path), model_fn=model_fn)
    with pytest.raises(ModelError, match=f"{own}.*metrics="):
        transformer.evaluate(frame)
    assert transformer.evaluate(frame, "mae")["mae"] > 0
