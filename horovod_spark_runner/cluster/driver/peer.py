"""One connection of the control server."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import IO

from ...typed_json import MessageError
from ..protocol.channel import MAX_DATA_BYTES, Handshake
from ..protocol.messages import Instruction, Told

# Seconds for which a slot may take nothing of what it is sent.
SEND_TIMEOUT = 5.0
_RECEIVE_BYTES = 256 * 1024


class Incoming:
    """A large result on its way: where its bytes go, and how many are still to come."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        self.stream = stream
        self.size = self.left = size
        self.ended = threading.Event()

    def take(self, data: bytes) -> None:
        if len(data) > self.left:
            raise MessageError("more data than were announced")
        self.stream.write(data)
        self.left -= len(data)
        if not self.left:
            self.ended.set()


class Peer:
    """One connection of a slot, which has proven that it holds the run's key."""

    def __init__(self, connection: socket.socket, handshake: Handshake) -> None:
        self.connection = connection
        self.is_writing = False  # waits for room to send
        self.slot: int | None = None
        self.rank = -1
        self.host = "?"
        self.ended = False
        self.last_seen = self._last_sent = time.monotonic()
        self._channel = handshake.channel(Told)
        self._messages: deque[Instruction] = deque()
        self._data: memoryview | None = None
        self._outgoing = memoryview(b"")
        self.incoming: Incoming | None = None

    @property
    def has_more(self) -> bool:
        """Whether there is something to send."""
        return bool(self._outgoing or self._messages or self._data)

    def is_late(self, now: float) -> bool:
        """Tell whether it takes nothing of what it is sent for too long."""
        return self.is_writing and now - self._last_sent > SEND_TIMEOUT

    def queue(self, message: Instruction) -> None:
        """Have ``message`` sent, before the rest of data that are on their way."""
        self._messages.append(message)

    def queue_data(self, data: memoryview) -> None:
        """Have ``data`` sent, in frames."""
        self._data = data

    def write(self) -> bool:
        """Send what there is room for; return whether something is left."""
        while self._outgoing or self._next_frame():
            try:
                sent = self.connection.send(self._outgoing)
            except BlockingIOError:
                return True
            self._outgoing = self._outgoing[sent:]
            self._last_sent = time.monotonic()
            if self._data is not None:
                self.last_seen = self._last_sent  # it takes what is sent, so it lives
                return True  # others, too, wait for their turn
        return False

    def _next_frame(self) -> bool:
        # Frames carry their number: they are made in the order in which they go.
        if self._outgoing:
            return False
        if self._messages:
            frame = self._channel.encode(self._messages.popleft())
        elif self._data:
            frame = self._channel.encode_data(self._data[:MAX_DATA_BYTES])
            self._data = self._data[MAX_DATA_BYTES:] or None
        else:
            return False
        if not self.is_writing:  # its time to take something begins
            self._last_sent = time.monotonic()
        self._outgoing = memoryview(frame)
        return True

    def read(self) -> Iterator[Told]:
        """Yield the messages that have arrived.

        Raises:
            OSError: the connection has ended.
            ChannelError: the stream is damaged.
            MessageError: the slot sends what nobody expects.
        """
        data = self.connection.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionError("closed by the slot")
        self.last_seen = time.monotonic()
        for message in self._channel.feed(data):
            if not isinstance(message, bytes):
                yield message  # it may say where the data that follow go
            elif self.incoming is None:
                raise MessageError("data that nobody announced")
            else:
                self.incoming.take(message)

    def close(self) -> None:
        self.connection.close()
        if self.incoming is not None:
            self.incoming.ended.set()  # perhaps too early
