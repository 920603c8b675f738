"""Trial of a model's training step and metrics, where several ranks compute them.

Keras' own metrics keep sums, and nearly all its losses are means over rows (sums are known). What a
``train_step``, and losses, metrics and layers that are the user's own, or hold functions that are,
compute is not known, so it is tried on a few rows: on all of them and in parts; see
`part_comparison`.
"""

from __future__ import annotations

import contextlib
import copy
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
    Key,
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
        model: the model.
        exchange: that of the model.
        training_data: rows as ``train_step`` takes them.
        data: the same rows as ``test_step`` takes them.

    Returns:
        Warnings of what is no mean over rows.

    Raises:
        ModelError: a step, loss or layer sums over rows, or a metric keeps what is no sum, or
            keeps it elsewhere than in variables.
    """
    rows = len(keras.tree.flatten(data)[0])

    def build(vary: bool) -> list[str]:
        with _preserve_state(model, exchange, vary=vary):
            model.test_step(data)
        return []

    compiled = (getattr(model, "_compile_loss", None), model._compile_metrics)
    if not all(each is None or each.built for each in compiled):
        try_varied(build)  # in eager mode, Keras makes losses and metrics at their first use
    custom_metrics = [m for m in getattr(model._compile_metrics, "metrics", ()) if _is_custom(m)]

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
    owners = [*all_layers(model), *getattr(model._compile_metrics, "metrics", ())]
    attributes = [(owner, _user_attributes(owner)) for owner in owners]
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
            for owner, values in attributes:
                for name in _user_attributes(owner):
                    del vars(owner)[name]
                vars(owner).update(values)


def _user_attributes(owner: keras.Layer | keras.metrics.Metric) -> dict[str, object]:
    """Return a layer's numbers (a count of steps in eager mode, say), or all of a metric."""
    kinds = object if isinstance(owner, keras.metrics.Metric) else int | float
    return {
        name: copy.copy(value) if isinstance(value, list | dict | set) else value
        for name, value in vars(owner).items()
        if isinstance(value, kinds) and name not in _of_keras()
    }


@functools.cache
def _of_keras() -> frozenset[str]:
    """Return the attributes that Keras itself gives layers, models and metrics."""
    kinds = keras.layers.Layer, keras.Sequential, keras.metrics.Metric
    return frozenset().union(*(vars(kind(name="fresh")) for kind in kinds))


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
        added: dict[str, list[Any]] = {}
        for layer in all_layers(model):  # some may have equal names
            added.setdefault(layer.name, []).extend(layer._losses)
        values: dict[Key, ArrayLike] = {(_ADDED, n): np.array(v) for n, v in added.items() if v}
        values |= {(GRADIENT, name): np.array(one) for name, one in gradients.items()}
        for variable, before in initial_statistics:
            values[CHANGE, variable.path] = measure_change(np.array(variable), before)
            variable.assign(before)
        return values

    low = bool(tf.config.list_logical_devices("GPU"))
    low = low or any(tf.as_dtype(layer.compute_dtype).size < 4 for layer in all_layers(model)[1:])
    differences = compare_parts(compute, rows, LOW_PRECISION if low else TOLERANCE)
    subjects = {
        _ADDED: f"the loss of layer '{{name}}' (add_loss or activity_regularizer) of model "
        f"{model.name!r}",
        GRADIENT: f"{_what_is_trained(model)} of model {model.name!r}",
        CHANGE: f"what variable '{{name}}' of model {model.name!r} changes by",
    }
    return report_parts(
        differences,
        subjects,
        "let it be the mean over rows, or of a function the values of all rows "
        "(keras.losses.Loss with reduction='sum' is a sum that is known); let an "
        "activity_regularizer be the sum over rows, which Keras divides by their number",
    )


def _what_is_trained(model: keras.Model) -> str:
    for name in ("train_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            return f"the loss in {name}"
    return loss_title(model)


def loss_title(model: keras.Model) -> str:
    """Return the names of a model's custom losses, for messages."""
    custom_losses = [repr(loss.name) for loss in _losses_of(model) if _is_custom(loss)]
    return f"loss {', '.join(custom_losses)}" if custom_losses else "the loss"


def _is_to_be_tried(model: keras.Model) -> bool:
    """Return whether a training step runs custom code, or compares rows."""
    operations = [*all_layers(model)[1:], *getattr(model, "operations", ())]
    return not _is_of_keras(type(model)) or any(map(_is_custom, [*operations, *_losses_of(model)]))


def _is_custom(thing: keras.Operation | keras.losses.Loss | keras.metrics.Metric) -> bool:
    """Return whether it is, or holds, code that is not Keras' own, or works across rows."""
    is_layer = isinstance(thing, keras.Layer) and not isinstance(thing, keras.layers.Lambda)
    if (isinstance(thing, keras.Operation) and not is_layer) or not _is_of_keras(type(thing)):
        return True
    settings = {**vars(thing), **vars(thing).get("_fn_kwargs", {})}
    functions = [value for value in settings.values() if callable(value)]
    # From the end, or without a number, an axis may be that of the rows.
    axes = keras.tree.flatten(settings.get("axis", -1))
    return (
        not all(map(_is_of_keras, functions))
        # A loss that a metric calls gives one number for a batch.
        or any(isinstance(f, keras.losses.Loss) or f in _OF_WHOLE_BATCHES for f in functions)
        or any(axis is None or axis == 0 or axis < -1 for axis in axes)
    )


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

    def after(*parts: slice) -> list[State]:
        compiled.reset_state()
        for part in parts:
            compiled.update_state(rows_of(y, part), rows_of(outputs, part))
        return [values_of(m.variables) for m in custom_metrics]

    # Halves that are equally large are how ranks share a batch.
    cut = rows // 2
    first, second = slice(0, cut), slice(cut, cut * 2)
    after(slice(0, cut * 2))
    at_once = results_of(custom_metrics)
    states = [after(first)]
    results = results_of(custom_metrics)
    states += [after(second), after(first, second)]
    in_turn = results_of(custom_metrics)
    for metric, result, *values in zip(custom_metrics, results, *states, strict=True):
        check_merge(
            metric,
            ([np.zeros_like(value) for value in values[0]], *values),
            result,
            "Keep sums, give the variable another aggregation ('mean', 'only_first_replica'), or "
            "train with num_workers=1",
        )
    return [
        f"metric {metric.name!r} of model {model.name!r} is not a mean over the batch's rows: the "
        "reported mean of the ranks' values differs from its value for the global batch"
        for metric, one, other in zip(custom_metrics, in_turn, at_once, strict=True)
        if not _are_close_results(one, other)
    ]


def check_merge(
    metric: keras.metrics.Metric, states: Sequence[State], result: Nest, advice: str
) -> None:
    """Check that a metric's variables are sums over rows, and all that its result is made of.

    Args:
        metric: the metric; it is reset.
        states: its variables' values to begin with, after one part of a batch, after another, and
            after both.
        result: of `results_of`, after the one part.
        advice: what to do about it.

    Raises:
        ModelError: one is none, or the result is made of something else, such as attributes.
    """
    for variable, initial, one, other, both in zip(metric.variables, *states, strict=True):
        if merge_of(variable) == SUM and not close(one + other - initial, both):
            raise ModelError(
                f"metric {metric.name!r} ({type(metric).__name__}) cannot be computed over several "
                f"processes: its variable {variable.name!r} is not a sum over rows (a maximum or a "
                f"running value, say). {advice}"
            )
    metric.reset_state()
    for variable, value in zip(metric.variables, states[1], strict=True):
        variable.assign(value)
    if not _are_close_results(results_of([metric])[0], result):
        raise ModelError(
            f"metric {metric.name!r} ({type(metric).__name__}) cannot be computed over several "
            "processes: its result does not follow from its variables, so that it has state "
            f"elsewhere (in attributes, say). Keep all state in variables (add_variable). {advice}"
        )


def results_of(metrics: Sequence[keras.metrics.Metric]) -> list[Nest]:
    """Return copies of metrics' results; of one that fails, as without rows, the error's text."""
    results: list[Nest] = []
    for metric in metrics:
        try:
            results.append(keras.tree.map_structure(np.array, metric.result()))
        except Exception as raised:  # the user's own code may fail in any way
            results.append(repr(raised))
    return results


def values_of(variables: Sequence[Any]) -> State:
    """Return copies of variables' values."""
    return [np.array(variable) for variable in variables]


def _are_close_results(one: Nest, other: Nest) -> bool:
    """Return whether two results of a metric differ by no more than rounding."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    pairs = zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True)
    return all(close(a, b) for a, b in pairs)


def _is_of_keras(thing: object) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("keras.")


def rows_of(values: Nest, part: slice) -> Nest:
    """Return some rows of all arrays."""
    return keras.tree.map_structure(lambda value: value[part], values)


def close(value: ArrayLike, other: ArrayLike) -> bool:
    """Return whether two results differ by no more than rounding."""
    return bool(np.allclose(value, other, rtol=_RTOL, atol=_ATOL, equal_nan=True))
