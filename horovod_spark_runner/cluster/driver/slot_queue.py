"""Queue for Spark's slots, shared by the runs of all threads, first come, first served.

Two runs that hold half of the slots each and wait for the rest would never end. So a run starts
once all of its slots are free of other runs of this process, and not before those that came
earlier: a run that needs many is not overtaken by ever new ones that need few.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

# How long a wait lasts at most before Ctrl-C, or a wish to end the run, is heard.
_TICK = 0.2


@dataclass(frozen=True)
class Claim:
    """What a run holds while it goes on.

    Attributes:
        application: the Spark application it runs in.
        demand: what each of its tasks holds; slots of different tasks cannot be counted together.
        slots: how many of them.
        total: how many there are; ``None`` if that is not known, or if the run has to be alone.
    """

    application: str
    demand: Hashable
    slots: int
    total: int | None


def fits(claim: Claim, running: Sequence[Claim]) -> bool:
    """Tell whether a run may start beside those that go on. Pure."""
    others = [other for other in running if other.application == claim.application]
    if not others:
        return True
    if claim.total is None or any(other.total is None for other in others):
        return False
    alike = all(other.demand == claim.demand for other in others)
    return alike and claim.slots + sum(other.slots for other in others) <= claim.total


class Turns:
    """The runs of this process that go on, and those that wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Each in a list of its own: claims may be equal.
        self._waiting: list[list[Claim]] = []
        self._running: list[list[Claim]] = []

    @contextlib.contextmanager
    def turn(
        self, claim: Claim, on_wait: Callable[[], None], look: Callable[[], None]
    ) -> Iterator[bool]:
        """Wait until there is room, and hold it.

        Args:
            claim: what is needed.
            on_wait: is called once if there is no room yet.
            look: is called again and again until there is room; what it raises ends the wait.

        Yields:
            Whether it had to wait.
        """
        ticket = [claim]
        try:
            yield self._wait(ticket, on_wait, look)
        finally:
            with self._changed:
                self._remove(self._running, ticket)

    def _wait(
        self, ticket: list[Claim], on_wait: Callable[[], None], look: Callable[[], None]
    ) -> bool:
        with self._changed:
            self._waiting.append(ticket)
            at_once = self._may_start(ticket)
        try:
            if not at_once:
                on_wait()
            while not self._start(ticket):
                look()  # without the lock, which every other run's start and end need
        finally:
            with self._changed:
                self._remove(self._waiting, ticket)
        return not at_once

    def _start(self, ticket: list[Claim]) -> bool:
        """Let a run start if it may, now or within a tick."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._may_start(ticket), _TICK):
                return False
            self._running.append(ticket)
            return True

    def _may_start(self, ticket: list[Claim]) -> bool:
        application = ticket[0].application
        first = next(other for other in self._waiting if other[0].application == application)
        return first is ticket and fits(ticket[0], [other[0] for other in self._running])

    def _remove(self, tickets: list[list[Claim]], ticket: list[Claim]) -> None:
        tickets[:] = [other for other in tickets if other is not ticket]
        self._changed.notify_all()
