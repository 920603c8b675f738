"""A Unix socket in a private directory where a small program hands over one JSON object.

The programs (`launch.programs`) do without this package; what they bring is made a dataclass here.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ...typed_json import parse_plain


@dataclass(frozen=True, slots=True)
class MpiIdentity:
    """The environment that MPI gave a rank; its shim brings it."""

    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class RemoteLaunch:
    """What mpirun wants to run elsewhere; the program brings it that it calls in place of ssh.

    Attributes:
        host: the node's name.
        command: for a shell.
    """

    host: str
    command: str


T = TypeVar("T")


class Caller:
    """A program that came to the door.

    Args:
        connection: its connection.
        on_text: takes the JSON that it brings.
    """

    def __init__(self, connection: socket.socket, on_text: Callable[[Caller, bytes], None]) -> None:
        self._connection = connection
        self._on_text = on_text
        self._received = b""
        self.ended = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def release(self, code: int) -> None:
        """Let the program end with ``code``."""
        with contextlib.suppress(OSError):  # it may have been ended already
            self._connection.sendall(bytes([code]))

    def close(self) -> None:
        self.ended = True
        self._connection.close()

    def read(self) -> None:
        """Take what has arrived."""
        try:
            data = self._connection.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            self.ended = True
            return
        self._received += data
        if self._received.endswith(b"\n"):
            self._on_text(self, self._received)


class JsonDoor(Generic[T]):
    """Waits for the programs that call at one Unix socket.

    Args:
        path: of the socket, in a private directory.
        brings: what they bring.
        on_call: takes each caller with what it brings.
    """

    def __init__(self, path: Path, brings: type[T], on_call: Callable[[Caller, T], None]) -> None:
        self.path = str(path)
        self._brings = brings
        self._on_call = on_call
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self.callers: list[Caller] = []

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return what to call when which descriptor can be read."""
        handlers: dict[int, Callable[[], None]] = {self._listener.fileno(): self._on_connect}
        handlers.update((c.fileno(), c.read) for c in self.callers if not c.ended)
        return handlers

    def close(self) -> None:
        self._listener.close()
        for caller in self.callers:
            caller.close()

    def _on_connect(self) -> None:
        connection, _ = self._listener.accept()
        self.callers.append(Caller(connection, self._on_text))

    def _on_text(self, caller: Caller, text: bytes) -> None:
        self._on_call(caller, parse_plain(text, self._brings))
