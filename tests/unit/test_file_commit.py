"""Scored files in their places, on disk and in an object store: every row once, no half files."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.ml import inference
from horovod_spark_runner.ml.files import FilesRequest, plan_files
from horovod_spark_runner.ml.inference import Predictor
from horovod_spark_runner.ml.trained import read_finished_run
from horovod_spark_runner.rundir.directory import RunDirectory
from horovod_spark_runner.settings.prediction import PredictionSettings
from horovod_spark_runner.storage.filesystem import Location

from ..counting_engine import Counted, save_line
from ..object_store import empty_folder, s3_server


@pytest.fixture
def predictor(tmp_path: Path) -> Iterator[Predictor]:
    save_line(tmp_path / "run", [Column("x", "float32", (2,))], [1.0, 10.0, 0.5])
    recipe = read_finished_run(RunDirectory(str(tmp_path / "run")), model_fn=Counted()).recipe
    yield Predictor(str(tmp_path), lambda: recipe, recipe.columns, recipe.outputs, 64)
    inference._models.clear()
    gc.unfreeze()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(params=["disk", "object store"])
def storage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Location:
    if request.param == "disk":
        return Location(tmp_path / "storage")
    return empty_folder(request.getfixturevalue("server"), "s3://scored/a b", monkeypatch)


def fill(source: Location) -> int:
    """Write files in folders of partitions, of several row groups each; return the rows."""
    for day in range(3):
        ids = np.arange(1000) + 1000 * day
        x = pa.ListArray.from_arrays(
            pa.array(np.arange(0, 2001, 2, dtype=np.int32)),
            pa.array(np.repeat(ids, 2), pa.float32()),
        )
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": ids, "x": x}), sink, row_group_size=300)
        folder = source.join(f"day={day}")
        if source.renames_whole:
            folder.make_folder()
        folder.join("part.parquet").write_bytes(sink.getvalue())
    return 3000


def read(place: Location) -> dict[int, float]:
    found: dict[int, float] = {}
    for file in place.files():
        if file.name != "_SUCCESS":
            with place.join(file.name).open_input() as stream:
                table = pq.read_table(stream)
            for row in table.to_pylist():
                assert row["id"] not in found
                found[row["id"]] = row["prediction"]
    return found


def request(storage: Location, **fields: Any) -> FilesRequest:
    given: dict[str, Any] = {"columns": ["id"], "mode": "error", **fields}
    target = storage.join("out")
    return FilesRequest(storage.join("in"), target, settings=PredictionSettings(), **given)


def test_attempts_that_were_repeated_count_once(predictor: Predictor, storage: Location) -> None:
    rows = fill(storage.join("in"))
    plan = plan_files(request(storage), predictor, 2, by_case=False)
    assert len(plan.units) == 3
    with plan.committing() as told:
        for number, unit in enumerate(plan.units):
            plan.task.score(number, unit)  # an attempt that Spark tells nothing of
            told.append((number, *plan.task.score(number, unit)))
        assert not storage.join("out", "_SUCCESS").exists()
    names = [file.name for file in storage.join("out").files()]
    assert names == ["_SUCCESS", *(f"day={day}/part.parquet" for day in range(3))]
    assert read(storage.join("out")) == {i: pytest.approx(11 * i + 0.5) for i in range(rows)}


def test_what_failed_leaves_nothing(predictor: Predictor, storage: Location) -> None:
    fill(storage.join("in"))
    storage.join("out").make_folder()
    storage.join("out", "old.parquet").write_bytes(b"old")
    plan = plan_files(request(storage, mode="overwrite"), predictor, 2, by_case=False)

    def fail() -> None:
        with plan.committing():
            plan.task.score(0, plan.units[0])
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert [file.name for file in storage.join("out").files()] == ["old.parquet"]
    # What another call is at, or was when it was killed, is no file of the destination.
    storage.join("out", "_staging-0123").make_folder()
    storage.join("out", "_staging-0123", "_half.parquet").write_bytes(b"half")
    storage.join("out", "old.parquet").delete_file()
    again = plan_files(request(storage), predictor, 2, by_case=False)
    with again.committing() as told:
        told += [(n, *again.task.score(n, unit)) for n, unit in enumerate(again.units)]
    assert storage.join("out", "_SUCCESS").exists()


def test_memory_of_a_worker_stays_flat(predictor: Predictor) -> None:
    """Ten million rows in Arrow batches of all sizes."""
    import psutil

    process, peaks = psutil.Process(), []
    sizes = [10_000, 4096, 1, 9_999, 333]
    values = pa.array(np.random.default_rng(0).random(20_000, np.float32))
    offsets = pa.array(np.arange(0, 20_001, 2, dtype=np.int32))
    batch = pa.ListArray.from_arrays(offsets, values)
    total = 10_000_000
    predict = Predictor(**{**vars(predictor), "batch_size": 4096})

    def arriving() -> Iterator[tuple[pa.Array, ...]]:
        left, number = total, 0
        while left:
            rows = min(sizes[number % len(sizes)], left)
            yield (batch.slice(0, rows),)
            left, number = left - rows, number + 1

    rows = 0
    for array in predict(arriving()):
        before, rows = rows, rows + len(array)
        if before // 1_000_000 != rows // 1_000_000:
            peaks.append(process.memory_info().rss)
    assert rows == total
    assert peaks[-1] - peaks[0] < 30e6
