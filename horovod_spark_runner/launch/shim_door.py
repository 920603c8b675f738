"""Where mpirun's shim meets the slot: it brings the rank's MPI environment and waits."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path


class ShimDoor:
    """A Unix socket that one shim connects to.

    Args:
        directory: private directory of the slot.
        on_environment: takes the MPI environment the shim brings.
    """

    def __init__(self, directory: Path, on_environment: Callable[[dict[str, str]], None]) -> None:
        self.path = str(directory / "shim")
        self._on_environment = on_environment
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._shim: socket.socket | None = None
        self._received = b""
        self._open = True

    @property
    def connected(self) -> bool:
        """Whether mpirun has started this rank."""
        return self._shim is not None

    @property
    def ended(self) -> bool:
        """Whether the shim went away: mpirun ended it, because another rank failed or it died."""
        return not self._open

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return what to call when which descriptor can be read."""
        if self._shim is None:
            return {self._listener.fileno(): self._on_connect}
        return {self._shim.fileno(): self._on_data} if self._open else {}

    def release(self, code: int) -> None:
        """Let the shim end with ``code``; anything but 0 makes mpirun end the other ranks."""
        if self._shim is not None:
            try:
                self._shim.sendall(bytes([code]))
            except OSError:
                pass  # mpirun has ended it already

    def close(self) -> None:
        self._listener.close()
        if self._shim is not None:
            self._shim.close()

    def _on_connect(self) -> None:
        self._shim, _ = self._listener.accept()

    def _on_data(self) -> None:
        assert self._shim is not None
        try:
            data = self._shim.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            self._open = False
            return
        self._received += data
        if self._received.endswith(b"\n"):
            self._on_environment(json.loads(self._received))
