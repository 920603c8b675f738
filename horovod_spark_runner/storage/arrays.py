"""Named arrays to bytes and back, with nothing that has to be unpickled.

NumPy's ``.npz`` does the work. Types NumPy has no name for in a file (bfloat16 and the float8
family) are stored as unsigned integers of their size, their names beside them.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .contents import Contents

Arrays = dict[str, np.ndarray]

_DTYPES = "__dtypes__"
_PLAIN_KINDS = "biufc"


def dump_arrays(arrays: Mapping[str, np.ndarray]) -> memoryview:
    """Return ``arrays`` as the bytes of an ``.npz`` file."""
    buffer = io.BytesIO()
    write_arrays(buffer, arrays.items())
    return buffer.getbuffer()


def write_arrays(file: Any, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write named arrays as an ``.npz`` file, one after the other.

    Args:
        file: takes bytes by its ``write``.
        arrays: what to write; each is asked for when the one before is written.
    """
    special: dict[str, str] = {}
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays:
            if array.dtype.kind in _PLAIN_KINDS:
                stored = array
            else:
                special[name] = array.dtype.name
                stored = array.view(f"uint{8 * array.dtype.itemsize}")
            _write_array(archive, name, stored)
        _write_array(archive, _DTYPES, np.frombuffer(json.dumps(special).encode(), dtype=np.uint8))


def _write_array(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
        np.lib.format.write_array(entry, array, allow_pickle=False)


def load_arrays(data: bytes | memoryview | Contents) -> Arrays:
    """Return the arrays of `write_arrays`.

    Raises:
        ValueError: the bytes are no such file, or hold Python objects.
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
        ValueError: the bytes are no such file.
    """

    def __init__(self, data: bytes | memoryview | Contents) -> None:
        contents = data if isinstance(data, Contents) else Contents(data)
        try:
            self._archive = zipfile.ZipFile(contents.open())
            names = [name.removesuffix(".npy") for name in self._archive.namelist()]
            self._special: dict[str, str] = json.loads(self._stored(_DTYPES).tobytes())
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f"not a file of arrays: {error}") from error
        self.names = tuple(name for name in names if name != _DTYPES)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array, which is not read."""
        with self._archive.open(f"{name}.npy") as entry:
            np.lib.format.read_magic(entry)
            shape: tuple[int, ...] = np.lib.format.read_array_header_1_0(entry)[0]
            return shape

    def read(self, name: str) -> np.ndarray:
        """Return an array.

        Raises:
            ValueError: it is damaged, or holds Python objects.
        """
        array = self._stored(name)
        if name in self._special:
            import ml_dtypes  # comes with the frameworks that have such types

            array = array.view(getattr(ml_dtypes, self._special[name]))
        return array

    def _stored(self, name: str) -> np.ndarray:
        try:
            with self._archive.open(f"{name}.npy") as entry:
                array: np.ndarray = np.lib.format.read_array(entry, allow_pickle=False)
        except (zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"not a file of arrays: {error}") from error
        return array
