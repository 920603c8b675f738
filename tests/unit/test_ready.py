"""What a slot does where a prefork process cannot be had, and what makes two of them differ."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from horovod_spark_runner.cluster.protocol.messages import Exited, Forked, ForkWorker, ProcessReport
from horovod_spark_runner.cluster.protocol.processes import GUARD_NAME, is_stopped
from horovod_spark_runner.cluster.slot import rank_process, worker_pool
from horovod_spark_runner.cluster.slot.rank_process import RankProcess
from horovod_spark_runner.cluster.slot.worker_pool import PendingWorker, _PreforkProcess
from horovod_spark_runner.cluster.slot.workspace import Workspace
from horovod_spark_runner.machine import process_start
from horovod_spark_runner.typed_json import to_json


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of prefork processes."""
    place = tmp_path / "ready"
    monkeypatch.setattr(worker_pool, "_directory", lambda: place)
    yield place
    for process in worker_pool._started:
        process.kill()
        process.wait()
    worker_pool._started.clear()


def ask(**environment: str) -> socket.socket | None:
    with open(os.devnull, "w") as output:
        whole = {**os.environ, **environment}
        wanted = ForkWorker("d", "p", whole, ("json",), 60)
        asked = worker_pool.request_worker(wanted, output.fileno())
    return None if asked is None else asked.connection


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
    for changes in ({"OMP_NUM_THREADS": "7"}, {"PYTHONPATH": "/elsewhere"}):
        before = sockets()
        connection = ask(**changes)
        assert connection is not None
        connection.close()
        assert len(sockets() - before) == 1, changes
    known = worker_pool._key({}, [])
    assert worker_pool._key({}, ["horovod.torch"]) != known
    assert worker_pool._key({}, ["torch", "torch._dynamo"]) == worker_pool._key(
        {}, ["horovod.torch"]
    )
    assert (
        worker_pool._key({}, ["tensorflow"])
        == worker_pool._key({}, ["tensorflow", "keras"])
        != known
    )
    assert worker_pool._key({}, ["jax"]) == known  # no copy of TensorFlow's
    monkeypatch.setattr(sys, "executable", "/other/python")
    assert worker_pool._key({}, []) != known


def test_a_package_that_was_installed_meanwhile_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(str(packages))
    before = worker_pool._key({}, [])
    assert worker_pool._key({}, []) == before
    os.utime(packages, ns=(1, 1))
    assert worker_pool._key({}, []) != before


def test_what_a_dead_executor_left_is_swept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = place.parent / f"{worker_pool._prefix()}{os.getpid()}-{process_start(os.getpid())}"
    dead = place.parent / f"{worker_pool._prefix()}{os.getpid()}-1"
    gone = place.parent / f"{worker_pool._prefix()}{2**22 + 1}-5"
    for directory in (alive, dead, gone):
        directory.mkdir(mode=0o700)
    connection = ask()
    assert connection is not None
    connection.close()
    assert alive.exists()
    assert not dead.exists()
    assert not gone.exists()


def pump(process: RankProcess, over: Callable[[], bool], seconds: float = 30) -> None:
    """Handle a process's events, as its slot's loop does."""
    deadline = time.monotonic() + seconds
    while not over():
        assert time.monotonic() < deadline
        for descriptor in select.select([*process.handlers()], [], [], 0.05)[0]:
            process.handlers()[descriptor]()
        process.check()


@pytest.fixture
def made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[socket.socket], RankProcess]]:
    """Makes the process of a rank whose prefork process is at the other end of a connection."""
    workspace = Workspace("unit")
    processes = []

    def make(connection: socket.socket, behind: _PreforkProcess | None = None) -> RankProcess:
        monkeypatch.setattr(
            rank_process, "request_worker", lambda *args: PendingWorker(connection, behind)
        )
        process = RankProcess(
            tmp_path / "payload",
            ["json"],
            dict(os.environ),
            tmp_path,
            workspace,
            max_result_bytes=1024,
            idle_timeout=60,
            on_report=lambda report: None,
            on_lines=lambda lines: None,
        )
        processes.append(process)
        return process

    yield make
    for process in processes:
        process.close()
    workspace.close()


@pytest.mark.parametrize("fault", ["dead", "mute"])
def test_a_worker_that_is_not_forked_is_started(
    fault: str,
    made: Callable[[socket.socket], RankProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_process, "FORK_SECONDS", 0.3)
    connection, other = socket.socketpair()
    if fault == "dead":
        other.close()
    process = made(connection)
    assert process._worker.pid is None
    pump(process, lambda: process._worker.pid is not None)
    pid = process._worker.pid
    assert pid is not None
    assert psutil.pid_exists(pid)
    assert not process.ended
    process.close()
    assert process.ended
    assert not psutil.pid_exists(pid)
    other.close()


@contextlib.contextmanager
def stopped(place: Path, program: str) -> Iterator[tuple[subprocess.Popen[bytes], _PreforkProcess]]:
    """Run a program in place of a prefork process, known at a socket, and stop it once it waits."""
    place.mkdir(mode=0o700)
    path = place / "key.socket"
    path.touch()
    wait = "print(flush=True)\nimport time; time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}\n{wait}"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        path.with_suffix(".process").write_text(f"{process.pid} {process_start(process.pid)}")
        known = worker_pool._recorded_process(path)
        assert known is not None
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(process.pid))
        try:
            yield process, known
        finally:
            process.kill()


@pytest.mark.thorough
def test_a_ready_process_that_is_stopped_is_not_waited_for(
    made: Callable[..., RankProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_process, "FORK_SECONDS", 600.0)
    connection, other = socket.socketpair()
    with stopped(tmp_path / "place", "") as (process, known), other:
        rank = made(connection, known)
        began = time.monotonic()
        pump(rank, lambda: rank._worker.pid is not None)
        assert time.monotonic() - began < rank_process.STOPPED_SECONDS + 5
        assert process.wait(60) == -signal.SIGKILL
    assert not known.path.exists()
    assert worker_pool._recorded_process(known.path) is None


@pytest.mark.thorough
def test_one_that_ranks_of_other_runs_come_from_is_only_not_asked_any_more(
    made: Callable[..., RankProcess], tmp_path: Path
) -> None:
    fork = """
import os
from horovod_spark_runner.cluster.protocol.processes import RANK_NAME, name_process
reading, writing = os.pipe()
if os.fork() == 0:
    name_process(RANK_NAME)
    os.write(writing, b"x")
    import time; time.sleep(600)
os.read(reading, 1)
"""
    connection, other = socket.socketpair()
    with stopped(tmp_path / "place", fork) as (process, known), other:
        rank = made(connection, known)
        pump(rank, lambda: rank._worker.pid is not None)
        assert process.poll() is None
        assert not known.path.exists()
        (worker,) = psutil.Process(process.pid).children()
        worker.kill()
        wait_until(lambda: worker.status() == psutil.STATUS_ZOMBIE)
        known.retire()
        assert process.wait(60) == -signal.SIGKILL


def test_a_number_that_another_process_has_now_is_left_alone(tmp_path: Path) -> None:
    with stopped(tmp_path / "place", "") as (process, known):
        other = replace(known, start="1")
        assert other.has_ended
        assert not other.is_stopped
        other.retire()
        assert process.poll() is None
        assert known.path.exists()


def test_one_that_is_stopped_ends_with_its_executor(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = subprocess.Popen(["sleep", "600"])
    try:
        monkeypatch.setattr(worker_pool, "_owner", lambda: executor.pid)
        connection = ask()
        assert connection is not None
        connection.close()
        (process,) = worker_pool._started
        family = psutil.Process(process.pid)
        wait_until(lambda: [child.name() for child in family.children()] == [GUARD_NAME])
        (guard,) = family.children()
        process.send_signal(signal.SIGSTOP)
    finally:
        executor.kill()
        executor.wait()
    process.wait(60)
    wait_until(lambda: not guard.is_running())
    wait_until(lambda: not place.exists())


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def report(other: socket.socket, what: ProcessReport) -> None:
    other.sendall(to_json(what).encode() + b"\n")


def finished() -> int:
    """Return the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.thorough
def test_a_ready_process_that_is_stopped_need_not_tell_the_exit_code(
    made: Callable[[socket.socket], RankProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_process, "_CODE_SECONDS", 600.0)
    connection, other = socket.socketpair()
    process = made(connection)
    with subprocess.Popen([sys.executable, "-c", "exit(3)"]) as worker, other:
        report(other, Forked(worker.pid, 0))
        pump(process, lambda: process.ended)
        failure = process.outcome().failure
        assert failure is not None
        assert "code 3" in failure.message


def test_a_result_is_kept_though_the_exit_code_never_comes(
    made: Callable[[socket.socket], RankProcess], tmp_path: Path
) -> None:
    connection, other = socket.socketpair()
    process = made(connection)
    report(other, Forked(finished(), 0))
    (tmp_path / "outcome").write_bytes(pickle.dumps((None, {})))
    (tmp_path / "result").write_bytes(b"the result")
    other.close()
    pump(process, lambda: process.ended)
    assert (process.outcome().result, process.outcome().failure) == (b"the result", None)


def test_a_request_to_end_waits_for_the_process(
    made: Callable[[socket.socket], RankProcess],
) -> None:
    connection, other = socket.socketpair()
    process = made(connection)
    process.request_end(signal.SIGTERM)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as child:
        report(other, Forked(child.pid, 0))
        pump(process, lambda: child.poll() is not None)
        assert child.returncode == -signal.SIGTERM
        report(other, Exited(child.returncode))
        pump(process, lambda: process.ended)
    failure = process.outcome().failure
    assert failure is not None
    assert "SIGTERM" in failure.message
    other.close()
