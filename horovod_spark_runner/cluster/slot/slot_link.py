"""The slot's connection to the driver: messages sent and received."""

from __future__ import annotations

import os
import select
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ..protocol.messages import (
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
from ..protocol.slot_plan import HEARTBEAT_SECONDS, SlotPlan
from .driver_link import DriverLink, meanwhile

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
