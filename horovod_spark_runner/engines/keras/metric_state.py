"""State of metrics, and reductions of losses, where several processes share the rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss

from ...errors import ModelError
from .model import Metric, MetricVariable, Nest, replaced

SUM, MEAN, FIRST = "sum", "mean", "first"
# A method as its class holds it.
_Update = Callable[..., object]
_Reduce = Callable[..., tf.Tensor]


def metric_variables(model: keras.Model) -> list[MetricVariable]:
    """Return the variables in which the model's metrics keep their sums."""
    return variables_of(model.metrics)


def variables_of(metrics: Iterable[Metric]) -> list[MetricVariable]:
    """Return the variables of some metrics, each once."""
    variables = {id(v): v for metric in metrics for v in metric.variables}
    return list(variables.values())


def merge_of(variable: MetricVariable) -> str:
    """Return how a metric's variable is merged over all processes.

    ``"sum"``, ``"mean"``, or ``"first"`` where one process's stands for all.
    """
    aggregation = variable.aggregation
    return aggregation if aggregation in (SUM, MEAN) else FIRST


@contextlib.contextmanager
def counting_means(rows: Callable[[], tf.Tensor], *, exact: bool = False) -> Iterator[None]:
    """Make Keras' means weigh one number for a whole batch by the batch's rows.

    Args:
        rows: returns how many, or a part of all.
        exact: refuse what would be no mean over rows.

    Raises:
        ModelError: rows have weights, but a metric's function gives one number for all of them.
    """

    def wrap(original: _Update) -> _Update:
        @functools.wraps(original)
        def update_state(metric: Metric, values: Nest, sample_weight: Nest = None) -> object:
            whole = tf.convert_to_tensor(values).shape.rank == 0
            if whole and sample_weight is None:
                sample_weight = rows()
            elif whole and exact and tf.convert_to_tensor(sample_weight).shape.rank != 0:
                raise ModelError(
                    f"metric {metric.name!r} gives one number for a whole batch, in which the "
                    "weights of its rows cannot count; let its function return a number per row, "
                    "or evaluate without weights"
                )
            return original(metric, values, sample_weight)

        return update_state

    with replaced(keras.metrics.Mean, "update_state", wrap):
        yield


def reduced_by(wrap: Callable[[_Reduce], _Reduce]) -> contextlib.AbstractContextManager[None]:
    """Replace the function by which Keras' losses are reduced to a number.

    It is called with the values, and ``sample_weight``, ``mask``, ``reduction`` and ``dtype`` by
    name. The mask is that of the predictions and of the loss itself (``ignore_class``).

    Args:
        wrap: makes it of Keras' own.
    """
    return replaced(keras_loss, "reduce_weighted_values", wrap)
