"""What a model's metrics keep, and how that of several processes becomes that of all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .protocols import Metric, MetricVariable

if TYPE_CHECKING:
    import keras

SUM, MEAN, FIRST = "sum", "mean", "first"


def metric_variables(model: keras.Model) -> list[MetricVariable]:
    """Return the variables in which the model's metrics keep their sums."""
    return variables_of(model.metrics)


def variables_of(metrics: Iterable[Metric]) -> list[MetricVariable]:
    """Return the variables of some metrics, each once."""
    found = {id(v): v for metric in metrics for v in metric.variables}
    return list(found.values())


def merge_of(variable: MetricVariable) -> str:
    """Say how a metric's variable becomes that of all processes.

    ``"sum"``, ``"mean"``, or ``"first"`` where one process's stands for all.
    """
    way = variable.aggregation
    return way if way in (SUM, MEAN) else FIRST
