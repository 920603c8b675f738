"""Interface for evaluating a trained model, whatever the framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..checkpoint.files import LogValue
from ..storage.arrays import Arrays
from .trained_model import Targets


@dataclass(frozen=True)
class Question:
    """What is to be found out about a model.

    Attributes:
        targets: what its outputs are compared with.
        compiled: whether its own loss and metrics are asked for.
        metrics: others, as `Engine.portable_metrics` gave them; ``None`` for none.
    """

    targets: Targets
    compiled: bool = True
    metrics: object = field(default=None, repr=False)


class Evaluator(Protocol):
    """A model with the sums of its metrics, in a Python worker of Spark's."""

    def begin(self) -> None:
        """Begin with other rows."""
        ...

    def update(self, features: Arrays, labels: Arrays) -> np.ndarray:
        """Take in rows.

        Args:
            features: the feature columns.
            labels: the columns of `Question.targets`.

        Returns:
            The model's first output for each row.

        Raises:
            ModelError: the rows show that a result would not be exact.
        """
        ...

    def take_sums(self) -> list[np.ndarray]:
        """Return what the rows since the last call have added, to go into `merged_sums`."""
        ...

    def results(self, sums: Sequence[np.ndarray]) -> dict[str, LogValue]:
        """Return the results that follow from the `merged_sums` of all rows, by name.

        Numbers, and lists of numbers where a metric gives several.
        """
        ...


def merged_sums(parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Return what several calls of `Evaluator.take_sums` gave, as one. Pure.

    Numbers are added up; arrays of bytes are put one after the other.
    """
    return [
        np.concatenate(arrays) if arrays[0].dtype == np.uint8 else np.sum(arrays, axis=0)
        for arrays in zip(*parts, strict=True)
    ]
