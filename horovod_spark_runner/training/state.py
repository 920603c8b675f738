"""A training's variables as named arrays, and back: what checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import RunDirectoryError
from ..storage.arrays import Arrays


class TrainingVariables:
    """All variables a training goes on from: weights, optimizers, seeds of random layers.

    Weights and optimizers have one value on all ranks; each rank's random layers have seeds of
    their own.

    Args:
        model: the built model.
        optimizers: its optimizers.
    """

    def __init__(self, model: Any, optimizers: Sequence[Any]) -> None:
        self.weights = list(model.weights)
        ids = {id(variable) for variable in self.weights}
        # What is a variable but no weight is the state of a random layer (dropout and the like).
        self.seeds = [v for v in model.non_trainable_variables if id(v) not in ids]
        self.optimizer: list[Any] = []
        for optimizer in optimizers:
            self.optimizer += optimizer.variables

    @property
    def _named(self) -> dict[str, Any]:
        groups = {"model": self.weights, "optimizer": self.optimizer}
        return {
            f"{group}/{number:05d}": variable
            for group, variables in groups.items()
            for number, variable in enumerate(variables)
        }

    @property
    def shared(self) -> list[Any]:
        """The variables that have one value on all ranks."""
        return [*self.weights, *self.optimizer]

    def describe(self) -> list[list[Any]]:
        """Return (name, path, shape, dtype) of every variable, as JSON."""
        seeds = {f"seed/{number:05d}": variable for number, variable in enumerate(self.seeds)}
        return [
            [name, variable.path, list(variable.shape), str(variable.dtype)]
            for name, variable in {**self._named, **seeds}.items()
        ]

    def capture(self, arrays: Arrays | None = None) -> Arrays:
        """Return a copy of what all ranks share.

        Args:
            arrays: what an earlier call returned and nobody needs any more; it is filled again,
                because memory that the system has to provide first costs more than the copy.
        """
        values = {name: tf.convert_to_tensor(variable) for name, variable in self._named.items()}
        if arrays is None:
            return {name: np.array(value) for name, value in values.items()}
        for name, value in values.items():
            np.copyto(arrays[name], value)
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over what `capture` returned."""
        for name, variable in self._named.items():
            variable.assign(arrays[name])

    def check_same(self, described: list[list[Any]], where: str) -> None:
        """Check that a checkpoint's variables are those of this model.

        Raises:
            RunDirectoryError: they are not; the first difference is shown.
        """
        own = [entry[1:] for entry in self.describe()]
        other = [entry[1:] for entry in described]
        for ours, theirs in zip(own, other, strict=False):
            if ours != theirs:
                raise RunDirectoryError(_other_model(where, _show(theirs), _show(ours)))
        if len(own) != len(other):
            raise RunDirectoryError(
                _other_model(where, f"{len(other)} variables", f"{len(own)} variables")
            )

    def separate_seeds(self, rank: int) -> None:
        """Give the random layers of this rank a stream of their own."""
        for variable in self.seeds:
            variable.assign(separate_seed(variable.numpy(), rank))


def separate_seed(seed: np.ndarray, rank: int) -> np.ndarray:
    """Return the state of a random layer on ``rank``, given that of rank 0. Pure.

    All ranks start from rank 0's state; without this, every rank would drop the same units.
    """
    value = np.array(seed)
    if value.dtype.kind == "u" and rank:
        value[..., 0] += np.array(rank * 0x9E3779B1 % 2**32, dtype=value.dtype)
    return value


def _show(entry: list[Any]) -> str:
    path, shape, dtype = entry
    return f"{path!r} ({dtype}, shape {tuple(shape)})"


def _other_model(where: str, theirs: str, ours: str) -> str:
    return (
        f"run_dir holds a run of another model: {where} has {theirs} where this model has {ours}. "
        "Give another run_dir, or resume='never' with an empty one"
    )
