"""Evaluating a trained model on a DataFrame: one pass over its rows in Spark tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import errors
from ..cluster.spark.session import described
from ..cluster.spark.tasks import query_worker, raise_task_error
from ..config.validators import ColumnNames
from ..data.prepare.columns import sources_of_features
from ..errors import DataError, HorovodSparkError, InvalidInputError, ModelError
from ..serialize import check_picklable, dumps
from ..training.engine import engine_named
from ..training.trained_model import Recipe
from ..training.trainee import Question
from .evaluating import ROW_SCHEMA, SCHEMA, Evaluation
from .features import feature_argument
from .inference import ERROR, SKIP, Predictor
from .spark_metrics import (
    SparkMetric,
    check_fit,
    check_same_columns,
    evaluate_rows,
    spark_metric,
)
from .targets import choose_targets, target_arguments, targets_by_outputs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# What stands for the model's own loss and metrics among others.
COMPILED = "compiled"


@dataclass(frozen=True)
class EvaluationRequest:
    """Arguments of `TFTransformer.evaluate`."""

    metrics: Any
    label_cols: ColumnNames | str | None
    sample_weight_col: str | bool | None
    handle_invalid: str


@dataclass(frozen=True)
class _Metrics:
    """The requested metrics, by who computes them."""

    compiled: bool
    others: Any
    spark: tuple[SparkMetric, ...]


def evaluate(
    frame: DataFrame,
    recipe: Recipe,
    predictor: Predictor,
    request: EvaluationRequest,
) -> dict[str, Any]:
    """Return a model's losses and metrics over all rows of ``frame``.

    Args:
        frame: feature and label columns, and sample weights.
        recipe: what the driver knows of the model.
        predictor: what predicts on such a DataFrame.
        request: what is asked for.

    Raises:
        InvalidInputError: an argument cannot be right, or names no metric.
        DataError: the columns do not fit the model's, a row cannot be evaluated, or there is none.
        ModelError: a loss or metric has no exact value over parts of the rows.
    """
    if request.handle_invalid not in (ERROR, SKIP):
        raise InvalidInputError(
            f"handle_invalid={request.handle_invalid!r} is for predictions: rows without one have "
            "no part in a metric; give evaluate(…, handle_invalid='skip') or 'error'"
        )
    metrics = _sorted_out(request.metrics, recipe)
    trained, label_cols = recipe.targets, request.label_cols
    if trained is None:
        if metrics.compiled:
            raise InvalidInputError(
                "the model comes from no training of this package's, so that what it was compiled "
                "with is not known; give the metrics, evaluate(df, metrics=['accuracy', …], "
                "label_cols=…)"
            )
        trained, label_cols = targets_by_outputs(frame, recipe.outputs, label_cols), None
    targets, names = choose_targets(trained, label_cols, request.sample_weight_col)
    check_fit(metrics.spark, recipe.outputs, targets)
    check_same_columns(metrics.spark, targets, names)
    sources = sources_of_features(frame, predictor.names)
    arguments = [
        *(feature_argument(s, c) for s, c in zip(sources, recipe.columns, strict=True)),
        *target_arguments(frame, targets.columns, names, targets.weight),
    ]
    evaluation = Evaluation(
        digest=predictor.digest,
        load=predictor.load,
        columns=recipe.columns,
        targets=targets.columns,
        names=(*predictor.names, *names),
        question=dumps(Question(targets, metrics.compiled, metrics.others)),
        batch_size=predictor.batch_size,
        skip=request.handle_invalid == SKIP,
        weight=targets.weight,
        label=targets.outputs.slots[0][0] if metrics.spark else None,
    )
    rows = frame.select(*(a.alias(f"c{number}") for number, a in enumerate(arguments)))
    try:
        with described(frame.sparkSession, "Horovod: evaluating a model"):
            _ask_first(frame, evaluation)
            return _one_pass(rows, evaluation, recipe, metrics.spark)
    except HorovodSparkError:
        raise
    except Exception as error:
        raise_task_error(error)
        raise


def _sorted_out(metrics: Any, recipe: Recipe) -> _Metrics:
    """Return the metrics by who computes them.

    Raises:
        InvalidInputError: something is no metric.
    """
    if metrics is None:
        return _Metrics(True, None, ())
    if isinstance(metrics, Mapping):
        items: list[Any] = [metrics]
    else:
        items = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    if not items:
        raise InvalidInputError(
            "metrics names none; None asks for the model's own loss and metrics"
        )
    compiled = any(isinstance(item, str) and item == COMPILED for item in items)
    items = [item for item in items if not (isinstance(item, str) and item == COMPILED)]
    pairs = [(item, spark_metric(item)) for item in items]
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


def _ask_first(frame: DataFrame, evaluation: Evaluation) -> None:
    """Load the model and the metrics in a worker, before any row is read.

    Raises:
        HorovodSparkError: of the kind that it found.
    """
    answer = json.loads(query_worker(frame.sparkSession, evaluation.describe, keep=True))
    if answer["error"]:
        raise getattr(errors, answer["error"], ModelError)(answer["message"])


def _one_pass(
    rows: DataFrame, evaluation: Evaluation, recipe: Recipe, spark: tuple[SparkMetric, ...]
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
        return {**results, **evaluate_rows(each, recipe.outputs[0], spark, label)}
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
