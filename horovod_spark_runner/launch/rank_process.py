"""A slot's handle on the worker process of its rank."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .lines import LineSplitter
from .outcome import (
    ABORTED,
    DIED,
    LOG_TAIL_LINES,
    OUTCOME_FILE,
    RESULT_FILE,
    STACKS_FILE,
    STACKS_SIGNAL,
    Failure,
)
from .processes import ChildOutput, describe_exit, end_group, start_tethered
from .workspace import Workspace

WORKER_MODULE = f"{__package__}.worker"
# PMIx ends a process that loses its daemon with this exit code (PMIX_ERR_LOST_CONNECTION, -61).
MPI_LOST_EXIT = 195
# A larger result goes to the driver directly: Spark holds results in the memory of its JVM.
MAX_OUTCOME_BYTES = 8 * 1024 * 1024


class RankProcess:
    """Starts the worker at once, lends it its MPI environment later, and reads its outcome.

    Args:
        payload: file that will hold the pickled call when the rank begins.
        modules: modules to import ahead.
        environment: the process's environment.
        directory: private directory of the rank.
        workspace: of the slot.
        on_report: takes the worker's reports.
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
        on_report: Callable[[dict[str, Any]], None],
        on_lines: Callable[[list[str]], None],
    ) -> None:
        self._directory = directory
        self._on_report = on_report
        self._reports = LineSplitter(tail=0)
        self._workspace = workspace
        self._socket, other = socket.socketpair()
        with other:
            arguments = [str(other.fileno()), str(directory), str(payload), *modules]
            self._process = start_tethered(
                [sys.executable, "-m", WORKER_MODULE, *arguments],
                environment,
                directory=os.getcwd(),
                inherit=(other.fileno(),),
            )
        workspace.watch(self._process.pid)
        self._output = ChildOutput(self._process, LOG_TAIL_LINES, on_lines)
        self.ended = False

    @property
    def log_tail(self) -> tuple[str, ...]:
        return self._output.tail

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return what to call when which descriptor can be read."""
        handlers = self._output.handlers()
        if not self.ended:
            handlers[self._socket.fileno()] = self._on_socket
        return handlers

    def begin(self, environment: Mapping[str, str], rank: int, size: int) -> None:
        """Let the worker join MPI as ``rank`` of ``size`` and run the function."""
        message = {"environment": dict(environment), "rank": rank, "size": size}
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # it has just died, which the loop notices

    def kill(self) -> None:
        """End the worker and what it started; safe to call again."""
        end_group(self._process, grace=0)
        self._workspace.forget(self._process.pid)
        self._output.drain()
        self.ended = True

    def ask_to_end(self) -> None:
        """Pass on that this host is to be left soon; a training saves and ends by itself."""
        if not self.ended:
            self._process.send_signal(signal.SIGTERM)

    def dump_stacks(self) -> None:
        """Have the worker write its Python stacks, for `stacks`."""
        if not self.ended and (self._directory / STACKS_FILE).exists():
            self._process.send_signal(STACKS_SIGNAL)

    def stacks(self) -> str:
        """Return the stacks the worker has written, if it was asked to."""
        path = self._directory / STACKS_FILE
        return path.read_text(errors="replace").strip() if path.exists() else ""

    def close(self) -> None:
        self.kill()
        self._output.close()
        self._socket.close()

    def outcome(
        self,
    ) -> tuple[bytes | None, tuple[Path, int] | None, Failure | None, dict[str, float]]:
        """Return what became of a worker that has ended by itself.

        Returns:
            The pickled result, or the file it is in and its size if it is large; the failure;
            seconds spent per phase.
        """
        code = self._process.wait()
        path = self._directory / OUTCOME_FILE
        if not path.exists() and code == MPI_LOST_EXIT:
            message = "MPI ended it when another rank or mpirun was gone"
            return None, None, Failure(ABORTED, time.time(), message), {}
        if not path.exists():
            hint = "; the system may have run out of memory" if code == -9 else ""
            return None, None, self._died(f"its process {describe_exit(code)}{hint}"), {}
        with path.open("rb") as stream:
            failure, timings = pickle.load(stream)
        if failure is None and code != 0:
            failure = self._died(f"its process {describe_exit(code)} while it left the MPI world")
        if failure is not None:
            return None, None, failure, timings
        result = self._directory / RESULT_FILE
        size = result.stat().st_size
        if size > MAX_OUTCOME_BYTES:
            return None, (result, size), None, timings
        return result.read_bytes(), None, None, timings

    def _died(self, message: str) -> Failure:
        return Failure(DIED, time.time(), message, log_tail=self.log_tail)

    def _on_socket(self) -> None:
        try:
            data = self._socket.recv(65536)
        except ConnectionError:
            data = b""
        for line in self._reports.feed(data):
            self._on_report(json.loads(line))
        if not data:  # closed with the process
            self._process.wait()
            self._output.drain()
            self.ended = True
