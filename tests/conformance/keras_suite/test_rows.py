"""What ``fit`` is given becomes the rows that it stands for."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_spark_runner.data.read.reader import DatasetReader
from horovod_spark_runner.data.read.sharding import plan_epoch

from .rows import NotRowsError, rows_of, write_rows

X = np.arange(24, dtype=np.float64).reshape(8, 3)
Y = np.arange(8)


class Batches(keras.utils.PyDataset):
    @property
    def num_batches(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        part = slice(2 * number, 2 * number + 2)
        return X[part], Y[part]


def endless() -> Any:
    return ((X[:2] + 2 * number, Y[:2]) for number in itertools.count())


@pytest.mark.parametrize(
    ("x", "y", "batch_size"),
    [
        (X, Y, None),
        (tf.constant(X), tf.constant(Y), None),
        (tf.data.Dataset.from_tensor_slices((X, Y)).batch(2), None, 2),
        (Batches(), None, 2),
        (((X[i : i + 2], Y[i : i + 2]) for i in range(0, 8, 2)), None, 2),
    ],
    ids=["arrays", "tensors", "dataset", "pydataset", "generator"],
)
def test_rows_are_those_given(x: Any, y: Any, batch_size: int | None) -> None:
    rows = rows_of(x, y, None, None)
    np.testing.assert_array_equal(rows.inputs.arrays["x"], X)
    np.testing.assert_array_equal(rows.labels.arrays["y"], Y)
    assert rows.inputs.arrays["x"].dtype == np.float32
    assert rows.batch_size == batch_size
    assert not rows.weights.names


def test_structures_become_columns() -> None:
    rows = rows_of({"a": X, "b": Y}, [Y, X], np.ones(8), None)
    assert (rows.inputs.names, rows.inputs.keys) == (("x_0", "x_1"), ("a", "b"))
    assert (rows.labels.names, rows.labels.keys) == (("y_0", "y_1"), None)
    assert rows.weights.names == ("w",)


def test_of_data_without_end_the_batches_needed_are_taken() -> None:
    assert rows_of(endless(), None, None, 5).count == 10


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (tf.ragged.constant([[1.0], [2.0, 3.0]]), "RaggedTensor"),
        (iter([(X[:1], Y[:1]), (X[:2], Y[:2])]), "no columns"),
        ((part for part in [(X[:1], Y[:1]), (X[:2], Y[:2])]), "differ in size"),
        ({"a": [X, X]}, "structure within"),
        (np.array(["a", "b"]), "arrays of <U1"),
    ],
    ids=["ragged", "iterator", "sizes", "nested", "text"],
)
def test_what_has_no_rows_is_refused(x: Any, reason: str) -> None:
    with pytest.raises(NotRowsError, match=reason):
        rows_of(x, None, None, None)


def test_the_batches_that_are_read_are_those_of_fit(tmp_path: Path) -> None:
    manifest = write_rows(rows_of(X.reshape(8, 3, 1), Y, None, None), tmp_path / "data")
    groups = [(group.rows, group.size) for group in manifest.row_groups]
    plan = plan_epoch(groups, global_batch=3, seed=0, epoch=0, window_bytes=1 << 20, shuffle=False)
    reader = DatasetReader(manifest)
    batches = [batch.arrays for batch in reader.epoch(plan, 0, 1)]
    reader.close()
    assert [batch["y"].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    np.testing.assert_array_equal(
        np.concatenate([batch["x"] for batch in batches]), X.reshape(8, 3, 1)
    )
