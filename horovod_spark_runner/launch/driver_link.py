"""A slot's connection to the driver: never waited for, never fatal."""

from __future__ import annotations

import contextlib
import socket

from .channel import NONCE_BYTES, ChannelError, FrameCodec, Message, new_nonce

CONNECT_TIMEOUT = 5.0
# What may wait to be sent. Above it log lines are dropped: a slow driver must not slow training.
MAX_PENDING_BYTES = 8 * 1024 * 1024


class DriverLink:
    """Sends what it can to the driver; everything is dropped quietly once the link is lost.

    Args:
        address: the driver's host and port.
        key: the run's secret.
    """

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._socket: socket.socket | None = None
        self._pending = bytearray()
        self.dropped = 0
        try:
            connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT)
            server_nonce = receive_exactly(connection, NONCE_BYTES)
            client_nonce = new_nonce()
            connection.sendall(client_nonce)
        except OSError:
            return
        self._codec = FrameCodec(key, server_nonce, client_nonce, is_server=False)
        connection.setblocking(False)
        self._socket = connection

    def fileno(self) -> int | None:
        """Return the descriptor to watch for messages, or ``None`` once the link is lost."""
        return None if self._socket is None else self._socket.fileno()

    @property
    def local_address(self) -> str | None:
        """The address of this host on the route to the driver."""
        return None if self._socket is None else self._socket.getsockname()[0]

    def send(self, message: Message, *, droppable: bool = False) -> None:
        """Queue ``message``; a droppable one is left out while too much is waiting."""
        if self._socket is None:
            return
        if droppable and len(self._pending) > MAX_PENDING_BYTES:
            self.dropped += 1
            return
        self._pending += self._codec.encode(message)
        self.flush()

    def flush(self) -> None:
        """Send what can be sent without waiting."""
        while self._socket is not None and self._pending:
            try:
                sent = self._socket.send(self._pending)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            del self._pending[:sent]

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without waiting."""
        if self._socket is None:
            return []
        try:
            data = self._socket.recv(65536)
            if data:
                return self._codec.feed(data)
        except BlockingIOError:
            return []
        except (OSError, ChannelError):
            pass
        self.close()
        return []

    def drain(self, timeout: float) -> None:
        """Send what is waiting, for at most about ``timeout`` seconds, then close."""
        if self._socket is not None:
            self._socket.settimeout(timeout)
            with contextlib.suppress(OSError):
                self._socket.sendall(self._pending)
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._pending.clear()


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Return exactly ``size`` bytes, or raise ``OSError``."""
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the driver closed the connection")
        data += chunk
    return data
