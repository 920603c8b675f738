"""A slot's hold on a worker process, whichever way it came to be."""

from __future__ import annotations

import abc
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

from ...machine import exit_code_of
from ..protocol.messages import Forked, ForkWorker, ProcessReport
from ..protocol.processes import end_descriptors, end_group, signal_group, start_tethered
from .worker_pool import Asked, ask_for_worker

WORKER_MODULE = "horovod_spark_runner.cluster.worker.main"
# How long after a worker's end its exit code may take to come: the ready process may be busy.
_CODE_SECONDS = 30.0
# After which the kernel is asked: the ready process may have been stopped.
_OWN_LOOK_SECONDS = 2.0
# How long a process that has closed its connection may take to end.
_END_SECONDS = 1.0
# After which a ready process that has been stopped is not waited for any longer.
STOPPED_SECONDS = 2.0


class Worker(abc.ABC):
    """A worker process.

    Attributes:
        connection: its reports come and its start message goes this way.
        output: what it prints.
        watched: further descriptors that can be read once it has ended.
        pid: its number and that of its process group, once it is known.
        guessed: whether its exit code is not known, and only taken for that of SIGKILL.
        ready_bytes: memory of the ready process that it is a copy of; 0 where there is none.
    """

    connection: socket.socket
    output: IO[bytes]
    watched: tuple[int, ...] = ()
    pid: int | None = None
    guessed = False
    ready_bytes = 0

    @abc.abstractmethod
    def take(self, report: ProcessReport) -> None:
        """Take what the ready process reports of it."""

    @abc.abstractmethod
    def hang_up(self) -> None:
        """Take note that nothing more comes by the connection."""

    @abc.abstractmethod
    def poll(self) -> int | None:
        """Return the exit code, that of a signal being negative; ``None`` while it runs."""

    @abc.abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if there is still a process to take it."""

    @abc.abstractmethod
    def end(self) -> None:
        """End it and what it started; safe to call again."""

    def will_not_come(self) -> bool:
        """Tell whether it is not there yet, and what is to fork it has been stopped."""
        return False

    def ready_that_ended(self) -> int | None:
        """Return the number of the process it was forked from, if that has ended before it."""
        return None

    def read_rest(self) -> bytes:
        """Return what an ended worker has left in the connection."""
        rest = b""
        self.connection.setblocking(False)
        with contextlib.suppress(OSError):
            while data := self.connection.recv(65536):
                rest += data
        return rest

    def unwatch(self) -> None:
        """Close what tells of its end."""
        for descriptor in self.watched:
            os.close(descriptor)
        self.watched = ()

    def close(self) -> None:
        """Close the descriptors."""
        self.connection.close()
        self.unwatch()


class StartedWorker(Worker):
    """A child process of this one.

    Args:
        arguments: of the worker program, after the descriptor.
        environment: of the process.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.connection, other = socket.socketpair()
        with other:
            self._process = start_tethered(
                [sys.executable, "-m", WORKER_MODULE, str(other.fileno()), *arguments],
                environment,
                directory=os.getcwd(),
                inherit=(other.fileno(),),
            )
        assert self._process.stdout is not None
        self.output = self._process.stdout
        self.pid = self._process.pid
        self.watched = end_descriptors(self._process.pid)

    def take(self, report: ProcessReport) -> None:
        """There is nobody to report of it."""

    def hang_up(self) -> None:
        # The process may have closed it; whether it has ended is seen by itself.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def poll(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        end_group(self._process, grace=0)


class ForkedWorker(Worker):
    """A child of this executor's ready process, which tells its number and its exit code.

    Args:
        asked: the connection to the ready process and, later, to the worker.
        output: what the worker prints.
    """

    def __init__(self, asked: Asked, output: IO[bytes]) -> None:
        self.connection, self._ready = asked.connection, asked.ready
        self.output = output
        self._stopped_since: float | None = None
        self._code: int | None = None
        self._gone_since: float | None = None

    def take(self, report: ProcessReport) -> None:
        if isinstance(report, Forked):
            self.pid, self.ready_bytes = report.pid, report.ready_bytes
            self.watched = end_descriptors(report.pid)
        else:
            self._code = report.code

    def hang_up(self) -> None:
        if self.pid is not None and self._code is None:
            # The ready process has died, and its workers with it.
            self._code, self.guessed = -signal.SIGKILL, True

    def will_not_come(self) -> bool:
        if self.pid is not None or self._ready is None or not self._ready.is_stopped:
            self._stopped_since = None
            return False
        now = time.monotonic()
        self._stopped_since = self._stopped_since or now
        if now - self._stopped_since < STOPPED_SECONDS:
            return False
        self._ready.send_away()
        return True

    def ready_that_ended(self) -> int | None:
        return self._ready.pid if self._ready is not None and self._ready.has_ended else None

    def poll(self) -> int | None:
        if self._code is None and self.watched and select.select(self.watched, [], [], 0)[0]:
            self._gone_since = time.monotonic()
            self.unwatch()
        gone = 0.0 if self._gone_since is None else time.monotonic() - self._gone_since
        if self._code is None and gone > _OWN_LOOK_SECONDS and self.pid is not None:
            self._code = exit_code_of(self.pid)
        if self._code is None and gone > _CODE_SECONDS:
            # Without a code for so long, the ready process has died as well, or hangs.
            self._code, self.guessed = -signal.SIGKILL, True
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        if self.pid is not None and self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self) -> None:
        if self.pid is not None:
            signal_group(self.pid, signal.SIGKILL)
            if self._code is None:
                self._code = -signal.SIGKILL
        # Where it has no number yet, the ready process ends it once the connection is closed.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def fork_worker(wanted: ForkWorker) -> ForkedWorker | None:
    """Return a worker forked by this executor's ready process; ``None`` if none can be had."""
    reading, writing = os.pipe()
    try:
        asked = ask_for_worker(wanted, writing)
    finally:
        os.close(writing)
    output = os.fdopen(reading, "rb", buffering=0)
    if asked is None:
        output.close()
        return None
    return ForkedWorker(asked, output)
