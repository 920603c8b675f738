"""Arrow columns to NumPy arrays, numbers without Python objects."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ...errors import DataError
from ..manifest import Column


def column_to_numpy(values: pa.ChunkedArray, column: Column) -> np.ndarray:
    """Return a Parquet column as one array of shape ``(rows, *column.shape)``.

    Raises:
        DataError: it holds nulls, lists of another length, or values that do not fit its type.
    """
    array = values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
    rows = len(array)
    if array.null_count:
        raise DataError(f"column {column.name!r} holds {array.null_count} null values")
    if column.encoding == "raw":
        return _raw_to_numpy(array, column)
    if column.is_encoded:
        encoded: np.ndarray = array.to_numpy(zero_copy_only=False)
        return encoded
    if column.shape:
        if pa.types.is_fixed_size_list(array.type):
            width = array.type.list_size
            array = pa.ListArray.from_arrays(
                np.arange(rows + 1, dtype=np.int32) * width, array.flatten()
            )
        offsets = array.offsets.to_numpy(zero_copy_only=False)
        if rows and not np.array_equal(np.diff(offsets), np.full(rows, column.width)):
            raise DataError(
                f"column {column.name!r} holds arrays of other than {column.width} elements"
            )
        array = array.values.slice(offsets[0] if rows else 0, rows * column.width)
        if array.null_count:
            raise DataError(f"column {column.name!r} holds arrays with null elements")
    flat = _strings(array, column) if column.is_text else _cast(_numbers(array, column), column)
    return flat.reshape(rows, *column.shape)


def _strings(array: pa.Array, column: Column) -> np.ndarray:
    if not pa.types.is_string(array.type) and not pa.types.is_large_string(array.type):
        raise DataError(f"column {column.name!r} holds {array.type}, not strings")
    try:
        strings: np.ndarray = array.to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise DataError(f"column {column.name!r} holds strings that are not UTF-8") from error
    return strings


def _numbers(array: pa.Array, column: Column) -> np.ndarray:
    numbers: np.ndarray = array.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind not in "biuf":
        raise DataError(f"column {column.name!r} holds {array.type}, not numbers")
    return numbers


def _raw_to_numpy(array: pa.Array, column: Column) -> np.ndarray:
    """Return fixed-width bytes as their elements, without copying."""
    if not pa.types.is_binary(array.type):  # fixed-size or large binary
        array = array.cast(pa.binary())
    rows = len(array)
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int32)[array.offset : array.offset + rows + 1]
    if rows and not np.array_equal(np.diff(bounds), np.full(rows, column.size)):
        raise DataError(f"column {column.name!r} holds byte strings of other than {column.size}")
    flat = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[0] + rows * column.size]
    return flat.view(column.dtype).reshape(rows, *column.shape)


def _cast(values: np.ndarray, column: Column) -> np.ndarray:
    """Return ``values`` in the column's dtype, in which all of them must fit."""
    if values.dtype == column.dtype:
        return values
    if values.dtype.kind == "f" and np.dtype(column.dtype).kind in "iu":
        raise DataError(f"column {column.name!r} holds floats, which do not fit {column.dtype}")
    if values.dtype.kind in "iu" and np.dtype(column.dtype).kind in "iu" and values.size:
        bounds = np.iinfo(column.dtype)
        if values.min() < bounds.min or values.max() > bounds.max:
            raise DataError(f"column {column.name!r} holds values too large for {column.dtype}")
    try:
        with np.errstate(over="raise"):
            return values.astype(column.dtype)
    except FloatingPointError as error:
        raise DataError(
            f"column {column.name!r} holds values too large for {column.dtype}"
        ) from error


def empty_rows(rows: int, column: Column) -> np.ndarray:
    """Return an empty array for ``rows`` of ``column``; numbers in memory TensorFlow can share.

    Arrow's memory is aligned to 64 bytes, and mostly reused: new pages from the system cost more
    than filling them.
    """
    if column.is_text:
        return np.empty((rows, *column.shape), object)
    buffer = pa.allocate_buffer(rows * column.size, resizable=False)
    return np.frombuffer(buffer, column.dtype).reshape(rows, *column.shape)
