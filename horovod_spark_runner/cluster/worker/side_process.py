"""A process that rank 0 forks before it joins MPI, and calls that are made in forks.

Code of a user's that is only tried would change the process that it runs in: counters, generators,
schedulers. In a fork it changes nothing. A rank that has joined MPI, uses a GPU or has gone through
a backward pass cannot be forked, so the first fork comes before that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from ...errors import HorovodSparkError, on_one_line
from ..protocol.outcome import STACKS_SIGNAL
from ..protocol.processes import die_with_parent, name_process
from . import reporting

T = TypeVar("T")

_NAME = "horovod-trial"


def call_in_fork(function: Callable[[], T], seconds: float) -> T:
    """Return what a function returns in a fork of this process.

    Args:
        function: returns what can be pickled.
        seconds: time limit.

    Raises:
        ChildProcessError: the fork ended, or was ended after the time limit, without a result.
        HorovodSparkError: the function has raised it.
        RuntimeError: the function has raised anything else, which the message describes.
    """
    pid, connection = _fork(lambda connection: connection.send_bytes(_outcome(function)))
    result: T = _receive(pid, connection, seconds)
    return result


class SideProcess:
    """A fork of this process that waits for one call.

    Args:
        payload: file of the rank's pickled call, whose arguments the side process loads.
    """

    def __init__(self, payload: Path) -> None:
        self._pid, self._connection = _fork(lambda connection: _serve(connection, payload))

    def call(self, function: Callable[..., T], *args: object, seconds: float) -> T:
        """Call a function with the arguments of the rank's call and with ``args``; once only.

        Raises:
            ChildProcessError: see `call_in_fork`, as for the others.
            HorovodSparkError: the function has raised it.
            RuntimeError: the function has raised anything else.
        """
        with contextlib.suppress(OSError):  # it has ended, which `_receive` reports
            self._connection.send_bytes(pickle.dumps((function, args)))
        result: T = _receive(self._pid, self._connection, seconds)
        return result


# The side process of this rank, from before it joins MPI until it is called.
_current: SideProcess | None = None


def start(payload: Path) -> None:
    """Fork this rank's side process, if there is memory for it."""
    global _current
    with contextlib.suppress(OSError):
        _current = SideProcess(payload)


def take() -> SideProcess | None:
    """Return this rank's side process, if it has one; once only."""
    global _current
    taken, _current = _current, None
    return taken


def _serve(connection: Connection, payload: Path) -> None:
    function, args = pickle.loads(connection.recv_bytes())

    def call() -> object:
        with payload.open("rb") as stream:
            _, call_args, call_kwargs = pickle.load(stream)
        return function(*call_args, *args, **call_kwargs)

    connection.send_bytes(_outcome(call))


def _fork(serve: Callable[[Connection], object]) -> tuple[int, Connection]:
    ours, theirs = Pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    with contextlib.suppress(BaseException):
        _set_apart(parent, theirs.fileno())
        serve(theirs)
    os._exit(0)


def _set_apart(parent: int, descriptor: int) -> None:
    """Let a fork end with its parent, print nothing and hold none of its files and sockets."""
    die_with_parent(parent)
    name_process(_NAME)
    faulthandler.disable()
    faulthandler.unregister(STACKS_SIGNAL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    reporting.connect(None)  # its socket is closed now, and another file may get its number
    for opened in map(int, os.listdir("/proc/self/fd")):
        if opened > 2 and opened != descriptor:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(opened)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)


def _outcome(function: Callable[[], object]) -> bytes:
    try:
        return pickle.dumps((function(), None))
    except HorovodSparkError as error:
        return pickle.dumps((None, error))
    except Exception as error:  # whose class the other process may not have
        text = f"{type(error).__name__}: {on_one_line(error)}"
        return pickle.dumps((None, RuntimeError(text)))


def _receive(pid: int, connection: Connection, seconds: float) -> Any:
    try:
        if not connection.poll(seconds):
            raise ChildProcessError(f"no result after {seconds:.0f} s")
        result, error = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError, pickle.UnpicklingError):
        raise ChildProcessError(f"process {pid} ended without a result") from None
    finally:
        _end(pid, connection)
    if error is not None:
        raise error
    return result


def _end(pid: int, connection: Connection) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
