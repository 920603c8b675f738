"""What ``fit`` is given, as rows: arrays, tensors, datasets, generators to columns of Parquet."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
from keras.src.trainers.data_adapters import data_adapter_utils

from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.prepare.columns import DataRequest
from horovod_spark_runner.data.prepare.parquet import open_parquet
from horovod_spark_runner.data.prepare.schema import Roles
from horovod_spark_runner.storage.filesystem import Location

# Batches that stand for data without an end, where the training is stopped long before it.
MOST_BATCHES = 2000


class NotRowsError(Exception):
    """What ``fit`` was given cannot be told as a call of our training."""


@dataclass(frozen=True)
class Part:
    """Inputs, labels or weights: arrays by column, and how they belong together.

    Attributes:
        names: column names, in order.
        keys: keys of a dict; ``None`` for a single array or a list.
        arrays: values by column.
    """

    names: tuple[str, ...] = ()
    keys: tuple[str, ...] | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """The data of one training or evaluation.

    Attributes:
        inputs: what the model is given.
        labels: what its outputs are compared with.
        weights: weights of the rows.
        batch_size: rows of a batch, where the data are in batches already.
    """

    inputs: Part
    labels: Part
    weights: Part
    batch_size: int | None = None

    @property
    def count(self) -> int:
        return len(next(iter(self.inputs.arrays.values())))


def rows_of(x: Any, y: Any, sample_weight: Any, batches: int | None) -> Rows:
    """Return the rows of what ``fit`` is given.

    Args:
        x: arrays, or anything that gives batches.
        y: labels, if ``x`` are arrays.
        sample_weight: weights, if ``x`` are arrays.
        batches: how many batches to take of data that have no end.

    Raises:
        NotRowsError: there are none to be had.
    """
    found = _batches(x)
    if found is None:
        return _rows(_arrays(x), _arrays(y), _arrays(sample_weight), None)
    limit = MOST_BATCHES if batches is None else batches
    taken = [
        tuple(_arrays(part) for part in data_adapter_utils.unpack_x_y_sample_weight(batch))
        for batch in itertools.islice(found, limit)
    ]
    if not taken:
        raise NotRowsError("the data have no batch")
    sizes = [_size(batch) for batch in taken]
    if len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]:
        raise NotRowsError("the batches differ in size")
    inputs, labels, weights = keras.tree.map_structure(_joined, *taken)
    return _rows(inputs, labels, weights, sizes[0])


def _size(batch: tuple[Any, ...]) -> int:
    return len(next(array for array in keras.tree.flatten(batch) if array is not None))


def _joined(*values: Any) -> Any:
    return None if values[0] is None else np.concatenate(values)


def _batches(x: Any) -> Iterator[Any] | None:
    """Return the batches of ``x``; ``None`` if it holds arrays."""
    if isinstance(x, tf.data.Dataset):
        batches: Iterator[Any] = iter(x)
        return batches
    if isinstance(x, keras.utils.PyDataset):
        numbers: Iterable[int] = (
            itertools.count() if x.num_batches is None else range(x.num_batches)
        )
        return (x[number] for number in numbers)
    if inspect.isgenerator(x):
        return x
    if hasattr(x, "__iter__") and not isinstance(
        x, (np.ndarray, tf.Tensor, tf.RaggedTensor, tf.Variable, list, tuple, dict)
    ):
        raise NotRowsError(f"{type(x).__module__} is a way to give data that has no columns")
    return None


def _arrays(structure: Any) -> Any:
    return keras.tree.map_structure(_array, structure)


def _array(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)) or "sparse" in str(type(value)):
        raise NotRowsError(f"{type(value).__name__}: rows of differing or sparse form")
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = array.astype(np.float32)
    elif array.dtype.kind == "u":  # Parquet columns are signed
        array = array.astype(np.int64 if array.dtype.itemsize > 2 else np.int32)
    elif array.dtype.kind not in "ib":
        raise NotRowsError(f"arrays of {array.dtype}")
    return array


def _rows(x: Any, y: Any, sample_weight: Any, batch_size: int | None) -> Rows:
    parts = (_part("x", x), _part("y", y), _part("w", sample_weight))
    lengths = {len(array) for part in parts for array in part.arrays.values()}
    if len(lengths) != 1:
        raise NotRowsError(f"arrays of {sorted(lengths)} rows")
    return Rows(*parts, batch_size)


def _part(prefix: str, structure: Any) -> Part:
    if structure is None:
        return Part()
    if not isinstance(structure, (list, tuple, dict)):
        return Part((prefix,), None, {prefix: structure})
    keys = tuple(structure) if isinstance(structure, dict) else None
    values = list(structure.values()) if isinstance(structure, dict) else list(structure)
    if not all(isinstance(value, np.ndarray) for value in values):
        raise NotRowsError("a structure within a structure, or None in one")
    names = tuple(f"{prefix}_{place}" for place in range(len(values)))
    return Part(names, keys, dict(zip(names, values, strict=True)))


def write_rows(rows: Rows, folder: Path) -> Manifest:
    """Write ``rows`` to one Parquet file in ``folder`` and return what it is."""
    arrays = {**rows.inputs.arrays, **rows.labels.arrays, **rows.weights.arrays}
    columns = {name: _column(array) for name, array in arrays.items()}
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "part-0.parquet", row_group_size=rows.count)
    request = DataRequest(
        Roles(rows.inputs.names, rows.labels.names, next(iter(rows.weights.names), None)),
        shapes={name: array.shape[1:] for name, array in arrays.items() if array.ndim > 1},
        allow_nan=True,
    )
    manifest = open_parquet(Location(str(folder)), request)
    if manifest is None:
        raise NotRowsError(f"columns of { ({n: a.dtype for n, a in arrays.items()}) }")
    return manifest


def _column(array: np.ndarray) -> pa.Array:
    values = pa.array(array.reshape(-1))
    if array.ndim == 1:
        return values
    width = array.size // len(array)
    if not width:
        raise NotRowsError("arrays without elements")
    return pa.FixedSizeListArray.from_arrays(values, width)
