"""Metrics of all ranks as those of one process.

Keras metrics keep sums (a total and a count, a confusion matrix, …), which Keras itself adds up
over replicas. Adding them up over the ranks before asking for the result gives each metric of the
whole epoch, weighted by samples, instead of a mean of means.
"""

from __future__ import annotations

from typing import Any

from .collectives import sum_over_ranks


def reduce_metrics(model: Any) -> dict[str, float]:
    """Return the model's metrics over all ranks; every rank must call it.

    The metrics of each rank keep the sums of all of them afterwards: reset them before the next
    epoch.
    """
    variables = [variable for metric in model.metrics for variable in metric.variables]
    if variables:
        summed = sum_over_ranks(variables, "metrics")
        for variable, value in zip(variables, summed, strict=True):
            variable.assign(value)
    return plain(model.get_metrics_result())


def plain(logs: dict[str, Any]) -> dict[str, float]:
    """Return ``logs`` as Python numbers, nested ones under joined names."""
    result: dict[str, float] = {}
    for name, value in logs.items():
        if isinstance(value, dict):
            result.update(plain({f"{name}_{inner}": v for inner, v in value.items()}))
        else:
            result[name] = float(value)
    return result


class MetricsGuard:
    """Keeps a step from leaving traces in the metrics (`restore`)."""

    def __init__(self, model: Any) -> None:
        self._variables = [v for metric in model.metrics for v in metric.variables]
        self._values = [v.numpy() for v in self._variables]

    def restore(self) -> None:
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)
