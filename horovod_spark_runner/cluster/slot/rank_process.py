"""A slot's handle on the worker process of its rank."""

from __future__ import annotations

import abc
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from ...typed_json import MessageError, parse, to_json
from ..protocol.channel import LineSplitter
from ..protocol.messages import (
    WORKER_REPORTS,
    Begin,
    Forked,
    ForkWorker,
    ProcessReport,
    RankReport,
    Started,
)
from ..protocol.outcome import (
    ABORTED,
    CRASH_FILE,
    CRASH_SIGNALS,
    DIED,
    LAUNCH,
    LOG_TAIL_LINES,
    LOST,
    MAX_TRACEBACK,
    MPI_ENDED,
    OUTCOME_FILE,
    RESULT_FILE,
    STACKS_FILE,
    STACKS_SIGNAL,
    Failure,
    RankOutcome,
    shortened,
)
from ..protocol.processes import (
    READY_NAME,
    ChildOutput,
    describe_exit,
    end_descriptors,
    end_group,
    exit_code_of,
    handles,
    is_stopped,
    signal_group,
    start_tethered,
    working_directory,
)
from ..protocol.topology import RankPlacement
from .node_door import Shim
from .worker_pool import PendingWorker, request_worker, retire_all
from .workspace import Workspace

_WORKER_MODULE = "horovod_spark_runner.cluster.worker.main"
# How long after a worker's end its exit code may take to arrive: the prefork process may be busy.
_CODE_SECONDS = 30.0
# After which the kernel is queried: the prefork process may have been stopped.
_KERNEL_CHECK_SECONDS = 2.0
# How long a process that has closed its connection may take to end.
_EXIT_SECONDS = 1.0
# How long to wait for a prefork process that has been stopped.
STOPPED_SECONDS = 2.0
# PMIx ends a process that loses its daemon with this exit code (PMIX_ERR_LOST_CONNECTION, -61).
_MPI_LOST_EXIT = 195
# How long a prefork process may take to fork a worker, imports included.
FORK_SECONDS = 60.0
# How long a worker that has closed its connection may still run: without it, and without those of
# MPI, which it has closed, too, it would wait for ever.
_HUNG_UP_SECONDS = 10.0
# Exit code of a process that MPI cannot bring into its world.
_MPI_START_EXIT = 14
# How long a rank may run after the world ended, to report its own failure first.
_ABORT_GRACE = 2.0
# How long a rank that has reported its failure may take to end: MPI's abort hangs without mpirun.
_END_SECONDS = 5.0
# How long the Python stacks of a process take to be written.
STACKS_GRACE = 0.5


class _Worker(abc.ABC):
    """A worker process.

    Attributes:
        connection: socket of its reports and of its start message.
        output: its output and errors.
        watched: further descriptors that can be read once it has ended.
        pid: its number and that of its process group, once it has one.
        guessed: whether its exit code is unknown, and assumed to be that of SIGKILL.
        ready_bytes: memory of the prefork process that it was forked from; 0 where there is none.
    """

    connection: socket.socket
    output: IO[bytes]
    watched: tuple[int, ...] = ()
    pid: int | None = None
    guessed = False
    ready_bytes = 0

    @abc.abstractmethod
    def take(self, report: ProcessReport) -> None:
        """Take a report of the prefork process about it."""

    @abc.abstractmethod
    def hang_up(self) -> None:
        """Take the end of the connection: no more reports come."""

    @abc.abstractmethod
    def poll(self) -> int | None:
        """Return the exit code, that of a signal being negative; ``None`` while it runs."""

    @abc.abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if there is still a process to take it."""

    @abc.abstractmethod
    def end(self) -> None:
        """End it and its children; safe to call again."""

    def is_stuck(self) -> bool:
        """Tell whether it is not forked yet, and its prefork process has been stopped."""
        return False

    def ended_prefork(self) -> int | None:
        """Return the number of its prefork process, if that ended before it."""
        return None

    def read_rest(self) -> bytes:
        """Return the unread reports of an ended worker."""
        rest = b""
        self.connection.setblocking(False)
        with contextlib.suppress(OSError):
            while data := self.connection.recv(65536):
                rest += data
        return rest

    def unwatch(self) -> None:
        """Close the descriptors that watch for its end."""
        for descriptor in self.watched:
            os.close(descriptor)
        self.watched = ()

    def close(self) -> None:
        """Close the descriptors."""
        self.connection.close()
        self.unwatch()


class _StartedWorker(_Worker):
    """A child process of this one.

    Args:
        arguments: of the worker program, after the descriptor.
        environment: of the process.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.connection, other = socket.socketpair()
        with other:
            self._process = start_tethered(
                [sys.executable, "-m", _WORKER_MODULE, str(other.fileno()), *arguments],
                environment,
                directory=working_directory(),
                inherit=(other.fileno(),),
            )
        assert self._process.stdout is not None
        self.output = self._process.stdout
        self.pid = self._process.pid
        self.watched = end_descriptors(self._process.pid)

    def take(self, report: ProcessReport) -> None:
        """Ignore the report: no prefork process is involved."""

    def hang_up(self) -> None:
        # The process may have closed it and still run: `poll` shows its end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)

    def poll(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        end_group(self._process, grace=0)


class _ForkedWorker(_Worker):
    """A child of this executor's prefork process, which reports its number and exit code.

    Args:
        pending: the connection to the prefork process and, later, to the worker.
        output: the worker's output and errors.
    """

    def __init__(self, pending: PendingWorker, output: IO[bytes]) -> None:
        self.connection, self._prefork = pending.connection, pending.prefork
        self.output = output
        self._stopped_since: float | None = None
        self._code: int | None = None
        self._ended_since: float | None = None

    def take(self, report: ProcessReport) -> None:
        if isinstance(report, Forked):
            self.pid, self.ready_bytes = report.pid, report.ready_bytes
            self.watched = end_descriptors(report.pid)
        else:
            self._code = report.code

    def hang_up(self) -> None:
        if self.pid is not None and self._code is None:
            # The prefork process has died, and its workers with it.
            self._code, self.guessed = -signal.SIGKILL, True

    def is_stuck(self) -> bool:
        if self.pid is not None or self._prefork is None or not self._prefork.is_stopped:
            self._stopped_since = None
            return False
        now = time.monotonic()
        self._stopped_since = self._stopped_since or now
        if now - self._stopped_since < STOPPED_SECONDS:
            return False
        self._prefork.retire()
        return True

    def ended_prefork(self) -> int | None:
        return self._prefork.pid if self._prefork is not None and self._prefork.has_ended else None

    def poll(self) -> int | None:
        if self._code is None and self.watched and select.select(self.watched, [], [], 0)[0]:
            self._ended_since = time.monotonic()
            self.unwatch()
        waited = 0.0 if self._ended_since is None else time.monotonic() - self._ended_since
        if self._code is None and waited > _KERNEL_CHECK_SECONDS and self.pid is not None:
            self._code = exit_code_of(self.pid)
        if self._code is None and waited > _CODE_SECONDS:
            # Without a code for so long, the prefork process has died as well, or hangs.
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
        # Where it has no number yet, the prefork process ends it once the connection is closed.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _fork_worker(request: ForkWorker) -> _ForkedWorker | None:
    """Return a worker forked by this executor's prefork process; ``None`` if there can be none."""
    reading, writing = os.pipe()
    try:
        pending = request_worker(request, writing)
    finally:
        os.close(writing)
    output = os.fdopen(reading, "rb", buffering=0)
    if pending is None:
        output.close()
        return None
    return _ForkedWorker(pending, output)


@dataclass(frozen=True)
class _LargeResult:
    """A result too large for the outcome: the file it is in and its size in bytes."""

    path: Path
    size: int


@dataclass(frozen=True)
class _WorkerEnd:
    """Outcome of a worker that has ended by itself.

    Attributes:
        failure: why there is no result; ``None`` if there is one.
        result: the pickled result, unless it is large.
        large: the large result.
        timings: seconds spent per phase of the start.
    """

    failure: Failure | None = None
    result: bytes | None = None
    large: _LargeResult | None = None
    timings: dict[str, float] = field(default_factory=dict)


class RankProcess:
    """Starts the worker at once, lends it its MPI environment later, and reads its outcome.

    Args:
        payload: file that will hold the pickled call when the rank begins.
        modules: modules to import ahead.
        environment: the process's environment.
        directory: private directory of the rank.
        workspace: of the slot.
        most_result_bytes: a larger result stays in its file.
        idle_timeout: seconds a prefork process waits for further ranks; 0 for none.
        on_report: takes the reports of the code that the worker runs.
        on_lines: takes its output lines.
    """

    def __init__(
        self,
        payload: Path,
        modules: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        workspace: Workspace,
        *,
        max_result_bytes: int,
        idle_timeout: float,
        on_report: Callable[[RankReport], None],
        on_lines: Callable[[list[str]], None],
    ) -> None:
        self._payload = payload
        self._modules = tuple(modules)
        self._environment = dict(environment)
        self._directory = directory
        self._most_result_bytes = max_result_bytes
        self._on_report = on_report
        self._on_lines = on_lines
        self._workspace = workspace
        self._begin: Begin | None = None
        self._end_signal: signal.Signals | None = None
        self.ended = self._killed = False
        self._take(self._fork(idle_timeout) or self._start())

    def _fork(self, idle_timeout: float) -> _Worker | None:
        if not idle_timeout:
            retire_all()
        if not idle_timeout or not self._modules:
            return None
        return _fork_worker(
            ForkWorker(
                directory=str(self._directory),
                payload=str(self._payload),
                environment=self._environment,
                modules=self._modules,
                idle_timeout=idle_timeout,
            )
        )

    def _start(self) -> _Worker:
        arguments = [str(self._directory), str(self._payload), *self._modules]
        return _StartedWorker(arguments, self._environment)

    def _take(self, worker: _Worker) -> None:
        self._worker = worker
        self._since = time.monotonic()
        self._hung_up: float | None = None  # since when
        self._given_up = False  # since it had hung up, but did not end
        self._called = False  # whether it has called the function
        self._reports = LineSplitter(tail=0)
        self._output = ChildOutput(worker.output, LOG_TAIL_LINES, self._on_lines)
        if worker.pid is not None:
            self._workspace.watch(worker.pid)
        if self._begin is not None:
            self._send(self._begin)

    @property
    def log_tail(self) -> tuple[str, ...]:
        return self._output.tail

    @property
    def ready_bytes(self) -> int:
        """Memory of the prefork process that forked the worker; 0 where there is none."""
        return self._worker.ready_bytes

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return the handlers to call, by readable descriptor."""
        handlers = self._output.handlers()
        if not self.ended:
            if self._hung_up is None:
                handlers[self._worker.connection.fileno()] = self._on_connection
            handlers.update(dict.fromkeys(self._worker.watched, self._look))
        return handlers

    def check(self) -> None:
        """Notice an end that no descriptor has shown, or a prefork process that does nothing."""
        if self.ended:
            return
        late = self._worker.pid is None and time.monotonic() - self._since > FORK_SECONDS
        if late or self._worker.is_stuck():
            self._start_instead()
        if self._hung_up is not None and time.monotonic() - self._hung_up > _HUNG_UP_SECONDS:
            self._given_up = True
            self._worker.end()
        self._look()

    def _start_instead(self) -> None:
        """Start the worker directly, as the prefork process does not fork it."""
        self._output.close()
        self._worker.close()
        self._take(self._start())

    def begin(self, environment: Mapping[str, str], rank: int, size: int) -> None:
        """Let the worker join MPI as ``rank`` of ``size`` and run the function."""
        self._begin = Begin(dict(environment), rank, size)
        self._send(self._begin)

    def kill(self) -> None:
        """End the worker and its children; safe to call again."""
        if self._killed:  # its numbers may be others' processes by now
            return
        self._killed = True
        self._worker.end()
        if self._worker.pid is not None:
            self._workspace.forget(self._worker.pid)
        self._output.drain()
        self.ended = True

    def request_end(self, number: signal.Signals) -> None:
        """Pass on that this host shuts down; a training saves and ends by itself.

        Args:
            number: the signal that the slot received.
        """
        self._end_signal = number
        self._worker.send_signal(signal.SIGTERM)

    def dump_stacks(self) -> None:
        """Have the worker write its Python stacks, for `stacks`."""
        if (self._directory / STACKS_FILE).exists() and self._handles_stacks:
            self._worker.send_signal(STACKS_SIGNAL)

    def stacks(self) -> str:
        """Return the stacks the worker has written on request, or why it has not."""
        if (pid := self._worker.pid) is not None and is_stopped(pid):
            return f"none: process {pid} is stopped (by SIGSTOP or a debugger), and runs nothing"
        path = self._directory / STACKS_FILE
        if path.exists() and not self._handles_stacks:
            return (
                f"none: process {pid} runs another program, or has taken {STACKS_SIGNAL.name} back"
            )
        return path.read_text(errors="replace").strip() if path.exists() else ""

    @property
    def _handles_stacks(self) -> bool:
        return (pid := self._worker.pid) is not None and handles(pid, STACKS_SIGNAL)

    def close(self) -> None:
        self.kill()
        self._output.close()
        self._worker.close()

    def reported_failure(self) -> Failure | None:
        """Return the failure that the worker has reported; it may not have ended yet."""
        return self._read_outcome()[0] if (self._directory / OUTCOME_FILE).exists() else None

    def _read_outcome(self) -> tuple[Failure | None, dict[str, float]]:
        with (self._directory / OUTCOME_FILE).open("rb") as stream:
            outcome: tuple[Failure | None, dict[str, float]] = pickle.load(stream)
        return outcome

    def outcome(self) -> _WorkerEnd:
        """Return the outcome of a worker that has ended by itself."""
        code = self._worker.poll()
        assert code is not None
        path = self._directory / OUTCOME_FILE
        if not path.exists() and code == _MPI_LOST_EXIT:
            message = "MPI ended it, because another rank or mpirun had ended"
            return _WorkerEnd(Failure(ABORTED, time.time(), message))
        if not path.exists() and code == -signal.SIGTERM and self._end_signal is not None:
            message = (
                f"its Spark task was killed or lost: its executor was asked to end, or has ended "
                f"({self._end_signal.name})"
            )
            return _WorkerEnd(Failure(LOST, time.time(), message, log_tail=self.log_tail))
        if not path.exists():
            message = f"its process {describe_exit(code)}{self._hint(code)}"
            return _WorkerEnd(self._died(message, self._crash(code)))
        failure, timings = self._read_outcome()
        if failure is None and code != 0 and not self._worker.guessed:
            end = f"its process {describe_exit(code)} while it left the MPI world"
            failure = self._died(f"{end}{self._hint(code)}")
        if failure is not None:
            return _WorkerEnd(failure, timings=timings)
        result = self._directory / RESULT_FILE
        size = result.stat().st_size
        if size > self._most_result_bytes:
            return _WorkerEnd(large=_LargeResult(result, size), timings=timings)
        return _WorkerEnd(result=result.read_bytes(), timings=timings)

    def _hint(self, code: int) -> str:
        killed = code == -signal.SIGKILL
        prefork = self._worker.ended_prefork() if killed else None
        if prefork is not None:
            return (
                f", as the process it was forked from has ended ({READY_NAME}, {prefork}): "
                "something has killed that, or the system has run out of memory; the ranks of this "
                "executor end with it, and a restart or the next run starts another one"
            )
        if self._given_up:
            return "; it had closed its connection to its slot (all file descriptors?)"
        if code == _MPI_START_EXIT and not self._called:
            lacking = self._workspace.lacking_shared_memory()
            return f"; MPI could not start, or mpirun had ended{lacking and ': '}{lacking}"
        return "; the system may have run out of memory" if killed else ""

    def _died(self, message: str, stacks: str = "") -> Failure:
        return Failure(DIED, time.time(), message, traceback=stacks, log_tail=self.log_tail)

    def _crash(self, code: int) -> str:
        """Return the Python stacks of a worker that ended with ``code``, if it wrote them."""
        path = self._directory / CRASH_FILE
        if -code not in CRASH_SIGNALS or not path.exists():
            return ""
        lines = path.read_text(errors="replace").splitlines()
        stacks = [line for line in lines if not line.startswith("Extension modules:")]
        self._on_lines(stacks)  # so that they are in the rank's log, too
        return shortened("\n".join(stacks).strip(), MAX_TRACEBACK)

    def _send(self, begin: Begin) -> None:
        with contextlib.suppress(OSError):  # it has just died; the loop will notice
            self._worker.connection.sendall(to_json(begin).encode() + b"\n")

    def _on_connection(self) -> None:
        try:
            data = self._worker.connection.recv(65536)
        except ConnectionError:
            data = b""
        self._read(data)
        if not data:
            self._hung_up = time.monotonic()
            self._worker.hang_up()
            if self._worker.pid is None:
                self._start_instead()
                return
        self._look()

    def _read(self, data: bytes) -> None:
        for line in self._reports.feed(data):
            try:
                report = parse(line, *WORKER_REPORTS)
            except MessageError:  # half a report of a worker that was killed
                continue
            if isinstance(report, ProcessReport):
                self._take_report(report)
            else:
                self._called |= isinstance(report, Started)
                self._on_report(report)

    def _take_report(self, report: ProcessReport) -> None:
        self._worker.take(report)
        if isinstance(report, Forked):
            self._workspace.watch(report.pid)
            if self._end_signal is not None:  # meanwhile
                self._worker.send_signal(signal.SIGTERM)

    def _look(self) -> None:
        """Notice the end of the process itself: its forks may keep its pipes and socket open."""
        if self._worker.poll() is None:
            return
        self._read(self._worker.read_rest())
        self._output.drain()
        self.ended = True


class Rank:
    """Brings one rank's process from start to outcome.

    Args:
        process: its worker process.
        on_failure: is called once if the rank fails.
    """

    def __init__(
        self, process: RankProcess, on_failure: Callable[[RankPlacement | None, Failure], None]
    ) -> None:
        self.process = process
        self.placement: RankPlacement | None = None
        self.timings: dict[str, float] = {}
        self.large: _LargeResult | None = None
        self.settled = False
        self.is_running = False
        self._on_failure = on_failure
        self._result: bytes | None = None
        self._failure: Failure | None = None
        self._shim: Shim | None = None
        self._world_ended: float | None = None
        # The failure that the worker has reported, and when.
        self._reported: tuple[float, Failure] | None = None

    @property
    def started(self) -> bool:
        """True once mpirun has started this rank."""
        return self._shim is not None

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def outcome(self, slot: int, host: str, timings: Mapping[str, float]) -> RankOutcome:
        return RankOutcome(
            slot=slot,
            host=host,
            placement=self.placement,
            result=self._result,
            result_bytes=0 if self.large is None else self.large.size,
            failure=self._failure,
            timings={**timings, **self.timings},
            ready_bytes=self.process.ready_bytes,
        )

    def begin(self, shim: Shim, environment: Mapping[str, str], size: int) -> None:
        """Join the world of ``size`` ranks with the MPI identity that ``shim`` brought."""
        assert self.placement is not None
        self._shim = shim
        if self.settled:  # it died before mpirun came to it
            shim.release(1)
        else:
            self.process.begin(environment, self.placement.rank, size)

    def check(self, now: float) -> None:
        """Check the process and the deadlines."""
        self.process.check()
        if self.process.ended and not self.settled:
            end = self.process.outcome()
            self.timings.update(end.timings)
            self.large = end.large
            self.settle(end.result, end.failure)
        if self._reported is None and not self.settled:
            failure = self.process.reported_failure()
            self._reported = None if failure is None else (now, failure)
        elif self._reported is not None and now - self._reported[0] > _END_SECONDS:
            self.settle(None, self._reported[1])
        if self._shim is not None and self._shim.ended and not self.settled:
            # mpirun ended it, because another rank failed or because it died itself.
            self._world_ended = self._world_ended or now
            if now - self._world_ended > _ABORT_GRACE:
                self.abort(ABORTED, "ended because another rank failed")

    def dump_stacks(self) -> None:
        """Have the process write the Python stacks of its threads; see `abort`."""
        if not self.settled:
            self.process.dump_stacks()

    def abort(self, kind: str, message: str, log_tail: tuple[str, ...] = ()) -> None:
        """End the rank now, for this reason, unless it has reported its own failure."""
        if self.settled:
            return
        failure = self.process.reported_failure()
        if failure is not None:  # and could not end: a thread may hang in the kernel
            self.settle(None, failure)
        else:
            stacks = self.process.stacks()
            self.settle(None, Failure(kind, time.time(), message, None, stacks, None, log_tail))

    def settle(self, result: bytes | None, failure: Failure | None) -> None:
        """Take the rank's outcome, once; its process has ended or is ended."""
        if self.settled:
            return
        self.settled = True
        self._result, self._failure = (result, None) if failure is None else (None, failure)
        self.process.kill()
        if self._shim is not None:
            # Anything but 0 makes mpirun end the other ranks.
            self._shim.release(0 if failure is None else 1)
        if failure is not None:
            self._on_failure(self.placement, failure)

    def explain_abort(self, why: str, log_tail: tuple[str, ...]) -> None:
        """Add the reason ``why`` to the outcome of a rank that was aborted."""
        failure = self._failure
        if failure is not None and failure.kind == ABORTED:
            message = f"{failure.message}: {why}"
            self._failure = replace(failure, kind=MPI_ENDED, message=message, log_tail=log_tail)

    def fail_result(self) -> None:
        """Take back a large result that could not be sent."""
        assert self.large is not None
        message = f"its result of {self.large.size:,} bytes could not be sent to the driver"
        self.large, self._failure = None, Failure(LAUNCH, time.time(), message)

    def close(self) -> None:
        self.process.close()
