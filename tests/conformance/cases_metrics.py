"""Cases: every metric that Keras exports."""

# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import metrics

from .case import Case
from .models import compiled, dense, two_outputs

CE = "sparse_categorical_crossentropy"


@keras.saving.register_keras_serializable("conformance")
class Largest(metrics.Metric):
    """A metric of a user's own that is no sum: the largest error so far."""

    def __init__(self, aggregation: str = "sum", name: str = "largest", **more: Any) -> None:
        super().__init__(name=name, **more)
        self.aggregation = aggregation
        self.value = self.add_variable((), "zeros", aggregation=aggregation, name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        y_true = keras.ops.cast(keras.ops.reshape(y_true, keras.ops.shape(y_pred)), self.dtype)
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(abs(y_true - y_pred))))

    def result(self) -> Any:
        return self.value

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "aggregation": self.aggregation}


@keras.saving.register_keras_serializable("conformance")
class Errors(metrics.Metric):
    """A metric of a user's own that gives a dictionary."""

    def __init__(self, name: str = "errors", **more: Any) -> None:
        super().__init__(name=name, **more)
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")
        self.off = self.add_weight(shape=(), initializer="zeros", name="off")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        y_true = keras.ops.cast(keras.ops.reshape(y_true, keras.ops.shape(y_pred)), self.dtype)
        self.count.assign_add(keras.ops.cast(keras.ops.size(y_pred), self.dtype))
        self.off.assign_add(keras.ops.sum(abs(y_true - y_pred)))

    def result(self) -> Any:
        return {"off": self.off / self.count, "count": self.count}


def far(y_true: Any, y_pred: Any) -> Any:
    """Return a metric that is a function."""
    return keras.ops.cast(abs(y_true - y_pred) > 0.5, "float32")


# fmt: off
REGRESSION: dict[str, Callable[[], Any]] = {
    "MeanSquaredError": metrics.MeanSquaredError,
    "RootMeanSquaredError": metrics.RootMeanSquaredError,
    "MeanAbsoluteError": metrics.MeanAbsoluteError,
    "MeanAbsolutePercentageError": metrics.MeanAbsolutePercentageError,
    "MeanSquaredLogarithmicError": metrics.MeanSquaredLogarithmicError,
    "LogCoshError": metrics.LogCoshError,
}
SCORES: dict[str, Callable[[], Any]] = {
    "KLDivergence": metrics.KLDivergence,
    # With labels of predictions' rank: Keras does not make them equal here, and mixes rows else.
    "Poisson": metrics.Poisson,
    "CosineSimilarity": metrics.CosineSimilarity,
    "PearsonCorrelation": metrics.PearsonCorrelation,
    "ConcordanceCorrelation": metrics.ConcordanceCorrelation,
}
BINARY: dict[str, Callable[[], Any]] = {
    "Accuracy": metrics.Accuracy,
    "BinaryAccuracy": metrics.BinaryAccuracy,
    "BinaryCrossentropy": metrics.BinaryCrossentropy,
    "Precision": metrics.Precision,
    "Recall": metrics.Recall,
    "TruePositives": metrics.TruePositives,
    "TrueNegatives": metrics.TrueNegatives,
    "FalsePositives": metrics.FalsePositives,
    "FalseNegatives": metrics.FalseNegatives,
}
CURVES: dict[str, Callable[[], Any]] = {
    "AUC": metrics.AUC,
    "PrecisionAtRecall": lambda: metrics.PrecisionAtRecall(0.6),
    "RecallAtPrecision": lambda: metrics.RecallAtPrecision(0.6),
    "SensitivityAtSpecificity": lambda: metrics.SensitivityAtSpecificity(0.6),
    "SpecificityAtSensitivity": lambda: metrics.SpecificityAtSensitivity(0.6),
}
SIGNS: dict[str, Callable[[], Any]] = {
    "Hinge": metrics.Hinge,
    "SquaredHinge": metrics.SquaredHinge,
}
CLASSES: dict[str, Callable[[], Any]] = {
    "CategoricalAccuracy": metrics.CategoricalAccuracy,
    "CategoricalCrossentropy": metrics.CategoricalCrossentropy,
    "CategoricalHinge": metrics.CategoricalHinge,
    "TopKCategoricalAccuracy": lambda: metrics.TopKCategoricalAccuracy(2),
    "OneHotIoU": lambda: metrics.OneHotIoU(3, [0, 2]),
    "OneHotMeanIoU": lambda: metrics.OneHotMeanIoU(3),
}
SPARSE: dict[str, Callable[[], Any]] = {
    "SparseCategoricalAccuracy": metrics.SparseCategoricalAccuracy,
    "SparseCategoricalCrossentropy": metrics.SparseCategoricalCrossentropy,
    "SparseTopKCategoricalAccuracy": lambda: metrics.SparseTopKCategoricalAccuracy(2),
    "IoU": lambda: metrics.IoU(3, [0, 2], sparse_y_pred=False),
    "MeanIoU": lambda: metrics.MeanIoU(3, sparse_y_pred=False),
}


def group(name: str, chosen: dict[str, Callable[[], Any]], head: tuple[int, str | None], loss: str, label: str) -> Case:
    """Return the case of several metrics of the same labels."""
    return Case(
        f"metrics-{name}",
        lambda: compiled(dense(*head), loss=loss, metrics=[metric() for metric in chosen.values()]),
        y=label,
        shows=tuple(f"metrics.{metric}" for metric in chosen),
    )


def single(name: str, metric: Callable[[], Any], head: tuple[int, str | None], loss: str, label: str) -> Case:
    """Return the case of one metric."""
    return Case(
        f"metric-{name.lower()}",
        lambda: compiled(dense(*head), loss=loss, metrics=[metric()]),
        y=label,
        shows=(f"metrics.{name}",),
    )


OF_METRICS = [
    group("regression", REGRESSION, (1, "softplus"), "mse", "positive"),
    group("scores", SCORES, (3, "softmax"), "mse", "simplex"),
    group("binary", BINARY, (3, "sigmoid"), "binary_crossentropy", "many"),
    group("curves", CURVES, (1, "sigmoid"), "binary_crossentropy", "binary"),
    group("signs", SIGNS, (3, "tanh"), "hinge", "signs"),
    group("classes", CLASSES, (3, "softmax"), "categorical_crossentropy", "onehot"),
    group("sparse", SPARSE, (3, "softmax"), CE, "label"),
    single("F1Score", metrics.F1Score, (3, "softmax"), "categorical_crossentropy", "onehot"),
    single("FBetaScore", lambda: metrics.FBetaScore("macro", 2.0), (3, "softmax"), "categorical_crossentropy", "onehot"),
    single("R2Score", metrics.R2Score, (2, None), "mse", "y2"),
    single("BinaryIoU", lambda: metrics.BinaryIoU([0, 1], 0.5), (1, "sigmoid"), "binary_crossentropy", "binary"),
    single("MeanMetricWrapper", lambda: metrics.MeanMetricWrapper(far, "far"), (2, None), "mse", "y2"),
    single("Metric", Errors, (1, None), "mse", "y"),
    Case("metric-that-is-no-sum", lambda: compiled(dense(), metrics=[Largest()]), refused_by_two="is not a sum"),
    Case("metric-of-first-replica", lambda: compiled(dense(), metrics=[Largest("only_first_replica")]), two=None, why="its `aggregation` says that one rank's value stands for all"),
    Case("metrics-auc-by-label", lambda: compiled(dense(3, "sigmoid"), loss="binary_crossentropy", metrics=[metrics.AUC(multi_label=True, num_labels=3)]), y="many"),
    Case("metrics-by-name", lambda: compiled(dense(3, "softmax"), loss=CE, metrics=["accuracy", "sparse_top_k_categorical_accuracy"]), y="label"),
    Case("metrics-function", lambda: compiled(dense(2), metrics=[far]), y="y2", custom_objects={"far": far}),
    Case("metrics-of-two-outputs", lambda: compiled(two_outputs(), loss=["mse", CE], metrics=[["mae"], ["accuracy"]], weighted_metrics=[["mse"], []]), y=["y", "label"], weight="w"),
    Case("metrics-dict", lambda: compiled(two_outputs("dict"), loss={"zeta": "mse", "alpha": CE}, metrics={"alpha": ["accuracy"], "zeta": "mae"}), y={"zeta": "y", "alpha": "label"}),
    Case("metrics-auto-scale-loss", lambda: compiled(dense(), metrics=["mae"], auto_scale_loss=False)),
]
# fmt: on
