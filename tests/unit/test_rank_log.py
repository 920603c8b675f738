"""A rank's log never holds up its slot."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner.cluster.slot.rank_log import RankLog


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Storage that takes nothing until the event is set."""
    free = threading.Event()
    append = RankLog._append

    def slow(log: RankLog, stream: Any, lines: list[str]) -> bool:
        free.wait(30)
        return append(log, stream, lines)

    monkeypatch.setattr(RankLog, "_append", slow)
    yield free
    free.set()
    for thread in threading.enumerate():
        if thread.name == "hsr-rank-log":  # none outlives its log for long
            thread.join(10)
            assert not thread.is_alive()


def lines_of(folder: Path) -> list[str]:
    return (folder / "rank-00003.log").read_text().splitlines()


def test_lines_before_and_after_the_rank_is_known(tmp_path: Path) -> None:
    log = RankLog(str(tmp_path / "logs"), tmp_path)
    log.write(["early"])
    log.open(3, "rank 3 of 4")
    log.write(["late", "later"])
    log.close()
    title, *lines = lines_of(tmp_path / "logs")
    assert title.endswith("rank 3 of 4")
    assert lines == ["early", "late", "later"]


def test_storage_that_hangs_holds_up_nobody(tmp_path: Path, hung: threading.Event) -> None:
    log = RankLog(str(tmp_path), tmp_path, max_waiting=5, close_seconds=0.2)
    log.open(3, "rank 3")
    began = time.monotonic()
    for number in range(100):
        log.write([f"line {number}", "and another"])
    log.close()
    assert time.monotonic() - began < 5
    assert TimeoutError.__name__ in log.problem


def test_what_was_dropped_is_counted(tmp_path: Path, hung: threading.Event) -> None:
    log = RankLog(str(tmp_path), tmp_path, max_waiting=5, close_seconds=0.2)
    log.open(3, "rank 3")
    for number in range(50):
        log.write([f"line {number}"])
    hung.set()
    deadline = time.monotonic() + 60
    while not log._waiting.empty():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    log.write(["the last"])
    log.close()
    log._thread.join(10)  # type: ignore[union-attr]
    written = [line for line in lines_of(tmp_path) if line.startswith("line ")]
    (note,) = [line for line in lines_of(tmp_path) if "dropped" in line]
    assert f" {50 - len(written)} " in note
    assert lines_of(tmp_path)[-1] == "the last"


def test_a_log_that_cannot_be_opened_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = RankLog(str(tmp_path / "file" / "logs"), tmp_path)
    log.open(3, "rank 3")
    log.write(["nothing"])
    log.close()
    assert str(tmp_path / "file" / "logs") in log.problem
    assert "NotADirectoryError" in log.problem
