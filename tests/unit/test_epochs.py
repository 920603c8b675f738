"""Which rows the steps of an epoch hold, on each rank."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovod_spark_runner.config.training import FitOptions
from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.prepare.columns import DataRequest
from horovod_spark_runner.data.prepare.parquet import open_parquet
from horovod_spark_runner.data.prepare.schema import Roles
from horovod_spark_runner.data.read.reader import DatasetReader
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.training.epochs import Epochs, Step

ROWS = 59


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("rows")
    numbers = pa.table({"x": pa.array(range(ROWS), pa.int32())})
    pq.write_table(numbers, folder / "part-0.parquet", row_group_size=20)
    found = open_parquet(Location(folder), DataRequest(Roles(("x",), ())))
    assert found is not None
    return found


def steps(
    manifest: Manifest,
    fit: FitOptions,
    size: int,
    epoch: int,
    first: int = 0,
    run_step: int | None = None,
) -> list[list[Step]]:
    """Return the steps of an epoch on each rank, with batches of their own."""
    found = []
    for rank in range(size):
        reader = DatasetReader(manifest)
        epochs = Epochs(reader, manifest, fit, 16, 1 << 28, rank, size)
        found.append([_kept(step) for step in epochs.steps_from(epoch, first, run_step)])
        reader.close()
    return found


def _kept(step: Step) -> Step:
    # The reader may use the memory of a batch again.
    arrays = {name: values.copy() for name, values in step.batch.arrays.items()}
    return replace(step, batch=replace(step.batch, arrays=arrays))


def rows_of(ranks: list[list[Step]]) -> list[list[int]]:
    """Return the rows of each global batch."""
    return [
        sorted(int(x) for step in parts for x in step.batch.arrays["x"])
        for parts in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize("size", [1, 3])
def test_several_passes_hold_every_row_equally_often(manifest: Manifest, size: int) -> None:
    fit = FitOptions(steps_per_epoch=6)  # a pass has four
    batches = [rows_of(steps(manifest, fit, size, epoch)) for epoch in (0, 1)]
    assert [len(epoch) for epoch in batches] == [6, 6]
    counts = Counter(row for epoch in batches for batch in epoch for row in batch)
    assert counts == dict.fromkeys(range(ROWS), 3)
    # A pass is over before the next begins, and is in another order.
    flat = [batch for epoch in batches for batch in epoch]
    for begin in (0, 4, 8):
        assert sorted(chain.from_iterable(flat[begin : begin + 4])) == list(range(ROWS))
    assert flat[:4] != flat[4:8]


def test_an_epoch_goes_on_at_a_step(manifest: Manifest) -> None:
    fit = FitOptions(steps_per_epoch=6)
    whole = rows_of(steps(manifest, fit, 2, 1))
    for first in (1, 4, 5):
        assert rows_of(steps(manifest, fit, 2, 1, first)) == whole[first:]


def test_shares_are_equal_only_where_ranks_divide_a_full_batch(manifest: Manifest) -> None:
    fit = FitOptions()
    assert [[s.equal for s in rank] for rank in steps(manifest, fit, 2, 0)] == [
        [True, True, True, False]
    ] * 2
    # 16 rows on three ranks, as after a restart of a run of four with one rank fewer.
    ranks = steps(manifest, fit, 3, 0)
    assert [[step.equal for step in rank] for rank in ranks] == [[False] * 4] * 3
    for parts in zip(*ranks, strict=True):
        assert sum(step.batch.rows for step in parts) == parts[0].rows
        assert sum(step.fraction for step in parts) == pytest.approx(1)
        assert max(s.batch.rows for s in parts) - min(s.batch.rows for s in parts) <= 1


def test_with_other_steps_per_epoch_the_rows_go_on_where_they_ended(manifest: Manifest) -> None:
    """After two epochs of six steps, epochs of three: a pass has four."""
    before, now = FitOptions(steps_per_epoch=6), FitOptions(steps_per_epoch=3)
    whole = rows_of(steps(manifest, before, 2, 2))
    assert rows_of(steps(manifest, now, 2, 2, run_step=12)) == whole[:3]
    assert rows_of(steps(manifest, now, 2, 3, run_step=15)) == whole[3:]
    assert rows_of(steps(manifest, now, 2, 3, 1, run_step=16)) == whole[4:]


def test_what_is_read_ahead_goes_on_into_the_next_epoch(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread reads all epochs, also those that end within a pass: the same rows."""
    begun: list[int] = []
    read = DatasetReader.passes

    def passes(self: DatasetReader, plans: Any, rank: int, world: int, first: int = 0) -> Any:
        begun.append(first)
        return read(self, plans, rank, world, first)

    monkeypatch.setattr(DatasetReader, "passes", passes)
    for fit in (FitOptions(epochs=3), FitOptions(epochs=3, steps_per_epoch=6)):
        apart = [rows_of(steps(manifest, fit, 1, epoch)) for epoch in range(3)]
        begun.clear()
        with contextlib.closing(DatasetReader(manifest)) as reader:
            epochs = Epochs(reader, manifest, fit, 16, 1 << 28, 0, 1, ahead=True)
            found = [rows_of([[_kept(s) for s in epochs.steps_from(e)]]) for e in range(3)]
        assert found == apart
        assert begun == [0]
        assert not readers()


def test_what_is_read_ahead_is_given_up_where_the_training_goes_on_elsewhere(
    manifest: Manifest,
) -> None:
    fit = FitOptions(epochs=3)
    whole = [rows_of(steps(manifest, fit, 1, epoch)) for epoch in range(3)]
    with contextlib.closing(DatasetReader(manifest)) as reader:
        epochs = Epochs(reader, manifest, fit, 16, 1 << 28, 0, 1, ahead=True)
        with contextlib.closing(epochs.steps_from(0)) as left_after_two:
            found = [_kept(step) for step in itertools.islice(left_after_two, 2)]
        rest = [_kept(step) for step in epochs.steps_from(0, 2)]  # after a checkpoint, say
        assert rows_of([found + rest]) == whole[0]
        with contextlib.closing(epochs.steps_from(1)) as stopped:
            next(stopped)
        assert rows_of([[_kept(step) for step in epochs.steps_from(2)]]) == whole[2]
        # Another rank's part of the same batches, as of ranks that make steps by themselves.
        assert rows_of([[_kept(s) for s in epochs.steps_from(1, part=(0, 1))]]) == whole[1]
        halves = [[_kept(s) for s in epochs.steps_from(1, part=(r, 2))] for r in range(2)]
        assert rows_of(halves) == whole[1]
        epochs.close()
    assert not readers()


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "hsr-reader"]
