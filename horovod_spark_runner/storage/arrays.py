"""Files of named arrays, without pickles.

They are NumPy's ``.npz``. Types that NumPy cannot name in a file (bfloat16, the float8 family) are
stored as unsigned integers of their size, and strings as JSON, with their type names beside them.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import InvalidInputError
from ..typed_json import load_json
from .contents import Contents, convert_parse_errors, open_archive

Arrays = dict[str, np.ndarray]

_DTYPES = "__dtypes__"
_PLAIN_KINDS = "biufc"
_TEXT = "text"
# Kind of file, for messages.
_KIND = "a file of arrays"


def dump_arrays(arrays: Mapping[str, np.ndarray]) -> memoryview:
    """Return ``arrays`` as the bytes of an ``.npz`` file."""
    buffer = io.BytesIO()
    write_arrays(buffer, arrays.items())
    return buffer.getbuffer()


def write_arrays(file: Any, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write named arrays as an ``.npz`` file, one after the other.

    Args:
        file: takes bytes by its ``write``.
        arrays: the arrays; each is fetched when the one before is written.
    """
    special: dict[str, str] = {}
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays:
            if array.dtype.kind in _PLAIN_KINDS:
                stored = array
            elif array.dtype == object:
                special[name] = _TEXT
                stored = _bytes_of(array.tolist())
            else:
                special[name] = array.dtype.name
                stored = array.view(f"uint{8 * array.dtype.itemsize}")
            _write_array(archive, name, stored)
        _write_array(archive, _DTYPES, _bytes_of(special))


def _bytes_of(value: object) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def _write_array(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
        if not (array.flags.c_contiguous and array.size):
            np.lib.format.write_array(entry, array, allow_pickle=False)
            return
        # A view of the bytes: NumPy's copy takes longer than their checksum.
        np.lib.format.write_array_header_1_0(entry, np.lib.format.header_data_from_array_1_0(array))
        for part in Contents(array.reshape(-1).view(np.uint8).data).parts():
            entry.write(part)


def load_arrays(data: bytes | memoryview | Contents) -> Arrays:
    """Return the arrays of `write_arrays`.

    Raises:
        ValueError: the bytes are not such a file, or hold Python objects.
    """
    file = ArraysFile(data)
    return {name: file.read(name) for name in file.names}


class ArraysFile:
    """A file of `write_arrays`, read an array at a time.

    Args:
        data: its contents.

    Attributes:
        names: of its arrays, in their order.

    Raises:
        ValueError: the bytes are not such a file.
    """

    def __init__(self, data: bytes | memoryview | Contents) -> None:
        self._contents = data if isinstance(data, Contents) else Contents(data)
        with open_archive(self._contents.open(), _KIND) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
        self._archive = zipfile.ZipFile(self._contents.open())
        self._special = load_json(self._stored(_DTYPES).tobytes())
        if not isinstance(self._special, dict):
            raise InvalidInputError(f"not {_KIND}: {_DTYPES} holds no names")
        self.names = tuple(name for name in names if name != _DTYPES)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array, which is not read."""
        with convert_parse_errors(_KIND), self._archive.open(f"{name}.npy") as entry:
            np.lib.format.read_magic(entry)
            shape: tuple[int, ...] = np.lib.format.read_array_header_1_0(entry)[0]
            return shape

    def read(self, name: str) -> np.ndarray:
        """Return an array.

        Raises:
            ValueError: it is damaged, or holds Python objects.
        """
        array = self._stored(name)
        if self._special.get(name) == _TEXT:
            return np.array(load_json(array.tobytes()), object)
        if name in self._special:
            with convert_parse_errors(_KIND):
                import ml_dtypes  # comes with the frameworks that have such types

                array = array.view(np.dtype(getattr(ml_dtypes, self._special[name])))
        return array

    def _stored(self, name: str) -> np.ndarray:
        with convert_parse_errors(_KIND), self._archive.open(f"{name}.npy") as entry:
            np.lib.format.read_magic(entry)
            shape, _, dtype = np.lib.format.read_array_header_1_0(entry)
            size = self._archive.getinfo(f"{name}.npy").file_size - entry.tell()
            # Memory is allocated by the header.
            fits = min(shape, default=0) >= 0 and math.prod(shape) * dtype.itemsize == size
            if not (fits or dtype.hasobject):
                raise ValueError(f"{name} of shape {shape} and dtype {dtype} has {size} bytes")
        with convert_parse_errors(_KIND), self._archive.open(f"{name}.npy") as entry:
            array: np.ndarray = np.lib.format.read_array(entry, allow_pickle=False)
        return array
