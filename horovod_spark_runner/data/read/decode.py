"""Decode stored values, and apply the user's transforms.

Petastorm's codecs write the same formats (``CompressedImageCodec`` PNG or JPEG, ``NdarrayCodec``
npy, ``CompressedNdarrayCodec`` npz). These are self-describing, so a Petastorm dataset is read
without its pickled Unischema. Nothing is unpickled here.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ...config.data import Transform
from ...errors import DataError
from ..manifest import Column, Manifest
from .arrow_to_numpy import empty_rows
from .images import decode_image
from .row_groups import RowGroupReader
from .sharding import Piece

_RETURNED = "its transform returned"
_MAX_THREADS = 8
# Rows a thread takes at once.
_TASK_ROWS = 16


def decode_array(name: str, encoding: str, data: bytes) -> np.ndarray:
    """Return the array in bytes of NumPy's formats.

    Raises:
        DataError: the bytes are invalid, or hold objects.
    """
    try:
        loaded = np.load(io.BytesIO(data), allow_pickle=False)
        actual = "npy" if isinstance(loaded, np.ndarray) else "npz"
        if actual != encoding:
            raise ValueError(f"it is stored as {actual}")
        if encoding == "npy":
            return np.asarray(loaded)
        (only,) = loaded.files
        return np.asarray(loaded[only])
    except Exception as error:  # what is corrupt raises many types
        raise DataError(f"column {name!r}: a {encoding} array cannot be decoded: {error}") from None


def decode_value(
    column: Column, stored: Any, transform: Transform | None, rng: np.random.Generator | None
) -> np.ndarray:
    """Return one row's value, in the column's shape and type.

    Args:
        column: the column.
        stored: bytes that are to be decoded, or the value itself.
        transform: what to do with the value.
        rng: random generator for the transform.

    Raises:
        DataError: it cannot be decoded, does not have the column's shape or does not fit its type,
            or the transform raised.
    """
    if column.encoding == "image":
        array = decode_image(column, stored)
    elif column.is_encoded:
        array = decode_array(column.name, column.encoding, stored)
    else:
        array = np.array(stored, column.numpy_dtype)  # a copy: what was read may be read again
    if transform is None:
        return fit_value(column, array, "a row holds")
    if column.encoding != "image":  # images are unchanged, for the transform to scale
        array = fit_value(column, array, "a row holds")
    result = _transformed(column, transform, array, rng)
    return fit_value(column, _as_array(column, result), _RETURNED)


def _transformed(
    column: Column, transform: Transform, array: np.ndarray, rng: np.random.Generator | None
) -> object:
    try:
        return transform(array if array.flags.writeable else array.copy(), rng)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise DataError(f"column {column.name!r}: its transform raised {reason}") from error


def _as_array(column: Column, result: object) -> np.ndarray:
    if result is None:
        raise DataError(
            f"column {column.name!r}: its transform returned None (is its return statement "
            "missing?)"
        )
    try:
        return np.asarray(result)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"column {column.name!r}: its transform returned no array: {error}"
        ) from error


def fit_value(column: Column, array: np.ndarray, made: str) -> np.ndarray:
    """Return ``array`` in the type of ``column``, if it has its shape and all its values fit.

    Floats may lose precision, but never become integers.

    Args:
        column: the column.
        array: one row's value.
        made: where it comes from, for the message.

    Raises:
        DataError: it does not fit; the message names a type that would.
    """
    if array.shape != column.shape:
        raise DataError(
            f"column {column.name!r}: {made} an array of shape {array.shape}, not {column.shape}"
        )
    wanted, kind = column.numpy_dtype, array.dtype.kind
    if column.is_text and (kind == "U" or all(isinstance(text, str) for text in array.flat)):
        return array.astype(object)
    if array.dtype == wanted and kind != "O":
        return array
    if column.is_text or kind not in "biuf":
        meant = "strings" if column.is_text else "numbers"
        raise DataError(f"column {column.name!r}: {made} values of {array.dtype}, not {meant}")
    if wanted.kind == "f":
        return _to_real(column, array, made)
    if kind == "f":
        advice = _advice(column, "float32")
        raise DataError(
            f"column {column.name!r}: {made} floats ({array.dtype}), but the column is "
            f"{column.dtype}; {advice}"
        )
    bounds = np.iinfo(wanted)
    low, high = int(array.min()), int(array.max())
    if low < bounds.min or high > bounds.max:
        advice = _advice(column, "int32" if low >= -(2**31) and high < 2**31 else "int64")
        raise DataError(
            f"column {column.name!r}: {made} values from {low} to {high}, which {column.dtype} "
            f"cannot hold; {advice}"
        )
    return array.astype(wanted)


def _to_real(column: Column, array: np.ndarray, made: str) -> np.ndarray:
    try:
        with np.errstate(over="raise"):
            return array.astype(column.numpy_dtype)
    except FloatingPointError as error:
        raise DataError(
            f"column {column.name!r}: {made} values too large for {column.dtype}; "
            + _advice(column, "float64")
        ) from error


def _check_finite(column: Column, value: np.ndarray, made: str) -> None:
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise DataError(
            f"column {column.name!r}: {made} values that are NaN or infinite; let them pass with "
            "allow_nan=True"
        )


def _advice(column: Column, dtype: str) -> str:
    if column.encoding == "raw":  # for raw columns, dtypes names the type of the bytes
        return f"return values that {column.dtype} holds"
    return f"keep them with dtypes={{{column.name!r}: {dtype!r}}}"


def no_generator(row: int) -> None:
    """Return no random generator, for a row that is not to be varied."""


class RowDecoder:
    """Makes each row's values what they are trained on: decoded and transformed, on threads.

    Args:
        columns: the columns; those that need neither pass through.
        transforms: what to do with each row's value, by column.
        allow_nan: let NaN and infinite values pass.
    """

    def __init__(
        self, columns: Sequence[Column], transforms: Mapping[str, Transform], allow_nan: bool
    ) -> None:
        self._columns = [c for c in columns if c.is_encoded or c.name in transforms]
        self._transforms = dict(transforms)
        self._allow_nan = allow_nan
        self._pool: ThreadPoolExecutor | None = None

    def __call__(
        self,
        arrays: dict[str, np.ndarray],
        random: Callable[[int], np.random.Generator | None] = no_generator,
    ) -> dict[str, np.ndarray]:
        """Return ``arrays`` decoded and transformed.

        Args:
            arrays: values by column; bytes objects where they are to be decoded.
            random: gives the generator for the row of that number, equal for all columns; by
                default none, for what is not to be varied.

        Raises:
            UndecodableRow: a row cannot be decoded, its transform raised or gave what does not
                fit, or what came of it is NaN or infinite.
        """
        if not self._columns:
            return arrays
        if self._pool is None:
            threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hsr-decode")
        decoded = dict(arrays)
        for column in self._columns:
            values = arrays[column.name]
            target = empty_rows(len(values), column)
            transform = self._transforms.get(column.name)
            some = functools.partial(
                _decode_into, column, values, target, transform, random, self._allow_nan
            )
            starts = range(0, len(values), _TASK_ROWS)
            for _ in self._pool.map(
                some, [range(s, min(s + _TASK_ROWS, len(values))) for s in starts]
            ):
                pass
            decoded[column.name] = target
        return decoded

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


class UndecodableRow(Exception):
    """A row that could not be decoded: its number among those given, and why."""

    def __init__(self, row: int, cause: DataError) -> None:
        super().__init__(row, cause)
        self.row = row
        self.cause = cause


def _decode_into(
    column: Column,
    values: np.ndarray,
    target: np.ndarray,
    transform: Transform | None,
    random: Callable[[int], np.random.Generator | None],
    allow_nan: bool,
    rows: range,
) -> None:
    for row in rows:
        rng = random(row) if transform is not None else None
        try:
            value = decode_value(column, values[row], transform, rng)
            if not allow_nan:
                _check_finite(column, value, "a row holds" if transform is None else _RETURNED)
            target[row] = value[()]  # a string, not an array that holds one
        except DataError as error:
            raise UndecodableRow(row, error) from error


def classes_of(labels: np.ndarray) -> np.ndarray:
    """Return the class of each row as an integer. Pure.

    Args:
        labels: integers, or one-hot rows.
    """
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels[..., 0]
    classes: np.ndarray = np.round(labels).astype(np.int64)
    return classes


def absent_classes(manifest: Manifest, label: str, classes: Iterable[int]) -> list[int]:
    """Return those of ``classes`` that no row has; stop reading once all are found.

    Args:
        manifest: the rows.
        label: the label column.
        classes: the classes.

    Raises:
        DataError: a value cannot be read.
    """
    left = set(classes)
    reader = RowGroupReader(manifest, [manifest.column(label)])
    try:
        for number, group in enumerate(manifest.row_groups):
            if not left:
                break
            values = reader.read(Piece(number, 0, group.rows))[label]
            left -= set(np.unique(classes_of(values)).tolist())
    finally:
        reader.close()
    return sorted(left)
