"""Numbers that make equal rows differ, so that what compares rows is told from a mean over them."""

from __future__ import annotations

import numpy as np


def parting_shares(shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers from 0 to below 0.9, of which those of later rows are larger.

    What compares the rows of a batch shows where the means of its parts differ: numbers that are
    only random have means that are nearly equal. Those for one shape are always the same.

    Args:
        shape: of the array, rows first.
    """
    rows = shape[0]
    random = np.random.Generator(np.random.Philox(0)).random(shape, np.float32)
    later = np.linspace(0, 1, rows, dtype=np.float32)
    shares: np.ndarray = np.float32(0.45) * (random + later.reshape(rows, *[1] * (len(shape) - 1)))
    return shares
