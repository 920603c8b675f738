"""Named arrays to bytes and back, with nothing that has to be unpickled.

NumPy's ``.npz`` does the work. Types NumPy has no name for in a file (bfloat16 and the float8
family) are stored as unsigned integers of their size, their names beside them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import numpy as np

Arrays = dict[str, np.ndarray]

_DTYPES = "__dtypes__"
_PLAIN_KINDS = "biufc"


def dump_arrays(arrays: Mapping[str, np.ndarray]) -> memoryview:
    """Return ``arrays`` as the bytes of an ``.npz`` file."""
    stored: dict[str, np.ndarray] = {}
    special: dict[str, str] = {}
    for name, array in arrays.items():
        if array.dtype.kind in _PLAIN_KINDS:
            stored[name] = array
        else:
            special[name] = array.dtype.name
            stored[name] = array.view(f"uint{8 * array.dtype.itemsize}")
    stored[_DTYPES] = np.frombuffer(json.dumps(special).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **stored)  # type: ignore[arg-type]
    return buffer.getbuffer()


def load_arrays(data: bytes | memoryview) -> Arrays:
    """Return the arrays of `dump_arrays`.

    Raises:
        ValueError: the bytes are no such file, or hold Python objects.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, EOFError, KeyError) as error:
        raise ValueError(f"not a file of arrays: {error}") from error
    special = json.loads(arrays.pop(_DTYPES).tobytes())
    if special:
        import ml_dtypes  # comes with the frameworks that have such types

        for name, dtype in special.items():
            arrays[name] = arrays[name].view(getattr(ml_dtypes, dtype))
    return arrays
