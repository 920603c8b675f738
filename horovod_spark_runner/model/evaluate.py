"""Evaluate a trained model on a DataFrame: one pass over its rows in Spark tasks."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .. import errors
from ..cluster.spark.session import described
from ..cluster.spark.tasks import query_worker, raise_task_error
from ..config.validators import ColumnNames
from ..data.manifest import Column
from ..data.prepare.columns import Source, sources_of, sources_of_features
from ..data.prepare.schema import Roles
from ..errors import DataError, HorovodSparkError, InvalidInputError, ModelError, brief
from ..formatting import quote_all
from ..serialize import check_picklable, dumps
from ..training.engine import engine_named
from ..training.onnx import CLASS, PROBABILITY
from ..training.spec import LABEL, Binding, OutputSpec, bind_columns
from ..training.trained_model import Recipe, Targets
from ..training.trainee import EvaluationRequest
from .evaluate_task import ROW_SCHEMA, SCHEMA, Evaluation
from .features import feature_argument
from .inference import ERROR, SKIP, Predictor, is_scalar
from .outputs import are_probabilities, misfit_of_classes

if TYPE_CHECKING:
    from pyspark.ml.evaluation import Evaluator
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

# What stands for the model's own loss and metrics among others.
_COMPILED = "compiled"
_PREFIX = "spark:"
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
class _Metrics:
    """The requested metrics, by who computes them."""

    compiled: bool
    others: object
    spark: tuple[_SparkMetric, ...]


def evaluate(
    frame: DataFrame,
    recipe: Recipe,
    predictor: Predictor,
    *,
    metrics: object,
    label_cols: ColumnNames | str | None,
    sample_weight_col: str | bool | None,
    handle_invalid: str,
) -> dict[str, Any]:
    """Return a model's losses and metrics over all rows of ``frame``.

    Args:
        frame: feature and label columns, and sample weights.
        recipe: what the driver knows of the model.
        predictor: what predicts on such a DataFrame.
        metrics: see `TFTransformer.evaluate`, as for the others.
        label_cols: the label columns, if not called as in training.
        sample_weight_col: the column of sample weights.
        handle_invalid: ``"error"`` or ``"skip"``.

    Raises:
        InvalidInputError: an argument cannot be right, or names no metric.
        DataError: the columns do not fit the model's, a row cannot be evaluated, or there is none.
        ModelError: a loss or metric has no exact value over parts of the rows.
    """
    if handle_invalid not in (ERROR, SKIP):
        raise InvalidInputError(
            f"handle_invalid={handle_invalid!r} is for predictions: rows without one have "
            "no part in a metric; give evaluate(…, handle_invalid='skip') or 'error'"
        )
    requested = _sort_metrics(metrics, recipe)
    trained = recipe.targets
    if trained is None:
        if requested.compiled:
            raise InvalidInputError(
                "the model comes from no training of this package's, so that what it was compiled "
                "with is not known; give the metrics, evaluate(df, metrics=['accuracy', …], "
                "label_cols=…)"
            )
        trained, label_cols = _targets_by_outputs(frame, recipe.outputs, label_cols), None
    targets, names = _choose_targets(trained, label_cols, sample_weight_col)
    _check_fit(requested.spark, recipe.outputs, targets)
    _check_same_columns(requested.spark, targets, names)
    sources = sources_of_features(frame, predictor.names)
    arguments = [
        *(feature_argument(s, c) for s, c in zip(sources, recipe.columns, strict=True)),
        *_target_arguments(frame, targets.columns, names, targets.weight),
    ]
    evaluation = Evaluation(
        predictor=replace(predictor, handle_invalid=handle_invalid),
        targets=targets.columns,
        names=names,
        request=dumps(EvaluationRequest(targets, requested.compiled, requested.others)),
        weight=targets.weight,
        label=targets.outputs.slots[0][0] if requested.spark else None,
    )
    rows = frame.select(*(a.alias(f"c{number}") for number, a in enumerate(arguments)))
    try:
        with described(frame.sparkSession, "Horovod: evaluating a model"):
            _check_on_worker(frame, evaluation)
            return _run_pass(rows, evaluation, recipe, requested.spark)
    except HorovodSparkError:
        raise
    except Exception as error:
        raise_task_error(error)
        raise


def _sort_metrics(metrics: object, recipe: Recipe) -> _Metrics:
    """Return the metrics by who computes them.

    Raises:
        InvalidInputError: something is no metric.
    """
    if metrics is None:
        return _Metrics(True, None, ())
    items = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    if not items:
        raise InvalidInputError(
            "metrics names none; None asks for the model's own loss and metrics"
        )
    wanted = [item for item in items if not (isinstance(item, str) and item == _COMPILED)]
    compiled = len(wanted) < len(items)
    pairs = [(item, _spark_metric(item)) for item in wanted]
    spark = tuple(metric for _, metric in pairs if metric is not None)
    others = [item for item, metric in pairs if metric is None]
    names = [metric.name for metric in spark]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidInputError(f"metrics asks for {', '.join(twice)} more than once")
    if not others:
        return _Metrics(compiled, None, spark)
    portable = engine_named(recipe.engine).portable_metrics(
        others[0] if isinstance(metrics, Mapping) else others
    )
    check_picklable({"metrics": portable})
    return _Metrics(compiled, portable, spark)


def _check_on_worker(frame: DataFrame, evaluation: Evaluation) -> None:
    """Load the model and the metrics in a worker, before any row is read.

    Raises:
        HorovodSparkError: of the kind that it found.
    """
    answer = json.loads(query_worker(frame.sparkSession, evaluation.describe, keep=True))
    if answer["error"]:
        raise getattr(errors, answer["error"], ModelError)(answer["message"])


def _run_pass(
    rows: DataFrame, evaluation: Evaluation, recipe: Recipe, spark: tuple[_SparkMetric, ...]
) -> dict[str, Any]:
    if evaluation.label is None:
        return _conclude(rows.mapInArrow(evaluation.add_up, SCHEMA), evaluation)
    evaluated = rows.mapInArrow(evaluation.add_up, f"{SCHEMA}, {ROW_SCHEMA}")
    # The model sees each row once; Spark's evaluators read what it gave.
    evaluated = evaluated.persist()
    try:
        results = _conclude(evaluated.filter("sums is not null"), evaluation)
        each = evaluated.filter("output is not null").select("output", "label", "weight")
        label = evaluation.name_of(evaluation.label)
        return {**results, **_evaluate_rows(each, recipe.outputs[0], spark, label)}
    finally:
        evaluated.unpersist()


def _conclude(evaluated: DataFrame, evaluation: Evaluation) -> dict[str, Any]:
    sums = evaluated.select("task", "rows", "skipped", "sums").repartition(1)
    # Heard out, the worker stays for the next evaluation, with the model it has loaded.
    collected = sums.mapInArrow(evaluation.conclude, "text string").collect()
    summary: dict[str, Any] = {"rows": 0, "skipped": 0}
    if collected:
        summary = json.loads(collected[0].text)
    if not summary["rows"]:
        skipped = summary["skipped"]
        hint = f"; {skipped} with invalid values were skipped" if skipped else ""
        raise DataError(f"the DataFrame has no rows to evaluate on{hint}")
    results: dict[str, Any] = summary["results"]
    return results


def _targets_by_outputs(
    frame: DataFrame, outputs: Sequence[OutputSpec], label_cols: ColumnNames | str | None
) -> Targets:
    """Return the targets of an externally trained model's outputs.

    Args:
        frame: the rows; labels have the types that `run_training` would give them.
        outputs: the model's outputs, by which the shapes of labels are known.
        label_cols: the label columns; by default ``label`` for a model with one output.

    Raises:
        InvalidInputError: the label columns are not known, or do not fit the outputs.
        DataError: a column is missing, or of a type that is no label's.
    """
    if label_cols is None and not (len(outputs) == 1 and LABEL in frame.columns):
        raise InvalidInputError(
            "the model comes from no training of this package's, so that its label columns are not "
            f"known; give label_cols=…, a column for each output: {_quote_outputs(outputs)}"
        )
    binding = bind_columns([LABEL] if label_cols is None else label_cols, "label_cols")
    names = [output.name for output in outputs]
    if binding.names is None and len(binding.slots) != len(outputs):
        raise InvalidInputError(
            f"label_cols gives {binding.describe()}; give a column for each output: "
            + _quote_outputs(outputs)
        )
    unknown = [name for name in binding.names or () if name not in names]
    if len(outputs) == 1:  # the only one may be called by its layer, too, which workers know
        names, unknown = list(binding.names or names), []
    if unknown or len(names) != len(outputs):
        raise InvalidInputError(
            f"label_cols names {quote_all(unknown or names)}; the model's outputs are "
            + _quote_outputs(outputs)
        )
    by_name = dict(zip(names, outputs, strict=True))
    columns: dict[str, Column] = {}
    for output, slot in zip(binding.names or names, binding.slots, strict=True):
        sources = sources_of(frame, Roles(slot, slot)) if slot else ()
        for source in sources:
            columns[source.name] = _label_column(source, by_name[output], len(slot))
    return Targets(binding, tuple(columns.values()))


def _label_column(source: Source, output: OutputSpec, joined: int) -> Column:
    """Return a label as it is compared with an output: of its shape, or of classes in its place."""
    depth = 1 if source.kind == "vector" else source.depth
    shape: tuple[int | None, ...] = ()
    if depth and joined == 1 and depth in (len(output.shape), len(output.shape) - 1):
        shape = output.shape[:depth]
    sizes = tuple(size for size in shape if size is not None)
    if source.kind == "binary" or len(sizes) != depth:
        raise DataError(
            f"label column {source.name!r} holds {source.kind} values, which cannot be compared "
            f"with output {output.name!r} of shape {output.shape}; give numbers, or arrays of "
            "that shape"
        )
    return Column(source.name, source.dtype, sizes)


def _quote_outputs(outputs: Sequence[OutputSpec]) -> str:
    return quote_all([output.name for output in outputs])


def _choose_targets(
    trained: Targets, label_cols: ColumnNames | str | None, weight: str | bool | None
) -> tuple[Targets, tuple[str, ...]]:
    """Return the targets of outputs, and the DataFrame's column for each of their columns.

    Args:
        trained: what they were compared with in training.
        label_cols: the label columns, if not called as those were.
        weight: the column of sample weights; ``None`` for that of the training, ``False`` for none.

    Raises:
        InvalidInputError: the label columns do not fit those of the training.
    """
    labels = trained.outputs.columns
    names = _match_label_names(trained.outputs, label_cols)
    columns = [column for column in trained.columns if column.name in labels]
    frame_columns = [names[column.name] for column in columns]
    chosen = trained.weight if weight is None else weight or None
    if chosen is True or not isinstance(chosen, (str, type(None))):
        raise InvalidInputError(
            "sample_weight_col must be a column's name, None for that of the training, or False "
            f"for no weights, got {brief(weight)}"
        )
    if chosen is None:
        return replace(trained, columns=tuple(columns), weight=None), tuple(frame_columns)
    key = "weight"  # a name of its own: the column may be a label, too
    while key in labels:
        key += "_"
    dtypes = [column.dtype for column in trained.columns if column.name == trained.weight]
    column = Column(key, dtypes[0] if dtypes else "float32")
    return replace(trained, columns=(*columns, column), weight=key), (*frame_columns, chosen)


def _match_label_names(trained: Binding, label_cols: ColumnNames | str | None) -> dict[str, str]:
    """Return the current name of each label column of the training."""
    names = {name: name for name in trained.columns}
    if label_cols is None:
        return names
    binding = bind_columns(label_cols, "label_cols")
    if binding.names is None:
        if len(binding.slots) != len(trained.slots):
            raise InvalidInputError(
                f"label_cols gives {binding.describe()}, but the model was trained on "
                f"{trained.describe()}; name as many, in this order"
            )
        pairs = list(zip(trained.slots, binding.slots, strict=True))
    else:
        slots_by_name = dict(zip(trained.names or (), trained.slots, strict=False))
        unknown = [name for name in binding.names if name not in slots_by_name]
        if unknown:
            right = (
                quote_all(list(slots_by_name))
                if slots_by_name
                else f"not named: give {trained.describe()}"
            )
            raise InvalidInputError(
                f"label_cols names {quote_all(unknown)}, but the outputs it was trained with are "
                + right
            )
        new_slots = dict(zip(binding.names, binding.slots, strict=True))
        pairs = [(slot, new_slots.get(name, slot)) for name, slot in slots_by_name.items()]
    called: dict[str, str] = {}
    for before, now in pairs:
        if len(before) != len(now):
            raise InvalidInputError(
                f"label_cols gives {' + '.join(now) or 'no column'} where the model was trained on "
                f"{' + '.join(before) or 'none'}"
            )
        for old, new in zip(before, now, strict=True):
            if called.setdefault(old, new) != new:
                raise InvalidInputError(
                    f"label_cols gives {called[old]!r} and {new!r} where the model was trained on "
                    f"one column for several outputs, {old!r}; give one column for all of these"
                )
    return {**names, **called}


def _target_arguments(
    frame: DataFrame, columns: Sequence[Column], names: Sequence[str], weight: str | None
) -> list[SparkColumn]:
    """Return the Spark expressions that give labels and weights as the model was trained on them.

    Args:
        frame: the rows.
        columns: what the model was trained on.
        names: the DataFrame's column for each.
        weight: which of ``columns`` is that of sample weights.

    Raises:
        DataError: a column is missing, there twice, or of another type.
    """
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise DataError(
            f"the DataFrame has no column {quote_all(missing)}, which the outputs are compared "
            "with or rows are weighed by; name the right ones, label_cols=… and "
            f"sample_weight_col=…; it has {quote_all(frame.columns)}"
        )
    sources = sources_of_features(frame, names)
    for source, column in zip(sources, columns, strict=True):
        if column.name == weight and (source.kind != "scalar" or source.is_text):
            raise DataError(
                f"sample_weight_col {source.name!r} must hold one number per row in an evaluation; "
                "sample_weight_col=False weighs none"
            )
    return [feature_argument(s, c) for s, c in zip(sources, columns, strict=True)]


@dataclass(frozen=True)
class _SparkMetric:
    """A metric that one of Spark ML's evaluators computes.

    Attributes:
        name: what its result is called.
        kind: name of the evaluator's class.
        evaluator: the evaluator.
    """

    name: str
    kind: str
    evaluator: Evaluator = field(repr=False)


def _spark_metric(metric: object) -> _SparkMetric | None:
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
        return _SparkMetric(f"{_PREFIX}{metric.getMetricName()}", kind, metric)
    if not isinstance(metric, str) or not metric.startswith(_PREFIX):
        return None
    name = metric.removeprefix(_PREFIX)
    for kind, names in _METRICS.items():
        if name in names:
            return _SparkMetric(metric, kind, getattr(evaluation, kind)(metricName=name))
    every = [_PREFIX + name for names in _METRICS.values() for name in names]
    close = difflib.get_close_matches(metric, every, n=1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    raise InvalidInputError(
        f"Spark ML has no metric {metric!r}{meant}; there are {', '.join(every)}"
    )


def _check_fit(
    metrics: Sequence[_SparkMetric], outputs: Sequence[OutputSpec], targets: Targets
) -> None:
    """Check that Spark ML's evaluators support the model's outputs and labels.

    Raises:
        InvalidInputError: a metric cannot be computed of the outputs and labels.
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
        takes, fits, hint = {
            _REGRESSION: ("one number per row", width == 1, ""),
            _BINARY: ("one score per row, or one for each of two classes", width in (1, 2), ""),
            _CLASSES: (
                "one score per class and row",
                width is not None and width > 1,
                ", which says no class: use 'spark:areaUnderROC', or Keras' 'binary_accuracy'",
            ),
        }[metric.kind]
        if not fits:
            raise InvalidInputError(
                f"{metric.name!r} takes {takes}; the output has shape {outputs[0].shape}{hint}"
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


def _check_same_columns(
    metrics: Sequence[_SparkMetric], targets: Targets, names: Sequence[str]
) -> None:
    """Check that evaluators which name their columns mean those that outputs are compared with.

    Args:
        metrics: the metrics, which `_check_fit` has let pass.
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


def _check_activation(metric: _SparkMetric, output: OutputSpec) -> None:
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


def _takes_probabilities(metric: _SparkMetric) -> bool:
    return metric.kind == _CLASSES and metric.evaluator.getMetricName() == "logLoss"


def _label_sizes(metric: _SparkMetric, output: OutputSpec) -> set[int]:
    """Return how many numbers a row's label may have: a class, or one for each of the classes."""
    return {1} if metric.kind == _REGRESSION else {1, _width(output) or 1}


def _wanted_label(metric: _SparkMetric, output: OutputSpec) -> str:
    sizes = _label_sizes(metric, output)
    return "one number" if sizes == {1} else f"a class, or {max(sizes)} numbers (one-hot),"


def _width(output: OutputSpec) -> int | None:
    """Return the elements of a row's output; ``None`` if it is no vector of static size."""
    if is_scalar(output):
        return 1
    return output.shape[0] if len(output.shape) == 1 else None


def _evaluate_rows(
    rows: DataFrame, output: OutputSpec, metrics: Sequence[_SparkMetric], label: str
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

    def place_of_largest(name: str) -> SparkColumn:
        return (F.array_position(name, F.array_max(name)) - 1).cast("double")

    def first_unless_several(name: str, several: SparkColumn) -> SparkColumn:
        return F.when(F.size(name) > 1, several).otherwise(F.col(name)[0])

    margin = F.col("output")[1] - F.col("output")[0]
    frame = rows.select(
        first_unless_several("output", place_of_largest("output")).alias("prediction"),
        array_to_vector("output").alias("scores"),
        first_unless_several("output", margin).alias("score"),
        first_unless_several("label", place_of_largest("label")).alias("label"),
        "weight",
    )
    results: dict[str, float] = {}
    for metric in metrics:
        _check_rows(rows, metric, output, label)
        _check_classes(frame, metric, output, label)
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


def _check_rows(rows: DataFrame, metric: _SparkMetric, output: OutputSpec, label: str) -> None:
    """Check that labels name one class each, and outputs are probabilities where they have to be.

    Raises:
        DataError, ModelError: see `_evaluate_rows`.
    """
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
    if not _takes_probabilities(metric):
        return
    wrong = rows.filter(~are_probabilities(F.col("output"), output)).select("output").first()
    if wrong is not None:
        raise ModelError(
            f"{metric.name!r} takes it that output {output.name!r} is probabilities, but in a row "
            f"it is {brief(wrong[0])}"
        )


def _check_classes(frame: DataFrame, metric: _SparkMetric, output: OutputSpec, label: str) -> None:
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
