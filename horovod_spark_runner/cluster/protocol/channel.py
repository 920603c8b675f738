"""Authenticated messages over TCP: between the driver and the slots, and between slots.

Handshake: each side sends 32 random bytes at once, and derives a key for each direction from the
run's key and both. The keys also depend on who listened and who connected, so that no peer can be
made to talk to itself. Then the side that connected proves that it has these keys, by 32 bytes, and
after it the side that listened. Frame: 4-byte length, 32-byte HMAC-SHA256 over (sequence number,
body), a JSON body. So a frame that was captured, reordered, reflected or sent by a stranger is
refused, lengths are capped before anything is read, and nothing is ever unpickled here. A body that
begins with a zero byte holds raw data: a part of a large call or result. Messages are
authenticated, not encrypted.

The run's key travels inside Spark's own task description, never in an environment variable, an
argument or a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import random
import re
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from ...typed_json import Message, parse, to_json

NONCE_BYTES = 32
PROOF_BYTES = 32
MAC_BYTES = 32
# Seconds between attempts to connect: a packet may be lost, and among many strangers a peer may be
# dropped before it could prove anything. Jitter keeps peers that were dropped together apart.
RETRY_PAUSES = (0.5, 1.0, 2.0)
MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_DATA_BYTES = MAX_BODY_BYTES - 1
_HEADER = struct.Struct("!I")
_SEQUENCE = struct.Struct("!Q")

_DATA = b"\0"
# Shorter than any text that a frame's code is made of.
_PROOF = b"proof"

M = TypeVar("M", bound=Message)
# A line longer than this is cut into pieces, so that one program cannot fill the memory.
MAX_LINE_BYTES = 64 * 1024
# Start of the lines of Open MPI's default error handler, and the first line of a notice.
_MPI_ERROR = re.compile(r"\[\S+:\d+\] \*\*\* *(.*)")
_END_OF_ANOTHER = "An error occurred in PMIx Event Notification"


class ChannelError(ConnectionError):
    """The peer does not hold the key, or the stream is damaged."""


class Handshake:
    """One side of a handshake. Does no I/O.

    Args:
        key: the run's secret.
        listened: whether this side listened, or connected.

    Attributes:
        nonce: first bytes that this side sends.
    """

    def __init__(self, key: bytes, *, listened: bool) -> None:
        self._key = key
        self._listened = listened
        self.nonce = os.urandom(NONCE_BYTES)

    def derive_keys(self, other: bytes) -> bytes:
        """Take the nonce of the other side and return the proof that this side sends."""
        nonces = self.nonce + other if self._listened else other + self.nonce
        to_client = hmac.digest(self._key, b"server to client" + nonces, "sha256")
        to_server = hmac.digest(self._key, b"client to server" + nonces, "sha256")
        self._send_key, self._receive_key = (
            (to_client, to_server) if self._listened else (to_server, to_client)
        )
        return hmac.digest(self._send_key, _PROOF, "sha256")

    def verify(self, proof: bytes) -> None:
        """Check the proof of the other side.

        Raises:
            ChannelError: it does not hold the key.
        """
        if not hmac.compare_digest(proof, hmac.digest(self._receive_key, _PROOF, "sha256")):
            raise ChannelError("the other side does not hold the key of this run")

    def channel(self, *kinds: type[M]) -> Channel[M]:
        """Return the channel for messages of ``kinds`` to come."""
        return Channel(self._send_key, self._receive_key, *kinds)


class Channel(Generic[M]):
    """One side of a connection after the handshake: messages to frames and back. Does no I/O.

    Args:
        send_key: of the frames that are made here.
        receive_key: of those that arrive.
        kinds: classes of the messages that may come.
    """

    def __init__(self, send_key: bytes, receive_key: bytes, *kinds: type[M]) -> None:
        self._send_key = send_key
        self._receive_key = receive_key
        self._kinds = kinds
        self._sent = 0
        self._received = 0
        self._buffer = bytearray()

    def encode(self, message: Message) -> bytes:
        """Return the frame of ``message``.

        Raises:
            ChannelError: the message is larger than a frame may be.
        """
        return self._frame(to_json(message).encode())

    def encode_data(self, data: bytes | memoryview) -> bytes:
        """Return the frame of raw ``data``, at most `MAX_DATA_BYTES`."""
        return self._frame(_DATA + bytes(data))

    def feed(self, data: bytes) -> list[M | bytes]:
        """Take received bytes and return the messages, and raw data, that they complete.

        Raises:
            ChannelError: a frame is too long, or was not made by the holder of the key.
            MessageError: it was, but its message is not expected here.
        """
        self._buffer += data
        messages: list[M | bytes] = []
        while (body := self._next_body()) is not None:
            messages.append(body[1:] if body.startswith(_DATA) else parse(body, *self._kinds))
        return messages

    def _frame(self, body: bytes) -> bytes:
        if len(body) > MAX_BODY_BYTES:
            raise ChannelError(f"message of {len(body)} bytes; at most {MAX_BODY_BYTES} fit")
        mac = _mac(self._send_key, self._sent, body)
        self._sent += 1
        return _HEADER.pack(len(body)) + mac + body

    def _next_body(self) -> bytes | None:
        """Remove the next complete frame from the buffer and return its body."""
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


def connect(
    address: tuple[str, int],
    timeout: float,
    key: bytes,
    *kinds: type[M],
    pauses: Sequence[float] = RETRY_PAUSES,
) -> tuple[socket.socket, Channel[M]]:
    """Connect to the listener at ``address``, if it holds the key.

    Args:
        address: host and port.
        timeout: seconds to wait for the connection, and then for each part of the handshake; the
            connection keeps it.
        key: the run's secret.
        kinds: classes of the messages that may come.
        pauses: approximate seconds before each further attempt.

    Raises:
        OSError: no answer in time, or the other side does not hold the key.
    """
    for pause in pauses:
        with contextlib.suppress(OSError):
            return _connect(address, timeout, key, *kinds)
        time.sleep(pause * random.uniform(0.5, 1.5))
    return _connect(address, timeout, key, *kinds)


def _connect(
    address: tuple[str, int], timeout: float, key: bytes, *kinds: type[M]
) -> tuple[socket.socket, Channel[M]]:
    handshake = Handshake(key, listened=False)
    connection = socket.create_connection(address, timeout=timeout)
    try:
        connection.sendall(handshake.nonce)
        connection.sendall(handshake.derive_keys(receive_exactly(connection, NONCE_BYTES)))
        handshake.verify(receive_exactly(connection, PROOF_BYTES))
    except OSError:
        connection.close()
        raise
    return connection, handshake.channel(*kinds)


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


class LineSplitter:
    """Splits output into lines.

    A line is decoded only when it is complete, so a character whose bytes arrive apart stays
    whole; a carriage return, as progress bars use it, ends a line too.

    Args:
        tail: how many of the last lines to remember.
    """

    def __init__(self, tail: int) -> None:
        self._pending = b""
        self._returned = False
        self.tail: deque[str] = deque(maxlen=tail)

    def feed(self, data: bytes) -> list[str]:
        """Take ``data`` and return the lines it completes, without their ends."""
        if self._returned:  # the line feed that belongs to a carriage return comes after it
            data = data.removeprefix(b"\n")
        self._returned = data.endswith(b"\r")
        pieces = (self._pending + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._pending = pieces.pop()
        while len(self._pending) > MAX_LINE_BYTES:
            cut = _character_boundary(self._pending, MAX_LINE_BYTES)
            pieces.append(self._pending[:cut])
            self._pending = self._pending[cut:]
        return self._remember(pieces)

    def finish(self) -> list[str]:
        """Return the incomplete last line when the output has ended."""
        rest, self._pending = self._pending, b""
        return self._remember([rest] if rest else [])

    def _remember(self, pieces: list[bytes]) -> list[str]:
        lines = [piece.decode("utf-8", "replace") for piece in pieces]
        self.tail.extend(line for line in lines if line.strip())
        return lines


class AbortNoticeFilter:
    """Drops Open MPI's notices in ranks that it ends because another rank has ended.

    The driver names the cause; errors of MPI calls, which look alike, stay.
    """

    def __init__(self) -> None:
        self._in_notice = False

    def filter(self, lines: Iterable[str]) -> list[str]:
        """Return ``lines`` of one rank, in order, without such notices."""
        passed = []
        for line in lines:
            if match := _MPI_ERROR.match(line):
                self._in_notice |= match[1] == _END_OF_ANOTHER
            else:
                self._in_notice = False
            if not self._in_notice:
                passed.append(line)
        return passed


def _character_boundary(data: bytes, limit: int) -> int:
    """Return the largest cut of at most ``limit`` bytes that splits no UTF-8 character."""
    cut = limit
    while cut > limit - 4 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut
