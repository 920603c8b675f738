"""Control server: the driver's connections to its slots, served by one thread."""

from __future__ import annotations

import contextlib
import io
import logging
import queue
import resource
import selectors
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO

from ...errors import EnvironmentProblem
from ...typed_json import MessageError
from ..protocol.channel import MAX_DATA_BYTES, Handshake
from ..protocol.listener import MAX_UNPROVEN, RESERVED_DESCRIPTORS, Listener
from ..protocol.messages import (
    CallWanted,
    Disconnected,
    Dropped,
    Ended,
    Envelope,
    Instruction,
    Log,
    ResultFollows,
    Silent,
    from_driver,
)

logger = logging.getLogger(__name__)

# Seconds after which a slot that reads nothing is disconnected.
SEND_TIMEOUT = 5.0
_RECEIVE_BYTES = 256 * 1024
# Characters of log lines that may wait to be shown. Above it they are dropped, and counted: a slow
# terminal must neither slow the run nor fill the driver's memory.
_MAX_LOG_CHARACTERS = 4 * 1024 * 1024
# Seconds that the rest of a large result may take once the run has ended.
_RESULT_TIMEOUT = 60.0
# Seconds between checks of the clock.
_TICK = 1.0
# Descriptors that a driver needs besides its slots' connections.
_OTHER_DESCRIPTORS = 256 + MAX_UNPROVEN


class _Incoming:
    """Large result that is arriving: its stream, and the number of missing bytes.

    On disk until it is unpickled: several large ones would fill the memory. What this machine
    cannot keep is no failure of the connection, so the slot is heard to the end.
    """

    def __init__(self, size: int) -> None:
        self.size = self.left = size
        self.ended = threading.Event()
        self.problem: OSError | None = None
        self.stream: IO[bytes] = io.BytesIO()
        with self._noting_problem():
            self.stream = tempfile.TemporaryFile()  # noqa: SIM115 - see `close`

    def take(self, data: bytes) -> None:
        if len(data) > self.left:
            raise MessageError("more data than were announced")
        self.left -= len(data)
        with self._noting_problem():
            if self.problem is None:
                self.stream.write(data)
                self.stream.flush()
        if not self.left:
            self.ended.set()

    def close(self) -> None:
        with self._noting_problem():
            self.stream.close()

    @contextlib.contextmanager
    def _noting_problem(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = self.problem or error


class _Peer:
    """One connection of a slot, which has proven that it holds the run's key."""

    def __init__(self, connection: socket.socket, handshake: Handshake) -> None:
        self.connection = connection
        self.is_writing = False  # waits for room to send
        self.slot: int | None = None
        self.rank = -1
        self.host = "?"
        self.ended = False
        self.last_seen = self._last_sent = time.monotonic()
        self._channel = handshake.channel(Envelope)
        self._messages: deque[Instruction] = deque()
        self._data: memoryview | None = None
        self._outgoing = memoryview(b"")
        self.incoming: _Incoming | None = None

    @property
    def has_more(self) -> bool:
        """True while something has to be sent."""
        return bool(self._outgoing or self._messages or self._data)

    def is_late(self, now: float) -> bool:
        """Tell whether it has read nothing of the sent data for too long."""
        return self.is_writing and now - self._last_sent > SEND_TIMEOUT

    def queue(self, message: Instruction) -> None:
        """Queue ``message``, ahead of the rest of queued data."""
        self._messages.append(message)

    def queue_data(self, data: memoryview) -> None:
        """Queue ``data``, to be sent in frames."""
        self._data = data

    def write(self) -> bool:
        """Send as much as the socket takes; return whether something is left."""
        while self._outgoing or self._next_frame():
            try:
                sent = self.connection.send(self._outgoing)
            except BlockingIOError:
                return True
            self._outgoing = self._outgoing[sent:]
            self._last_sent = time.monotonic()
            if self._data is not None:
                self.last_seen = self._last_sent  # it reads data, so it is alive
                return True  # one frame at a time: other slots wait, too
        return False

    def _next_frame(self) -> bool:
        # Frames are numbered: they are encoded in the order in which they are sent.
        if self._outgoing:
            return False
        if self._messages:
            frame = self._channel.encode(self._messages.popleft())
        elif self._data:
            frame = self._channel.encode_data(self._data[:MAX_DATA_BYTES])
            self._data = self._data[MAX_DATA_BYTES:] or None
        else:
            return False
        if not self.is_writing:  # its time to read something begins
            self._last_sent = time.monotonic()
        self._outgoing = memoryview(frame)
        return True

    def read(self) -> Iterator[Envelope]:
        """Yield the messages that have arrived.

        Raises:
            OSError: the connection has ended.
            ChannelError: the stream is damaged.
            MessageError: the message is not expected here.
        """
        data = self.connection.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionError("closed by the slot")
        self.last_seen = time.monotonic()
        for message in self._channel.feed(data):
            if not isinstance(message, bytes):
                yield message  # a `ResultFollows` sets ``incoming`` before its data
            elif self.incoming is None:
                raise MessageError("unexpected data: no result was announced")
            else:
                self.incoming.take(message)

    def close(self) -> None:
        self.connection.close()
        if self.incoming is not None:
            self.incoming.ended.set()  # its data may be incomplete


class _Mailbox:
    """Queue of messages, with a limit for log lines.

    Args:
        limit: characters of log lines that may wait.
    """

    def __init__(self, limit: int = _MAX_LOG_CHARACTERS) -> None:
        self._limit = limit
        self._messages: queue.SimpleQueue[Envelope | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._dropped = 0

    def put(self, envelope: Envelope) -> None:
        """Add a message, or drop and count its lines if too many wait."""
        if isinstance(envelope.message, Log):
            size = _characters(envelope.message)
            with self._lock:
                if self._waiting + size > self._limit:
                    self._dropped += len(envelope.message.lines)
                    return
                self._waiting += size
        self._messages.put(envelope)

    def wake(self) -> None:
        """Make a waiting `get` return at once."""
        self._messages.put(None)

    def get(self, timeout: float) -> Envelope:
        """Wait for a message and return it.

        Raises:
            queue.Empty: there was none for ``timeout`` seconds, or `wake` was called.
        """
        envelope = self._messages.get(timeout=timeout)
        if envelope is None:
            raise queue.Empty
        self._count_taken(envelope)
        return envelope

    def drain(self) -> list[Envelope]:
        """Return the messages that are waiting now, without those that arrive meanwhile."""
        messages = []
        with contextlib.suppress(queue.Empty):
            for _ in range(self._messages.qsize()):
                envelope = self._messages.get_nowait()
                if envelope is not None:
                    self._count_taken(envelope)
                    messages.append(envelope)
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            messages.append(from_driver(Dropped(dropped)))
        return messages

    def empty(self) -> bool:
        return self._messages.empty()

    def _count_taken(self, envelope: Envelope) -> None:
        if isinstance(envelope.message, Log):
            with self._lock:
                self._waiting -= _characters(envelope.message)


def _characters(log: Log) -> int:
    return sum(map(len, log.lines))


class ControlServer:
    """Accepts the slots' connections and puts their messages into ``events``.

    Bound to one address only. A connection that closes before its slot sent `Ended` makes a
    `Disconnected` event. One thread serves all slots, and never waits for one of them. Use as a
    context manager.

    Args:
        bind: address or name of this machine to listen at.
        key: the run's secret.
        payload: the pickled call, for slots that ask for it.
        host: where executors reach the driver, if that is another.
        port: to listen at; 0 for one that the system chooses.
        slots: how many will connect.

    Raises:
        EnvironmentProblem: it cannot listen there.
    """

    def __init__(
        self,
        bind: str,
        key: bytes,
        payload: bytes = b"",
        *,
        host: str | None = None,
        port: int = 0,
        slots: int = 1,
    ) -> None:
        self._payload = memoryview(payload)
        self._host = host
        _allow_descriptors(slots)
        try:
            self._listener = Listener(bind, key, self._admit, port)
        except OSError as error:
            raise EnvironmentProblem(
                f"the driver cannot listen for its slots at {bind} port {port}: {error}. Give an "
                "address of this machine in spark.driver.bindAddress (spark.driver.host is where "
                "executors reach it), and a free port in spark.horovod.controlPort, or none"
            ) from error
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)
        self._lock = threading.Lock()
        self._peers: set[_Peer] = set()
        self._slots: dict[int, _Peer] = {}
        self._to_send: set[_Peer] = set()
        self._closing = False
        self._results: dict[int, _Incoming] = {}
        self.events = _Mailbox()
        self._thread = threading.Thread(target=self._serve, name="hsr-control", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.address
        return self._host or host, port

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing = True
        self._wake_thread()
        self._thread.join()
        for result in self._results.values():
            result.close()

    def broadcast(self, message: Instruction) -> None:
        """Send ``message`` to every slot that is connected; does not wait for them."""
        self._queue([(peer, message) for peer in self._current()])

    def send(self, messages: Mapping[int, Instruction]) -> None:
        """Send each slot its message, by number, if it is connected; does not wait for them."""
        with self._lock:
            pairs = [(self._slots[slot], m) for slot, m in messages.items() if slot in self._slots]
        self._queue(pairs)

    def has_any(self, slots: Iterable[int]) -> bool:
        """Tell whether any of these slots is connected."""
        with self._lock:
            return any(slot in self._slots for slot in slots)

    def silent_slots(self, seconds: float) -> list[Envelope]:
        """Return a `Silent` of each slot that is connected but sent nothing for ``seconds``."""
        limit = time.monotonic() - seconds
        return [
            Envelope(peer.slot, peer.rank, peer.host, Silent(seconds))
            for peer in self._current()
            if peer.slot is not None and peer.last_seen < limit
        ]

    def reset_silence(self) -> None:
        """Count the slots' silence from now on: this process was suspended meanwhile."""
        for peer in self._current():
            peer.last_seen = time.monotonic()

    def result(self, rank: int) -> IO[bytes] | None:
        """Return the large pickled result that ``rank`` sent here, if it did.

        Waits for it: the outcome, which came through Spark, may have been faster.

        Raises:
            EnvironmentProblem: this machine could not keep it.
        """
        deadline = time.monotonic() + _RESULT_TIMEOUT
        while rank not in self._results and self._peers and time.monotonic() < deadline:
            time.sleep(0.01)
        result = self._results.get(rank)
        if result is None or not result.ended.wait(_RESULT_TIMEOUT) or result.left:
            return None
        if result.problem is not None:
            raise EnvironmentProblem(
                f"the driver cannot keep the result of rank {rank}, {result.size:,} bytes, in its "
                f"temporary folder (TMPDIR): {result.problem}"
            ) from result.problem
        result.stream.seek(0)
        return result.stream

    @property
    def result_bytes(self) -> int:
        """Number of bytes of large results that have arrived."""
        return sum(result.size - result.left for result in list(self._results.values()))

    def _current(self) -> list[_Peer]:
        with self._lock:
            return list(self._peers)

    def _queue(self, messages: Sequence[tuple[_Peer, Instruction]]) -> None:
        for peer, message in messages:
            peer.queue(message)
        if messages:
            with self._lock:
                self._to_send.update(peer for peer, _ in messages)
            self._wake_thread()

    def _wake_thread(self) -> None:
        """Make the thread send queued messages."""
        with contextlib.suppress(OSError):  # it is awake already, or has ended
            self._waker.send(b"\0")

    # -- the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        checked = time.monotonic()
        while not self._closing:
            for key, events in self._selector.select(_TICK):
                if key.fileobj is self._wake:
                    with contextlib.suppress(OSError):
                        self._wake.recv(4096)
                    self._send_queued()
                elif key.fileobj is self._listener:
                    self._listener.handle()
                else:
                    self._handle(key.data, events)
            if time.monotonic() - checked > _TICK:
                checked = time.monotonic()
                self._check_clock(checked)
        self._send_queued()
        self._close()

    def _handle(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_READ and peer in self._peers:
            self._read(peer)
        if events & selectors.EVENT_WRITE and peer in self._peers:
            self._write(peer)

    def _admit(self, connection: socket.socket, handshake: Handshake) -> None:
        peer = _Peer(connection, handshake)
        with self._lock:
            self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _send_queued(self) -> None:
        with self._lock:
            peers = [peer for peer in self._to_send if peer in self._peers]
            self._to_send.clear()
        for peer in peers:
            if not peer.is_writing:
                self._write(peer)

    def _read(self, peer: _Peer) -> None:
        try:
            for envelope in peer.read():
                self._take(peer, envelope)
        except BlockingIOError:
            return
        except OSError:
            self._disconnect(peer)  # the slot has ended; its outcome comes through Spark
            return
        except MessageError as error:
            logger.warning("a connection of host %s is closed: %s", peer.host, error)
            self._disconnect(peer)
            return
        if peer.has_more and not peer.is_writing:
            self._write(peer)

    def _write(self, peer: _Peer) -> None:
        try:
            waits = peer.write()
        except OSError:
            self._disconnect(peer)
            return
        if waits != peer.is_writing:
            peer.is_writing = waits
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
            self._selector.modify(peer.connection, wanted, peer)

    def _check_clock(self, now: float) -> None:
        for peer in self._current():
            if peer.is_late(now):
                self._disconnect(peer)
        self._listener.handle()

    def _disconnect(self, peer: _Peer) -> None:
        with self._lock:
            if peer not in self._peers:
                return
            if peer.slot is not None and not peer.ended:
                # Before it is gone: who waits until a slot is gone then reads its last message.
                lost = Envelope(peer.slot, peer.rank, peer.host, Disconnected(time.time()))
                self.events.put(lost)
            self._peers.discard(peer)
            if peer.slot is not None and self._slots.get(peer.slot) is peer:
                del self._slots[peer.slot]
        if peer.incoming is not None and peer.incoming.left:  # it may be sent again
            self._results = {r: i for r, i in self._results.items() if i is not peer.incoming}
        self._selector.unregister(peer.connection)
        peer.close()

    def _take(self, peer: _Peer, envelope: Envelope) -> None:
        self._identify(peer, envelope)
        match envelope.message:
            case CallWanted():
                peer.queue_data(self._payload)
            case ResultFollows(size):
                self._results[envelope.rank] = peer.incoming = _Incoming(size)
            case Ended():
                peer.ended = True
            case _:
                self.events.put(envelope)

    def _identify(self, peer: _Peer, envelope: Envelope) -> None:
        """Record which slot ``peer`` is."""
        peer.slot, peer.host = envelope.slot, envelope.host
        peer.rank = max(peer.rank, envelope.rank)  # some messages are the slot's, not a rank's
        with self._lock:
            before = self._slots.get(peer.slot)
            self._slots[peer.slot] = peer
        if before is not None and before is not peer:
            # It has reconnected before the loss of the other connection was noticed.
            before.ended = True
            self._disconnect(before)

    def _close(self) -> None:
        for peer in self._current():
            peer.close()
        for end in (self._listener, self._wake, self._waker):
            end.close()
        self._selector.close()


def _allow_descriptors(slots: int) -> None:
    """Allow this process to open more files, within the system's limit.

    Raises:
        EnvironmentProblem: there are too few for the slots.
    """
    wanted = slots + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if allowed < slots + RESERVED_DESCRIPTORS:
            raise EnvironmentProblem(
                f"the driver may open {allowed} files (ulimit -Hn), too few for connections of "
                f"{slots} slots: allow {wanted}"
            )
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
