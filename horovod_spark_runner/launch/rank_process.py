"""A slot's handle on the worker process of its rank."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .lines import LineSplitter
from .outcome import DIED, LOG_TAIL_LINES, OUTCOME_FILE, PAYLOAD_FILE, Failure
from .processes import ChildOutput, describe_exit, end_group, start_tethered

WORKER_MODULE = f"{__package__}.worker"


class RankProcess:
    """Starts the worker at once, lends it its MPI environment later, and reads its outcome.

    Args:
        payload: pickled call.
        modules: modules to import ahead.
        environment: the process's environment.
        directory: private directory of the slot.
        on_report: takes the worker's reports.
        on_lines: takes its output lines.
    """

    def __init__(
        self,
        payload: bytes,
        modules: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        *,
        on_report: Callable[[dict[str, Any]], None],
        on_lines: Callable[[list[str]], None],
    ) -> None:
        self._directory = directory
        self._on_report = on_report
        self._reports = LineSplitter(tail=0)
        (directory / PAYLOAD_FILE).write_bytes(payload)
        self._socket, other = socket.socketpair()
        with other:
            arguments = [str(other.fileno()), str(directory), *modules]
            self._process = start_tethered(
                [sys.executable, "-m", WORKER_MODULE, *arguments],
                environment,
                directory=os.getcwd(),
                inherit=(other.fileno(),),
            )
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
        self.ended = True

    def close(self) -> None:
        self.kill()
        self._output.close()
        self._socket.close()

    def outcome(self) -> tuple[bytes | None, Failure | None, dict[str, float]]:
        """Return result, failure and timings of a worker that has ended by itself."""
        code = self._process.wait()
        path = self._directory / OUTCOME_FILE
        if not path.exists():
            hint = "; the system may have run out of memory" if code == -9 else ""
            return None, self._died(f"its process {describe_exit(code)}{hint}"), {}
        with path.open("rb") as stream:
            result, failure, timings = pickle.load(stream)
        if failure is None and code != 0:
            failure = self._died(f"its process {describe_exit(code)} while it left the MPI world")
        return result, failure, timings

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
