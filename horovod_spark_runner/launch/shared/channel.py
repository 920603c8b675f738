"""Authenticated messages between the driver and the slots, over TCP.

Handshake: the server sends 32 random bytes, the client answers with 32 of its own; each side then
derives a key of its direction from the run's key and both nonces. Frame: 4-byte length, 32-byte
HMAC-SHA256 over (sequence number, body), a JSON body. So a frame that was captured, reordered,
reflected or sent by a stranger is refused, lengths are capped before anything is read, and
nothing is ever unpickled here. A body that begins with a zero byte holds raw data: a part of a
large call or result. Messages are authenticated, not encrypted.

The run's key travels inside Spark's own task description, never in an environment variable, an
argument or a file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from typing import Any

NONCE_BYTES = 32
MAC_BYTES = 32
MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_DATA_BYTES = MAX_BODY_BYTES - 1
_HEADER = struct.Struct("!I")
_SEQUENCE = struct.Struct("!Q")

_DATA = b"\0"

Message = dict[str, Any]


class ChannelError(Exception):
    """The peer is not who it says, or the stream is damaged."""


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


class FrameCodec:
    """Turns messages into frames and back, for one connection. Does no I/O.

    Args:
        key: the run's secret.
        server_nonce: bytes the server sent first.
        client_nonce: bytes the client answered with.
        is_server: which side this is.
    """

    def __init__(
        self, key: bytes, server_nonce: bytes, client_nonce: bytes, *, is_server: bool
    ) -> None:
        nonces = server_nonce + client_nonce
        to_client = hmac.digest(key, b"server to client" + nonces, "sha256")
        to_server = hmac.digest(key, b"client to server" + nonces, "sha256")
        self._send_key, self._receive_key = (
            (to_client, to_server) if is_server else (to_server, to_client)
        )
        self._sent = 0
        self._received = 0
        self._buffer = bytearray()

    def encode(self, message: Message) -> bytes:
        """Return the frame of ``message``.

        Raises:
            ChannelError: the message is larger than a frame may be.
        """
        return self._frame(json.dumps(message, separators=(",", ":")).encode())

    def encode_data(self, data: bytes | memoryview) -> bytes:
        """Return the frame of raw ``data``, at most `MAX_DATA_BYTES`."""
        return self._frame(_DATA + bytes(data))

    def _frame(self, body: bytes) -> bytes:
        if len(body) > MAX_BODY_BYTES:
            raise ChannelError(f"message of {len(body)} bytes; at most {MAX_BODY_BYTES} fit")
        mac = _mac(self._send_key, self._sent, body)
        self._sent += 1
        return _HEADER.pack(len(body)) + mac + body

    def feed(self, data: bytes) -> list[Message | bytes]:
        """Take received bytes and return the messages, and raw data, that they complete.

        Raises:
            ChannelError: a frame is too long, or was not made by the holder of the key.
        """
        self._buffer += data
        messages: list[Message | bytes] = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > MAX_BODY_BYTES:
                raise ChannelError(f"frame of {length} bytes announced; at most {MAX_BODY_BYTES}")
            end = _HEADER.size + MAC_BYTES + length
            if len(self._buffer) < end:
                break
            mac = bytes(self._buffer[_HEADER.size : _HEADER.size + MAC_BYTES])
            body = bytes(self._buffer[_HEADER.size + MAC_BYTES : end])
            if not hmac.compare_digest(mac, _mac(self._receive_key, self._received, body)):
                raise ChannelError("frame with a wrong authentication code")
            self._received += 1
            del self._buffer[:end]
            if body.startswith(_DATA):
                messages.append(body[1:])
                continue
            message = json.loads(body)
            if not isinstance(message, dict):
                raise ChannelError("frame that holds no message")
            messages.append(message)
        return messages


def _mac(key: bytes, sequence: int, body: bytes) -> bytes:
    return hmac.new(key, _SEQUENCE.pack(sequence) + body, hashlib.sha256).digest()
