"""NumPy arrays as TensorFlow tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from ...data.manifest import Column
from ...storage.arrays import Arrays

# Bytes; kernels end the process if memory of any other alignment is passed to them.
ALIGNMENT = 64
# Batches that wait for the step.
PREFETCH_BATCHES = 8

# A column, or several for a dictionary.
Role = str | Sequence[str]


def as_tensor(values: np.ndarray) -> tf.Tensor:
    """Return ``values`` as a tensor that shares their memory, so they must not change any more.

    What cannot be shared, such as strings and memory that is not aligned as TensorFlow's kernels
    need it, is copied.
    """
    flags = values.flags
    if (
        values.dtype.kind in "fiub"
        and flags.c_contiguous
        and flags.writeable
        and values.__array_interface__["data"][0] % ALIGNMENT == 0
    ):
        return tf.experimental.dlpack.from_dlpack(values.__dlpack__())
    return tf.convert_to_tensor(values)


def as_tensors(arrays: Arrays) -> dict[str, tf.Tensor]:
    """Return every array `as_tensor`."""
    return {name: as_tensor(values) for name, values in arrays.items()}


def blocks_to_dataset(
    blocks: Callable[[], Iterator[Arrays]],
    columns: Mapping[str, Column],
    roles: Sequence[Role],
    batch_size: int,
) -> tf.data.Dataset:
    """Return a dataset of batches.

    Args:
        blocks: yields arrays of shape ``(batches, batch_size, *shape)`` by column. Many batches at
            once, because every way from Python into ``tf.data`` costs as much as a small batch.
        columns: types and shapes.
        roles: what an element consists of: each a column, or several for a dict.
        batch_size: rows of a batch.
    """
    signature = {
        name: tf.TensorSpec((None, batch_size, *column.shape), column.dtype)
        for name, column in columns.items()
    }
    batches = tf.data.Dataset.from_generator(blocks, output_signature=signature)
    batches = batches.flat_map(tf.data.Dataset.from_tensor_slices)
    return batches.map(functools.partial(_by_role, roles)).prefetch(PREFETCH_BATCHES)


def _by_role(
    roles: Sequence[Role], batch: dict[str, tf.Tensor]
) -> tuple[tf.Tensor | dict[str, tf.Tensor], ...]:
    return tuple(
        batch[role] if isinstance(role, str) else {name: batch[name] for name in role}
        for role in roles
    )
