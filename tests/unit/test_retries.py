"""Retries of storage that fails, and timeouts of storage that hangs."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from concurrent.futures import wait
from pathlib import Path

import pytest

from horovod_spark_runner.errors import CheckpointError, InvalidInputError
from horovod_spark_runner.storage import retries
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.storage.retries import (
    TIMEOUT_VARIABLE,
    HungError,
    Watchdog,
    call_with_timeout,
    retry,
)


def test_an_answer_and_an_error_are_handed_on() -> None:
    assert call_with_timeout(lambda watchdog: 7, "x") == 7
    with pytest.raises(FileNotFoundError):
        call_with_timeout(lambda watchdog: Path("/no/such/file").read_text(), "x")


def test_an_error_keeps_nothing_alive_once_it_is_handled() -> None:
    class Data:
        pass

    data = Data()
    seen = weakref.ref(data)

    def fail(watchdog: Watchdog, data: Data = data) -> None:
        raise OSError(str(data))

    gc.disable()
    try:
        with pytest.raises(OSError, match="Data object"):
            call_with_timeout(fail, "x")
        del data, fail
        deadline = time.monotonic() + 60
        while seen() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert seen() is None
    finally:
        gc.enable()


def test_what_makes_headway_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.5")

    def slow(watchdog: Watchdog) -> str:
        for _ in range(5):
            time.sleep(0.2)
            watchdog.reset()
        return "done"

    assert call_with_timeout(slow, "x") == "done"


def test_a_place_that_does_not_answer_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody reads hangs as a server that is away does."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.3")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=r"pipe.*\b0\.3 s"):
        Location(str(pipe)).write_in_place(b"x")
    # Timeouts do not add up: another call has less time while this one hangs.
    monkeypatch.setenv(TIMEOUT_VARIABLE, "600")
    monkeypatch.setattr(retries, "_HANGING_SECONDS", 0.2)
    with pytest.raises(HungError, match=r"x.*\b0\.2 s"):
        call_with_timeout(lambda watchdog: time.sleep(2), "x")
    Location(str(tmp_path / "other")).write_in_place(b"x")  # that answers
    pipe.open("rb").close()  # lets the writer go
    assert retries._abandoned is not None
    wait([retries._abandoned[0]])
    assert call_with_timeout(lambda watchdog: time.sleep(0.5), "x") is None


def test_a_second_try_is_left_out_where_the_first_hung() -> None:
    tries = []

    def hang() -> None:
        tries.append(1)
        raise HungError("x: the storage has not answered")

    with pytest.raises(CheckpointError, match="cannot be read: x: the storage has not answered"):
        retry(hang, "it cannot be read", pause=lambda seconds: None)
    assert tries == [1]


def test_the_limit_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv(TIMEOUT_VARIABLE, text)
        with pytest.raises(InvalidInputError, match=f"seconds.*'{text}'"):
            call_with_timeout(lambda watchdog: 7, "x")


@pytest.mark.parametrize("text", ["inf", "1e12"])
def test_no_limit_is_a_limit_too(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    assert call_with_timeout(lambda watchdog: time.sleep(0.05), "x") is None


def test_large_files_are_read_and_written_in_parts(tmp_path: Path) -> None:
    data = os.urandom(40 * 2**20)
    place = Location(str(tmp_path / "large"))
    place.write_bytes(memoryview(data))
    assert place.read_bytes() == data
    assert threading.active_count() < 50
