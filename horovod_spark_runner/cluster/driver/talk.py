"""The driver's end of the conversation with the slots of a running run."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from typing import Protocol

from ..protocol.messages import Notice, Preempt, Stalled, Stop, Told, by_driver
from ..protocol.rendezvous import HEARTBEAT_SECONDS, Rendezvous, SlotPlan
from .control_server import ControlServer
from .phases import Phases
from .watch import RunWatch, Verdict

logger = logging.getLogger(__name__)

# Seconds between looks at what only time tells.
LOOK_SECONDS = 1.0
# A slot that has been silent for so long when Spark ends the run was missed by Spark, too.
UNHEARD = 2.5 * HEARTBEAT_SECONDS
# A loop that was held up for so long says nothing about the slots: the driver was stopped.
HELD_UP = 3.0


class Observer(Protocol):
    """Shows a run to people while it goes on."""

    def on_message(self, told: Told) -> None:
        """Take one message of a slot, or of the driver itself."""

    def look(self) -> None:
        """Look up, several times a second, also while the run waits; what this raises ends it."""

    def close(self) -> None:
        """The run has ended."""


class Talk:
    """What the driver hears of its slots, what it concludes, and what it answers.

    Args:
        plan: what the slots were told.
        server: their connections.
        observer: is shown what they tell.
    """

    def __init__(self, plan: SlotPlan, server: ControlServer, observer: Observer) -> None:
        self._server = server
        self._slots = range(plan.slots)
        self._observer = observer
        self._rendezvous = Rendezvous(plan.slots, share_gpus=plan.options.share_gpus)
        self.watch = RunWatch(plan.slots, plan.options, time.monotonic())
        self._warnings: set[str] = set()
        self.phases = Phases(plan.slots, plan.workers, time.monotonic())
        self._turned = self._looked = time.monotonic()
        self._taken = 0
        self._preempting = False

    def go_on(self) -> Verdict:
        """Wait a moment for messages, and see what is to be done."""
        with contextlib.suppress(queue.Empty):
            self._take(self._server.events.get(timeout=0.1))
            self.take_rest()
        now = time.monotonic()
        if now - self._turned > HELD_UP:
            self._server.hear_anew()
            self.watch.hear_anew(now)
        self._turned = now
        if (taken := self._server.bytes_taken) != self._taken:  # who sends results does not stall
            self._taken = taken
            self.watch.hear_anew(now)
        if now - self._looked > LOOK_SECONDS:
            self._looked = now
            self._server.tell(self._rendezvous.look(now))
            for silent in self._server.silent_slots(self.watch.heartbeat_timeout):
                self.watch.take(silent, now)
        verdict = self.watch.decide(now)
        if verdict is Verdict.ASK_FOR_STACKS:
            self._server.broadcast(Stalled(self.watch.stall_reason))
        return verdict

    def wake(self) -> None:
        """Let `go_on` wait no longer; for any thread."""
        self._server.events.wake()

    def let_look(self) -> None:
        """Let the observer end the run, by what it raises."""
        self._observer.look()

    def take_rest(self) -> None:
        """Take the messages that have come."""
        for told in self._server.events.drain():
            self._take(told)

    def stop(self) -> None:
        """Ask the slots to end their ranks, and themselves."""
        self._server.broadcast(Stop("ended by the driver"))

    def preempt(self) -> None:
        """Ask the ranks, once, to save what they have and end.

        Raises:
            KeyboardInterrupt: they do not run yet.
        """
        if self._preempting:
            return
        self._preempting = True
        if not self.watch.is_running:
            raise KeyboardInterrupt
        self._server.broadcast(Preempt())
        text = "interrupted: the ranks are asked to save and end; once more ends them at once"
        self._observer.on_message(by_driver(Notice(text, warn=False)))

    def see_off(self, seconds: float) -> None:
        """Wait, not longer than so, for slots whose executors are to be left to have ended.

        For a job that Spark has ended by itself. It may have missed a machine before the silence
        of its slots was too long: they are what tells who was lost.
        """
        self.take_rest()
        deadline = time.monotonic() + seconds
        while self._server.has_any(self.watch.leaving) and time.monotonic() < deadline:
            self.go_on()
        for silent in self._server.silent_slots(UNHEARD):
            self.watch.take(silent, time.monotonic())

    def hear_out(self, seconds: float) -> None:
        """Wait, not longer than so, for slots that have ended to have been heard out."""
        deadline = time.monotonic() + seconds
        while self._server.has_any(self._slots) and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        """Take what has come, and show no more."""
        self.take_rest()
        self._observer.close()

    def _take(self, told: Told) -> None:
        now = time.monotonic()
        self._observer.on_message(told)
        self.phases.take(told, now)
        if isinstance(told.message, Notice) and told.message.warn:
            self._warn(told.message.text)
        self.watch.take(told, now)
        waited = self._rendezvous.placed is None
        self._server.tell(self._rendezvous.take(told, now))
        if waited and self._rendezvous.placed is not None:
            self._take(by_driver(self._rendezvous.placed))

    def _warn(self, text: str) -> None:
        if text not in self._warnings:  # many ranks may say the same
            self._warnings.add(text)
            logger.warning("%s", text)
