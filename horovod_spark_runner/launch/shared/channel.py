"""Authenticated messages over TCP: between the driver and the slots, and between slots.

Handshake, the same for both sides: each sends 32 random bytes at once, and derives a key for each
direction from the run's key and both. The keys also depend on who listened and who connected, so
that nobody can be made to talk to himself. Frame: 4-byte length, 32-byte HMAC-SHA256 over (sequence
number, body), a JSON body. So a frame that was captured, reordered, reflected or sent by a stranger
is refused, lengths are capped before anything is read, and nothing is ever unpickled here. A body
that begins with a zero byte holds raw data: a part of a large call or result. Messages are
authenticated, not encrypted.

The run's key travels inside Spark's own task description, never in an environment variable, an
argument or a file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from typing import Generic, TypeVar

from .typed_json import Message, parse, to_json

NONCE_BYTES = 32
MAC_BYTES = 32
MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_DATA_BYTES = MAX_BODY_BYTES - 1
_HEADER = struct.Struct("!I")
_SEQUENCE = struct.Struct("!Q")

_DATA = b"\0"

M = TypeVar("M", bound=Message)


class ChannelError(Exception):
    """The peer is not who it says, or the stream is damaged."""


class Channel(Generic[M]):
    """One side of a connection: the handshake, then frames out of messages and back. Does no I/O.

    Args:
        key: the run's secret.
        kinds: classes of the messages that may come.
        listened: whether this side listened, or connected.

    Attributes:
        nonce: the bytes that this side sends first.
        is_open: whether those of the other side have arrived, so that frames can be made.
    """

    def __init__(self, key: bytes, *kinds: type[M], listened: bool) -> None:
        self._key = key
        self._kinds = kinds
        self._listened = listened
        self.nonce = os.urandom(NONCE_BYTES)
        self.is_open = False
        self._sent = 0
        self._received = 0
        self._buffer = bytearray()

    def encode(self, message: Message) -> bytes:
        """Return the frame of ``message``; the channel is open.

        Raises:
            ChannelError: the message is larger than a frame may be.
        """
        return self._frame(to_json(message).encode())

    def encode_data(self, data: bytes | memoryview) -> bytes:
        """Return the frame of raw ``data``, at most `MAX_DATA_BYTES`; the channel is open."""
        return self._frame(_DATA + bytes(data))

    def feed(self, data: bytes) -> list[M | bytes]:
        """Take received bytes and return the messages, and raw data, that they complete.

        Raises:
            ChannelError: a frame is too long, or was not made by the holder of the key.
            MessageError: it was, but holds no message that is expected here.
        """
        self._buffer += data
        if not self.is_open and not self._open():
            return []
        messages: list[M | bytes] = []
        while (body := self._next_body()) is not None:
            messages.append(body[1:] if body.startswith(_DATA) else parse(body, *self._kinds))
        return messages

    def _open(self) -> bool:
        if len(self._buffer) < NONCE_BYTES:
            return False
        other = bytes(self._buffer[:NONCE_BYTES])
        del self._buffer[:NONCE_BYTES]
        nonces = self.nonce + other if self._listened else other + self.nonce
        to_client = hmac.digest(self._key, b"server to client" + nonces, "sha256")
        to_server = hmac.digest(self._key, b"client to server" + nonces, "sha256")
        self._send_key, self._receive_key = (
            (to_client, to_server) if self._listened else (to_server, to_client)
        )
        self.is_open = True
        return True

    def _frame(self, body: bytes) -> bytes:
        if len(body) > MAX_BODY_BYTES:
            raise ChannelError(f"message of {len(body)} bytes; at most {MAX_BODY_BYTES} fit")
        mac = _mac(self._send_key, self._sent, body)
        self._sent += 1
        return _HEADER.pack(len(body)) + mac + body

    def _next_body(self) -> bytes | None:
        """Take the next whole frame's body out of what has arrived."""
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > MAX_BODY_BYTES:
            raise ChannelError(f"frame of {length} bytes announced; at most {MAX_BODY_BYTES}")
        end = _HEADER.size + MAC_BYTES + length
        if len(self._buffer) < end:
            return None
        mac = bytes(self._buffer[_HEADER.size : _HEADER.size + MAC_BYTES])
        body = bytes(self._buffer[_HEADER.size + MAC_BYTES : end])
        if not hmac.compare_digest(mac, _mac(self._receive_key, self._received, body)):
            raise ChannelError("frame with a wrong authentication code")
        self._received += 1
        del self._buffer[:end]
        return body


def connect(address: tuple[str, int], timeout: float, channel: Channel[M]) -> socket.socket:
    """Connect to who listens at ``address`` and open ``channel``.

    Args:
        address: host and port.
        timeout: seconds to wait for the connection, and then for its part of the handshake; the
            connection keeps it.
        channel: a new one, of the side that connects.

    Raises:
        OSError: nobody answers in time.
    """
    connection = socket.create_connection(address, timeout=timeout)
    try:
        connection.sendall(channel.nonce)
        channel.feed(receive_exactly(connection, NONCE_BYTES))
    except OSError:
        connection.close()
        raise
    return connection


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Return exactly ``size`` bytes, or raise ``OSError``."""
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the connection was closed")
        data += chunk
    return data


def _mac(key: bytes, sequence: int, body: bytes) -> bytes:
    return hmac.new(key, _SEQUENCE.pack(sequence) + body, hashlib.sha256).digest()
