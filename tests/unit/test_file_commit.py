"""Scored files in their places, on disk and in an object store: every row once, no half files."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovod_spark_runner import DataError, InvalidInputError, RunFailedError
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.config.prediction import PredictionSettings
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.model import inference
from horovod_spark_runner.model import predict_files as files
from horovod_spark_runner.model.inference import Predictor
from horovod_spark_runner.model.load import read_finished_run
from horovod_spark_runner.model.predict_files import (
    FilesRequest,
    _Commit,
    _committing,
    _FilesPlan,
    _plan_files,
)
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.storage.lease import identity

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
        if source.has_atomic_rename:
            folder.make_folder()
        folder.join("part.parquet").write_bytes(sink.getvalue())
    return 3000


def read(place: Location) -> dict[int, float]:
    found: dict[int, float] = {}
    for file in place.files():
        if file.name not in ("_SUCCESS", "._lease"):
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


def score(plan: _FilesPlan, commit: _Commit) -> None:
    """Score all units, as tasks do."""
    for unit in plan.units:
        commit.files[unit.target] = plan.task.score(unit, commit.staging)[0]


def names(place: Location) -> list[str]:
    """Return the files of a destination, without the guard that local ones keep."""
    return [file.name for file in place.files() if file.name != "._lease"]


@pytest.mark.thorough
def test_attempts_that_were_repeated_count_once(predictor: Predictor, storage: Location) -> None:
    rows = fill(storage.join("in"))
    plan = _plan_files(request(storage), predictor, 2, by_case=False)
    assert len(plan.units) == 3
    out = storage.join("out")
    with _committing(out, "error") as commit:
        for unit in plan.units:
            # An attempt that Spark does not report.
            plan.task.score(unit, commit.staging)
        score(plan, commit)
        assert not out.join("_SUCCESS").exists()
    assert names(out) == ["_SUCCESS", *(f"day={day}/part.parquet" for day in range(3))]
    assert read(out) == {i: pytest.approx(11 * i + 0.5) for i in range(rows)}


@pytest.mark.thorough
def test_what_failed_leaves_nothing(predictor: Predictor, storage: Location) -> None:
    fill(storage.join("in"))
    out = storage.join("out")
    out.make_folder()
    out.join("old.parquet").write_bytes(b"old")
    plan = _plan_files(request(storage, mode="overwrite"), predictor, 2, by_case=False)

    def fail() -> None:
        with _committing(out, "overwrite") as commit:
            plan.task.score(plan.units[0], commit.staging)
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert names(out) == ["old.parquet"]


def test_of_two_calls_at_once_the_second_is_refused(
    predictor: Predictor, storage: Location
) -> None:
    rows = fill(storage.join("in"))
    out = storage.join("out")
    plan = _plan_files(request(storage), predictor, 2, by_case=False)
    with _committing(out, "error") as commit:
        for mode in ("error", "overwrite"):
            _plan_files(request(storage, mode=mode), predictor, 2, by_case=False)
            named = rf"out\b.*another call.*\b{os.getpid()}\b"
            with pytest.raises(InvalidInputError, match=named), _committing(out, mode):
                pass
        score(plan, commit)
    with pytest.raises(InvalidInputError, match=r"out\b.*empty"), _committing(out, "error"):
        pass
    assert len(read(out)) == rows


def test_a_job_that_reports_nothing_replaces_nothing(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose session is stopped before it begins."""

    class Job:
        cancelled_elsewhere = False

        def __init__(self, *given: Any) -> None:
            pass

        def run(self) -> None:
            return None

    storage = Location(tmp_path / "storage")
    fill(storage.join("in"))
    out = storage.join("out")
    out.make_folder()
    out.join("old.parquet").write_bytes(b"old")
    asked = request(storage, mode="overwrite")
    monkeypatch.setattr(files, "TaggedJob", Job)
    monkeypatch.setattr(files, "_slots", lambda spark: 2)
    monkeypatch.setattr(files, "is_case_sensitive", lambda spark: False)
    with pytest.raises(RunFailedError, match=r"/out\b.*files"):
        files.predict_files(None, asked, predictor)
    assert names(out) == ["old.parquet"]


@pytest.mark.thorough
def test_files_that_came_meanwhile_are_not_removed(predictor: Predictor, storage: Location) -> None:
    fill(storage.join("in"))
    plan = _plan_files(request(storage), predictor, 2, by_case=False)
    out = storage.join("out")

    def meanwhile() -> None:
        with _committing(out, "error") as commit:
            score(plan, commit)
            out.join("others.parquet").write_bytes(b"others")

    with pytest.raises(InvalidInputError, match=r"out\b.*empty"):
        meanwhile()
    assert names(out) == ["others.parquet"]


@pytest.mark.thorough
def test_a_lease_that_was_taken_over_ends_the_call(predictor: Predictor, storage: Location) -> None:
    """As of a driver that was stopped for a while."""
    fill(storage.join("in"))
    out = storage.join("out")
    out.make_folder()
    out.join("old.parquet").write_bytes(b"old")
    plan = _plan_files(request(storage, mode="overwrite"), predictor, 2, by_case=False)
    other = json.dumps({"token": "other", **identity(), "host": "other"})

    def stopped() -> None:
        with _committing(out, "overwrite") as commit:
            score(plan, commit)
            out.join("_lease.json").write_text(other)

    with pytest.raises(InvalidInputError, match=r"out\b.*taken over"):
        stopped()
    assert names(out) == ["_lease.json", "old.parquet"]
    assert out.join("_lease.json").read_text() == other


# A driver that is killed once it has moved a file.
KILLED = """
import os, sys
from horovod_spark_runner.model.predict_files import _committing
from horovod_spark_runner.storage.filesystem import Location

move_to = Location.move_to

def move(self, target):
    move_to(self, target)
    if target.name == "a.parquet":
        os.kill(os.getpid(), 9)

Location.move_to = move
with _committing(Location(sys.argv[1]), sys.argv[2]) as commit:
    for name in ("a.parquet", "b.parquet"):
        commit.staging.join(f"staged-{name}").write_bytes(b"new")
        commit.files[name] = f"staged-{name}"
"""


@pytest.mark.parametrize("mode", ["error", "overwrite"])
def test_a_driver_that_is_killed_while_it_moves_files(
    mode: str, predictor: Predictor, tmp_path: Path
) -> None:
    """The files there are never taken for all of them."""
    storage = Location(tmp_path / "storage")
    rows = fill(storage.join("in"))
    out = storage.join("out")
    out.make_folder()
    if mode == "overwrite":
        out.join("old.parquet").write_bytes(b"old")
        out.join("_SUCCESS").write_bytes(b"")
    command = [sys.executable, "-c", KILLED, str(out), mode]
    killed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    left = [place.name for place in out.list()]
    assert "a.parquet" in left
    assert not {"_SUCCESS", "old.parquet"} & set(left)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="no _SUCCESS.*mode='overwrite'"):
            _plan_files(request(storage), predictor, 2, by_case=False)
    plan = _plan_files(request(storage, mode="overwrite"), predictor, 2, by_case=False)
    with _committing(out, "overwrite") as commit:
        score(plan, commit)
    assert names(out) == ["_SUCCESS", *(f"day={day}/part.parquet" for day in range(3))]
    assert len(read(out)) == rows


@pytest.mark.thorough
def test_storage_that_fails_while_files_are_moved(
    predictor: Predictor, storage: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(storage.join("in"))
    out = storage.join("out")
    out.make_folder()
    out.join("old.parquet").write_bytes(b"old")
    plan = _plan_files(request(storage, mode="overwrite"), predictor, 2, by_case=False)
    move_to = Location.move_to

    def move(self: Location, target: Location) -> None:
        if "day=1" in str(target):
            raise OSError("no more quota")
        move_to(self, target)

    def fail() -> None:
        with _committing(out, "overwrite") as commit:
            score(plan, commit)
            monkeypatch.setattr(Location, "move_to", move)

    with pytest.raises(InvalidInputError, match=r"out\b.*no more quota"):
        fail()
    monkeypatch.setattr(Location, "move_to", move_to)
    with pytest.raises(InvalidInputError, match="no _SUCCESS"):
        _plan_files(request(storage), predictor, 2, by_case=False)
    with _committing(out, "overwrite") as commit:
        score(plan, commit)
    assert len(read(out)) == 3000


def test_destinations_that_cannot_be_are_named(predictor: Predictor, tmp_path: Path) -> None:
    storage = Location(tmp_path / "storage")
    fill(storage.join("in"))
    storage.join("out").write_bytes(b"text")
    for mode in ("error", "overwrite"):
        with pytest.raises(InvalidInputError, match=r"out\b.*\bfile\b.*folder"):
            _plan_files(request(storage, mode=mode), predictor, 2, by_case=False)
    within = storage.join("out", "scored")
    asked = FilesRequest(storage.join("in"), within, None, "error", PredictionSettings())
    _plan_files(asked, predictor, 2, by_case=False)
    with (
        pytest.raises(InvalidInputError, match="out/scored.*directory"),
        _committing(within, "error"),
    ):
        pass
    assert storage.join("out").read_bytes() == b"text"


def test_a_source_is_known_by_its_other_names(tmp_path: Path) -> None:
    """It would be emptied in place of what was in the destination."""
    (tmp_path / "in").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for source, target in (
        (tmp_path / "in", tmp_path / "link"),
        (tmp_path / "in" / "some.parquet", tmp_path / "link"),
        (tmp_path / "link", tmp_path / "in" / "scored"),
        ("s3a://bucket/in", "s3://bucket/in/"),
        ("s3://bucket/in", "s3n://bucket"),
    ):
        places = Location(source), Location(target)
        with pytest.raises(InvalidInputError, match=re.escape(str(places[1]))):
            FilesRequest(*places, None, "overwrite", PredictionSettings())


@pytest.mark.thorough
def test_a_source_that_changes_meanwhile_is_named(predictor: Predictor, storage: Location) -> None:
    fill(storage.join("in"))
    plan = _plan_files(request(storage), predictor, 2, by_case=False)
    storage.join("in", "day=1", "part.parquet").delete_file()
    # As many rows, in groups as large.
    place = storage.join("in", "day=0", "part.parquet")
    with place.open_input() as stream:
        table = pq.read_table(stream)
    sink = pa.BufferOutputStream()
    pq.write_table(table.take(pa.array(range(999, -1, -1))), sink, row_group_size=300)
    place.write_bytes(sink.getvalue())
    out = storage.join("out")

    def task(number: int) -> None:
        with _committing(out, "error") as commit:
            body = plan.task.over(plan.units, commit.staging)
            list(body(iter([pa.RecordBatch.from_pydict({"id": [number]})])))

    with pytest.raises(DataError, match=r"in/day=1/part\.parquet(?!.*\brow)"):
        task(1)
    with pytest.raises(DataError, match=r"in/day=0/part\.parquet.*\brows"):
        task(0)
    assert names(out) == []


@pytest.mark.thorough
def test_a_damaged_page_is_named_with_its_file(predictor: Predictor, storage: Location) -> None:
    fill(storage.join("in"))
    place = storage.join("in", "day=1", "part.parquet")
    data = bytearray(place.read_bytes())
    for byte in (20, 40, 60):
        data[byte] ^= 255
    place.write_bytes(bytes(data))
    plan = _plan_files(request(storage), predictor, 2, by_case=False)
    with _committing(storage.join("out"), "error") as commit:
        with pytest.raises(DataError, match=r"in/day=1/part\.parquet.*read.*row group 0"):
            plan.task.score(plan.units[1], commit.staging)
        score(replace(plan, units=()), commit)


def written(place: Path, **columns: Any) -> None:
    place.parent.mkdir(exist_ok=True)
    x = pa.array([[1.0, 2.0]], pa.list_(pa.float32()))
    options = {"use_deprecated_int96_timestamps": columns.pop("int96", False)}
    pq.write_table(pa.table({"x": x, **columns}), place, **options)


def test_what_is_stored_otherwise_is_refused_by_name(predictor: Predictor, tmp_path: Path) -> None:
    storage = Location(tmp_path)
    at = pa.array([1], pa.timestamp("us"))
    written(tmp_path / "in" / "a.parquet", at=at, int96=True)
    told = r"'at'.*a\.parquet.*INT96.*INT64.*outputTimestampType.*columns"
    with pytest.raises(DataError, match=told):
        _plan_files(request(storage, columns=None), predictor, 2, by_case=False)
    assert _plan_files(request(storage, columns=["x"]), predictor, 2, by_case=False).tasks == 1
    written(tmp_path / "in" / "b.parquet", at=at)
    with pytest.raises(DataError, match=r"b\.parquet.*columns.*a\.parquet"):
        _plan_files(request(storage, columns=["x"]), predictor, 2, by_case=False)


def test_parts_are_never_called_as_other_files(predictor: Predictor, tmp_path: Path) -> None:
    for name in ("a", "a-00001"):
        written(tmp_path / "in" / f"{name}.parquet")
    place = tmp_path / "in"
    read = [files._read_source_file(Location(place), path.name) for path in place.iterdir()]
    large = [Location(place), pa.schema([]), [], read[0].metadata, ""]

    class Large(files._SourceFile):
        @property
        def sizes(self) -> list[int]:
            return [10, 10]

    with pytest.raises(DataError, match=r"'a-00001\.parquet'"):
        files._split_files([Large("a.parquet", *large), *read[1:], *read[:1]], 10)
    units = files._split_files([Large("b.parquet", *large)], 10)
    assert [(unit.target, unit.groups) for unit in units] == [
        ("b-00000.parquet", (0,)), ("b-00001.parquet", (1,)),
    ]  # fmt: skip


@pytest.mark.thorough
def test_a_row_that_fails_leaves_no_writing_behind(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows before it are written meanwhile, by another thread, to what is closed next."""
    (tmp_path / "in").mkdir()
    x = pa.array([[1.0, 2.0], None], pa.list_(pa.float32()))
    pq.write_table(pa.table({"x": x}), tmp_path / "in" / "some.parquet", row_group_size=1)
    plan = _plan_files(request(Location(tmp_path), columns=[]), predictor, 2, by_case=False)
    events: list[str] = []
    write, close = pq.ParquetWriter.write_table, pq.ParquetWriter.close

    def slow(sink: Any, *given: Any) -> None:
        time.sleep(0.3)
        write(sink, *given)
        events.append("written")

    def closed(sink: Any) -> None:
        events.append("closed")
        close(sink)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", slow)
    monkeypatch.setattr(pq.ParquetWriter, "close", closed)
    with pytest.raises(DataError, match="some.parquet.*'x'.*null.*row 0"):
        plan.task.score(plan.units[0], Location(tmp_path))
    assert events[:2] == ["written", "closed"]


def test_empty_row_groups_give_no_rows(predictor: Predictor, tmp_path: Path) -> None:
    storage = Location(tmp_path)
    storage.join("in").make_folder()
    x = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32()))
    table = pa.table({"id": pa.array([0, 1], pa.int16()), "x": x})
    with pq.ParquetWriter(tmp_path / "in" / "some.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 1), table.slice(0, 0), table.slice(1)):
            writer.write_table(part)
    pq.write_table(table.slice(0, 0), tmp_path / "in" / "none.parquet")
    assert pq.ParquetFile(tmp_path / "in" / "none.parquet").num_row_groups == 1
    plan = _plan_files(request(storage), predictor, 2, by_case=False)
    with _committing(storage.join("out"), "error") as commit:
        score(plan, commit)
    assert read(storage.join("out")) == {0: 21.5, 1: 43.5}
    schema = pq.read_schema(tmp_path / "out" / "none.parquet")
    assert schema.equals(pq.read_schema(tmp_path / "out" / "some.parquet"))
    assert schema.field("id").type == pa.int16()


@pytest.mark.thorough
def test_small_files_share_a_task(predictor: Predictor, tmp_path: Path) -> None:
    storage = Location(tmp_path)
    storage.join("in").make_folder()
    x = pa.array([[1.0, 2.0]] * 10, pa.list_(pa.float32()))
    for number in range(40):
        ids = np.arange(10) + 10 * number
        pq.write_table(pa.table({"id": ids, "x": x}), tmp_path / "in" / f"{number:02d}.parquet")
    plan = _plan_files(request(storage), predictor, 2, by_case=False)
    assert len(plan.units) == 40
    assert plan.tasks == 6
    # Where there are slots for all, none waits for another.
    assert _plan_files(request(storage), predictor, 40, by_case=False).tasks == 40
    numbers = pa.RecordBatch.from_pydict({"id": list(range(40))})
    with _committing(storage.join("out"), "error") as commit:
        for out in plan.task.over(plan.units, commit.staging)(iter([numbers])):
            for number, name, rows in map(json.loads, out["text"].to_pylist()):
                assert rows == 10
                commit.files[plan.units[number].target] = name
    assert sorted(read(storage.join("out"))) == list(range(400))


@pytest.mark.thorough
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
