"""Worker pool of an executor: prefork processes, from which ranks' workers are forked.

Importing TensorFlow takes seconds; forking a process that has done so takes milliseconds. Each
executor has one prefork process for each environment its ranks are started with: the first slot
that needs one starts it, the slots and runs that follow find it at a Unix socket in a directory of
this user's. It ends with its executor, and after ``worker_idle_timeout`` seconds without a request.
It imports installed packages only and never runs a user's code, so each worker is like a new
process.

A slot connects, sends one request with the pipe for the rank's output, and keeps the connection:
the worker reports over it as a worker that was started directly does over its socket, and the
prefork process adds the exit code. Where there is no prefork process and none can be started, or it
has been stopped, a rank's worker is started directly.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...frameworks import frameworks_of
from ...machine import process_start
from ...typed_json import MessageError, parse, to_json
from ..protocol.channel import receive_exactly
from ..protocol.command import ATTEMPT, SPARK_FILES
from ..protocol.messages import PREFORK_REQUESTS, ForkWorker, ImportModules, PreforkRequest
from ..protocol.processes import RANK_NAME, is_stopped, numbering, working_directory
from .workspace import is_private, short_temporary

_MODULE = "horovod_spark_runner.cluster.worker.prefork"
# Variables that differ between ranks or runs, and that no import reads.
_PER_RANK = ("TMPDIR", "CUDA_VISIBLE_DEVICES", SPARK_FILES, ATTEMPT)
_LENGTH = struct.Struct("!I")
_MAX_REQUEST = 16 * 1024 * 1024
# Prefork processes that this process has started, to collect their exit codes.
_started: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class _PreforkProcess:
    """Prefork process, as recorded beside its socket.

    Attributes:
        path: of the socket.
        pid: number of the process.
        start: when it started; distinguishes it from a later process of that number.
    """

    path: Path
    pid: int
    start: str

    @property
    def has_ended(self) -> bool:
        return process_start(self.pid) != self.start

    @property
    def is_stopped(self) -> bool:
        return is_stopped(self.pid) and not self.has_ended

    def retire(self) -> None:
        """Take its socket away, and end it unless it has workers of other runs."""
        with contextlib.suppress(OSError), _locked(self.path.parent):
            if _recorded_process(self.path) == self:
                self.path.unlink(missing_ok=True)
                _record(self.path).unlink()
            self.end()

    def end(self) -> None:
        """End it, unless it has workers, which would end with it."""
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if not self.has_ended and not any(map(_is_worker, psutil.Process(self.pid).children())):
                os.kill(self.pid, signal.SIGKILL)


def _is_worker(process: Any) -> bool:
    return bool(process.name() == RANK_NAME and process.status() != "zombie")


def _recorded_process(path: Path) -> _PreforkProcess | None:
    """Return the process recorded for a socket; it may have ended."""
    try:
        pid, start = _record(path).read_text().split()
        return _PreforkProcess(path, int(pid), start)
    except (OSError, ValueError):
        return None


def _record(path: Path) -> Path:
    """Return the file that names the process at a socket."""
    return path.with_suffix(".process")


@dataclass(frozen=True)
class PendingWorker:
    """Requested worker: its connection, and the prefork process that will fork it."""

    connection: socket.socket
    prefork: _PreforkProcess | None


def request_worker(request: ForkWorker, output: int) -> PendingWorker | None:
    """Request a worker from this executor's prefork process; start that process if needed.

    Args:
        request: the worker, with all of its environment.
        output: descriptor that takes the worker's output.

    Returns:
        The worker to be; ``None`` if a prefork process cannot be started here.
    """
    environment = request.environment
    per_rank = {name: environment[name] for name in _PER_RANK if name in environment}
    try:
        worker = _reach(environment, request.modules, request.idle_timeout)
        _write_request(worker.connection, replace(request, environment=per_rank), output)
    except OSError:
        return None
    return worker


def request_import(
    environment: Mapping[str, str], modules: Sequence[str], idle_timeout: float
) -> None:
    """Have this executor's prefork process import ``modules``, if possible; does not wait.

    Args:
        environment: of the workers to be.
        modules: modules that they will need.
        idle_timeout: seconds a prefork process waits for the next request.
    """
    request = ImportModules(tuple(modules), idle_timeout)
    with contextlib.suppress(OSError):
        worker = _reach(environment, modules, idle_timeout)
        with worker.connection as connection:
            _write_request(connection, request)


def retire_all() -> None:
    """Ask all prefork processes of this executor to end after their workers."""
    directory = _directory()
    if directory.exists():
        with contextlib.suppress(OSError), _locked(directory):
            _retire(directory.glob("*.socket"))


def _reach(
    environment: Mapping[str, str], modules: Sequence[str], idle_timeout: float
) -> PendingWorker:
    """Connect to this executor's prefork process for the environment; start it if needed."""
    shared = {name: text for name, text in environment.items() if name not in _PER_RANK}
    _started[:] = [process for process in _started if process.poll() is None]
    directory = _directory()
    with _locked(directory):
        path = directory / f"{_key(shared, modules)}.socket"
        connection = _connect(path) or _start(path, shared, idle_timeout)
        return PendingWorker(connection, _recorded_process(path))


def _write_request(connection: socket.socket, request: PreforkRequest, *files: int) -> None:
    """Send ``request`` and descriptors."""
    data = to_json(request).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    connection.sendmsg([_LENGTH.pack(len(data))], rights)
    connection.sendall(data)


def read_request(connection: socket.socket) -> tuple[PreforkRequest, list[int]]:
    """Return a request and its descriptors; the data after it stay unread.

    Raises:
        OSError: the connection has ended, or this is not a request.
    """
    head, files, _, _ = socket.recv_fds(connection, _LENGTH.size, 4)
    try:
        size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        if size > _MAX_REQUEST:
            raise OSError(f"a request of {size} bytes")
        request = parse(receive_exactly(connection, size), *PREFORK_REQUESTS)
        if len(files) != isinstance(request, ForkWorker):
            raise OSError(f"{type(request).__name__} with {len(files)} descriptors")
    except (OSError, MessageError) as error:
        for file in files:
            os.close(file)
        raise OSError(str(error)) from error
    return request, list(files)


def remove_if_over(path: Path, is_over: Callable[[], bool]) -> bool:
    """Take this process's socket away, and the directory with the last one.

    Args:
        path: of the socket; another process's may be there by now.
        is_over: is called once no slot can be about to connect.

    Returns:
        Whether it was done; not while a slot looks for it.
    """
    try:
        with _locked(path.parent, fcntl.LOCK_NB):
            if not is_over():
                return False
            process = _recorded_process(path)
            if process is None or process.pid == os.getpid():
                path.unlink(missing_ok=True)
                _record(path).unlink(missing_ok=True)
            if not any(path.parent.glob("*.socket")):
                shutil.rmtree(path.parent, ignore_errors=True)
    except BlockingIOError:
        return False
    except OSError:  # the directory has been removed already
        pass
    return True


@contextlib.contextmanager
def _locked(directory: Path, how: int = 0) -> Iterator[None]:
    """Hold the lock of a directory, which is made if it is not there."""
    lock = directory / "lock"
    while True:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        _check_private(directory)
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(lock.open("w"))
                fcntl.flock(file, fcntl.LOCK_EX | how)
                if os.fstat(file.fileno()).st_ino != lock.stat().st_ino:
                    continue
            except FileNotFoundError:  # the last user has just removed it
                continue
            yield
            return


def _check_private(directory: Path) -> None:
    if not is_private(directory):
        raise PermissionError(f"{directory} is not a private directory of this user")


def _owner() -> int:
    # Spark's Python daemon: all of an executor's Python workers that run no query are its children,
    # one like another.
    parent = os.getppid()
    return parent if parent > 1 else os.getpid()


def _prefix() -> str:
    return f"hsr-ready-{os.getuid()}-{numbering()}-"


def _directory() -> Path:
    """Return the directory of this executor's prefork processes."""
    owner = _owner()
    return Path(short_temporary(32)) / f"{_prefix()}{owner}-{process_start(owner)}"


def _sweep(directory: Path) -> None:
    """Remove the directories of executors that were killed together with all their processes."""
    for other in directory.parent.glob(f"{_prefix()}*"):
        owner, _, began = other.name.removeprefix(_prefix()).partition("-")
        with contextlib.suppress(OSError, ValueError):
            if process_start(int(owner)) != began:
                _check_private(other)
                for path in other.glob("*.socket"):
                    if (process := _recorded_process(path)) is not None:  # it may be stopped
                        process.end()
                shutil.rmtree(other)


def _key(environment: Mapping[str, str], modules: Sequence[str]) -> str:
    """Return a hash of everything that an import may depend on."""
    places = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    facts = {
        "environment": dict(environment),
        "frameworks": frameworks_of(modules),
        "python": sys.executable,
        "directory": working_directory(),
        # Changes when a package is installed, removed or replaced.
        "installed": [(path, os.stat(path).st_mtime_ns) for path in filter(os.path.isdir, places)],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError:  # none there, or one that has died
        connection.close()
        return None
    return connection


def _start(path: Path, environment: Mapping[str, str], idle_timeout: float) -> socket.socket:
    """Start the prefork process that listens at ``path`` and return a connection to it."""
    _sweep(path.parent)
    _retire(other for other in path.parent.glob("*.socket") if other != path)
    path.unlink(missing_ok=True)
    owner = _owner()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(128)
        arguments = [listener.fileno(), path, owner, process_start(owner), idle_timeout]
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, *map(str, arguments)],
            env={**environment, "TMPDIR": str(path.parent)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
        )
        _started.append(process)
        _record(path).write_text(f"{process.pid} {process_start(process.pid)}")
        connection = _connect(path)
    if connection is None:
        raise ConnectionError(f"nothing listens at {path}")
    return connection


def _retire(paths: Iterable[Path]) -> None:
    """Ask the prefork processes at these sockets to end after their workers."""
    for path in paths:
        connection = _connect(path)
        if connection is not None:
            with connection, contextlib.suppress(OSError):
                _write_request(connection, ImportModules((), 0.0))
