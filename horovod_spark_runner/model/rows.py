"""Rows that no prediction can be made of: nulls, and arrays of other sizes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..data.manifest import Column
from ..errors import DataError


def valid_rows(array: pa.Array, column: Column) -> np.ndarray | None:
    """Tell which rows hold a value as the model takes it.

    Args:
        array: the rows of a feature column.
        column: what the model was trained on.

    Returns:
        A boolean per row; ``None`` if all are valid.
    """
    valid = array.is_valid() if array.null_count else None
    if column.encoding == "raw":
        valid = _sized(pc.binary_length(array), column.size)
    elif not column.encoding and column.shape:
        valid = _sized(pc.list_value_length(array), column.width)
        elements = array.flatten()
        if elements.null_count:
            mask: np.ndarray = _to_numpy(valid).copy()
            parents = pc.list_parent_indices(array).filter(elements.is_null())
            mask[parents.to_numpy(zero_copy_only=False)] = False
            return mask
    if valid is None:
        return None
    given = _to_numpy(valid)
    return None if bool(np.all(given)) else given


def valid_in_all(
    arrays: Sequence[pa.Array], columns: Sequence[Column], advice: str | None
) -> np.ndarray | None:
    """Tell which rows hold a value in every column.

    Args:
        arrays: the rows, by column.
        columns: what the model was trained on.
        advice: what else may become of rows without, for the error; ``None`` if they are no error.

    Returns:
        A boolean per row; ``None`` if all are valid.

    Raises:
        DataError: a row is not valid, and that is an error.
    """
    valid: np.ndarray | None = None
    for array, column in zip(arrays, columns, strict=True):
        mask = valid_rows(array, column)
        if mask is None:
            continue
        if advice is not None:
            row = int(np.argmin(mask))
            raise DataError(
                f"{describe_fault(array, column, row)} in row {row} of a batch of {len(array)} "
                f"(counted from 0); {advice}"
            )
        valid = mask if valid is None else valid & mask
    return valid


def describe_fault(array: pa.Array, column: Column, row: int) -> str:
    """Say what is wrong with a row that is not valid."""
    value = array[row]
    if not value.is_valid:
        return f"column {column.name!r} is null" + _or_what_became_null(column)
    if column.encoding == "raw":
        return f"column {column.name!r} holds {len(value.as_py())} bytes, not {column.size}"
    size = len(value)
    if size != column.width:
        return f"column {column.name!r} holds an array of {size} elements, not {column.width}"
    if is_whole(column):
        return (
            f"column {column.name!r} holds an array with elements that are null or too large for "
            f"{column.dtype}"
        )
    return f"column {column.name!r} holds an array with null elements"


def _or_what_became_null(column: Column) -> str:
    """Return what else Spark hands over as null: what does not fit the type or shape."""
    if len(column.shape) > 1 and not column.encoding:
        return ", or holds nested arrays of other sizes,"
    if not column.shape and is_whole(column):
        return f", or too large for {column.dtype},"
    return ""


def is_whole(column: Column) -> bool:
    """Tell whether a column holds whole numbers."""
    return not column.encoding and not column.is_text and column.numpy_dtype.kind in "iu"


def with_nulls(values: pa.Array, valid: np.ndarray) -> pa.Array:
    """Return the values of the valid rows in their places, and null in all others."""
    places = np.cumsum(valid) - 1
    return values.take(pa.array(places, pa.int64(), mask=~valid))


def _sized(lengths: pa.Array, wanted: int) -> pa.Array:
    return pc.equal(lengths, wanted).fill_null(False)


def _to_numpy(mask: pa.Array) -> np.ndarray:
    array: np.ndarray = mask.to_numpy(zero_copy_only=False)
    return array
