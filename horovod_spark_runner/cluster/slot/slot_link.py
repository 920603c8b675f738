"""The slot's connection to the driver: messages sent and received."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ...errors import LaunchError
from ..protocol.channel import MAX_DATA_BYTES, RETRY_PAUSES, Channel, connect
from ..protocol.messages import (
    INSTRUCTIONS,
    Answer,
    Back,
    CallWanted,
    Dropped,
    Ended,
    Gather,
    Heartbeat,
    Instruction,
    Joining,
    Log,
    RankReport,
    ResultFollows,
    SlotReport,
    Stop,
    Told,
)
from ..protocol.rendezvous import HEARTBEAT_SECONDS, SlotPlan

CONNECT_TIMEOUT = 5.0
RECONNECT_TIMEOUT = 1.0
# How long a large call or result may make no headway at all.
TRANSFER_TIMEOUT = 60.0
# What may wait to be sent. Above it log lines are dropped: a slow driver must not slow training.
MAX_PENDING_BYTES = 1024 * 1024


class DriverLink:
    """Sends what it can to the driver; everything is dropped quietly once the link is lost.

    Args:
        address: the driver's host and port.
        key: the run's secret.
        pauses: seconds between tries to connect at the start.
    """

    def __init__(
        self, address: tuple[str, int], key: bytes, pauses: Sequence[float] = RETRY_PAUSES
    ) -> None:
        self._socket: socket.socket | None = None
        self._channel: Channel[Instruction]  # of each connection anew
        self._pending = bytearray()
        self._early: list[Instruction] = []
        self._address = address
        self._key = key
        self._problem = ""
        self._connect(CONNECT_TIMEOUT, pauses)

    def check(self) -> None:
        """Check that the driver was reached.

        Raises:
            LaunchError: it was not.
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
        """Try once to mend a lost connection; return whether it was lost and is there again."""
        if self._socket is not None:
            return False
        self._connect(RECONNECT_TIMEOUT, ())
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

    def send(self, told: Told, *, droppable: bool = False) -> bool:
        """Queue a message; return whether it was.

        A droppable one is left out while too much is waiting.
        """
        if self._socket is None or (droppable and len(self._pending) > MAX_PENDING_BYTES):
            return False
        self._pending += self._channel.encode(told)
        self.flush()
        return True

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

    def receive(self) -> list[Instruction]:
        """Return the messages that have arrived, without waiting.

        Raises:
            MessageError: the driver said what no slot expects.
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

    def fetch(self, wanted: Told, path: Path, size: int) -> None:
        """Ask for the run's call and write it, ``size`` bytes, to ``path``; waits for it.

        Raises:
            LaunchError: it cannot be had.
        """
        self.send(wanted)
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
        self._socket.settimeout(TRANSFER_TIMEOUT)
        self._socket.sendall(self._pending)
        self._pending.clear()
        data = self._socket.recv(MAX_DATA_BYTES)
        self._socket.setblocking(False)
        if not data:
            raise ConnectionError("the driver closed the connection")
        return self._channel.feed(data)

    def send_file(self, header: Told, path: Path) -> bool:
        """Send ``header``, then the contents of ``path``; waits. Return whether it was sent."""
        if self._socket is None:
            return False
        self._socket.settimeout(TRANSFER_TIMEOUT)
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


@contextlib.contextmanager
def meanwhile(action: Callable[[], object], *, every: float) -> Iterator[None]:
    """Call ``action`` every so many seconds while the calling thread waits for something else."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every):
            action()

    thread = threading.Thread(target=repeat, name="hsr-meanwhile", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # messages carry their number: one sender at a time


# Between looks at what no descriptor tells.
POLL_SECONDS = 0.2
# Characters of output that all slots together may send to the driver per second, and at once after
# a pause: it has to read what else they say, too.
LOG_RATE = 4 * 1024 * 1024
LOG_BURST = 32 * 1024 * 1024
EXECUTOR_ENDED = "its executor has ended"


class StoppedError(Exception):
    """The driver has ended the run, or the executor has ended, while a slot waited."""


class Allowance:
    """So much of something per second, on average.

    Args:
        rate: how much.
        burst: how much at once after a pause.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._most = self._left = burst
        self._since = time.monotonic()

    def take(self, amount: float) -> bool:
        """Take so much, if there is anything left; return whether there was."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._since) * self._rate)
        self._since = now
        if self._left <= 0:
            return False
        self._left -= amount
        return True


class SlotLink(DriverLink):
    """Speaks for one slot: its messages say which, and a lost connection is mended.

    Args:
        plan: what the driver asked for.
        slot: index of the slot.
    """

    def __init__(self, plan: SlotPlan, slot: int) -> None:
        self.host = socket.gethostname()
        self._plan = plan
        self._slot = slot
        self._parent = os.getppid()
        self._last_beat = 0.0
        self._left_out = 0  # lines
        self._allowance = Allowance(LOG_RATE / plan.slots, LOG_BURST / plan.slots)
        super().__init__(plan.driver, plan.key)

    @property
    def executor_has_ended(self) -> bool:
        return os.getppid() != self._parent

    def tell(self, message: SlotReport | RankReport, rank: int = -1) -> None:
        """Send ``message`` of a rank, or of the slot."""
        self.send(self._told(message, rank))

    def tell_lines(self, lines: Sequence[str], rank: int) -> None:
        """Send what a rank has printed, or leave it out where the driver has more than enough."""
        size = sum(map(len, lines))
        if self._allowance.take(size) and self.send(
            self._told(Log(tuple(lines)), rank), droppable=True
        ):
            if self._left_out:
                self.tell(Dropped(self._left_out), rank)
                self._left_out = 0
        else:
            self._left_out += len(lines)

    def send_result(self, rank: int, path: Path, size: int) -> bool:
        """Send a rank's pickled result, ``size`` bytes in a file; return whether it was sent."""
        return self.send_file(self._told(ResultFollows(size), rank), path)

    def _told(self, message: SlotReport | RankReport, rank: int = -1) -> Told:
        return Told(self._slot, rank, self.host, message)

    def leave(self) -> None:
        """Say good-bye; safe to call again."""
        self.tell(Ended())
        self.drain(timeout=1.0)

    def beat(self) -> bool:
        """Tell at times that the slot lives; return whether it had to connect again."""
        self.flush()
        now = time.monotonic()
        if now - self._last_beat < HEARTBEAT_SECONDS:
            return False
        self._last_beat = now
        return self._show_life()

    def living(self) -> AbstractContextManager[None]:
        """Tell that the slot lives while the calling thread waits for something else."""
        return meanwhile(self._show_life, every=HEARTBEAT_SECONDS)

    def ask(self, joining: Joining) -> Answer:
        """Tell of this slot and return what the driver answers.

        Args:
            joining: where the slot is, or why it cannot take part.

        Returns:
            The answer; `Gather` also if the driver was never reached.

        Raises:
            StoppedError: the run has ended meanwhile.
        """
        if self.fileno() is None:
            return Gather()
        self.tell(joining)
        while True:
            for message in self._await():
                if isinstance(message, Answer):
                    return message
            if self.beat():
                self.tell(joining)

    def take_call(self, path: Path, leader_folder: Path) -> None:
        """Put the pickled call at ``path``; a large one leaves the driver once per host.

        Args:
            path: where the ranks read it, in this slot's folder.
            leader_folder: that of the slot which fetches it for all of its host.

        Raises:
            LaunchError: it cannot be had.
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
        self.fetch(self._told(CallWanted()), partial, self._plan.payload_bytes)
        partial.rename(path)

    def _await(self) -> list[Instruction]:
        """Wait a moment and return the messages that have come."""
        link = self.fileno()
        select.select([] if link is None else [link], [], [], POLL_SECONDS)
        messages = self.receive()
        for message in messages:
            if isinstance(message, Stop):
                raise StoppedError(message.reason)
        if self.executor_has_ended:
            raise StoppedError(EXECUTOR_ENDED)
        return messages

    def _show_life(self) -> bool:
        again = self.reconnect()
        if again:
            self.tell(Back())
        self.tell(Heartbeat())
        self.flush()
        return again


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
