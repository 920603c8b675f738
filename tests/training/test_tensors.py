"""Batches as TensorFlow tensors."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from horovod_spark_runner import Dataset, InvalidInputError
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.data.prepare.columns import DataRequest
from horovod_spark_runner.data.prepare.parquet import open_parquet
from horovod_spark_runner.data.prepare.schema import Roles
from horovod_spark_runner.data.read.arrow_to_numpy import empty_rows
from horovod_spark_runner.engines.keras.binding import as_tensor
from horovod_spark_runner.storage.filesystem import Location

from ..unit.test_reader import dataset


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint16", "int64", "bool"])
def test_a_tensor_shares_aligned_memory(dtype: str) -> None:
    values = empty_rows(64, Column("v", dtype, (64,)))
    values[:] = 0
    tensor = as_tensor(values)
    assert (tensor.dtype.name, tensor.shape) == (dtype, (64, 64))
    values[3, 5] = 1
    assert tensor.numpy()[3, 5] == 1


def test_what_cannot_be_shared_is_copied() -> None:
    values = empty_rows(9, Column("v", "float32"))
    values[:] = np.arange(9)
    frozen = pa.array([1.0, 2.0]).to_numpy()
    assert not frozen.flags.writeable
    for array in (values[1:], values[::2], frozen, np.float32(3).reshape(()), values[:0]):
        tensor = as_tensor(array)
        np.testing.assert_array_equal(tensor.numpy(), array)
        # A kernel ends the process if it is given memory that is not aligned.
        if array.size:
            address = np.asarray(memoryview(tensor)).__array_interface__["data"][0]
            assert address % 64 == 0


def test_memory_lives_as_long_as_its_tensors(tmp_path: Path) -> None:
    data = dataset(tmp_path, [[40, 60]])
    kept = list(data.epoch(0, rank=0, size=1, batch_size=16, as_tensors=True))
    assert all(isinstance(batch["v"], tf.Tensor) for batch in kept)
    for _ in range(3):  # memory that was given back would be used again
        list(data.epoch(0, rank=0, size=1, batch_size=16))
    found = np.concatenate([batch["id"] for batch in kept])
    assert sorted(found) == list(range(100))
    for batch in kept:
        np.testing.assert_array_equal(batch["v"][:, 0], tf.cast(batch["id"], tf.float32))


def passes(data: Dataset, ranks: int, steps: int) -> list[list[int]]:
    """Return the tags of every global batch of ``tf_dataset``."""
    parts = [
        data.tf_dataset("v", ["id"], "id", rank=rank, size=ranks, batch_size=6 // ranks)
        for rank in range(ranks)
    ]
    found: list[list[int]] = [[] for _ in range(steps)]
    for part in parts:
        for step, (features, labels, weight) in enumerate(part.take(steps)):
            np.testing.assert_array_equal(labels["id"], weight)
            np.testing.assert_array_equal(features[:, 0], tf.cast(weight, tf.float32))
            found[step] += weight.numpy().tolist()
    return found


def test_a_tf_dataset_has_full_batches_of_every_epoch(tmp_path: Path) -> None:
    data = dataset(tmp_path, [[10, 7], [15]])  # 32 rows: 5 full global batches
    alone = passes(data, 1, 15)
    for epoch in range(3):
        rows = [tag for batch in alone[5 * epoch : 5 * epoch + 5] for tag in batch]
        assert len(set(rows)) == 30
    assert alone[:5] != alone[5:10]
    assert passes(data, 2, 15) == alone
    assert passes(data, 3, 15) == alone


def test_model_fit_takes_a_tf_dataset_again_and_again(tmp_path: Path) -> None:
    data = dataset(tmp_path, [[64]])
    batches = data.tf_dataset("v", "id", rank=0, size=1, batch_size=16)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse")
    again = keras.models.clone_model(model)
    again.set_weights(model.get_weights())
    again.compile(keras.optimizers.Adam(0.05), "mse")
    # Epochs go on within a call; every call begins with the first one.
    for epochs in (3, 2):
        model.fit(batches, epochs=epochs, steps_per_epoch=4, verbose=0)
        for epoch in range(epochs):
            for batch in data.epoch(epoch, rank=0, size=1, batch_size=16):
                again.train_on_batch(batch["v"], batch["id"])
    for ours, theirs in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_wrong_tf_datasets_are_refused(tmp_path: Path) -> None:
    data = dataset(tmp_path, [[8]])
    with pytest.raises(InvalidInputError, match="column 'q'"):
        data.tf_dataset("q", "id", rank=0, size=1, batch_size=2)
    for labels in (None, 5, [], ["id", None]):
        with pytest.raises(InvalidInputError, match="labels.*column"):
            data.tf_dataset("v", labels, rank=0, size=1, batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="shuffle.*'yes'"):
        data.tf_dataset("v", "id", rank=0, size=1, batch_size=2, shuffle="yes")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"\b8"):
        data.tf_dataset("v", "id", rank=0, size=3, batch_size=4)
    with pytest.raises(InvalidInputError, match="size"):
        data.tf_dataset("v", "id", rank=3, size=3, batch_size=2)


def test_strings_become_tensors_of_strings(tmp_path: Path) -> None:
    table = pa.table({"s": [f"é{i}" for i in range(50)], "w": [["a", str(i)] for i in range(50)]})
    pq.write_table(table.append_column("id", [range(50)]), tmp_path / "f.parquet")
    request = DataRequest(Roles(("s", "w", "id"), (), labelled=False))
    manifest = open_parquet(Location(tmp_path), request)
    assert manifest is not None
    data = Dataset(manifest)
    seen = []
    for batch in data.epoch(0, rank=0, size=1, batch_size=8, as_tensors=True):
        assert batch["s"].dtype == batch["w"].dtype == tf.string
        assert batch["w"].shape[1:] == (2,)
        for text, words, number in zip(batch["s"], batch["w"], batch["id"], strict=True):
            assert text.numpy().decode() == f"é{number}"
            assert words.numpy().tolist() == [b"a", str(int(number)).encode()]
            seen.append(int(number))
    assert sorted(seen) == list(range(50))
    batches = data.tf_dataset(["s", "w"], "id", rank=0, size=1, batch_size=8)
    features, numbers = next(iter(batches))
    assert features["s"].numpy().tolist() == [f"é{n}".encode() for n in numbers]
    for empty in (np.empty((0, 2), object), Column("w", "string", (2,)).blank()[:0]):
        assert as_tensor(empty).dtype == tf.string
