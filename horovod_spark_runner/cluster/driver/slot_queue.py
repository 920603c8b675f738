"""Queue for Spark's slots, shared by the runs of all threads: first come, first served.

Two runs that hold half of the slots each and wait for the rest would never end. So a run starts
once all its slots are free of other runs of this process, and not before those that came earlier:
a run that needs many is not overtaken again and again by new ones that need few.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

# Seconds after which a wait is interrupted, so that Ctrl-C and ``poll`` can end it.
_TICK = 0.2


@dataclass(frozen=True)
class SlotDemand:
    """Slots that a run holds while it runs.

    Attributes:
        application: the Spark application it runs in.
        shape: resources of each of its tasks; slots of different shapes cannot be counted together.
        slots: how many it holds.
        total: how many there are; ``None`` if that is unknown, or if the run has to be alone.
    """

    application: str
    shape: Hashable
    slots: int
    total: int | None


def fits(demand: SlotDemand, running: Sequence[SlotDemand]) -> bool:
    """Tell whether a run may start beside those that are running. Pure."""
    others = [other for other in running if other.application == demand.application]
    if not others:
        return True
    if demand.total is None or any(other.total is None for other in others):
        return False
    same_shape = all(other.shape == demand.shape for other in others)
    return same_shape and demand.slots + sum(other.slots for other in others) <= demand.total


class SlotQueue:
    """Runs of this process: those that hold slots, and those that wait for some."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # A list around each demand tells equal demands apart: tickets are compared by identity.
        self._waiting: list[list[SlotDemand]] = []
        self._running: list[list[SlotDemand]] = []

    @contextlib.contextmanager
    def hold(
        self, demand: SlotDemand, on_wait: Callable[[], None], poll: Callable[[], None]
    ) -> Iterator[bool]:
        """Wait until the slots are free, and hold them.

        Args:
            demand: the slots.
            on_wait: is called once if they are not free yet.
            poll: is called repeatedly until they are free; an exception of it ends the wait.

        Yields:
            Whether it had to wait.
        """
        ticket = [demand]
        try:
            yield self._wait(ticket, on_wait, poll)
        finally:
            with self._changed:
                self._remove(self._running, ticket)

    def _wait(
        self, ticket: list[SlotDemand], on_wait: Callable[[], None], poll: Callable[[], None]
    ) -> bool:
        with self._changed:
            self._waiting.append(ticket)
            at_once = self._may_start(ticket)
        try:
            if not at_once:
                on_wait()
            while not self._start(ticket):
                poll()  # without the lock, which every other run's start and end need
        finally:
            with self._changed:
                self._remove(self._waiting, ticket)
        return not at_once

    def _start(self, ticket: list[SlotDemand]) -> bool:
        """Start a run if it may start now or within a tick; return whether it did."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._may_start(ticket), _TICK):
                return False
            self._running.append(ticket)
            return True

    def _may_start(self, ticket: list[SlotDemand]) -> bool:
        application = ticket[0].application
        first = next(other for other in self._waiting if other[0].application == application)
        return first is ticket and fits(ticket[0], [other[0] for other in self._running])

    def _remove(self, tickets: list[list[SlotDemand]], ticket: list[SlotDemand]) -> None:
        tickets[:] = [other for other in tickets if other is not ticket]
        self._changed.notify_all()
