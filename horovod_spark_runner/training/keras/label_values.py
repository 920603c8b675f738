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
from .protocols import Nest

_OF_TWO = (keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy)


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
        weighted: whether rows have weights: then some may not count.
    """

    def __init__(
        self, model: keras.Model, outputs: Nest | None, columns: Sequence[str], *, weighted: bool
    ) -> None:
        self._model = model
        self._shapes = [tuple(one.shape) for one in keras.tree.flatten(outputs)]
        self._label = f"label column {columns[0]!r}" if len(columns) == 1 else "label column"
        self._weighted = weighted
        # Once Keras knows the losses, which it makes at their first use.
        self._rules: list[_Rule] | None = None

    def __call__(self, labels: Nest) -> None:
        """Check labels, arrays in the structure the losses take.

        Raises:
            ModelError: some cannot be meant; the message has the column and a value.
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
        if len(paths) != len(self._shapes):
            return []
        rules = []
        for loss in self._model._compile_loss._flat_losses:
            # Of a single output, Keras may call it by its name.
            place = 0 if len(paths) == 1 else paths.index(tuple(loss.path))
            check = self._check_of(loss.loss, self._shapes[place])
            if check is not None:
                rules.append(_Rule(place, check))
        return rules

    def _check_of(
        self, loss: keras.losses.Loss, shape: tuple[int | None, ...]
    ) -> Callable[[np.ndarray], None] | None:
        """Return what checks the labels of a loss of Keras' own, for outputs of some shape."""
        if not type(loss).call.__module__.startswith("keras."):
            return None
        function, given = getattr(loss, "fn", None), getattr(loss, "_fn_kwargs", {})
        if function is keras.losses.sparse_categorical_crossentropy:
            classes = shape[given.get("axis", -1)]
            ignored = given.get("ignore_class")
            return lambda values: self._check_classes(loss.name, values, classes, ignored)
        one_each = len(shape) == 2 and shape[1] == 1
        if function in _OF_TWO and one_each and not self._weighted:
            return lambda values: self._check_of_two(loss.name, values)
        return None

    def _check_classes(
        self, name: str, values: np.ndarray, classes: int | None, ignored: int | None
    ) -> None:
        said = f"loss {name!r} takes numbers of classes, but the {self._label} holds"
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

    def _check_of_two(self, name: str, values: np.ndarray) -> None:
        if values.size and (values.min() < 0 or values.max() > 1):
            wrong: Any = values[(values < 0) | (values > 1)].flat[0]
            raise ModelError(
                f"loss {name!r} takes 0 and 1, or what is in between, but the {self._label} holds "
                f"{wrong:g}, for which it has no lowest value; turn the two classes into 0 and 1, "
                "or compile the model for several classes ('sparse_categorical_crossentropy') or "
                "real numbers ('mse')"
            )
