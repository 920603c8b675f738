"""Bytes to arrays: encoded images, NumPy's own formats, raw elements.

Petastorm's codecs write the same formats (``CompressedImageCodec`` PNG or JPEG, ``NdarrayCodec``
npy, ``CompressedNdarrayCodec`` npz), which say themselves what they hold: a Petastorm dataset is
read without its Unischema, which is stored pickled. Nothing is unpickled here.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..errors import DataError, EnvironmentProblem
from .arrow_to_numpy import empty_rows
from .manifest import Column

# Called with a decoded, resized image and a random generator (``None`` outside training); returns
# an array of the column's shape and type.
Transform = Callable[[np.ndarray, np.random.Generator | None], np.ndarray]
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_MAX_THREADS = 8
# Rows a thread takes at once.
_TASK_ROWS = 16


def image_mode(name: str, shape: Sequence[int]) -> str:
    """Return Pillow's mode for images of ``shape``.

    Raises:
        DataError: no image has that shape.
    """
    channels = shape[2] if len(shape) == 3 else 1
    if len(shape) not in (2, 3) or channels not in _MODES:
        raise DataError(
            f"shapes gives image column {name!r} the shape {tuple(shape)}; it must be (height, "
            "width) or (height, width, channels) with 1, 3 or 4 channels"
        )
    return _MODES[channels]


def decode_image(column: Column, data: bytes) -> np.ndarray:
    """Return an encoded image in the shape of ``column``, resized to it if it is of another size.

    Raises:
        DataError: the bytes are no image.
        EnvironmentProblem: Pillow is not installed.
    """
    pillow = _pillow()
    try:
        with pillow.open(io.BytesIO(data)) as image:
            if column.dtype != "uint16" or image.mode in ("RGB", "RGBA", "P", "1", "L"):
                image = image.convert(image_mode(column.name, column.shape))
            height, width = column.shape[:2]
            if image.size != (width, height):
                image = image.resize((width, height), pillow.Resampling.BILINEAR, reducing_gap=3.0)
            array = np.asarray(image)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise DataError(f"column {column.name!r}: an image cannot be decoded: {error}") from error
    return array.reshape(column.shape)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentProblem(
            "columns of encoded images need Pillow: pip install 'horovod_spark_runner[images]'"
        ) from error
    return Image


def decode_array(name: str, encoding: str, data: bytes) -> np.ndarray:
    """Return the array in bytes of NumPy's formats.

    Raises:
        DataError: the bytes are something else, or hold objects.
    """
    try:
        loaded = np.load(io.BytesIO(data), allow_pickle=False)
        if encoding == "npy":
            return np.asarray(loaded)
        (only,) = loaded.files
        return np.asarray(loaded[only])
    except (ValueError, OSError, EOFError, KeyError) as error:
        raise DataError(f"column {name!r}: a {encoding} array cannot be decoded: {error}") from None


def decode_value(
    column: Column, data: bytes, transform: Transform | None, rng: np.random.Generator | None
) -> np.ndarray:
    """Return one row's value.

    Raises:
        DataError: it cannot be decoded, or has not the column's shape.
    """
    if column.encoding == "image":
        array = decode_image(column, data)
        if transform is not None:
            array = np.asarray(transform(array, rng))
    else:
        array = decode_array(column.name, column.encoding, data)
    if array.shape != column.shape:
        made = "its transform returned" if transform is not None else "a row holds"
        raise DataError(
            f"column {column.name!r}: {made} an array of shape {array.shape}, not {column.shape}"
        )
    return array


class RowDecoder:
    """Decodes the values of many rows on threads.

    Args:
        columns: the columns to decode; others pass through.
        transforms: what to do with decoded images, by column.
    """

    def __init__(self, columns: Sequence[Column], transforms: Mapping[str, Transform]) -> None:
        self._columns = [c for c in columns if c.encoding not in ("", "raw")]
        self._transforms = dict(transforms)
        self._pool: ThreadPoolExecutor | None = None

    def __call__(
        self,
        arrays: dict[str, np.ndarray],
        random: Callable[[int], np.random.Generator | None],
    ) -> dict[str, np.ndarray]:
        """Return ``arrays`` with all bytes decoded.

        Args:
            arrays: values by column; bytes objects where they are to be decoded.
            random: gives the generator for the row of that number.

        Raises:
            UndecodableRow: a row cannot be decoded.
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
            some = functools.partial(_decode_into, column, values, target, transform, random)
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
    rows: range,
) -> None:
    for row in rows:
        rng = random(row) if transform is not None else None
        try:
            target[row] = decode_value(column, values[row], transform, rng)
        except DataError as error:
            raise UndecodableRow(row, error) from error
