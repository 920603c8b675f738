"""A Unix socket in a private directory where a small program hands over one JSON object."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Caller:
    """A program that came to the door.

    Args:
        connection: its connection.
        on_message: takes the JSON object it brings.
    """

    def __init__(
        self, connection: socket.socket, on_message: Callable[[Caller, dict[str, Any]], None]
    ) -> None:
        self._connection = connection
        self._on_message = on_message
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
            self._on_message(self, json.loads(self._received))


class JsonDoor:
    """Waits for the programs that call at one Unix socket.

    Args:
        path: of the socket, in a private directory.
        on_message: takes each caller with the JSON object it brings.
    """

    def __init__(self, path: Path, on_message: Callable[[Caller, dict[str, Any]], None]) -> None:
        self.path = str(path)
        self._on_message = on_message
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
        self.callers.append(Caller(connection, self._on_message))
