"""Large weights of Keras models, written to and read from files without copies of them.

By itself, Keras draws initial values at random (three times the memory of a weight; TensorFlow
keeps what it has once taken), reads a weight as a whole, and copies it twice into its variable.
Here a large weight begins as zeros that take no memory, and is read into what its variable uses.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from keras.src.saving.saving_lib import H5IOStore

from .state import value_of

# Numbers from which a weight counts as large.
LARGE = 4 * 1024 * 1024
# Numbers that are copied at once.
_PART = 4 * 1024 * 1024
# Bytes at multiples of which TensorFlow wants tensors to begin.
_ALIGNMENT = 64
# Kinds of numbers whose memory NumPy can hand over.
_SHARED_KINDS = "fiu"
# Only for the thread that saves or loads: others may use Keras meanwhile.
_sparing: ContextVar[bool] = ContextVar("sparing", default=False)


@contextlib.contextmanager
def sparing_memory() -> Iterator[None]:
    """Save and load models without copies of large weights.

    Whatever a model is built with inside has to be loaded, too: it begins as zeros.
    """
    _watch()
    token = _sparing.set(True)
    try:
        yield
    finally:
        _sparing.reset(token)


@functools.cache
def _watch() -> None:
    make, fill = keras.Layer.add_weight, keras.Variable.assign
    read, write = H5IOStore.__getitem__, H5IOStore.__setitem__

    @functools.wraps(make)
    def add_weight(
        self: keras.Layer, shape: Any = None, initializer: Any = None, *args: Any, **kwargs: Any
    ) -> keras.Variable:
        if _sparing.get() and _is_large(shape):
            initializer = _zeros
        return make(self, shape, initializer, *args, **kwargs)

    @functools.wraps(fill)
    def assign(self: keras.Variable, value: Any) -> Any:
        if not (_sparing.get() and isinstance(value, np.memmap) and _fits(self, value)):
            return fill(self, value)
        tensor = _tensor(value)
        self.value.assign(tensor)
        return tensor

    @functools.wraps(read)
    def get(self: H5IOStore, key: str) -> Any:
        mapped = _mapped(self._h5_entry_group.get(key)) if _sparing.get() else None
        return read(self, key) if mapped is None else mapped

    @functools.wraps(write)
    def put(self: H5IOStore, key: str, value: Any) -> None:
        if _sparing.get() and isinstance(value, keras.Variable):
            value = value_of(value)
        write(self, key, value)

    keras.Layer.add_weight, keras.Variable.assign = add_weight, assign
    H5IOStore.__getitem__, H5IOStore.__setitem__ = get, put


def _is_large(shape: Any) -> bool:
    sizes = shape if isinstance(shape, (tuple, list)) else ()
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) >= LARGE


def _zeros(shape: Sequence[int], dtype: str | None = None) -> tf.Tensor:
    kind = tf.as_dtype(dtype or keras.config.floatx()).as_numpy_dtype
    if np.dtype(kind).kind not in _SHARED_KINDS:
        return tf.zeros(shape, kind)
    return _shared(_aligned(tuple(shape), np.dtype(kind)))


def _tensor(value: np.ndarray) -> tf.Tensor:
    copy = _aligned(value.shape, value.dtype)
    into, source = copy.reshape(-1), value.reshape(-1)
    for begin in range(0, value.size, _PART):
        into[begin : begin + _PART] = source[begin : begin + _PART]
    return _shared(copy)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return zeros where TensorFlow wants numbers to begin; memory is taken as it is written."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + size].view(dtype).reshape(shape)


def _shared(array: np.ndarray) -> tf.Tensor:
    """Return a tensor in the memory of an array that is not used otherwise."""
    with tf.device("cpu:0"):
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _fits(variable: keras.Variable, value: np.ndarray) -> bool:
    return (
        isinstance(variable.value, tf.Variable)
        and tuple(variable.value.shape) == value.shape
        and variable.value.dtype.as_numpy_dtype == value.dtype
    )


def _mapped(data: Any) -> np.memmap | None:
    """Return a memory map of a contiguous array in an HDF5 file; ``None`` for any other."""
    if (
        not isinstance(data, h5py.Dataset)
        or data.size < LARGE
        or data.dtype.kind not in _SHARED_KINDS
    ):
        return None
    begin = data.id.get_offset()
    if "dtype" in data.attrs or not data.dtype.isnative or begin is None:
        return None
    if data.external or data.is_virtual or data.file.driver != "sec2":
        return None
    return np.memmap(data.file.filename, data.dtype, "r", begin, data.shape)
