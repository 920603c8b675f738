"""Losses and means of one rank's rows as parts of those of the global batch; labels for losses.

A step averages the ranks' gradients by their rows. That is the gradient of the global batch where
a loss is a mean over rows. Keras also has losses that are sums, or means over what is not masked or
over the sum of sample weights; their denominators are those of the global batch here. With
fraction f of the rows, and the local loss S/d of the sum S over the denominator d, a rank takes
S/(f·D), D being the sum of all ranks' d: the mean of the ranks' losses by f is then sum(S)/D.

Labels are checked because Keras cuts fractions off the numbers of classes, names neither column nor
value where a class is not among the outputs' (on a GPU its loss is NaN), and has a loss without a
lowest value where the label of one of two classes is neither 0 nor 1 nor in between. Models of
several outputs are left to it, as in ``fit``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...errors import ModelError
from ...training.label_values import check_classes, outside
from .exchange import Part, Scope, differentiable_sum
from .metrics import counting_means, reduced_by
from .model import Nest

_MEANS = ("sum_over_batch_size", "mean")
_Reduce = Callable[..., tf.Tensor]
_OF_TWO = (keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy)
# By which computed probabilities may leave 0 to 1: 1 - 0.9 - 0.1 is below 0.
_ROUNDING = 1e-6


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
            (total,) = part.sum([count], scope.name("denominator"))
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


class LabelCheck:
    """Checks the labels of every batch, of a model with one output.

    Args:
        model: the compiled model.
        outputs: what its call gives; ``None`` if it has no call.
        columns: the label columns, for messages.
        weighted: whether rows have weights of which some are 0: these may hold anything.
    """

    def __init__(
        self, model: keras.Model, outputs: Nest | None, columns: Sequence[str], *, weighted: bool
    ) -> None:
        self._model = model
        self._outputs = keras.tree.flatten(outputs)
        names = ", ".join(map(repr, columns))
        many = len(columns) > 1
        self._subject = (
            f"the label columns {names} hold" if many else f"the label column {names} holds"
        )
        self._weighted = weighted

    def __call__(self, labels: Nest) -> None:
        """Check labels, arrays in the structure the losses take.

        Raises:
            ModelError: some cannot be meant; the message has the columns and a value.
        """
        values = keras.tree.flatten(labels)
        losses = getattr(self._model._compile_loss, "_flat_losses", None)
        if losses is None or not len(losses) == len(values) == len(self._outputs) == 1:
            return
        loss, shape = losses[0].loss, _shape_of(self._outputs[0])
        if not _is_of_keras(loss):
            return
        function, arguments = getattr(loss, "fn", None), getattr(loss, "_fn_kwargs", {})
        if function is keras.losses.sparse_categorical_crossentropy:
            prefix = f"loss {loss.name!r} takes numbers of classes, but {self._subject}"
            classes = None if shape is None else shape[arguments.get("axis", -1)]
            check_classes(prefix, values[0], classes, arguments.get("ignore_class"))
        elif function in _OF_TWO and shape and shape[1:] == (1,) and not self._weighted:
            prefix = f"loss {loss.name!r} takes 0 and 1, or what is in between, but {self._subject}"
            _check_of_two(prefix, values[0])


def _is_of_keras(loss: keras.losses.Loss) -> bool:
    """Return whether a loss reads labels by Keras' own code, not by a custom method."""
    kind = type(loss)
    overrides_call = kind.__call__ is not keras.losses.Loss.__call__
    return not overrides_call and kind.call.__module__.startswith("keras.")


def _shape_of(output: object) -> tuple[int | None, ...] | None:
    """Return the shape of an output; ``None`` if it is not known."""
    shape = getattr(output, "shape", None)
    return None if shape is None or getattr(shape, "rank", 0) is None else tuple(shape)


def _check_of_two(prefix: str, values: np.ndarray) -> None:
    wrong = outside(values, -_ROUNDING, 1 + _ROUNDING)
    if wrong.size:
        raise ModelError(
            f"{prefix} {wrong[0]:.8g}, outside [0, 1]: the loss is unbounded; turn the two classes "
            "into 0 and 1, or compile the model for several classes "
            "('sparse_categorical_crossentropy') or floats ('mse')"
        )
