"""The driver's end of the control messages."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import tempfile
import threading
import time
from typing import IO

from ..errors import EnvironmentProblem
from .channel import (
    MAX_DATA_BYTES,
    NONCE_BYTES,
    ChannelError,
    FrameCodec,
    Message,
    new_nonce,
)
from .driver_link import CONNECT_TIMEOUT, receive_exactly
from .network import family_of

# Seconds for which a slot may take nothing of what it is sent.
SEND_TIMEOUT = 5.0


class ControlServer:
    """Accepts the slots' connections and puts their messages into ``events``.

    Bound to one address only. A peer that does not hold the run's
    key is dropped. A connection that closes before its slot said ``ended`` makes an event
    ``gone``. Use as a context manager.

    Args:
        bind: address or name of this machine to listen at.
        key: the run's secret.
        payload: the pickled call, for slots that ask for it.
        host: where executors reach the driver, if that is another.
        port: to listen at; 0 for one that the system chooses.

    Raises:
        EnvironmentProblem: it cannot listen there.
    """

    def __init__(
        self, bind: str, key: bytes, payload: bytes = b"", *, host: str | None = None, port: int = 0
    ) -> None:
        self._key = key
        self._payload = payload
        self._host = host
        try:
            self._listener = socket.create_server((bind, port), family=family_of(bind))
        except OSError as error:
            raise EnvironmentProblem(
                f"the driver cannot listen for its slots at {bind} port {port}: {error}. Give an "
                "address of this machine in spark.driver.bindAddress (spark.driver.host is where "
                "executors reach it), and a free port in spark.horovod.controlPort, or none"
            ) from error
        self._lock = threading.Lock()
        self._peers: set[_Peer] = set()
        self._closing = False
        self._results: dict[int, IO[bytes]] = {}
        self.events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._accept, name="hsr-control", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return self._host or host, port

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing = True
        # A blocked accept is woken by shutdown, not by close.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._current():
            peer.shut()
        for stream in self._results.values():
            stream.close()

    def broadcast(self, message: Message) -> None:
        """Send ``message`` to every slot that is connected."""
        for peer in self._current():
            peer.send(message)

    def silent_slots(self, seconds: float) -> list[Message]:
        """Return where the slots are that are connected but sent nothing for ``seconds``."""
        limit = time.monotonic() - seconds
        return [
            {"slot": peer.slot, "host": peer.host}
            for peer in self._current()
            if peer.slot is not None and peer.last_seen < limit
        ]

    def hear_anew(self) -> None:
        """Count the slots' silence from now on: this process did not listen meanwhile."""
        for peer in self._current():
            peer.last_seen = time.monotonic()

    def result(self, rank: int) -> IO[bytes] | None:
        """Return the pickled result that ``rank`` sent here because of its size, if it did."""
        return self._results.get(rank)

    def _current(self) -> list[_Peer]:
        with self._lock:
            return list(self._peers)

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
            peer: _Peer | None = None
            try:
                peer = _Peer(connection, self._key)
                with self._lock:
                    self._peers.add(peer)
                while True:
                    self._take(peer, peer.receive())
            except (OSError, ChannelError):
                pass  # a stranger, or a slot that ended; the run's outcome comes through Spark
            finally:
                if peer is not None:
                    self._part(peer)

    def _part(self, peer: _Peer) -> None:
        with self._lock:
            self._peers.discard(peer)
        if peer.slot is not None and not peer.ended:
            gone = {"type": "gone", "slot": peer.slot, "rank": peer.rank, "host": peer.host}
            self.events.put({**gone, "time": time.time()})

    def _take(self, peer: _Peer, message: Message) -> None:
        kind = message.get("type")
        if kind == "payload":
            peer.send_data(self._payload)
        elif kind == "result":
            # Kept on disk until it is unpickled: several large ones would fill the memory.
            stream = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
            peer.receive_into(stream, int(message["bytes"]))
            self._results[int(message["rank"])] = stream
        elif kind == "ended":
            peer.ended = True
        else:
            self.events.put(message)


class _Peer:
    """One connected slot."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # frames carry their number: one sender at a time
        self._arrived: list[Message | bytes] = []
        self.slot: int | None = None
        self.rank = -1
        self.host = "?"
        self.ended = False
        self.last_seen = time.monotonic()
        connection.settimeout(CONNECT_TIMEOUT)
        nonce = new_nonce()
        connection.sendall(nonce)
        answer = receive_exactly(connection, NONCE_BYTES)
        connection.settimeout(None)
        # For sending only: a slot that does not read must not keep the driver from the others.
        limit = struct.pack("@ll", int(SEND_TIMEOUT), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._codec = FrameCodec(key, nonce, answer, is_server=True)

    def receive(self) -> Message:
        """Wait for the next message and return it."""
        message = self._next()
        if isinstance(message, bytes):
            raise ChannelError("data that nobody announced")
        if "slot" in message:
            self.slot, self.host = int(message["slot"]), str(message.get("host", "?"))
            self.rank = int(message.get("rank", -1))
        return message

    def send(self, message: Message) -> None:
        """Send ``message``; a slot that takes nothing any more is given up."""
        if not self._lock.acquire(timeout=SEND_TIMEOUT):  # a large call is on its way, and stuck
            self.shut()
            return
        try:
            self._connection.sendall(self._codec.encode(message))
        except OSError:  # perhaps half of it was sent: nothing that follows could be read
            self.shut()
        finally:
            self._lock.release()

    def send_data(self, data: bytes) -> None:
        view = memoryview(data)
        for begin in range(0, len(view), MAX_DATA_BYTES):
            with self._lock:
                self._connection.sendall(
                    self._codec.encode_data(view[begin : begin + MAX_DATA_BYTES])
                )
            self.last_seen = time.monotonic()  # it takes what is sent, so it lives

    def receive_into(self, stream: IO[bytes], size: int) -> None:
        """Write the ``size`` bytes of data that follow to ``stream``."""
        while stream.tell() < size:
            message = self._next()
            if not isinstance(message, bytes):
                raise ChannelError("a message in the middle of data")
            stream.write(message)
        stream.seek(0)

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _next(self) -> Message | bytes:
        while not self._arrived:
            data = self._connection.recv(MAX_DATA_BYTES)
            if not data:
                raise ConnectionError("closed by the slot")
            self.last_seen = time.monotonic()
            self._arrived = self._codec.feed(data)
        return self._arrived.pop(0)
