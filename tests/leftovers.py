"""What a run must not leave behind, and which Spark task a rank belongs to.

Everything the tests start inherits two variables set in `conftest`: what others run on the
machine at the same time is none of ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from pathlib import Path

import psutil

from horovod_spark_runner.cluster.protocol.processes import GUARD_NAME, READY_NAME

MARK = "TEST_RUN_ID"
NAMES = (
    "cluster.worker.main",
    "cluster/programs/shim.py",
    "cluster/programs/sweeper.py",
    "prterun",
    "prted",
    "mpirun",
)
# What `leftovers` judges, and what TensorFlow deletes when the tests' own process ends.
OTHERS = ("hsr-", "__autograph_generated_file", "torchinductor_")
# Of a slot, and of an MPI whose temporary folder is nobody's.
OURS = ("hsr-", "prte.", "ompi.", "pmix-")
# These stay for the next run, as long as their executor does.
READY = "cluster.worker.prefork"
_SHARED_MEMORY = Path("/dev/shm")
# What others left behind, killed together with what clears up after them, is none of ours.
_THERE_BEFORE = frozenset(_SHARED_MEMORY.glob("hsr-*"))


def leftovers(*, session_over: bool = False) -> list[str]:
    """Return the processes and directories of the tests' runs that are there now.

    Args:
        session_over: whether what waits for a next run counts, too.
    """
    places = [path for path in Path(os.environ["TMPDIR"]).iterdir() if path.name.startswith(OURS)]
    found = [str(path) for path in places if session_over or "hsr-ready-" not in path.name]
    found += [f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("hsr-")]
    mark = f"{MARK}={os.environ[MARK]}".encode()
    segments = set(_SHARED_MEMORY.glob("hsr-*")) - _THERE_BEFORE
    found += [str(path) for path in segments if not _is_used_by_others(path, mark)]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                name = (entry / "comm").read_text().strip()
                ours = mark in (entry / "environ").read_bytes()
            except (OSError, UnicodeDecodeError):
                continue
            rank = READY in command and name == "horovod-rank"
            waits = session_over and READY in command
            if ours and (rank or waits or any(part in command for part in NAMES)):
                found.append(f"{name}: {command}")
    return found


def _is_used_by_others(path: Path, mark: bytes) -> bool:
    """Tell whether other tests' ranks hold ``path``, or what clears up after them names it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes():
                    continue
                # A run's ranks map nothing yet while they import their frameworks.
                named = str(path).encode() in (entry / "cmdline").read_bytes()
                if named or str(path) in (entry / "maps").read_text():
                    return True
            except OSError:
                continue
    return False


def marked_processes() -> list[psutil.Process]:
    """Return the processes of the tests."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    # Not by process_iter, which keeps its objects: one whose number is used again is not equal
    # to the process that has it now.
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(psutil.Process(pid))
    return found


def inventory() -> frozenset[str]:
    """Return all that the tests have on this machine now, but what stays for as long as they do.

    That is a Spark session with its Python workers, and processes that wait for its next run.
    """
    allowed = _session()
    temporary = Path(os.environ["TMPDIR"]).iterdir()
    found = [*leftovers(), *(str(path) for path in temporary if not path.name.startswith(OTHERS))]
    for process in {*marked_processes(), *psutil.Process().children(recursive=True)} - allowed:
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            waits = process.name() in (READY_NAME, GUARD_NAME)
            if command and not waits and "resource_tracker" not in command:
                found.append(f"process {process.pid} {process.name()}: {command[:200]}")
    ports = _session_ports()
    for connection in psutil.Process().net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port not in ports:
            found.append(f"a socket that listens at {connection.laddr}")
    return frozenset(found)


def _session() -> set[psutil.Process]:
    """Return the JVM of this process and what it has started."""
    spark = sys.modules.get("pyspark")
    gateway = spark and spark.SparkContext._gateway
    if not gateway:
        return set()
    with contextlib.suppress(psutil.NoSuchProcess):
        java = psutil.Process(gateway.proc.pid)
        return {java, *java.children(recursive=True)}
    return set()


def _session_ports() -> set[int]:
    """Return where this process listens for its Spark session."""
    spark = sys.modules.get("pyspark")
    context = spark and spark.SparkContext._active_spark_context
    return {context._accumulatorServer.server_address[1]} if context else set()


def await_nothing_left(
    seconds: float = 30.0,
    *,
    session_over: bool = False,
    before: frozenset[str] | None = None,
) -> None:
    """Fail if something is still there after a while.

    Args:
        seconds: to wait.
        session_over: whether what waits for a next run counts, too.
        before: an `inventory`; all that has come since then counts, and not only that of runs.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = leftovers(session_over=session_over) if before is None else inventory() - before
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def forget_shared_memory() -> None:
    """Delete the file that MPI makes for a process which imports it, and never removes."""
    maps = Path("/proc/self/maps").read_text()
    for place in set(re.findall(rf"{_SHARED_MEMORY}/sm_segment\.\S+", maps)):
        Path(place).unlink(missing_ok=True)


def own_task() -> int:
    """Return the process of the Spark task that the calling rank belongs to."""
    return task_of(Path(os.environ["TMPDIR"]).parents[1])


def task_of(directory: Path) -> int:
    """Return the process of the Spark task whose private directory this is.

    It is the parent of the process that clears up after it, which names the directory.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode().split("\0")
                if str(directory) in command and any("sweeper.py" in part for part in command):
                    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, UnicodeDecodeError):
                continue
    raise RuntimeError(f"nothing clears up {directory}")
