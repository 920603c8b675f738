"""Metrics requested for an evaluation: names, functions and objects, on their way to a worker.

Loads no framework: who gives a Keras object has loaded it.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidInputError

# What Keras chooses a metric for by the shapes of labels and outputs.
_BY_SHAPE = ("accuracy", "acc", "crossentropy", "ce")


@dataclass(frozen=True)
class _MetricObject:
    """A Keras metric without its variables.

    Attributes:
        name: its name.
        kind: its class.
        config: the arguments it is made with.
        direct: whether they are those of its constructor, as functions of the user's own must be.
    """

    name: str
    kind: type
    config: Mapping[str, object] = field(repr=False)
    direct: bool = False

    def make(self) -> object:
        """Return the metric.

        Raises:
            InvalidInputError: its configuration does not suffice.
        """
        try:
            if self.direct:
                return self.kind(**self.config)
            return self.kind.from_config(dict(self.config))  # type: ignore[attr-defined]
        except Exception as error:  # the user's own constructor may fail in any way
            raise InvalidInputError(
                f"metric {self.name!r} cannot be made again from its get_config(): "
                f"{type(error).__name__}: {error}; let get_config() of {self.kind.__name__} return "
                "all arguments of its constructor"
            ) from error


def portable_metrics(metrics: object) -> object:
    """Return metrics in a form that can be pickled; see `Engine.portable_metrics`."""
    if isinstance(metrics, str):
        return metrics
    if isinstance(metrics, Mapping):
        return {str(output): portable_metrics(inner) for output, inner in metrics.items()}
    if isinstance(metrics, Sequence):
        return [portable_metrics(inner) for inner in metrics]
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(metrics, keras.metrics.Metric):
        return _portable(metrics, keras)
    if callable(metrics) and not isinstance(metrics, type):
        return metrics
    hint = f"; give an object, {metrics.__name__}(…)" if isinstance(metrics, type) else ""
    raise InvalidInputError(
        f"{metrics!r:.200} is no metric{hint}. A metric is the name of one of Keras', an object of "
        "keras.metrics, a function of labels and predictions, or 'spark:…'"
    )


def _portable(metric: Any, keras: Any) -> _MetricObject:
    # Its configuration would name the function, which only the user's own program knows.
    if type(metric) is keras.metrics.MeanMetricWrapper:
        arguments = {"fn": metric._fn, "name": metric.name, "dtype": metric.dtype}
        config = {**arguments, **_untracked(metric._fn_kwargs)}
        return _MetricObject(metric.name, type(metric), config, direct=True)
    try:
        return _MetricObject(metric.name, type(metric), _untracked(metric.get_config()))
    except NotImplementedError as error:
        raise InvalidInputError(
            f"metric {metric.name!r} has no get_config(), by which it is made again on Spark's "
            "workers"
        ) from error


def _untracked(value: Any) -> Any:
    """Return plain containers for Keras' own, which can be pickled but not read again."""
    if isinstance(value, dict):
        return {name: _untracked(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_untracked(inner) for inner in value]
    if isinstance(value, set):
        return set(value)
    return tuple(map(_untracked, value)) if type(value) is tuple else value


def make_metrics(portable: object) -> object:
    """Return the metrics behind `portable_metrics`' result, for ``Model.compile``.

    Raises:
        InvalidInputError: a name is none of Keras', or an object cannot be made again.
    """
    if isinstance(portable, str):
        _check_exists(portable)
        return portable
    if isinstance(portable, Mapping):
        return {output: make_metrics(inner) for output, inner in portable.items()}
    if isinstance(portable, list):
        return [make_metrics(inner) for inner in portable]
    return portable.make() if isinstance(portable, _MetricObject) else portable


def _check_exists(name: str) -> None:
    import keras

    if name in _BY_SHAPE:
        return
    try:
        keras.metrics.get(name)
    except TypeError as error:
        raise InvalidInputError(
            f"metric {name!r} takes arguments: give the object, keras.metrics.{name}(…)"
        ) from error
    except ValueError as error:
        names = [*_BY_SHAPE, *dir(keras.metrics)]
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
        meant = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
        raise InvalidInputError(
            f"there is no metric {name!r}{meant}; give the name of one in keras.metrics, or one of "
            "Spark's, 'spark:…'"
        ) from error
