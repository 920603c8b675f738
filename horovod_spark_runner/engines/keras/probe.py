"""Trial of a model's training step and metrics, where several ranks compute them.

Keras' own metrics keep sums, and nearly all its losses are means over rows (sums are known). What a
``train_step``, losses, metrics and layers of the user's own compute is not known, so it is tried
on a few rows: on all of them and in parts; see `part_comparison`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from ...errors import ModelError
from ...training.part_comparison import (
    CHANGE,
    GRADIENT,
    LOW_PRECISION,
    TOLERANCE,
    Values,
    compare_parts,
    measure_change,
    report_parts,
    try_varied,
    vary_weights,
)
from .metrics import SUM, merge_of, metric_variables
from .model import Nest, all_layers, replaced
from .optimizers import leaf_optimizers
from .state import nothing_drawn, tracked_variables

if TYPE_CHECKING:  # loads Horovod, which Spark's Python workers must not
    from .step import DistributedStep

_RTOL, _ATOL = 1e-3, 1e-5
_ADDED = "added"

# Keras' own losses that are ratios over a whole batch, or compare its rows with each other.
_OF_WHOLE_BATCHES = (keras.losses.circle, keras.losses.dice, keras.losses.tversky)

# The values of a metric's variables.
State = list[np.ndarray]


def try_model(
    model: keras.Model, exchange: DistributedStep, training_data: Nest, data: Nest
) -> list[str]:
    """Try a model's training step and metrics on some rows; leave no trace in it.

    Args:
        model: the model, all its metrics and losses built.
        exchange: that of the model.
        training_data: rows as ``train_step`` takes them.
        data: the same rows as ``test_step`` takes them.

    Returns:
        Warnings of what is no mean over rows.

    Raises:
        ModelError: a step, loss or layer sums over rows, or a metric keeps what is no sum.
    """
    rows = len(keras.tree.flatten(data)[0])
    custom_metrics = [
        m for m in getattr(model._compile_metrics, "metrics", ()) if _is_custom_metric(m)
    ]

    def step(vary: bool) -> list[str]:
        with _preserve_state(model, exchange, vary=vary):
            return _try_step(model, exchange, training_data, rows)

    def metrics(vary: bool) -> list[str]:
        with _preserve_state(model, exchange, vary=vary):
            return _try_metrics(model, custom_metrics, data, rows)

    step_warnings = [*try_varied(step)] if _is_to_be_tried(model) else []
    return list(dict.fromkeys([*step_warnings, *(try_varied(metrics) if custom_metrics else ())]))


@contextlib.contextmanager
def _preserve_state(model: keras.Model, exchange: DistributedStep, *, vary: bool) -> Iterator[None]:
    """Restore a model's state afterwards: weights, counters, seeds and metrics.

    Args:
        model: the model.
        exchange: that of the model.
        vary: whether it has other weights meanwhile, by which rows differ.
    """
    variables = {id(v): v for v in tracked_variables(model, exchange.optimizers)}
    # Slots of optimizers change where gradients are applied only.
    slots = {id(v) for o in leaf_optimizers(exchange.optimizers) for v in o.variables if v.shape}
    saved = [(v, np.array(v)) for key, v in variables.items() if key not in slots]
    numbers = [
        (vars(layer), {k: v for k, v in vars(layer).items() if _may_count(k, v)})
        for layer in all_layers(model)
    ]
    trained = {id(v) for v in model.trainable_weights}
    with nothing_drawn():
        try:
            for variable, value in saved:
                if vary and id(variable) in trained and value.dtype.kind == "f":
                    variable.assign(vary_weights(value))
            for optimizer in exchange.optimizers:
                if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                    optimizer.dynamic_scale.assign(1.0)  # half precision holds no more
            yield
        finally:
            if any(id(variable) not in variables for variable in metric_variables(model)):
                model.reset_metrics()  # those that were made here
            for variable, value in saved:
                variable.assign(value)
            for held, values in numbers:
                for name in [name for name, value in held.items() if _may_count(name, value)]:
                    del held[name]
                held.update(values)


def _may_count(name: str, value: object) -> bool:
    """Return whether an attribute is a user's number, such as a count of steps in eager mode."""
    return isinstance(value, int | float) and name not in _of_keras()


@functools.cache
def _of_keras() -> frozenset[str]:
    """Return the attributes that Keras itself gives layers and models."""
    fresh = keras.layers.Layer(name="fresh"), keras.Sequential(name="fresh")
    return frozenset().union(*map(vars, fresh))


# -- the training step -----------------------------------------------------------------------------


def _try_step(model: keras.Model, exchange: DistributedStep, data: Nest, rows: int) -> list[str]:
    statistics = [v for v in model.non_trainable_weights if v.dtype != "string"]
    initial_statistics = [(v, np.array(v)) for v in statistics]
    sums: dict[str, list[tf.Tensor]] = {}

    def compute(chosen: np.ndarray, fraction: float) -> Values:
        if fraction == 1.0:
            sums.clear()
        batch = keras.tree.map_structure(lambda value: tf.gather(value, chosen), data)
        with _treat_rows_alone():
            gradients = exchange.try_step(batch, fraction, sums)
        values = {(_ADDED, str(n)): np.array(loss) for n, loss in enumerate(model.losses)}
        values |= {(GRADIENT, name): np.array(one) for name, one in gradients.items()}
        for variable, before in initial_statistics:
            values[CHANGE, variable.path] = measure_change(np.array(variable), before)
            variable.assign(before)
        return values

    low = bool(tf.config.list_logical_devices("GPU"))
    low = low or any(tf.as_dtype(layer.compute_dtype).size < 4 for layer in all_layers(model)[1:])
    differences = compare_parts(compute, rows, LOW_PRECISION if low else TOLERANCE)
    subjects = {
        _ADDED: f"loss {{name}} that a layer adds (add_loss) of model {model.name!r}",
        GRADIENT: f"{_what_is_trained(model)} of model {model.name!r}",
        CHANGE: f"what variable '{{name}}' of model {model.name!r} changes by",
    }
    return report_parts(
        differences,
        subjects,
        "let it be the mean over rows, or of a function the values of all rows "
        "(keras.losses.Loss with reduction='sum' is a sum that is known)",
    )


def _what_is_trained(model: keras.Model) -> str:
    for name in ("train_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            return f"the loss in {name}"
    return loss_title(model)


def loss_title(model: keras.Model) -> str:
    """Return the names of a model's custom losses, for messages."""
    custom_losses = [repr(loss.name) for loss in _losses_of(model) if _is_custom_loss(loss)]
    return f"loss {', '.join(custom_losses)}" if custom_losses else "the loss"


def _is_to_be_tried(model: keras.Model) -> bool:
    """Return whether a training step runs custom code, or compares rows."""
    operations = [*all_layers(model)[1:], *getattr(model, "operations", ())]
    return (
        not _is_of_keras(type(model))
        or any(_is_custom(each) for each in operations)
        or any(map(_is_custom_loss, _losses_of(model)))
    )


def _is_custom(operation: object) -> bool:
    is_layer = isinstance(operation, keras.Layer) and not isinstance(operation, keras.layers.Lambda)
    return not is_layer or not _is_of_keras(type(operation))


def _losses_of(model: keras.Model) -> list[keras.losses.Loss]:
    flat = getattr(getattr(model, "_compile_loss", None), "_flat_losses", None) or ()
    return [output.loss for output in flat]


@contextlib.contextmanager
def _treat_rows_alone() -> Iterator[None]:
    """Make Keras' layers that drop values, or take moments, treat each row separately."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            plain = not layer._layers or isinstance(layer, keras.layers.RNN)
            if plain and _is_of_keras(type(layer)) and layer._call_has_training_arg:
                kwargs["training"] = False
            return original(layer, *args, **kwargs)

        return call

    with replaced(keras.Layer, "__call__", wrap):
        yield


# -- metrics ---------------------------------------------------------------------------------------


def _try_metrics(
    model: keras.Model, custom_metrics: Sequence[keras.metrics.Metric], data: Nest, rows: int
) -> list[str]:
    compiled: keras.metrics.Metric = model._compile_metrics
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    if y is None:
        return []
    outputs = model(x, training=False)
    if not all(np.shape(value)[:1] == (rows,) for value in keras.tree.flatten(outputs)):
        return []

    def after(*parts: slice) -> list[tuple[State, Nest]]:
        compiled.reset_state()
        for part in parts:
            compiled.update_state(rows_of(y, part), rows_of(outputs, part))
        return [(values_of(m.variables), m.result()) for m in custom_metrics]

    # Halves that are equally large are how ranks share a batch.
    cut = rows // 2
    first, second = slice(0, cut), slice(cut, cut * 2)
    states = [[state for state, _ in after(*parts)] for parts in ((first,), (second,))]
    in_turn, at_once = after(first, second), after(slice(0, cut * 2))
    zero = [[np.zeros_like(value) for value in state] for state in states[0]]
    for metric, a, b, (both, _), initial in zip(
        custom_metrics, *states, in_turn, zero, strict=True
    ):
        check_sums(
            metric,
            (initial, a, b, both),
            "Keep sums, give the variable another aggregation ('mean', 'only_first_replica'), or "
            "train with num_workers=1",
        )
    return [
        f"metric {metric.name!r} of model {model.name!r} is no mean over the rows of a batch: "
        "every rank computes it from its own rows, and their mean, which is reported, is another "
        "number than that of the global batch"
        for metric, (_, one), (_, other) in zip(custom_metrics, in_turn, at_once, strict=True)
        if not _are_close_results(one, other)
    ]


def check_sums(metric: keras.metrics.Metric, states: Sequence[State], advice: str) -> None:
    """Check that a metric's variables are sums over rows.

    Args:
        metric: the metric.
        states: its variables' values to begin with, after one part of a batch, after another, and
            after both.
        advice: what to do about it.

    Raises:
        ModelError: one is none.
    """
    for variable, initial, one, other, both in zip(metric.variables, *states, strict=True):
        if merge_of(variable) == SUM and not close(one + other - initial, both):
            raise ModelError(
                f"metric {metric.name!r} ({type(metric).__name__}) cannot be computed over several "
                f"processes: its variable {variable.name!r} is not a sum over rows (a maximum or a "
                f"running value, say). {advice}"
            )


def values_of(variables: Sequence[Any]) -> State:
    """Return copies of variables' values."""
    return [np.array(variable) for variable in variables]


def _are_close_results(one: Nest, other: Nest) -> bool:
    """Return whether two results of a metric differ by no more than rounding."""
    pairs = zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True)
    return all(close(a, b) for a, b in pairs)


def _is_of_keras(thing: object) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("keras.")


def _is_custom_metric(metric: keras.metrics.Metric) -> bool:
    function = getattr(metric, "_fn", None)  # of a MeanMetricWrapper
    custom_update = not _is_of_keras(type(metric).update_state)
    return custom_update or (function is not None and not _is_of_keras(function))


def _is_custom_loss(loss: keras.losses.Loss) -> bool:
    function = getattr(loss, "fn", None)
    if function is None:
        return not _is_of_keras(type(loss).call)
    return not _is_of_keras(function) or function in _OF_WHOLE_BATCHES


def rows_of(values: Nest, part: slice) -> Nest:
    """Return some rows of all arrays."""
    return keras.tree.map_structure(lambda value: value[part], values)


def close(value: ArrayLike, other: ArrayLike) -> bool:
    """Return whether two results differ by no more than rounding."""
    return bool(np.allclose(value, other, rtol=_RTOL, atol=_ATOL, equal_nan=True))
