"""The reader as a whole: tagged rows, exactly once, in one order, in bounded memory."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_spark_runner import DataError, Dataset, InvalidInputError
from horovod_spark_runner.data.manifest import Column, Manifest
from horovod_spark_runner.data.prepare.columns import DataRequest
from horovod_spark_runner.data.prepare.parquet import open_parquet, read_footers
from horovod_spark_runner.data.prepare.schema import Roles
from horovod_spark_runner.data.read import reader
from horovod_spark_runner.data.read.sharding import plan_epoch
from horovod_spark_runner.storage.filesystem import Location

HOSTILE = "a b'c\"d\né%20#?"


def dataset(folder: Path, files: list[list[int]], columns: tuple[Column, ...] = ()) -> Dataset:
    """Write files with row groups of the given sizes; rows are tagged 0, 1, … in ``id``."""
    folder.mkdir(parents=True, exist_ok=True)
    tag = 0
    for number, groups in enumerate(files):
        schema = pa.schema([("id", pa.int64()), ("v", pa.list_(pa.float32()))])
        with pq.ParquetWriter(folder / f"part-{number:03d}.parquet", schema) as writer:
            for rows in groups:
                tags = np.arange(tag, tag + rows)
                values = pa.array([[float(t), float(-t)] for t in tags], pa.list_(pa.float32()))
                writer.write_table(pa.table({"id": tags, "v": values}, schema=schema))
                tag += rows
    facts = read_footers(Location(folder))
    names = tuple(file.name for file in facts.files)
    declared = columns or (Column("id", "int64"), Column("v", "float32", (2,)))
    manifest = Manifest(str(folder), names, declared, facts.row_groups, "c", footers=facts.sums)
    return Dataset(manifest)


def tags(data: Dataset, epoch: int, size: int, batch_size: int, **options: Any) -> list[list[int]]:
    """Return the tags of every global batch, read by ``size`` ranks."""
    ranks = [
        data.epoch(epoch, rank=rank, size=size, batch_size=batch_size, **options)
        for rank in range(size)
    ]
    seen = []
    for parts in zip(*ranks, strict=True):  # strict: equally many steps
        for part in parts:
            np.testing.assert_array_equal(part["v"][:, 0], part["id"])
        seen.append([int(tag) for part in parts for tag in part["id"]])
    return seen


FILES = [[7, 0, 13], [], [1], [40, 2], [0], [64]]
ROWS = 127


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return dataset(tmp_path_factory.mktemp("data") / HOSTILE, FILES)


@pytest.mark.thorough
def test_thousands_of_passes_see_every_row_once(small: Dataset) -> None:
    """Petastorm's reader lost rows in one pass of ten over a small shard."""
    orders = set()
    for epoch in range(1000):
        size = 1 + epoch % 4
        read = tags(small, epoch, size, 12 // size, window_bytes=300)
        flat = [tag for batch in read for tag in batch]
        assert sorted(flat) == list(range(ROWS))
        assert len(read) == small.steps(12 // size, size) == 11
        orders.add(tuple(flat))
    assert len(orders) == 1000


@pytest.mark.parametrize("batch", [12, 24, 300])
def test_one_order_on_any_number_of_ranks(small: Dataset, batch: int) -> None:
    alone = tags(small, 3, 1, batch)
    for size in (2, 3, 4, 6, 12):
        assert tags(small, 3, size, batch // size) == alone


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_hardly_any_rows(tmp_path: Path, rows: int) -> None:
    data = dataset(tmp_path, [[rows]])
    for size in (1, 2, 7):
        read = tags(data, 0, size, 4)
        assert sorted(tag for batch in read for tag in batch) == list(range(rows))


def test_one_row_group_for_many_ranks(tmp_path: Path) -> None:
    data = dataset(tmp_path, [[100]])
    read = tags(data, 0, 16, 2)
    assert sorted(tag for batch in read for tag in batch) == list(range(100))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10), st.integers(1, 4), st.integers(0, 12))
def test_a_resumed_epoch_goes_on_where_it_was(
    small: Dataset, epoch: int, size: int, first: int
) -> None:
    whole = tags(small, epoch, size, 12 // size)
    assert tags(small, epoch, size, 12 // size, first_step=first) == whole[first:]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=40).filter(sum),
    st.integers(1, 1024),
    st.integers(1, 5),
    st.integers(0, 2**32 - 1),
    st.integers(1, 1 << 14),
)
def test_up_to_1024_ranks_share_every_row(
    sizes: list[int], size: int, per_rank: int, seed: int, window: int
) -> None:
    plan = plan_epoch(
        [(rows, rows * 8) for rows in sizes],
        global_batch=per_rank * size,
        seed=seed,
        epoch=0,
        window_bytes=window,
    )
    seen = {lane: np.zeros(plan.lane_rows(lane), int) for lane in range(plan.lanes)}
    for step in range(plan.steps):
        counts = []
        for rank in range(size):
            slices = plan.rank_slices(step, rank, size)
            counts.append(sum(part.stop - part.start for part in slices))
            for part in slices:
                seen[part.lane][part.start : part.stop] += 1
        assert max(counts) - min(counts) <= 1
    assert sum(len(rows) for rows in seen.values()) == sum(sizes)
    assert all((rows == 1).all() for rows in seen.values())


def test_a_position_is_found_without_reading_what_is_before(tmp_path: Path) -> None:
    """By count, not by time: of 64 row groups, only the ones at the position are read."""
    data = dataset(tmp_path, [[50] * 64])
    whole = tags(data, 0, 1, 10, window_bytes=4000)
    read: list[int] = []
    original = pq.ParquetFile.read_row_group

    def count(self: Any, group: int, **options: Any) -> Any:
        read.append(group)
        return original(self, group, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pq.ParquetFile, "read_row_group", count)
        rest = tags(data, 0, 1, 10, first_step=310, window_bytes=4000)
    assert rest == whole[310:]
    assert len(read) <= 20


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 2}, "rank.*size=2.*2"),
        ({"rank": -1}, r"rank.*\b0\b.*-1"),
        ({"rank": 0.0}, "rank"),
        ({"size": 0}, r"(?<!_)size.*\b1\b.*\b0"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": None}, "batch_size"),
    ],
)
def test_wrong_shares_are_refused(small: Dataset, wrong: dict[str, Any], message: str) -> None:
    share = {"rank": 0, "size": 2, "batch_size": 1, **wrong}
    with pytest.raises(InvalidInputError, match=message):
        small.epoch(0, **share)
    with pytest.raises(InvalidInputError, match=message):
        small.share(**share)
    with pytest.raises(InvalidInputError, match=message):
        small.tf_dataset("v", "id", **share)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"epoch": epoch} for epoch in (1.5, -1, True, None)),
        *({"window_bytes": size} for size in (None, 0, "1")),
        *({"seed": seed} for seed in (-1, None, 0.5)),
        {"first_step": -1},
    ],
)
def test_wrong_positions_are_refused(small: Dataset, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    arguments = {"epoch": 0, "rank": 0, "size": 1, "batch_size": 1, **wrong}
    with pytest.raises(InvalidInputError, match=name):
        small.epoch(arguments.pop("epoch"), **arguments)


def test_steps_of_wrong_sizes_are_refused(small: Dataset) -> None:
    for sizes in ((0, 2), (2, 0), (2.0, 2), (-1, 2)):
        with pytest.raises(InvalidInputError, match=r"\b1"):
            small.steps(*sizes)


def test_numbers_may_be_numpys(small: Dataset) -> None:
    one, seed = np.int64(1), np.uint8(3)
    arguments = {"rank": np.int32(0), "size": one, "batch_size": np.int16(12), "seed": seed}
    plain = [
        batch["id"].tolist() for batch in small.epoch(1, rank=0, size=1, batch_size=12, seed=3)
    ]
    assert [batch["id"].tolist() for batch in small.epoch(one, **arguments)] == plain
    assert small.steps(np.int8(12), one) == len(plain)


def test_an_abandoned_pass_leaves_no_thread(
    small: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "CHUNK_ROWS", 4)  # the thread that reads ahead has no room for all

    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("hsr-")]

    passes: list[Any] = [small.epoch(0, rank=0, size=1, batch_size=2) for _ in range(5)]
    for each in passes:
        next(each)
    assert threads().count("hsr-reader") == 5
    for each in passes:
        each.close()
    assert threads() == []


def test_a_fault_in_the_reading_thread_is_raised_where_batches_are_used(tmp_path: Path) -> None:
    data = dataset(tmp_path, [[10]])
    table = pa.table({"id": [1] * 10, "v": pa.array([[1.0, None]] * 10, pa.list_(pa.float32()))})
    pq.write_table(table, tmp_path / "part-000.parquet")
    broken = Dataset(replace(data.manifest, footers=()))
    with pytest.raises(DataError, match="'v'.*null element"):
        list(broken.epoch(0, rank=0, size=1, batch_size=2))


def test_slices_of_lists_keep_their_offsets(tmp_path: Path) -> None:
    """Many ranks on one row group: each takes a slice of the lists in the middle."""
    data = dataset(tmp_path, [[30]])
    shares = [
        int(tag)
        for rank in range(7)
        for batch in data.share(rank=rank, size=7, batch_size=3)
        for tag in batch["v"][:, 0]
    ]
    assert shares == list(range(30))


def vary(image: np.ndarray, generator: np.random.Generator | None) -> np.ndarray:
    noise = 0.0 if generator is None else generator.normal()
    return (image + noise).astype(np.float32)


def test_transforms_vary_by_epoch_and_sample_only(tmp_path: Path) -> None:
    from PIL import Image

    rows = []
    for number in range(40):
        buffer = io.BytesIO()
        Image.fromarray(np.full((2, 2), number, np.uint8)).save(buffer, "PNG")
        rows.append(buffer.getvalue())
    pq.write_table(pa.table({"image": rows, "id": range(40)}), tmp_path / "f.parquet")
    facts = read_footers(Location(tmp_path))
    columns = (Column("image", "float32", (2, 2, 1), "image"), Column("id", "int64"))
    manifest = Manifest(
        str(tmp_path), ("f.parquet",), columns, facts.row_groups, "c", file_sizes=(1,)
    )
    data = Dataset(manifest, {"image": vary})

    def means(epoch: int, size: int) -> dict[int, float]:
        return {
            int(tag): float(image.mean())
            for rank in range(size)
            for batch in data.epoch(epoch, rank=rank, size=size, batch_size=12 // size)
            for image, tag in zip(batch["image"], batch["id"], strict=True)
        }

    first = means(0, 1)
    assert means(0, 3) == first
    assert means(1, 1) != first
    assert len({round(mean - tag, 5) for tag, mean in first.items()}) == 40
    plain = [b["image"].mean() for b in data.share(rank=0, size=1, batch_size=1)]
    assert plain == list(range(40))
    validating = reader.DatasetReader(manifest, transforms={"image": vary}, augment=False)
    with contextlib.closing(validating):
        plan = plan_epoch(
            [(40, 40)], global_batch=12, seed=0, epoch=0, window_bytes=2**20, shuffle=False
        )
        batches = validating.epoch(plan, 0, 1)
        assert [i.mean() for batch in batches for i in batch.arrays["image"]] == plain
    shrinking = Dataset(manifest, {"image": lambda image, generator: image[:1]})
    with pytest.raises(DataError, match=r"transform.*\(1, 2, 1\)"):
        list(shrinking.share(rank=0, size=1, batch_size=1))


LIMITED = """
import resource, sys
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
pa.set_cpu_count(1); pa.set_io_thread_count(1)
from horovod_spark_runner import Dataset
from horovod_spark_runner.data.manifest import Manifest

def resident():
    with open("/proc/self/status") as status:
        return int(next(l for l in status if l.startswith("VmData")).split()[1]) * 1024

manifest = Manifest.from_json(sys.stdin.read())
limit = resident() + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    np.ones(2 * int(sys.argv[1]), np.uint8)
except MemoryError:
    pass
else:
    sys.exit("the limit does not hold")
data, peaks = Dataset(manifest), []
for epoch in range(int(sys.argv[2])):
    total = 0
    batches = data.epoch(epoch, rank=0, size=1, batch_size=64, window_bytes=8 << 20)
    for batch in batches:
        total += int(batch["id"].sum())
    assert total == sum(range(manifest.rows)), total
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(*peaks)
"""


def read_limited(data: Dataset, limit: int, epochs: int) -> list[int]:
    """Read in a process that may allocate ``limit`` bytes; return its peak after each epoch."""
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), str(epochs)],
        input=data.manifest.to_json(),
        capture_output=True,
        text=True,
        timeout=480,
        # No allocator that reserves address space ahead, so that the limit is on what is in use.
        env={
            **os.environ,
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
        },
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [int(peak) for peak in run.stdout.split()]


def wide(folder: Path, rows: int, width: int) -> Dataset:
    """Write ``rows`` rows of ``width`` random floats in row groups of 1 MiB."""
    schema = pa.schema([("id", pa.int64()), ("v", pa.list_(pa.float32()))])
    generator = np.random.default_rng(0)
    step = (1 << 20) // (4 * width)
    with pq.ParquetWriter(folder / "f.parquet", schema, use_dictionary=False) as writer:
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            values = pa.array(generator.random(count * width, np.float32))
            offsets = pa.array(np.arange(count + 1, dtype=np.int32) * width)
            lists = pa.ListArray.from_arrays(offsets, values)
            tags = np.arange(begin, begin + count)
            writer.write_table(pa.table({"id": tags, "v": lists}, schema=schema))
    facts = read_footers(Location(folder))
    columns = (Column("id", "int64"), Column("v", "float32", (width,)))
    return Dataset(
        Manifest(str(folder), ("f.parquet",), columns, facts.row_groups, "c", file_sizes=(1,))
    )


def test_a_dataset_of_several_times_the_memory(tmp_path: Path) -> None:
    """512 MiB of rows in a process that may allocate 176 MiB, thread stacks of 8 MiB included."""
    data = wide(tmp_path, 131_072, 1024)
    assert sum(group.size for group in data.manifest.row_groups) > 512 << 20
    read_limited(data, 176 << 20, 1)


def test_memory_stays_flat_over_50_epochs(tmp_path: Path) -> None:
    peaks = read_limited(wide(tmp_path, 4096, 1024), 176 << 20, 50)
    assert len(peaks) == 50
    assert peaks[-1] < 1.05 * peaks[9], "the process grows from epoch to epoch"


def test_row_groups_are_as_large_as_they_are_in_memory(tmp_path: Path) -> None:
    """The shuffle window is in bytes of memory; Parquet's own sizes are after its dictionaries."""
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(64_000, np.float32)), 64)
    pq.write_table(pa.table({"v": zeros}), tmp_path / "f.parquet")
    folder = Location(tmp_path)
    assert read_footers(folder).row_groups[0].size < 64_000
    manifest = open_parquet(folder, DataRequest(Roles(("v",), (), labelled=False)))
    assert manifest is not None
    assert manifest.row_groups[0].size >= 4 * 64_000
