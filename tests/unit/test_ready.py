"""What a slot does where a ready process cannot be had, and what makes two of them differ."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from horovod_spark_runner.launch import ready, worker_handle
from horovod_spark_runner.launch.rank_process import RankProcess
from horovod_spark_runner.launch.workspace import Workspace

REQUEST = {"directory": "d", "payload": "p"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of ready processes."""
    place = tmp_path / "ready"
    monkeypatch.setattr(ready, "_directory", lambda: place)
    yield place
    for process in ready._started:
        process.kill()
        process.wait()
    ready._started.clear()


def ask(**environment: str) -> socket.socket | None:
    with open(os.devnull, "w") as output:
        whole = {**os.environ, **environment}
        return ready.ask_for_worker(REQUEST, output.fileno(), whole, ["json"], 60)


def test_a_directory_that_others_may_enter_is_not_used(place: Path) -> None:
    place.mkdir(mode=0o755)
    assert ask() is None
    assert not list(place.glob("*.socket"))


def test_one_for_each_environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sockets() -> set[str]:
        return {path.name for path in place.glob("*.socket")}

    for _ in range(2):
        connection = ask(TMPDIR="/a", CUDA_VISIBLE_DEVICES="0")
        assert connection is not None
        connection.close()
        assert len(sockets()) == 1
    first = sockets()
    for changes in ({"OMP_NUM_THREADS": "7"}, {"PYTHONPATH": "/elsewhere"}):
        connection = ask(**changes)
        assert connection is not None
        connection.close()
        assert sockets() - first
    known = ready._key({}, [])
    assert ready._key({}, ["horovod.torch"]) != known
    monkeypatch.setattr(sys, "executable", "/other/python")
    assert ready._key({}, []) != known


def test_a_package_that_was_installed_meanwhile_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(str(packages))
    before = ready._key({}, [])
    assert ready._key({}, []) == before
    os.utime(packages, ns=(1, 1))
    assert ready._key({}, []) != before


def test_what_a_dead_executor_left_is_swept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = place.parent / f"{ready._prefix()}{os.getpid()}-{ready.process_start(os.getpid())}"
    dead = place.parent / f"{ready._prefix()}{os.getpid()}-1"
    gone = place.parent / f"{ready._prefix()}{2**22 + 1}-5"
    for directory in (alive, dead, gone):
        directory.mkdir(mode=0o700)
    connection = ask()
    assert connection is not None
    connection.close()
    assert alive.exists()
    assert not dead.exists()
    assert not gone.exists()


def test_a_worker_that_is_not_forked_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*args: Any) -> socket.socket:
        connection, other = socket.socketpair()
        other.close()
        return connection

    monkeypatch.setattr(worker_handle, "ask_for_worker", dead)
    workspace = Workspace("unit")
    process = RankProcess(
        tmp_path / "payload",
        ["json"],
        dict(os.environ),
        tmp_path,
        workspace,
        idle_timeout=60,
        on_report=lambda report: None,
        on_lines=lambda lines: None,
    )
    try:
        assert process._worker.pid is None
        deadline = time.monotonic() + 30
        while process._worker.pid is None:
            assert time.monotonic() < deadline
            for descriptor in select.select([*process.handlers()], [], [], 1)[0]:
                process.handlers()[descriptor]()
        pid = process._worker.pid
        assert psutil.pid_exists(pid)
        assert not process.ended
    finally:
        process.close()
        workspace.close()
    assert process.ended
    assert not psutil.pid_exists(pid)
