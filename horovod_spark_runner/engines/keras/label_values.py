"""Labels that a compiled loss would take for others, or that have no meaning for it.

Keras cuts fractions off the numbers of classes, names neither column nor value where a class is not
among the outputs' (on a GPU its loss is NaN), and has a loss without a lowest value where the label
of one of two classes is neither 0 nor 1 nor in between. Models of several outputs are left to it,
as in ``fit``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from ...errors import ModelError
from .model import Nest

_OF_TWO = (keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy)
# By which computed probabilities may leave 0 to 1: 1 - 0.9 - 0.1 is below 0.
_ROUNDING = 1e-6


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
        # Once Keras knows the losses, which it makes at their first use.
        self._check: Callable[[np.ndarray], None] | None = None

    def __call__(self, labels: Nest) -> None:
        """Check labels, arrays in the structure the losses take.

        Raises:
            ModelError: some cannot be meant; the message has the columns and a value.
        """
        values = keras.tree.flatten(labels)
        losses = getattr(self._model._compile_loss, "_flat_losses", None)
        if losses is None or not len(losses) == len(values) == len(self._outputs) == 1:
            return
        if self._check is None:
            self._check = self._check_of(losses[0].loss)
        self._check(values[0])

    def _check_of(self, loss: keras.losses.Loss) -> Callable[[np.ndarray], None]:
        """Return a check of labels, which does nothing for a custom loss."""
        function, arguments = getattr(loss, "fn", None), getattr(loss, "_fn_kwargs", {})
        shape = _shape_of(self._outputs[0])
        if not _is_of_keras(loss):
            return lambda values: None
        if function is keras.losses.sparse_categorical_crossentropy:
            classes = None if shape is None else shape[arguments.get("axis", -1)]
            ignored = arguments.get("ignore_class")
            prefix = f"loss {loss.name!r} takes numbers of classes, but {self._subject}"
            return lambda values: _check_classes(prefix, values, classes, ignored)
        alone = shape is not None and len(shape) == 2 and shape[1] == 1
        if function in _OF_TWO and alone and not self._weighted:
            range_prefix = (
                f"loss {loss.name!r} takes 0 and 1, or what is in between, but {self._subject}"
            )
            return lambda values: _check_of_two(range_prefix, values)
        return lambda values: None


def _is_of_keras(loss: keras.losses.Loss) -> bool:
    """Return whether a loss reads labels by Keras' own code, not by a custom method."""
    kind = type(loss)
    overrides_call = kind.__call__ is not keras.losses.Loss.__call__
    return not overrides_call and kind.call.__module__.startswith("keras.")


def _shape_of(output: Any) -> tuple[int | None, ...] | None:
    """Return the shape of an output; ``None`` if it is not known."""
    shape = getattr(output, "shape", None)
    return None if shape is None or getattr(shape, "rank", 0) is None else tuple(shape)


def _check_classes(
    prefix: str, values: np.ndarray, classes: int | None, ignored: int | None
) -> None:
    if values.dtype.kind == "f":
        wrong = values[values != np.floor(values)]
        if wrong.size:
            raise ModelError(
                f"{prefix} fractions such as {wrong.flat[0]:g}, which Keras would cut off; index "
                "the classes (pyspark.ml.feature.StringIndexer), or compile the model with a "
                "loss for real numbers, such as 'mse'"
            )
    if classes is None or not values.size:
        return
    if values.min() < 0 or values.max() >= classes:
        wrong = values[(values < 0) | (values >= classes)]
        wrong = wrong[wrong != ignored] if ignored is not None else wrong
        if wrong.size:
            raise ModelError(
                f"{prefix} {wrong.flat[0]:g}, and the output has {classes} classes, 0 to "
                f"{classes - 1}; index them from 0 (pyspark.ml.feature.StringIndexer), or give "
                "the output as many numbers as there are classes"
            )


def _check_of_two(prefix: str, values: np.ndarray) -> None:
    low, high = -_ROUNDING, 1 + _ROUNDING
    if values.size and (values.min() < low or values.max() > high):
        wrong: Any = values[(values < low) | (values > high)].flat[0]
        raise ModelError(
            f"{prefix} {wrong:.8g}, for which it has no lowest value; turn the two classes into 0 "
            "and 1, or compile the model for several classes ('sparse_categorical_crossentropy') "
            "or real numbers ('mse')"
        )
