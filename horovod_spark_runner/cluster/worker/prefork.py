"""Prefork process: it has imported a framework and forks a worker for every request.

See `worker_pool` for the slots' side. It has one Python thread and runs no user code, so a fork
copies nothing half-done. A worker dies with it, and it ends a worker whose slot has ended. If it
were stopped, by SIGSTOP, it would not see that its executor has ended: a guard, forked before
anything is imported, wakes it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ...machine import process_start
from ...typed_json import to_json
from ..protocol.messages import Exited, Forked, ForkWorker
from ..protocol.processes import (
    GUARD_NAME,
    READY_NAME,
    die_with_parent,
    name_process,
    resident_bytes,
    signal_group,
)
from ..slot.worker_pool import read_request, remove_if_over
from .main import import_ahead, prepare, work

# Milliseconds between checks of the clock, and of the executor where the kernel has no pidfd.
_TICK = 1000
_REQUEST_SECONDS = 5.0
_IMPORT_SECONDS = 300.0
# A container that shuts down signals all its processes. Ranks use the time to save, and this
# process has to live as long as they do.
_IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class _PreforkServer:
    """Serves requests until its executor has ended or no request comes for a while.

    Args:
        listener: socket that slots connect to.
        path: of the listener.
        owner: process with which this one ends, too.
        owner_start: when that process started.
        idle_timeout: seconds to wait for the next request.
    """

    def __init__(
        self, listener: socket.socket, path: Path, owner: int, owner_start: str, idle_timeout: float
    ) -> None:
        self._listener = listener
        self._path = path
        self._owner = owner
        self._owner_start = owner_start
        self._idle_timeout = idle_timeout
        self._last_used = time.monotonic()
        # The connections of workers to their slots, by process.
        self._workers: dict[int, socket.socket] = {}
        self._modules: set[str] = set()
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._owner_watch = _watch(owner)

    def serve(self) -> None:
        """Fork a worker for every request, until the end."""
        while self._owner_lives() and not self._is_over():
            for call in self._events():
                call()
        self._listener.close()
        remove_if_over(self._path, lambda: True)
        # An executor that was asked to end goes first; its slots let ranks save before they follow.
        while self._workers:
            for call in self._events():
                call()

    def _events(self) -> list[Callable[[], None]]:
        poll = select.poll()
        calls: dict[int, Callable[[], None]] = {self._wake: self._on_exits}
        if self._listener.fileno() >= 0:  # else it is closed
            calls[self._listener.fileno()] = self._on_request
        for descriptor in calls:
            poll.register(descriptor, select.POLLIN)
        if self._owner_watch is not None and self._listener.fileno() >= 0:
            poll.register(self._owner_watch, select.POLLIN)
        for pid, slot in self._workers.items():
            # Only the slot's end is watched: its messages are for the worker.
            poll.register(slot, select.POLLRDHUP)
            calls[slot.fileno()] = functools.partial(_kill, pid)
        return [calls[number] for number, _ in poll.poll(_TICK) if number in calls]

    def _owner_lives(self) -> bool:
        return process_start(self._owner) == self._owner_start

    def _is_over(self) -> bool:
        if self._workers or time.monotonic() - self._last_used < self._idle_timeout:
            return False
        return remove_if_over(self._path, self._has_no_request)

    def _has_no_request(self) -> bool:
        waiting, _, _ = select.select([self._listener], [], [], 0)
        return not waiting

    def _on_request(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_REQUEST_SECONDS)
        try:
            request, files = read_request(connection)
        except OSError:
            connection.close()
            return
        self._idle_timeout, self._last_used = request.idle_timeout, time.monotonic()
        if not isinstance(request, ForkWorker):  # no worker is requested yet, or any more
            connection.close()
            self._import(request.modules)
            return
        began = time.monotonic()
        self._import(request.modules)
        seconds = time.monotonic() - began
        connection.settimeout(None)
        sys.stdout.flush()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # no memory, perhaps: the slot starts a worker itself, or reports why not
            connection.close()
        else:
            if pid == 0:
                self._become_worker(connection, request, files[0], seconds, parent)
            self._workers[pid] = connection
        os.close(files[0])

    def _import(self, modules: Iterable[str]) -> None:
        missing = [module for module in modules if module not in self._modules]
        if missing:
            # The kernel ends an import that hangs: Python code could not.
            signal.setitimer(signal.ITIMER_REAL, _IMPORT_SECONDS)
            import_ahead(missing)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            self._modules.update(missing)

    def _on_exits(self) -> None:
        os.read(self._wake, 4096)
        while self._workers:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            slot = self._workers.pop(pid, None)
            if slot is None:
                continue
            # On a new line, also after a line that the worker did not end.
            report = Exited(os.waitstatus_to_exitcode(status))
            with slot, contextlib.suppress(OSError):
                slot.setblocking(False)
                slot.sendall(b"\n" + to_json(report).encode() + b"\n")
            self._last_used = time.monotonic()

    def _become_worker(
        self,
        slot: socket.socket,
        request: ForkWorker,
        output: int,
        import_seconds: float,
        parent: int,
    ) -> None:
        """Run the rank in this forked process; never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *_IGNORED_SIGNALS):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            die_with_parent(parent)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            self._listener.close()
            for other in self._workers.values():
                other.close()
            for descriptor in (self._wake, self._waker, self._owner_watch):
                if descriptor is not None:
                    os.close(descriptor)
            os.environ.update(request.environment)
            tempfile.tempdir = None
            _reseed_numpy()
            directory = Path(request.directory)
            prepare(directory)
            forked = Forked(os.getpid(), resident_bytes(parent))
            slot.sendall(to_json(forked).encode() + b"\n")
            code = work(slot, directory, Path(request.payload), import_seconds)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)


def _watch(pid: int) -> int | None:
    """Return a descriptor that can be read once the process has ended, where the kernel has it."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _start_guard(owner: int, owner_start: str, listener: socket.socket) -> None:
    """Fork the process that wakes this one when its executor ends."""
    parent = os.getpid()
    if os.fork() != 0:
        return
    try:
        os.setsid()  # a signal that stops the whole group does not stop it
        name_process(GUARD_NAME)
        die_with_parent(parent)
        listener.close()
        watch = _watch(owner)
        while process_start(owner) == owner_start:
            select.select([] if watch is None else [watch], [], [], _TICK / 1000)
        while True:
            os.kill(parent, signal.SIGCONT)
            time.sleep(1.0)
    finally:
        os._exit(0)


def _reseed_numpy() -> None:
    """Seed NumPy's global generator differently in each worker; Python's does so by itself."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _kill(pid: int) -> None:
    """End a worker and its children."""
    signal_group(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it may not have its own group yet
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Serve: ``python -m …cluster.worker.prefork FD PATH OWNER OWNER_START IDLE``."""
    descriptor, path, owner, owner_start, idle = sys.argv[1:]
    name_process(READY_NAME)
    for number in (signal.SIGINT, *_IGNORED_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    _start_guard(int(owner), owner_start, listener)
    _PreforkServer(listener, Path(path), int(owner), owner_start, float(idle)).serve()


if __name__ == "__main__":
    main()
