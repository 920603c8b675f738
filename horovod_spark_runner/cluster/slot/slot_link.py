"""A slot's connection to the driver."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ...errors import LaunchError
from ...machine import repeat_in_thread
from ..protocol.channel import MAX_DATA_BYTES, RETRY_PAUSES, Channel, connect
from ..protocol.messages import (
    INSTRUCTIONS,
    Answer,
    Back,
    CallWanted,
    Dropped,
    Ended,
    Envelope,
    Gather,
    Heartbeat,
    Instruction,
    JoinReport,
    Log,
    RankReport,
    ResultFollows,
    SlotReport,
    Stop,
)
from ..protocol.rendezvous import HEARTBEAT_SECONDS, SlotPlan

_CONNECT_TIMEOUT = 5.0
_RECONNECT_TIMEOUT = 1.0
# How long the transfer of a large call or result may stand still.
_TRANSFER_TIMEOUT = 60.0
# Bytes that may wait to be sent. Above it log lines are dropped: a slow driver must not slow
# training.
_MAX_PENDING_BYTES = 1024 * 1024
# Seconds between checks that no descriptor triggers.
POLL_SECONDS = 0.2
# Characters of output that all slots together may send to the driver per second, and at once after
# a pause: it has to read their other messages, too.
_LOG_RATE = 4 * 1024 * 1024
_LOG_BURST = 32 * 1024 * 1024
EXECUTOR_ENDED = "its executor has ended"


class _DriverLink:
    """Connection to the driver that never blocks; without it, messages are dropped quietly.

    Args:
        address: the driver's host and port.
        key: the run's secret.
        pauses: seconds between attempts to connect at the start.
    """

    def __init__(
        self, address: tuple[str, int], key: bytes, pauses: Sequence[float] = RETRY_PAUSES
    ) -> None:
        self._socket: socket.socket | None = None
        self._channel: Channel[Instruction]  # a new one for each connection
        self._pending = bytearray()
        self._early: list[Instruction] = []
        self._address = address
        self._key = key
        self._problem = ""
        self._connect(_CONNECT_TIMEOUT, pauses)

    def check(self) -> None:
        """Check that the driver was reached.

        Raises:
            LaunchError: the driver was not reached.
        """
        if self._socket is None:
            host, port = self._address
            raise LaunchError(
                f"{socket.gethostname()} cannot reach the driver at {host} port {port} "
                f"({self._problem}): executors must be able to connect to it. Behind a firewall, "
                "open the port that spark.horovod.controlPort names; where the driver has several "
                "addresses, name the right one in spark.driver.host"
            )

    def reconnect(self) -> bool:
        """Try once to restore a lost connection; return whether it was lost and is restored."""
        if self._socket is not None:
            return False
        self._connect(_RECONNECT_TIMEOUT, ())
        return self._socket is not None

    def _connect(self, timeout: float, pauses: Sequence[float]) -> None:
        try:
            self._socket, self._channel = connect(
                self._address, timeout, self._key, *INSTRUCTIONS, pauses=pauses
            )
        except OSError as error:
            self._problem = str(error)
        else:
            self._socket.setblocking(False)

    def fileno(self) -> int | None:
        """Return the descriptor to watch for messages, or ``None`` once the link is lost."""
        return None if self._socket is None else self._socket.fileno()

    @property
    def local_address(self) -> str | None:
        """The address of this host on the route to the driver."""
        return None if self._socket is None else self._socket.getsockname()[0]

    def send(self, envelope: Envelope, *, droppable: bool = False) -> bool:
        """Queue a message; return whether it was queued.

        A droppable one is dropped while too much is waiting.
        """
        if self._socket is None or (droppable and len(self._pending) > _MAX_PENDING_BYTES):
            return False
        self._pending += self._channel.encode(envelope)
        self.flush()
        return True

    def flush(self) -> None:
        """Send as much as possible without waiting."""
        while self._socket is not None and self._pending:
            try:
                sent = self._socket.send(self._pending)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            del self._pending[:sent]

    def receive(self) -> list[Instruction]:
        """Return the messages that have arrived, without waiting.

        Raises:
            MessageError: the driver sent a message that no slot expects.
        """
        early, self._early = self._early, []
        if self._socket is None:
            return early
        try:
            data = self._socket.recv(65536)
            if data:
                return early + [m for m in self._channel.feed(data) if not isinstance(m, bytes)]
        except BlockingIOError:
            return early
        except OSError:
            pass
        self.close()
        return early

    def fetch(self, request: Envelope, path: Path, size: int) -> None:
        """Request the run's call and write it, ``size`` bytes, to ``path``; waits for it.

        Raises:
            LaunchError: it cannot be fetched.
        """
        self.send(request)
        try:
            with path.open("wb") as stream:
                while stream.tell() < size:
                    for message in self._wait():
                        if isinstance(message, bytes):
                            stream.write(message)
                        else:
                            self._early.append(message)
        except OSError as error:
            raise LaunchError(
                f"the function and its arguments, {size:,} bytes, could not be fetched from the "
                f"driver at {self._address[0]} port {self._address[1]}: {error}"
            ) from error

    def _wait(self) -> list[Instruction | bytes]:
        if self._socket is None:
            raise ConnectionError("no connection to the driver")
        self._socket.settimeout(_TRANSFER_TIMEOUT)
        self._socket.sendall(self._pending)
        self._pending.clear()
        data = self._socket.recv(MAX_DATA_BYTES)
        self._socket.setblocking(False)
        if not data:
            raise ConnectionError("the driver closed the connection")
        return self._channel.feed(data)

    def send_file(self, header: Envelope, path: Path) -> bool:
        """Send ``header``, then the contents of ``path``; waits. Return whether it was sent."""
        if self._socket is None:
            return False
        self._socket.settimeout(_TRANSFER_TIMEOUT)
        try:
            self._socket.sendall(self._pending + self._channel.encode(header))
            self._pending.clear()
            with path.open("rb") as stream:
                while data := stream.read(MAX_DATA_BYTES):
                    self._socket.sendall(self._channel.encode_data(data))
            self._socket.setblocking(False)
        except OSError:
            self.close()
            return False
        return True

    def drain(self, timeout: float) -> None:
        """Send the queued messages, for at most about ``timeout`` seconds, then close."""
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


class StoppedError(Exception):
    """The driver has ended the run, or the executor has ended, while a slot waited."""


class _RateLimit:
    """Rate limit with bursts (a token bucket).

    Args:
        rate: amount per second, on average.
        burst: amount at once after a pause.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._most = self._left = burst
        self._since = time.monotonic()

    def take(self, amount: float) -> bool:
        """Take ``amount`` if anything is left; return whether it was taken."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._since) * self._rate)
        self._since = now
        if self._left <= 0:
            return False
        self._left -= amount
        return True


class SlotLink(_DriverLink):
    """Connection of one slot: wraps its messages in envelopes and restores a lost connection.

    Args:
        plan: the driver's plan.
        slot: number of the slot.
    """

    def __init__(self, plan: SlotPlan, slot: int) -> None:
        self.host = socket.gethostname()
        self._plan = plan
        self._slot = slot
        self._parent = os.getppid()
        self._last_beat = 0.0
        self._dropped_lines = 0
        self._log_limit = _RateLimit(_LOG_RATE / plan.slots, _LOG_BURST / plan.slots)
        super().__init__(plan.driver, plan.key)

    @property
    def executor_has_ended(self) -> bool:
        return os.getppid() != self._parent

    def report(self, message: SlotReport | RankReport, rank: int = -1) -> None:
        """Send a message of a rank, or of the slot."""
        self.send(self._envelope(message, rank))

    def report_lines(self, lines: Sequence[str], rank: int) -> None:
        """Send a rank's output, or drop it while the driver is busy."""
        size = sum(map(len, lines))
        if self._log_limit.take(size) and self.send(
            self._envelope(Log(tuple(lines)), rank), droppable=True
        ):
            if self._dropped_lines:
                self.report(Dropped(self._dropped_lines), rank)
                self._dropped_lines = 0
        else:
            self._dropped_lines += len(lines)

    def send_result(self, rank: int, path: Path, size: int) -> bool:
        """Send a rank's pickled result, ``size`` bytes in a file; return whether it was sent.

        It is the run's last message: a lost connection is restored at once, and a part sent again.
        """
        for pause in (0.0, *RETRY_PAUSES):
            time.sleep(pause)
            if self.reconnect():
                self.report(Back())
            if self.send_file(self._envelope(ResultFollows(size), rank), path):
                return True
        return False

    def _envelope(self, message: SlotReport | RankReport, rank: int = -1) -> Envelope:
        return Envelope(self._slot, rank, self.host, message)

    def leave(self) -> None:
        """Report the end and close; safe to call again."""
        self.report(Ended())
        self.drain(timeout=1.0)

    def beat(self) -> bool:
        """Send a heartbeat when it is due; return whether the slot had to reconnect."""
        self.flush()
        now = time.monotonic()
        if now - self._last_beat < HEARTBEAT_SECONDS:
            return False
        self._last_beat = now
        return self._send_heartbeat()

    def keep_alive(self) -> AbstractContextManager[None]:
        """Send heartbeats while the calling thread is blocked inside."""
        # It ends before the calling thread goes on: messages are numbered, by one sender at a time.
        return repeat_in_thread(self._send_heartbeat, "hsr-heartbeat", every=HEARTBEAT_SECONDS)

    def await_answer(self, joining: JoinReport) -> Answer:
        """Send this slot's report and return the driver's answer.

        Args:
            joining: the slot's location, or why it cannot take part.

        Returns:
            The answer; `Gather` also if the driver was never reached.

        Raises:
            StoppedError: the run has ended meanwhile.
        """
        if self.fileno() is None:
            return Gather()
        self.report(joining)
        while True:
            for message in self._await():
                if isinstance(message, Answer):
                    return message
            if self.beat():
                self.report(joining)

    def fetch_call(self, path: Path, leader_folder: Path) -> None:
        """Write the pickled call to ``path``; a large one is fetched once per host.

        Args:
            path: file for the ranks, in this slot's folder.
            leader_folder: folder of the slot that fetches it for its host.

        Raises:
            LaunchError: it cannot be fetched.
            StoppedError: the run has ended meanwhile.
        """
        if self._plan.payload is not None:
            path.write_bytes(self._plan.payload)
            return
        whole = leader_folder / path.name
        if leader_folder != path.parent:
            while os.access(leader_folder, os.X_OK):  # until its slot has ended, too early
                if whole.exists():
                    _link_or_copy(whole, path)
                    return
                self.beat()
                self._await()
        partial = path.with_suffix(".part")
        self.fetch(self._envelope(CallWanted()), partial, self._plan.payload_bytes)
        partial.rename(path)

    def _await(self) -> list[Instruction]:
        """Wait a moment and return the messages that have arrived."""
        link = self.fileno()
        select.select([] if link is None else [link], [], [], POLL_SECONDS)
        messages = self.receive()
        for message in messages:
            if isinstance(message, Stop):
                raise StoppedError(message.reason)
        if self.executor_has_ended:
            raise StoppedError(EXECUTOR_ENDED)
        return messages

    def _send_heartbeat(self) -> bool:
        reconnected = self.reconnect()
        if reconnected:
            self.report(Back())
        self.report(Heartbeat())
        self.flush()
        return reconnected


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
