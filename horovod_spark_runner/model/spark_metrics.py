"""Spark ML's evaluators on the outputs of a model."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import DataError, InvalidInputError, ModelError, brief
from ..training.onnx import CLASS, PROBABILITY
from ..training.spec import OutputSpec
from ..training.trained_model import Targets
from .inference import is_scalar
from .outputs import are_probabilities, misfit_of_classes

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


def spark_metric(metric: Any) -> SparkMetric | None:
    """Return the Spark ML metric of this name or evaluator; ``None`` for another kind of metric.

    Raises:
        InvalidInputError: Spark has no such metric, or not for what a model gives.
    """
    from pyspark.ml import evaluation

    if isinstance(metric, evaluation.Evaluator):
        kind = type(metric).__name__
        if kind not in _METRICS:
            raise InvalidInputError(
                f"{kind} cannot evaluate a network's outputs; those that can are "
                + ", ".join(_METRICS)
            )
        return SparkMetric(f"{PREFIX}{metric.getMetricName()}", kind, metric)
    if not isinstance(metric, str) or not metric.startswith(PREFIX):
        return None
    name = metric.removeprefix(PREFIX)
    for kind, names in _METRICS.items():
        if name in names:
            return SparkMetric(metric, kind, getattr(evaluation, kind)(metricName=name))
    every = [PREFIX + name for names in _METRICS.values() for name in names]
    close = difflib.get_close_matches(metric, every, n=1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    raise InvalidInputError(
        f"Spark ML has no metric {metric!r}{meant}; there are {', '.join(every)}"
    )


def check_fit(
    metrics: Sequence[SparkMetric], outputs: Sequence[OutputSpec], targets: Targets
) -> None:
    """Check that Spark ML's evaluators support the model's outputs and labels.

    Raises:
        InvalidInputError: they cannot.
    """
    labels = targets.outputs
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
        _check_activation(metric, outputs[0])
        name = labels.slots[0][0]
        sizes = [math.prod(column.shape) for column in targets.columns if column.name == name]
        # What a transform gives is seen in the rows.
        if name not in targets.transforms and sizes[0] not in _label_sizes(metric, outputs[0]):
            raise InvalidInputError(
                f"{metric.name!r} compares {_wanted_label(metric, outputs[0])} with each row of "
                f"output {outputs[0].name!r}, but label column {name!r} holds {sizes[0]} numbers "
                "per row: use Keras' metrics"
            )


def check_same_columns(
    metrics: Sequence[SparkMetric], targets: Targets, names: Sequence[str]
) -> None:
    """Check that evaluators which name their columns mean those that outputs are compared with.

    Args:
        metrics: the metrics, which `check_fit` has let pass.
        targets: what outputs are compared with.
        names: the DataFrame's column for each of ``targets.columns``.

    Raises:
        InvalidInputError: an evaluator names another column, which it would not be given.
    """
    called = dict(zip((column.name for column in targets.columns), names, strict=True))
    weight = None if targets.weight is None else called[targets.weight]
    for metric in metrics:
        one = metric.evaluator
        for param, used, argument in (
            (one.labelCol, called[targets.outputs.slots[0][0]], "label_cols"),
            (one.weightCol, weight, "sample_weight_col"),
        ):
            if one.isSet(param) and one.getOrDefault(param) != used:
                named = one.getOrDefault(param)
                raise InvalidInputError(
                    f"the evaluator of {metric.name!r} has {param.name}={named!r}, but the column "
                    f"that is used here is {used!r}: name it, evaluate(…, {argument}={named!r}), "
                    f"or give an evaluator without {param.name}"
                )


def _check_activation(metric: SparkMetric, output: OutputSpec) -> None:
    """Check that an output of several numbers can be of classes of which one is right."""
    if _width(output) == 1:
        return
    holds = PROBABILITY if _takes_probabilities(metric) else CLASS
    misfit = misfit_of_classes(output, holds)
    if misfit is not None:
        what, text = misfit
        advice = "; use Keras' metrics, such as 'binary_accuracy' or 'AUC'"
        if what == "activation":
            advice = (
                ": it is scores of classes (logits); use a metric of Keras' made with "
                "from_logits=True, such as keras.metrics.SparseCategoricalCrossentropy"
            )
        raise InvalidInputError(f"{metric.name!r} takes it that {text}{advice}")


def _takes_probabilities(metric: SparkMetric) -> bool:
    return metric.kind == _CLASSES and metric.evaluator.getMetricName() == "logLoss"


def _label_sizes(metric: SparkMetric, output: OutputSpec) -> set[int]:
    """Return how many numbers a row's label may have: a class, or one for each of the classes."""
    return {1} if metric.kind == _REGRESSION else {1, _width(output) or 1}


def _wanted_label(metric: SparkMetric, output: OutputSpec) -> str:
    sizes = _label_sizes(metric, output)
    return "one number" if sizes == {1} else f"a class, or {max(sizes)} numbers (one-hot),"


def _width(output: OutputSpec) -> int | None:
    """Return the elements of a row's output; ``None`` if it is no vector of static size."""
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
        ModelError: outputs are not the probabilities that a metric is about.
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
        F.when(F.size("output") > 1, F.col("output")[1] - F.col("output")[0])
        .otherwise(F.col("output")[0])
        .alias("score"),
        F.when(F.size("label") > 1, place_of_largest("label"))
        .otherwise(F.col("label")[0])
        .alias("label"),
        "weight",
    )
    results: dict[str, float] = {}
    for metric in metrics:
        _check_label_arrays(rows, metric, output, label)
        _check_classes(frame, metric, output, label)
        if _takes_probabilities(metric):
            _check_probabilities(rows, metric, output)
        one = metric.evaluator
        columns = {one.labelCol: "label", one.weightCol: "weight"}
        if metric.kind == _BINARY:
            # Of a vector Spark reads what is of class 1, which is all only of probabilities.
            softmax = _width(output) == 2 and output.activation == "softmax"
            columns[one.rawPredictionCol] = "scores" if softmax else "score"
        else:
            columns[one.predictionCol] = "prediction"
        if metric.kind == _CLASSES:
            columns[one.probabilityCol] = "scores"
        results[metric.name] = float(one.evaluate(frame, columns))
    return results


def _check_label_arrays(
    rows: DataFrame, metric: SparkMetric, output: OutputSpec, label: str
) -> None:
    """Check that each row's label has the length that the metric takes, and names one class."""
    from pyspark.sql import functions as F

    value = F.col("label")
    size = F.size(value)
    largest = F.filter(value, lambda one: one == F.array_max(value))
    right = size.isin(*_label_sizes(metric, output)) & ((size == 1) | (F.size(largest) == 1))
    wrong = rows.filter(~right).select("label").first()
    if wrong is not None:
        raise DataError(
            f"{metric.name!r} compares {_wanted_label(metric, output)} with each row of output "
            f"{output.name!r}, but label column {label!r} holds {brief(wrong[0])}: use Keras' "
            "metrics"
        )


def _check_probabilities(rows: DataFrame, metric: SparkMetric, output: OutputSpec) -> None:
    from pyspark.sql import functions as F

    wrong = rows.filter(~are_probabilities(F.col("output"), output)).select("output").first()
    if wrong is not None:
        raise ModelError(
            f"{metric.name!r} takes it that output {output.name!r} is probabilities, but in a row "
            f"it is {brief(wrong[0])}"
        )


def _check_classes(frame: DataFrame, metric: SparkMetric, output: OutputSpec, label: str) -> None:
    from pyspark.sql import functions as F

    value = F.col("label")
    if metric.kind == _BINARY:
        wanted, right = "0 or 1", value.isin(0.0, 1.0)
    elif metric.kind == _CLASSES:
        wanted, right = "whole numbers from 0", (value >= 0) & (value == F.floor(value))
        if _takes_probabilities(metric):  # Spark looks for that of the label among them
            width = _width(output) or 0
            wanted, right = f"{wanted} to {width - 1}", right & (value < width)
    else:
        return
    wrong = frame.filter(~right).select("label").first()
    if wrong is not None:
        raise DataError(
            f"{metric.name!r} takes labels that are {wanted}, but column {label!r} holds {wrong[0]}"
        )
