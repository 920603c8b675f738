"""Lease files, mostly as run directories use them."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.errors import CheckpointError, RunDirectoryError
from horovod_spark_runner.machine import process_start
from horovod_spark_runner.storage import lease as lease_module
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.storage.lease import (
    Lease,
    _Holder,
    _holder_of,
    holds,
    identity,
    seems_held,
)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(str(tmp_path))


def test_the_second_writer_refuses_and_says_who_is_first(directory: RunDirectory) -> None:
    with directory.lease() as lease:
        assert holds(directory.lock, lease.token)
        with pytest.raises(RunDirectoryError, match=r"another run.*process \d+"):
            directory.lease().__enter__()
    assert not directory.lock.exists()
    with directory.lease():
        pass


def test_a_new_attempt_shuts_out_the_writers_of_the_last(directory: RunDirectory) -> None:
    with directory.lease() as lease:
        first = lease.token
        second = lease.begin_attempt()
        assert holds(directory.lock, second)
        assert not holds(directory.lock, first)


class Faulty:
    """The lock's file on storage that fails once, before or after it has written."""

    def __init__(self, place: Location, when: str, error: BaseException) -> None:
        self._place, self._when, self._error = place, when, error
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)

    def write_text(self, text: str) -> None:
        first, self.failed = not self.failed, True
        if not first or self._when == "after":
            self._place.write_text(text)
        if first:
            raise self._error


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_write_that_fails_loses_the_lock_to_nobody(directory: RunDirectory, when: str) -> None:
    with directory.lease() as lease:
        first = lease.token
        lease._file = Faulty(directory.lock, when, OSError(5, "Input/output error"))  # type: ignore[assignment]
        with pytest.raises(CheckpointError, match="Input/output error"):
            lease.begin_attempt()
        second = lease.begin_attempt()  # that of the restart
        assert first != second == lease.token
        assert holds(directory.lock, second)
    assert not directory.lock.exists()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_lock_that_was_not_taken_is_not_left(
    directory: RunDirectory, error: BaseException
) -> None:
    lease = directory.lease()
    lease._file = Faulty(directory.lock, "after", error)  # type: ignore[assignment]
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        lease.__enter__()
    assert lease._file.failed  # type: ignore[attr-defined]
    assert not directory.lock.exists()


def test_a_lock_that_an_ended_run_of_this_process_left_is_stale(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    with directory.lease():
        left = directory.lock.read_text()
    directory.lock.write_text(left)  # it could not be deleted
    with caplog.at_level(logging.WARNING), directory.lease():
        assert "this process" in caplog.text
        with pytest.raises(RunDirectoryError, match="another run"):
            directory.lease().__enter__()


def test_a_killed_process_leaves_a_lock_that_is_taken_over(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import os, sys; from horovod_spark_runner.checkpoint.run_directory import RunDirectory;"
        "RunDirectory(sys.argv[1]).lease().__enter__(); os.kill(os.getpid(), 9)"
    )
    place = str(directory.location)
    killed = subprocess.run([sys.executable, "-c", code, place], check=False)
    assert killed.returncode == -9
    assert directory.lock.exists()
    with caplog.at_level(logging.WARNING), directory.lease() as lease:
        assert holds(directory.lock, lease.token)
    assert re.search("stale.*process", caplog.text)
    assert not directory.lock.exists()


def test_what_a_killed_driver_was_writing_is_swept_by_the_next(
    directory: RunDirectory, tmp_path: Path
) -> None:
    left, other = tmp_path / ".lock.json.0123abcd", tmp_path / ".lock.json.mine"
    for path in (left, other):
        path.touch()
    with directory.lease():
        assert not left.exists()
        assert other.exists()


def test_a_damaged_lock_is_not_taken_for_another_runs(directory: RunDirectory) -> None:
    with directory.lease() as lease:
        directory.lock.write_text("{")
        with pytest.raises(RunDirectoryError, match=r"lock\.json.*damaged"):
            RunDirectory(directory.location, lease.token).check_held()


def held(**changed: Any) -> dict[str, Any]:
    return {"token": "t", "renewed": 1000.0, **identity(), **changed}


def test_what_can_be_told_at_once_of_a_holder() -> None:
    assert _holder_of(held()) is _Holder.ALIVE
    assert _holder_of(held(started="1")) is _Holder.DEAD  # its number was given away
    assert _holder_of(held(host="other")) is _Holder.ELSEWHERE
    assert _holder_of(held(pids="pid:[1]", pid=1)) is _Holder.ELSEWHERE  # a container's
    assert _holder_of({}) is _Holder.DEAD
    # To be shown, the clocks are good enough.
    assert seems_held(held(), 99999.0)
    assert seems_held(held(host="other"), 1059.0)
    assert not seems_held(held(host="other"), 1061.0)


class Elsewhere:
    """A holder on another host, whose clock differs; renews its lock until told to stop."""

    def __init__(self, directory: RunDirectory, ahead: float, monkeypatch: Any) -> None:
        monkeypatch.setattr(lease_module, "STALE_SECONDS", 1.5)
        monkeypatch.setattr(lease_module, "WATCH_SECONDS", 0.1)
        self._directory, self._ahead = directory, ahead
        self._dead = threading.Event()
        self._thread = threading.Thread(target=self._renew)
        self._write()
        self._thread.start()

    def _write(self) -> None:
        record = held(host="other", renewed=time.time() + self._ahead)
        self._directory.lock.write_text(json.dumps(record))

    def _renew(self) -> None:
        while not self._dead.wait(0.5):
            self._write()

    def die(self) -> None:
        self._dead.set()
        self._thread.join()


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", [-3600.0, -61.0, 0.0, 61.0, 3600.0])
def test_a_live_lock_elsewhere_is_respected_whatever_its_clock_says(
    directory: RunDirectory, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = Elsewhere(directory, ahead, monkeypatch)
    try:
        with pytest.raises(RunDirectoryError, match=r"another run.*\bother"):
            directory.lease().__enter__()
    finally:
        holder.die()
    assert holds(directory.lock, "t")


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
def test_a_dead_one_elsewhere_is_taken_over_whatever_its_clock_says(
    directory: RunDirectory,
    ahead: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Elsewhere(directory, ahead, monkeypatch).die()
    with caplog.at_level(logging.WARNING), directory.lease() as lease:
        assert holds(directory.lock, lease.token)
    waits, takes_over = caplog.messages
    assert directory.lock.name in waits
    assert re.search(r"stale.*\bother\b", takes_over)


def test_where_files_cannot_be_locked_the_second_still_refuses(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS with a folder, and on mounted object stores: what is written is read back."""

    def refuse(*arguments: Any) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(lease_module, "SETTLE_SECONDS", 0.5)
    won, refused = compete_for(directory, 4)
    assert (len(won), len(refused)) == (1, 3)
    won[0].__exit__(None, None, None)


def test_what_is_locked_is_open_for_writing(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[int] = []

    def note(file: Any, how: int) -> None:
        flags.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE)

    monkeypatch.setattr(fcntl, "flock", note)
    with directory.lease():
        pass
    assert set(flags) == {os.O_WRONLY}  # or NFS answers EBADF


def test_a_damaged_lock_is_stale(directory: RunDirectory) -> None:
    directory.lock.write_text("{")
    with directory.lease() as lease:
        assert holds(directory.lock, lease.token)


def compete_for(
    directory: RunDirectory, number: int
) -> tuple[list[Lease], list[RunDirectoryError]]:
    """Have threads enter at once; return the locks that were taken and the refusals."""
    won: list[Lease] = []
    refused: list[RunDirectoryError] = []
    start = threading.Barrier(number)

    def compete() -> None:
        start.wait()
        try:
            won.append(directory.lease().__enter__())
        except RunDirectoryError as error:
            refused.append(error)

    threads = [threading.Thread(target=compete) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won, refused


def test_of_many_at_once_one_gets_it(directory: RunDirectory) -> None:
    # A stale lock makes it hard: all see it and want to take it over.
    directory.lock.write_text(json.dumps(held(started="1")))
    won, refused = compete_for(directory, 8)
    assert len(won) == 1
    assert len(refused) == 7
    assert holds(directory.lock, won[0].token)
    won[0].__exit__(None, None, None)


def test_it_is_renewed_and_not_taken_back(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for the file to change between two renewals, also on a busy machine.
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 1.0)
    with directory.lease():
        before = json.loads(directory.lock.read_text())["renewed"]
        deadline = time.monotonic() + 60
        while json.loads(directory.lock.read_text())["renewed"] == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        directory.lock.write_text(json.dumps(held(token="another's")))
        time.sleep(1.5)
    assert holds(directory.lock, "another's")


def test_process_start_knows_the_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert process_start(child.pid) is None
    assert process_start(1) is not None
