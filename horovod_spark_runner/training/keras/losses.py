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
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from .collectives import Part, differentiable_sum, sum_over_ranks
from .metric_state import counting_means
from .protocols import Loss, Nest
from .scope import Scope, replaced

_MEANS = ("sum_over_batch_size", "mean")
# A method as its class holds it.
_Loss = Callable[..., tf.Tensor]


@contextlib.contextmanager
def parts_of_a_whole(part: Part, scope: Scope) -> Iterator[None]:
    """Let Keras's losses, means and synchronised layers count for all ranks, while in a step."""
    if part.size == 1:
        yield
        return
    context = tf.distribute.get_replica_context()
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(keras.losses.Loss, "__call__", _loss_of(part, scope)))
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
    """Let nothing be summed over ranks meanwhile: Keras's optimizers would add gradients again."""
    context = tf.distribute.get_replica_context()
    ours = None if context is None else vars(context).pop("all_reduce", None)
    try:
        yield
    finally:
        if ours is not None:
            context.all_reduce = ours


def _loss_of(part: Part, scope: Scope) -> Callable[[_Loss], _Loss]:
    def wrap(original: _Loss) -> _Loss:
        @functools.wraps(original)
        def call(
            self: keras.losses.Loss,
            y_true: tf.Tensor,
            y_pred: tf.Tensor,
            sample_weight: tf.Tensor | None = None,
        ) -> tf.Tensor:
            with noting_masks(self) as masks:
                loss = original(self, y_true, y_pred, sample_weight)
            if self.reduction == "sum":
                scope.note()
                return tf.math.divide_no_nan(loss, part.fraction(loss.dtype))
            mask = merged_mask(y_pred, masks)
            count = _denominator(self.reduction, mask, sample_weight, loss.dtype)
            if count is None:
                return loss
            count = tf.stop_gradient(count) * part.present(loss.dtype)
            (total,) = sum_over_ranks([count], scope.name("denominator"))
            return loss * tf.math.divide_no_nan(count, part.fraction(loss.dtype) * total)

        return call

    return wrap


@contextlib.contextmanager
def noting_masks(loss: Loss) -> Iterator[list[tf.Tensor]]:
    """Note the masks that a loss itself puts on its values while called, as ``ignore_class`` does.

    Args:
        loss: the loss; what its ``call`` returns tells.
    """
    masks: list[tf.Tensor] = []
    own = vars(loss).get("call")
    original = loss.call

    @functools.wraps(original)
    def call(*args: Nest, **kwargs: Nest) -> Nest:
        values = original(*args, **kwargs)
        mask = getattr(values, "_keras_mask", None)
        if mask is not None:
            masks.append(mask)
        return values

    loss.call = call
    try:
        yield masks
    finally:
        if own is None:
            del loss.call
        else:
            loss.call = own


def merged_mask(y_pred: Nest, masks: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Return the mask by which Keras weighs the values of a loss; ``None`` if there is none.

    Args:
        y_pred: what the loss was called with.
        masks: what `noting_masks` gave.
    """
    mask = getattr(y_pred, "_keras_mask", None)
    if not masks:
        return mask
    return masks[-1] if mask is None else mask & masks[-1]


def _denominator(
    reduction: str | None, mask: tf.Tensor | None, sample_weight: tf.Tensor | None, dtype: tf.DType
) -> tf.Tensor | None:
    """Return what a loss divides by, where that is not the number of rows times a constant."""
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
