"""The classes that labels stand for, and which of some no row has."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..manifest import Manifest
from .pieces import PieceReader
from .sharding import Piece


def classes_of(labels: np.ndarray) -> np.ndarray:
    """Return the class of each row as an integer. Pure.

    Args:
        labels: whole numbers, or one-hot rows.
    """
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels[..., 0]
    classes: np.ndarray = np.round(labels).astype(np.int64)
    return classes


def absent_classes(manifest: Manifest, label: str, classes: Iterable[int]) -> list[int]:
    """Return those of ``classes`` that no row has; reads no further than until all are found.

    Args:
        manifest: the rows.
        label: the label column.
        classes: what to look for.

    Raises:
        DataError: a value cannot be read.
    """
    left = set(classes)
    reader = PieceReader(manifest, [manifest.column(label)])
    try:
        for number, group in enumerate(manifest.row_groups):
            if not left:
                break
            values = reader.read(Piece(number, 0, group.rows))[label]
            left -= set(np.unique(classes_of(values)).tolist())
    finally:
        reader.close()
    return sorted(left)
