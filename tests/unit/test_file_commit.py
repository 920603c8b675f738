"""Scored files in their places, on disk and in an object store: every row once, no half files."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovod_spark_runner import DataError, InvalidInputError, RunFailedError
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.ml import file_claim, files, inference
from horovod_spark_runner.ml.file_commit import Commit, committing
from horovod_spark_runner.ml.file_schema import check_stored_alike
from horovod_spark_runner.ml.files import FilesPlan, FilesRequest, plan_files
from horovod_spark_runner.ml.inference import Predictor
from horovod_spark_runner.ml.trained import read_finished_run
from horovod_spark_runner.rundir import lock
from horovod_spark_runner.rundir.directory import RunDirectory
from horovod_spark_runner.settings.prediction import PredictionSettings
from horovod_spark_runner.storage.filesystem import FileStat, Location

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


def score(plan: FilesPlan, commit: Commit) -> None:
    """Score all there is, as tasks do."""
    for number, unit in enumerate(plan.units):
        commit.told.append((number, *plan.task.score(number, unit, commit.staging)))


@pytest.mark.thorough
def test_attempts_that_were_repeated_count_once(predictor: Predictor, storage: Location) -> None:
    rows = fill(storage.join("in"))
    plan = plan_files(request(storage), predictor, 2, by_case=False)
    assert len(plan.units) == 3
    with plan.committing() as commit:
        for number, unit in enumerate(plan.units):
            # An attempt that Spark tells nothing of.
            plan.task.score(number, unit, commit.staging)
        score(plan, commit)
        assert not storage.join("out", "_SUCCESS").exists()
    names = [file.name for file in storage.join("out").files()]
    assert names == ["_SUCCESS", *(f"day={day}/part.parquet" for day in range(3))]
    assert read(storage.join("out")) == {i: pytest.approx(11 * i + 0.5) for i in range(rows)}
    assert [place.name for place in storage.list()] == ["in", "out"]


def test_a_new_folder_appears_whole(predictor: Predictor, tmp_path: Path) -> None:
    """One that exists stays the folder it is, with its rights."""
    storage = Location(tmp_path / "storage")
    fill(storage.join("in"))
    target = tmp_path / "storage" / "out"
    plan = plan_files(request(storage), predictor, 2, by_case=False)
    with plan.committing() as commit:
        score(plan, commit)
        assert not target.exists()
    assert len(read(storage.join("out"))) == 3000
    # Within folders that are not there, either.
    deep = FilesRequest(
        storage.join("in"), storage.join("a", "b"), ["id"], "error", PredictionSettings()
    )
    with (again := plan_files(deep, predictor, 2, by_case=False)).committing() as commit:
        score(again, commit)
    assert len(read(storage.join("a", "b"))) == 3000
    assert [place.name for place in storage.join("a").list()] == ["b"]
    target.chmod(0o750)
    before = target.stat()
    plan = plan_files(request(storage, mode="overwrite"), predictor, 2, by_case=False)
    with plan.committing() as commit:
        score(plan, commit)
    assert (target.stat().st_ino, target.stat().st_mode) == (before.st_ino, before.st_mode)
    assert sorted(path.name for path in target.iterdir())[0] == "_SUCCESS"


@pytest.mark.thorough
def test_what_failed_leaves_nothing(predictor: Predictor, storage: Location) -> None:
    fill(storage.join("in"))
    storage.join("out").make_folder()
    storage.join("out", "old.parquet").write_bytes(b"old")
    plan = plan_files(request(storage, mode="overwrite"), predictor, 2, by_case=False)

    def fail() -> None:
        with plan.committing() as commit:
            plan.task.score(0, plan.units[0], commit.staging)
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert [file.name for file in storage.join("out").files()] == ["old.parquet"]


def test_of_two_calls_at_once_the_second_is_refused(
    predictor: Predictor, storage: Location
) -> None:
    rows = fill(storage.join("in"))
    late = plan_files(request(storage), predictor, 2, by_case=False)
    with plan_files(request(storage), predictor, 2, by_case=False).committing() as commit:
        for mode in ("error", "overwrite"):
            second = plan_files(request(storage, mode=mode), predictor, 2, by_case=False)
            named = rf"out\b.*another call.*\b{os.getpid()}\b"
            with pytest.raises(InvalidInputError, match=named), second.committing():
                pass
        score(late, commit)
    with pytest.raises(InvalidInputError, match=r"out\b.*empty"), late.committing():
        pass
    assert len(read(storage.join("out"))) == rows
    assert [place.name for place in storage.list()] == ["in", "out"]


def test_a_job_that_tells_of_nothing_replaces_nothing(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose session is stopped before it begins."""

    class Job:
        def __init__(self, *given: Any) -> None:
            pass

        def run(self) -> None:
            return None

    storage = Location(tmp_path / "storage")
    fill(storage.join("in"))
    storage.join("out").make_folder()
    storage.join("out", "old.parquet").write_bytes(b"old")
    plan = plan_files(request(storage, mode="overwrite"), predictor, 2, by_case=False)
    monkeypatch.setattr(files, "TaggedJob", Job)
    with pytest.raises(RunFailedError, match=r"/out\b.*files"):
        score_by_job(plan)
    assert [file.name for file in storage.join("out").files()] == ["old.parquet"]


def score_by_job(plan: FilesPlan) -> None:
    with plan.committing() as commit:
        commit.told += files._told(None, plan, commit)


@pytest.mark.thorough
def test_files_that_came_meanwhile_are_not_removed(predictor: Predictor, storage: Location) -> None:
    fill(storage.join("in"))
    plan = plan_files(request(storage), predictor, 2, by_case=False)

    def meanwhile() -> None:
        with plan.committing() as commit:
            score(plan, commit)
            storage.join("out").make_folder()
            storage.join("out", "others.parquet").write_bytes(b"others")

    with pytest.raises(InvalidInputError, match=r"out\b.*empty"):
        meanwhile()
    assert [file.name for file in storage.join("out").files()] == ["others.parquet"]


@pytest.mark.thorough
def test_a_claim_that_was_taken_over_ends_the_call(predictor: Predictor, storage: Location) -> None:
    """As of a driver that was stopped for a while."""
    fill(storage.join("in"))
    storage.join("out").make_folder()
    storage.join("out", "old.parquet").write_bytes(b"old")
    plan = plan_files(request(storage, mode="overwrite"), predictor, 2, by_case=False)
    other = json.dumps({"token": "other", **lock.identity(), "host": "other"})

    def stopped() -> None:
        with plan.committing() as commit:
            score(plan, commit)
            storage.join("out", "_claim.json").write_text(other)

    with pytest.raises(InvalidInputError, match=r"out\b.*taken over"):
        stopped()
    names = [file.name for file in storage.join("out").files()]
    assert names == ["_claim.json", "old.parquet"]
    assert storage.join("out", "_claim.json").read_text() == other


def test_a_claim_that_is_interrupted_is_given_up(
    storage: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a notebook's process, which lives on, no later call could take it over."""
    out = storage.join("out")
    out.make_folder()
    place = out.join("_claim.json")
    place.write_text(json.dumps({"moving": True, "ended": True}))

    sleep, caller = time.sleep, threading.current_thread()

    def interrupted(seconds: float) -> None:
        if threading.current_thread() is caller:  # and none of py4j's, say
            raise KeyboardInterrupt
        sleep(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt), committing(out, "error", []):
            pass
    assert not place.exists()


@pytest.mark.thorough
def test_claims_of_other_machines_are_watched(
    predictor: Predictor, storage: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_claim, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(file_claim, "STALE_SECONDS", 0.5)
    fill(storage.join("in"))
    storage.join("out").make_folder()
    place = storage.join("out", "_claim.json")
    storage.join("out", "_staging-0123").make_folder()
    storage.join("out", "_staging-0123", "_half.parquet").write_bytes(b"half")
    plan = plan_files(request(storage), predictor, 2, by_case=False)
    ended = threading.Event()

    def renew() -> None:
        number = 0
        while not ended.wait(0.2):
            number += 1
            place.write_text(json.dumps({"token": "t", "host": "other", "renewed": number}))

    place.write_text(json.dumps({"token": "t", "host": "other", "renewed": 0}))
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(InvalidInputError, match="another call"), plan.committing():
            pass
    finally:
        ended.set()
        thread.join()
    assert storage.join("out", "_staging-0123").exists()
    with plan.committing() as commit:
        score(plan, commit)
    assert [p.name for p in storage.join("out").list() if not p.name.startswith("day")] == [
        "_SUCCESS"
    ]


# A driver that is killed once it has moved a file.
KILLED = """
import os, sys
from horovod_spark_runner.ml.file_commit import committing
from horovod_spark_runner.storage.filesystem import FileStat, Location

move_to = Location.move_to

def move(self, target):
    move_to(self, target)
    if target.name == "a.parquet":
        os.kill(os.getpid(), 9)

Location.move_to = move
with committing(Location(sys.argv[1]), sys.argv[2], ["a.parquet", "b.parquet"]) as commit:
    for number in range(2):
        name = f"00000{number}-0.parquet"
        commit.staging.join(name).write_bytes(b"new")
        commit.told.append((number, name, 1))
"""


def kill(target: Location, mode: str) -> None:
    command = [sys.executable, "-c", KILLED, str(target), mode]
    killed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr


def test_a_driver_that_is_killed_in_a_new_folder(
    predictor: Predictor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Location(tmp_path / "storage")
    rows = fill(storage.join("in"))
    kill(storage.join("out"), "error")
    assert not storage.join("out").exists()
    hidden = [place.name.partition("out")[0] for place in storage.list()]
    assert hidden == ["_claim-", "_staging-", "in"]
    plan = plan_files(request(storage), predictor, 2, by_case=False)
    with caplog.at_level(logging.WARNING), plan.committing() as commit:
        score(plan, commit)
    assert [place.name for place in storage.list()] == ["in", "out"]
    assert len(read(storage.join("out"))) == rows
    assert caplog.text.count(hidden[1]) == 1
    # Killed while the folder did not exist, which another program has made since.
    kill(storage.join("other"), "error")
    storage.join("other").make_folder()
    with committing(storage.join("other"), "error", []):
        pass
    assert [place.name for place in storage.list()] == ["in", "other", "out"]


def test_a_driver_that_is_killed_while_it_moves_files(predictor: Predictor, tmp_path: Path) -> None:
    storage = Location(tmp_path / "storage")
    rows = fill(storage.join("in"))
    storage.join("out").make_folder()
    storage.join("out", "old.parquet").write_bytes(b"old")
    storage.join("out", "_SUCCESS").write_bytes(b"")
    kill(storage.join("out"), "overwrite")
    unfinished = "_SUCCESS.*mode='overwrite'"
    for _ in range(2):  # also when it was told already
        with pytest.raises(InvalidInputError, match=unfinished):
            plan_files(request(storage), predictor, 2, by_case=False)
    plan = plan_files(request(storage, mode="overwrite"), predictor, 2, by_case=False)
    with plan.committing() as commit:
        score(plan, commit)
    names = [place.name for place in storage.join("out").list()]
    assert names == ["_SUCCESS", "day=0", "day=1", "day=2"]
    assert len(read(storage.join("out"))) == rows


@pytest.mark.thorough
def test_storage_that_fails_while_files_are_moved(
    predictor: Predictor, storage: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(storage.join("in"))
    storage.join("out").make_folder()
    storage.join("out", "old.parquet").write_bytes(b"old")
    plan = plan_files(request(storage, mode="overwrite"), predictor, 2, by_case=False)
    move_to = Location.move_to

    def move(self: Location, target: Location) -> None:
        if "day=1" in str(target):
            raise OSError("no more quota")
        move_to(self, target)

    def fail() -> None:
        with plan.committing() as commit:
            score(plan, commit)
            monkeypatch.setattr(Location, "move_to", move)

    with pytest.raises(OSError, match="no more quota"):
        fail()
    monkeypatch.setattr(Location, "move_to", move_to)
    with pytest.raises(InvalidInputError, match="files.*call"):
        plan_files(request(storage), predictor, 2, by_case=False)
    with plan.committing() as commit:
        score(plan, commit)
    assert len(read(storage.join("out"))) == 3000


def test_destinations_that_cannot_be_are_named(predictor: Predictor, tmp_path: Path) -> None:
    storage = Location(tmp_path / "storage")
    fill(storage.join("in"))
    storage.join("out").write_bytes(b"text")
    for mode in ("error", "overwrite"):
        with pytest.raises(InvalidInputError, match=r"out\b.*\bfile\b.*folder"):
            plan_files(request(storage, mode=mode), predictor, 2, by_case=False)
    within = storage.join("out", "scored")
    asked = FilesRequest(storage.join("in"), within, None, "error", PredictionSettings())
    plan = plan_files(asked, predictor, 2, by_case=False)
    named = "out/scored.*directory"
    with pytest.raises(InvalidInputError, match=named), plan.committing():
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
    plan = plan_files(request(storage), predictor, 2, by_case=False)
    storage.join("in", "day=1", "part.parquet").delete_file()
    sink = pa.BufferOutputStream()
    x = pa.array([[1.0, 2.0]], pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": [0], "x": x}), sink)
    storage.join("in", "day=2", "part.parquet").write_bytes(sink.getvalue())
    # As many rows, in groups as large.
    place = storage.join("in", "day=0", "part.parquet")
    with place.open_input() as stream:
        table = pq.read_table(stream)
    sink = pa.BufferOutputStream()
    pq.write_table(table.take(pa.array(range(999, -1, -1))), sink, row_group_size=300)
    place.write_bytes(sink.getvalue())
    numbers = pa.RecordBatch.from_pydict({"id": [0]})

    def task(number: int) -> None:
        with plan.committing() as commit:
            share = [range(number, number + 1)]
            body = plan.task.over(plan.units, share, commit.staging)
            with pytest.raises(DataError) as raised:
                list(body(iter([numbers])))
            assert commit.failure() == str(raised.value)
            raise raised.value

    with pytest.raises(DataError, match=r"in/day=1/part\.parquet(?!.*\brow)"):
        task(1)
    for day in (2, 0):
        with pytest.raises(DataError, match=rf"in/day={day}/part\.parquet.*\brows"):
            task(day)
    assert not storage.join("out").files()


@pytest.mark.thorough
def test_a_damaged_page_is_told_of_with_its_file(predictor: Predictor, storage: Location) -> None:
    fill(storage.join("in"))
    place = storage.join("in", "day=1", "part.parquet")
    data = bytearray(place.read_bytes())
    for byte in (20, 40, 60):
        data[byte] ^= 255
    place.write_bytes(bytes(data))
    plan = plan_files(request(storage), predictor, 2, by_case=False)
    with plan.committing() as commit:
        body = plan.task.over(plan.units, [range(1, 2)], commit.staging)
        with pytest.raises(DataError, match=r"in/day=1/part\.parquet.*read") as raised:
            list(body(iter([pa.RecordBatch.from_pydict({"id": [0]})])))
        assert commit.failure() == str(raised.value)


def test_what_would_be_stored_otherwise_is_told() -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"at": pa.array([1], pa.timestamp("us"))}), sink)
    file = pq.ParquetFile(pa.BufferReader(sink.getvalue()))
    told = r"'at'.*\bhere\b.*INT64.*Timestamp\(.*\b1\b.*\b0\b.*INT96.*\b1\b.*\b0\b.*columns"
    options = {"use_deprecated_int96_timestamps": True}
    with pytest.raises(DataError, match=told):
        check_stored_alike(file, file.schema_arrow, ["at"], options, "here")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.thorough
def test_the_bar_counts_files_that_are_done(predictor: Predictor, tmp_path: Path) -> None:
    """Whatever is written aside meanwhile: what a task notes of a failure, say."""
    storage = Location(tmp_path)
    fill(storage.join("in"))
    plan = plan_files(request(storage), predictor, 2, by_case=False)
    shown = Terminal()
    with plan.committing() as commit:
        with files._showing(plan, commit, shown):
            for name in ("000001-a.parquet", "._failed-000002.1a", "_failed-000002", "_000002-b"):
                commit.staging.join(name).write_text("")
            deadline = time.monotonic() + 30
            while "1.00k/3.00k" not in shown.getvalue() and time.monotonic() < deadline:
                time.sleep(0.1)
        assert "1.00k/3.00k" in shown.getvalue()
        score(plan, commit)


def test_many_row_groups_are_counted_once() -> None:
    added: list[int] = []

    class Size(int):
        def __add__(self, other: int) -> Size:
            added.append(1)
            return Size(int(self) + int(other))

        __radd__ = __add__

    group = SimpleNamespace(total_byte_size=Size(10), num_rows=2)
    footer: Any = SimpleNamespace(num_row_groups=1000, row_group=lambda number: group)
    units, costs = files._units([FileStat("some.parquet", 1, 0)], [(footer, "")], 5000)
    assert [(len(unit.groups), unit.rows) for unit in units] == [(500, 1000)] * 2
    assert costs == [5000 + files._FILE_BYTES] * 2
    assert len(added) <= 4000


@pytest.mark.thorough
def test_a_row_that_fails_leaves_no_writing_behind(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows before it are written meanwhile, by another thread, to what is closed next."""
    (tmp_path / "in").mkdir()
    x = pa.array([[1.0, 2.0], None], pa.list_(pa.float32()))
    pq.write_table(pa.table({"x": x}), tmp_path / "in" / "some.parquet", row_group_size=1)
    plan = plan_files(request(Location(tmp_path), columns=[]), predictor, 2, by_case=False)
    written: list[str] = []
    write, close = pq.ParquetWriter.write_table, pq.ParquetWriter.close

    def slow(sink: Any, *given: Any) -> None:
        time.sleep(0.3)
        write(sink, *given)
        written.append("written")

    def closed(sink: Any) -> None:
        written.append("closed")
        close(sink)

    with plan.committing() as commit:
        monkeypatch.setattr(pq.ParquetWriter, "write_table", slow)
        monkeypatch.setattr(pq.ParquetWriter, "close", closed)
        with pytest.raises(DataError, match="some.parquet.*'x'.*null.*row 0"):
            plan.task.score(0, plan.units[0], commit.staging)
    assert written[:2] == ["written", "closed"]


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
    plan = plan_files(request(storage), predictor, 2, by_case=False)
    with plan.committing() as commit:
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
    plan = plan_files(request(storage), predictor, 2, by_case=False)
    assert len(plan.units) == 40
    assert [number for share in plan.shares for number in share] == list(range(40))
    assert len(plan.shares) <= 8
    numbers = pa.RecordBatch.from_pydict({"id": list(range(len(plan.shares)))})
    with plan.committing() as commit:
        body = plan.task.over(plan.units, plan.shares, commit.staging)
        rows = [
            json.loads(text) for out in body(iter([numbers])) for text in out["text"].to_pylist()
        ]
        commit.told += [tuple(row) for row in rows]
    assert sorted(read(storage.join("out"))) == list(range(400))
    # Where there are slots for all, none waits for another.
    assert (
        len(plan_files(request(storage, mode="overwrite"), predictor, 40, by_case=False).shares)
        == 40
    )


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
