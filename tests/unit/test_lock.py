"""The lock of a run directory."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner.errors import RunDirectoryError
from horovod_spark_runner.machine import process_start
from horovod_spark_runner.storage import lock as lock_module
from horovod_spark_runner.storage.lock import RunLock, holds, why_stale
from horovod_spark_runner.storage.run_directory import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(str(tmp_path))


def test_the_second_writer_refuses_and_says_who_is_first(directory: RunDirectory) -> None:
    with RunLock(directory) as lock:
        assert holds(directory, lock.token)
        with pytest.raises(RunDirectoryError, match=r"written by another run \(process \d+ on "):
            RunLock(directory).__enter__()
    assert directory.location.list() == []
    with RunLock(directory):
        pass


def test_a_new_attempt_shuts_out_the_writers_of_the_last(directory: RunDirectory) -> None:
    with RunLock(directory) as lock:
        first = lock.token
        second = lock.begin_attempt()
        assert holds(directory, second)
        assert not holds(directory, first)


def test_a_killed_process_leaves_a_lock_that_is_taken_over(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import os, sys; from horovod_spark_runner.storage.lock import RunLock;"
        "from horovod_spark_runner.storage.run_directory import RunDirectory;"
        "RunLock(RunDirectory(sys.argv[1])).__enter__(); os.kill(os.getpid(), 9)"
    )
    place = str(directory.location)
    killed = subprocess.run([sys.executable, "-c", code, place], check=False)
    assert killed.returncode == -9
    assert directory.lock.exists()
    with caplog.at_level(logging.WARNING), RunLock(directory) as lock:
        assert holds(directory, lock.token)
    assert "is stale (process" in caplog.text
    assert directory.location.list() == []


def held(**changed: Any) -> dict[str, Any]:
    identity = lock_module._identity()
    return {"token": "t", "renewed": 1000.0, **identity, **changed}


def test_when_a_lock_is_stale() -> None:
    # On this machine the process tells, not the clock.
    assert why_stale(held(), 99999.0) is None
    assert "is gone" in str(why_stale(held(started="1"), 1001.0))  # its number was given away
    # Elsewhere, or in another container of this machine, its time tells.
    assert why_stale(held(host="other"), 1059.0) is None
    assert "last renewed 61 s ago on other" in str(why_stale(held(host="other"), 1061.0))
    assert why_stale(held(pids="pid:[1]", pid=1), 1059.0) is None


def test_a_damaged_lock_is_stale(directory: RunDirectory) -> None:
    directory.lock.write_text("{")
    with RunLock(directory) as lock:
        assert holds(directory, lock.token)


def test_of_many_at_once_one_gets_it(directory: RunDirectory) -> None:
    # A stale lock makes it hard: all see it and want to take it over.
    directory.lock.write_text(json.dumps(held(started="1")))
    won: list[RunLock] = []
    refused: list[Exception] = []
    start = threading.Barrier(8)

    def compete() -> None:
        start.wait()
        try:
            won.append(RunLock(directory).__enter__())
        except RunDirectoryError as error:
            refused.append(error)

    threads = [threading.Thread(target=compete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(refused) == 7
    assert holds(directory, won[0].token)
    won[0].__exit__(None, None, None)


def test_it_is_renewed_and_not_taken_back(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "RENEW_SECONDS", 0.2)
    with RunLock(directory):
        before = json.loads(directory.lock.read_text())["renewed"]
        deadline = time.monotonic() + 5
        while json.loads(directory.lock.read_text())["renewed"] == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        directory.lock.write_text(json.dumps(held(token="another's")))
        time.sleep(0.5)
    assert holds(directory, "another's")


def test_process_start_knows_the_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert process_start(child.pid) is None
    assert process_start(1) is not None
