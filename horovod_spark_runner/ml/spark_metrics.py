"""Spark ML's evaluators on the outputs of a model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import DataError, InvalidInputError
from ..training.spec import Binding, OutputSpec
from .inference import is_scalar

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PREFIX = "spark:"
_BINARY = "BinaryClassificationEvaluator"
_CLASSES = "MulticlassClassificationEvaluator"
_REGRESSION = "RegressionEvaluator"
_METRICS = {
    _BINARY: ("areaUnderROC", "areaUnderPR"),
    _REGRESSION: ("rmse", "mse", "r2", "mae", "var"),
    _CLASSES: (
        "f1",
        "accuracy",
        "weightedPrecision",
        "weightedRecall",
        "weightedTruePositiveRate",
        "weightedFalsePositiveRate",
        "weightedFMeasure",
        "truePositiveRateByLabel",
        "falsePositiveRateByLabel",
        "precisionByLabel",
        "recallByLabel",
        "fMeasureByLabel",
        "logLoss",
        "hammingLoss",
    ),
}


@dataclass(frozen=True)
class SparkMetric:
    """A metric that one of Spark ML's evaluators computes.

    Attributes:
        name: what its result is called.
        kind: name of the evaluator's class.
        evaluator: the evaluator.
    """

    name: str
    kind: str
    evaluator: Any = field(repr=False)


def spark_metric(given: Any) -> SparkMetric | None:
    """Return the metric of Spark ML that is meant; ``None`` if another kind is.

    Raises:
        InvalidInputError: Spark has no such metric, or not for what a model gives.
    """
    from pyspark.ml import evaluation

    if isinstance(given, evaluation.Evaluator):
        kind = type(given).__name__
        if kind not in _METRICS:
            raise InvalidInputError(
                f"{kind} cannot evaluate a network's outputs; those that can are "
                + ", ".join(_METRICS)
            )
        return SparkMetric(f"{PREFIX}{given.getMetricName()}", kind, given)
    if not isinstance(given, str) or not given.startswith(PREFIX):
        return None
    name = given.removeprefix(PREFIX)
    for kind, names in _METRICS.items():
        if name in names:
            return SparkMetric(given, kind, getattr(evaluation, kind)(metricName=name))
    every = [PREFIX + name for names in _METRICS.values() for name in names]
    close = difflib.get_close_matches(given, every, n=1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    raise InvalidInputError(
        f"Spark ML has no metric {given!r}{meant}; there are {', '.join(every)}"
    )


def check_fit(
    metrics: Sequence[SparkMetric], outputs: Sequence[OutputSpec], labels: Binding
) -> None:
    """Check that Spark ML's evaluators can take what the model gives.

    Raises:
        InvalidInputError: they cannot.
    """
    for metric in metrics:
        if len(outputs) != 1 or len(labels.slots) != 1 or len(labels.slots[0]) != 1:
            raise InvalidInputError(
                f"{metric.name!r} needs a model with one output that is compared with one column; "
                f"it has {len(outputs)} outputs, compared with {labels.describe()}: use Keras' "
                "metrics"
            )
        width = _width(outputs[0])
        if metric.kind == _REGRESSION and width != 1:
            raise InvalidInputError(
                f"{metric.name!r} takes one number per row; the output has shape {outputs[0].shape}"
            )
        if metric.kind == _BINARY and width not in (1, 2):
            raise InvalidInputError(
                f"{metric.name!r} takes one score per row, or one for each of two classes; the "
                f"output has shape {outputs[0].shape}"
            )
        if metric.kind == _CLASSES and (width is None or width < 2):
            raise InvalidInputError(
                f"{metric.name!r} takes one score per class and row; the output has shape "
                f"{outputs[0].shape}, which says no class: use 'spark:areaUnderROC', or Keras' "
                "'binary_accuracy'"
            )


def _width(output: OutputSpec) -> int | None:
    """Return how many numbers a row's output has; ``None`` if it is no vector of known size."""
    if is_scalar(output):
        return 1
    return output.shape[0] if len(output.shape) == 1 else None


def evaluate_rows(
    rows: DataFrame, output: OutputSpec, metrics: Sequence[SparkMetric], label: str
) -> dict[str, float]:
    """Return the metrics by name.

    Args:
        rows: ``output``, ``label`` (arrays of numbers) and ``weight``.
        output: what the model gives.
        metrics: what to compute.
        label: the DataFrame's name for the label column, for messages.

    Raises:
        DataError: labels are not the classes that a metric is about; Spark would take any number.
    """
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    def place_of_largest(name: str) -> Any:
        return (F.array_position(name, F.array_max(name)) - 1).cast("double")

    frame = rows.select(
        F.when(F.size("output") > 1, place_of_largest("output"))
        .otherwise(F.col("output")[0])
        .alias("prediction"),
        array_to_vector("output").alias("scores"),
        F.col("output")[0].alias("score"),
        F.when(F.size("label") > 1, place_of_largest("label"))
        .otherwise(F.col("label")[0])
        .alias("label"),
        "weight",
    )
    found: dict[str, float] = {}
    for metric in metrics:
        _check_classes(frame, metric, label)
        one = metric.evaluator
        columns = {one.labelCol: "label", one.weightCol: "weight"}
        if metric.kind == _BINARY:
            columns[one.rawPredictionCol] = "score" if _width(output) == 1 else "scores"
        else:
            columns[one.predictionCol] = "prediction"
        if metric.kind == _CLASSES:
            columns[one.probabilityCol] = "scores"
        found[metric.name] = float(one.evaluate(frame, columns))
    return found


def _check_classes(frame: DataFrame, metric: SparkMetric, label: str) -> None:
    from pyspark.sql import functions as F

    value = F.col("label")
    if metric.kind == _BINARY:
        wanted, right = "0 or 1", value.isin(0.0, 1.0)
    elif metric.kind == _CLASSES:
        wanted, right = "whole numbers from 0", (value >= 0) & (value == F.floor(value))
    else:
        return
    wrong = frame.filter(~right).select("label").first()
    if wrong is not None:
        raise DataError(
            f"{metric.name!r} takes labels that are {wanted}, but column {label!r} holds {wrong[0]}"
        )
