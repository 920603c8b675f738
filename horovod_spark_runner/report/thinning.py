"""Fewer points of a curve, in which nothing that can be seen is lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def thin(x: np.ndarray, y: np.ndarray, columns: int) -> np.ndarray:
    """Return the indices, ascending, of the points to draw.

    Of each of so many equal parts of the range of ``x``, the first and the last point stay, the
    lowest and the highest, and the first that is no number: drawn in as many columns of pixels, the
    curve looks as if all points were there.

    Args:
        x: ascending and finite.
        y: one value for each.
        columns: parts of the range.
    """
    count = len(x)
    if count <= 4 * columns:
        return np.arange(count)
    width = float(x[-1] - x[0]) or 1.0
    column = np.minimum(((x - x[0]) * (columns / width)).astype(np.int64), columns - 1)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    finite = np.isfinite(y)
    kept = [starts, np.append(starts[1:], count) - 1, _first_in_each(column, ~finite)]
    owner = np.cumsum(np.diff(column, prepend=-1) != 0) - 1
    for reduce, nothing in ((np.minimum, np.inf), (np.maximum, -np.inf)):
        extreme = reduce.reduceat(np.where(finite, y, nothing), starts)
        kept.append(_first_in_each(column, finite & (y == extreme[owner])))
    return np.unique(np.concatenate(kept))


def _first_in_each(column: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the first of the ``chosen`` points of each column that has some."""
    places = np.flatnonzero(chosen)
    first: np.ndarray = places[np.flatnonzero(np.diff(column[places], prepend=-1))]
    return first


def groups(count: int, limit: int) -> list[range]:
    """Return at most ``limit`` ranges of nearly equal length that make up ``range(count)``."""
    number = min(count, limit)
    edges = [count * i // number for i in range(number + 1)] if number else [0]
    return [range(begin, end) for begin, end in pairwise(edges)]
