"""Losses and means of one rank's rows as parts of those of the global batch.

A step averages the ranks' gradients by their rows. That is the gradient of the global batch where
a loss is a mean over rows. Keras also has losses that are sums, or means over what is not masked or
over the sum of sample weights; their denominators are those of the global batch here. With
fraction f of the rows, and the local loss S/d of the sum S over the denominator d, a rank takes
S/(f·D), D being the sum of all ranks' d: the mean of the ranks' losses by f is then sum(S)/D.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from .exchange import Part, Scope, differentiable_sum, sum_over_ranks
from .metrics import counting_means, reduced_by

_MEANS = ("sum_over_batch_size", "mean")
_Reduce = Callable[..., tf.Tensor]


@contextlib.contextmanager
def parts_of_a_whole(part: Part, scope: Scope) -> Iterator[None]:
    """Make Keras' losses, means and synchronised layers count all ranks' rows within a step."""
    if part.size == 1:
        yield
        return
    context = tf.distribute.get_replica_context()
    with contextlib.ExitStack() as stack:
        stack.enter_context(reduced_by(_reducing(part, scope)))
        if not part.equal:

            def rows() -> tf.Tensor:
                scope.note()
                return part.fraction(tf.float32) * part.size

            stack.enter_context(counting_means(rows))
        if context is not None:
            # What layers call that share their statistics, as synchronised batch normalisation.
            context.all_reduce = functools.partial(_all_reduce, part, scope)
            stack.callback(vars(context).pop, "all_reduce", None)
        yield


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Suspend sums over ranks: Keras' optimizers would add gradients again."""
    context = tf.distribute.get_replica_context()
    ours = None if context is None else vars(context).pop("all_reduce", None)
    try:
        yield
    finally:
        if ours is not None:
            context.all_reduce = ours


def _reducing(part: Part, scope: Scope) -> Callable[[_Reduce], _Reduce]:
    def wrap(original: _Reduce) -> _Reduce:
        @functools.wraps(original)
        def reduce(values: tf.Tensor, **settings: Any) -> tf.Tensor:
            loss = original(values, **settings)
            reduction = settings["reduction"]
            if reduction == "sum":
                scope.note()
                return tf.math.divide_no_nan(loss, part.fraction(loss.dtype))
            count = _denominator(reduction, settings["mask"], settings["sample_weight"], loss.dtype)
            if count is None:
                return loss
            count = tf.stop_gradient(count) * part.present(loss.dtype)
            (total,) = sum_over_ranks([count], scope.name("denominator"))
            return loss * tf.math.divide_no_nan(count, part.fraction(loss.dtype) * total)

        return reduce

    return wrap


def _denominator(
    reduction: str | None, mask: tf.Tensor | None, sample_weight: tf.Tensor | None, dtype: tf.DType
) -> tf.Tensor | None:
    """Return a loss's divisor, unless it is the number of rows times a constant."""
    if mask is not None and reduction in _MEANS:
        return tf.reduce_sum(tf.cast(mask, dtype))
    if reduction != "mean_with_sample_weight":
        return None
    if sample_weight is None:
        return None if mask is None else tf.reduce_sum(tf.cast(mask, dtype))
    weight = tf.cast(sample_weight, dtype)
    if mask is not None:
        mask = tf.cast(mask, dtype)
        if mask.shape.rank == (weight.shape.rank or 0) + 1:
            weight = tf.expand_dims(weight, -1)
        elif weight.shape.rank == (mask.shape.rank or 0) + 1:
            mask = tf.expand_dims(mask, -1)
        weight *= mask
    return tf.reduce_sum(weight)


def _all_reduce(
    part: Part, scope: Scope, reduce_op: object, value: tf.Tensor, *_: object
) -> tf.Tensor:
    summed = tf.nest.map_structure(
        lambda v: differentiable_sum(v, part, scope.name("statistic")), value
    )
    if str(getattr(reduce_op, "name", reduce_op)).upper().endswith("MEAN"):
        return tf.nest.map_structure(lambda v: v / tf.cast(part.size, v.dtype), summed)
    return summed
