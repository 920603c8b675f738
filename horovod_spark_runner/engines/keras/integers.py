"""Whole numbers that the type of a model's input cannot hold. Pure.

Keras casts a column to the type of the input that it feeds, and 256 becomes 0 as an uint8.
"""

from __future__ import annotations

import numpy as np

from ...errors import DataError


def bounds_of(given: str, taken: str) -> tuple[int, int] | None:
    """Return the least and the largest number of type ``taken``, where others may be given.

    Args:
        given: dtype of a column.
        taken: dtype of the input it feeds.

    Returns:
        The bounds; ``None`` if one of the types is not of whole numbers, or all numbers fit.
    """
    if not (_is_whole(given) and _is_whole(taken)):
        return None
    have, can = np.iinfo(given), np.iinfo(taken)
    return None if can.min <= have.min and have.max <= can.max else (int(can.min), int(can.max))


def check_within(values: np.ndarray, bounds: tuple[int, int], column: str, taken: str) -> None:
    """Check that an input can hold all numbers of a batch.

    Args:
        values: the numbers.
        bounds: the least and the largest that it can hold.
        column: where they come from, for messages.
        taken: the input and its type, for messages.

    Raises:
        DataError: it cannot.
    """
    low, high = bounds
    if not values.size or (values.min() >= low and values.max() <= high):
        return
    wrong = values[(values < low) | (values > high)]
    raise DataError(
        f"column {column!r} holds {int(wrong[0])}, which the model's input {taken} cannot hold: "
        f"it takes {low:,} to {high:,}. Mend the rows, or build the model with a wider "
        "keras.Input(…, dtype=…)"
    )


def _is_whole(dtype: str) -> bool:
    try:
        return np.dtype(dtype).kind in ("i", "u")
    except TypeError:  # one that NumPy does not know, such as bfloat16
        return False
