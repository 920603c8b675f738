"""Metrics that are given to evaluate by, on their way to a worker. Loads no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import InvalidInputError


def portable_metrics(given: object) -> object:
    """Return metrics as what can be pickled; see `Engine.portable_metrics`."""
    if isinstance(given, Mapping):
        return {str(name): _checked(one) for name, one in given.items()}
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [_checked(one) for one in given]
    return [_checked(given)]


def _checked(metric: object) -> object:
    if isinstance(metric, str) or (callable(metric) and not isinstance(metric, type)):
        return metric
    hint = f"; give an object, {metric.__name__}(…)" if isinstance(metric, type) else ""
    raise InvalidInputError(
        f"{metric!r:.200} is no metric of a PyTorch model{hint}. A metric is 'accuracy', 'mae' or "
        "'mse', a function of outputs and labels, or 'spark:…'; a dictionary gives them names"
    )
