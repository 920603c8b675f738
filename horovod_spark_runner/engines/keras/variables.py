"""The variables of a Keras model and its optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from ...checkpoint.model_state import TrainingVariables, Variable

if TYPE_CHECKING:
    import keras


def value_of(variable: keras.Variable) -> np.ndarray:
    """Return a variable's value; it must not change while it is used.

    It is the variable's own memory where that is the processor's: no copy of what may be gigabytes.
    """
    return np.asarray(tf.convert_to_tensor(variable))


class KerasVariables(TrainingVariables):
    """Keras implementation of `TrainingVariables`.

    Args:
        model: the built model.
        optimizers: its optimizers.
    """

    def __init__(
        self, model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer]
    ) -> None:
        self._model = model
        self._optimizers = optimizers

    @property
    def weights(self) -> list[keras.Variable]:
        """The model's weights."""
        return list(self._model.weights)

    @property
    def groups(self) -> dict[str, list[keras.Variable]]:
        groups = {"model": self.weights}
        for number, optimizer in enumerate(self._optimizers):
            groups[f"optimizer{number or ''}"] = list(optimizer.variables)
        return groups

    @property
    def seeds(self) -> list[keras.Variable]:
        # What is a variable but no weight is the state of a random layer (dropout and the like).
        ids = {id(variable) for variable in self._model.weights}
        return [v for v in self._model.non_trainable_variables if id(v) not in ids]

    def view(self, variable: keras.Variable) -> tf.Tensor:
        return tf.convert_to_tensor(variable)

    def trained_by(self) -> list[list[int] | None]:
        indices = {id(variable): index for index, variable in enumerate(self.weights)}
        groups: list[list[int] | None] = []
        for optimizer in self._optimizers:
            # Keras has no public name for what an optimizer was built for.
            positions = [indices.get(id(v)) for v in getattr(optimizer, "_trainable_variables", ())]
            trained = [index for index in positions if index is not None]
            groups.append(
                trained if optimizer.built and trained and len(trained) == len(positions) else None
            )
        return groups

    def build_optimizers(self, trained: Sequence[Sequence[int] | None]) -> None:
        weights = self.weights
        for optimizer, indices in zip(self._optimizers, trained, strict=False):
            if not optimizer.built and indices and max(indices) < len(weights):
                optimizer.build([weights[index] for index in indices])

    def is_rate(self, variable: keras.Variable) -> bool:
        return str(getattr(variable, "name", "")) == "learning_rate"

    def likely_cause(self, differing: Sequence[Variable]) -> str:
        if any(map(self.is_rate, differing)):
            return (
                "The learning rate differs, so a callback set it from what only its own rank knows "
                "(its clock, random numbers, or a loss of its own); use the logs that Keras "
                "passes, which are those of all ranks"
            )
        if not any(getattr(v, "trainable", True) for v in differing):
            return (
                "They are not trained but set by a layer or callback from its own rank's rows; "
                "average them over the ranks (horovod.tensorflow.allreduce), or keep them out of "
                "the weights"
            )
        return (
            "They are changed outside Keras's optimizers (assigned by a train_step or callback on "
            "its own), whose gradients are exchanged; apply gradients with a "
            "keras.optimizers.Optimizer, and let callbacks do the same on every rank"
        )
