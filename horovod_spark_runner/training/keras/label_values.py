"""Labels that a compiled loss would take for others, or that have no meaning for it.

Keras cuts fractions off the numbers of classes, names neither column nor value where a class is not
among the outputs' (on a GPU its loss is NaN), and has a loss without a lowest value where the label
of one of two classes is neither 0 nor 1 nor in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from ...errors import ModelError
from .binding import name_choices
from .protocols import Nest

_OF_TWO = (keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy)
# By which computed probabilities may leave 0 to 1: 1 - 0.9 - 0.1 is below 0.
_ROUNDING = 1e-6


class _Rule(NamedTuple):
    """The labels at a place among the flattened ones, and what has to hold for them."""

    place: int
    check: Callable[[np.ndarray], None]


class LabelCheck:
    """Checks the labels of every batch.

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
        if len(columns) == 1:
            told = [f"the label column {columns[0]!r} holds"] * len(self._outputs)
        elif len(self._outputs) == 1:
            told = [f"the label columns {', '.join(map(repr, columns))} hold"]
        else:  # by the names that label_cols gives them
            names = name_choices(model, outputs)[0]
            told = [f"the label of output {name!r} holds" for name in names]
        self._told = told
        self._weighted = weighted
        # Once Keras knows the losses, which it makes at their first use.
        self._rules: list[_Rule] | None = None

    def __call__(self, labels: Nest) -> None:
        """Check labels, arrays in the structure the losses take.

        Raises:
            ModelError: some cannot be meant; the message has the column, or of several the output,
                and a value.
        """
        if self._rules is None:
            if not getattr(self._model._compile_loss, "built", False):
                return
            self._rules = self._find(labels)
        if self._rules:
            arrays = keras.tree.flatten(labels)
            for rule in self._rules:
                rule.check(arrays[rule.place])

    def _find(self, labels: Nest) -> list[_Rule]:
        paths = [path for path, _ in keras.tree.flatten_with_path(labels)]
        if len(paths) != len(self._outputs):
            return []
        rules = []
        for loss in self._model._compile_loss._flat_losses:
            # Of a single output, Keras may call it by its name.
            path = paths[0] if len(paths) == 1 else tuple(loss.path)
            if path not in paths:  # a loss that takes several outputs together
                continue
            place = paths.index(path)
            check = self._check_of(loss.loss, place, counts=loss.loss_weights != 0)
            if check is not None:
                rules.append(_Rule(place, check))
        return rules

    def _check_of(
        self, loss: keras.losses.Loss, place: int, *, counts: bool
    ) -> Callable[[np.ndarray], None] | None:
        """Return what checks the labels at a place, if their loss is one of Keras' own.

        Args:
            loss: the loss.
            place: of its output, among the flattened ones.
            counts: whether it is part of the model's loss.
        """
        if not _is_of_keras(loss):
            return None
        function, given = getattr(loss, "fn", None), getattr(loss, "_fn_kwargs", {})
        name, told = f"loss {loss.name!r}", self._told[place]
        if function is keras.losses.sparse_categorical_crossentropy:
            shape = _shape_of(self._outputs[place])
            # Without a weight, too, Keras ends where a class is not among the outputs'.
            classes = None if shape is None else shape[given.get("axis", -1)]
            ignored = given.get("ignore_class")
            said = f"{name} takes numbers of classes, but {told}"
            return lambda values: _check_classes(said, values, classes, ignored)
        if function in _OF_TWO and counts and not self._weighted:
            shape = _shape_of(self._outputs[place])
            if shape is not None and len(shape) == 2 and shape[1] == 1:
                between = f"{name} takes 0 and 1, or what is in between, but {told}"
                return lambda values: _check_of_two(between, values)
        return None


def _is_of_keras(loss: keras.losses.Loss) -> bool:
    """Tell whether a loss takes labels as Keras' do, not by a method of the user's own."""
    kind = type(loss)
    own_call = kind.__call__ is not keras.losses.Loss.__call__
    return not own_call and kind.call.__module__.startswith("keras.")


def _shape_of(output: Any) -> tuple[int | None, ...] | None:
    """Return the shape of an output; ``None`` if it is not known."""
    shape = getattr(output, "shape", None)
    return None if shape is None or getattr(shape, "rank", 0) is None else tuple(shape)


def _check_classes(said: str, values: np.ndarray, classes: int | None, ignored: int | None) -> None:
    if values.dtype.kind == "f":
        wrong = values[values != np.floor(values)]
        if wrong.size:
            raise ModelError(
                f"{said} fractions such as {wrong.flat[0]:g}, which Keras would cut off; index "
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
                f"{said} {wrong.flat[0]:g}, and the output has {classes} classes, 0 to "
                f"{classes - 1}; index them from 0 (pyspark.ml.feature.StringIndexer), or give "
                "the output as many numbers as there are classes"
            )


def _check_of_two(said: str, values: np.ndarray) -> None:
    low, high = -_ROUNDING, 1 + _ROUNDING
    if values.size and (values.min() < low or values.max() > high):
        wrong: Any = values[(values < low) | (values > high)].flat[0]
        raise ModelError(
            f"{said} {wrong:.8g}, for which it has no lowest value; turn the two classes into 0 "
            "and 1, or compile the model for several classes ('sparse_categorical_crossentropy') "
            "or real numbers ('mse')"
        )
