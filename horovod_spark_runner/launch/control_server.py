"""The driver's end of the control messages."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading

from .channel import NONCE_BYTES, ChannelError, FrameCodec, Message, new_nonce
from .driver_link import CONNECT_TIMEOUT, receive_exactly


class ControlServer:
    """Accepts the slots' connections and puts their messages into ``events``.

    Bound to one address only, on a port the system chooses. A peer that does not hold the run's
    key is dropped. Use as a context manager.

    Args:
        host: address to listen on; the one executors reach the driver at.
        key: the run's secret.
    """

    def __init__(self, host: str, key: bytes) -> None:
        self._key = key
        self._listener = socket.create_server((host, 0), family=_family(host))
        self._lock = threading.Lock()
        self._peers: dict[socket.socket, FrameCodec] = {}
        self._closing = False
        self.events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._accept, name="hsr-control", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing = True
        # A blocked accept is woken by shutdown, not by close.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._peers:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def broadcast(self, message: Message) -> None:
        """Send ``message`` to every slot that is connected."""
        with self._lock:
            for connection, codec in self._peers.items():
                with contextlib.suppress(OSError):
                    connection.sendall(codec.encode(message))

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="hsr-control-peer", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(CONNECT_TIMEOUT)
                nonce = new_nonce()
                connection.sendall(nonce)
                answer = receive_exactly(connection, NONCE_BYTES)
                connection.settimeout(None)
                codec = FrameCodec(self._key, nonce, answer, is_server=True)
                with self._lock:
                    self._peers[connection] = codec
                while data := connection.recv(65536):
                    for message in codec.feed(data):
                        self.events.put(message)
            except (OSError, ChannelError):
                pass  # a stranger, or a slot that ended; the run's outcome comes through Spark
            finally:
                with self._lock:
                    self._peers.pop(connection, None)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
