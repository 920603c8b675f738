"""Coordinator of the slots on the driver: takes their messages, answers, and judges the run."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from typing import Protocol

from ..protocol.messages import Envelope, Notice, Preempt, Stalled, Stop, from_driver
from ..protocol.rendezvous import HEARTBEAT_SECONDS, Rendezvous, SlotPlan
from .control_server import ControlServer
from .result import PhaseTimer
from .watch import RunWatch, Verdict

logger = logging.getLogger(__name__)

# Seconds to wait for a message before the clock is checked.
_WAIT_SECONDS = 0.1
# Seconds between checks for slots that are late or silent, which no message reports.
CHECK_SECONDS = 1.0
# A slot that has been silent for so long when Spark ends the run is the one that Spark lost.
LOST_SECONDS = 2.5 * HEARTBEAT_SECONDS
# After a longer gap between two steps the driver itself was suspended, not the slots silent.
_SUSPENDED_SECONDS = 3.0


class Observer(Protocol):
    """Shows a run to people while it runs."""

    def on_message(self, envelope: Envelope) -> None:
        """Take one message of a slot, or of the driver itself."""

    def poll(self) -> None:
        """Act, several times a second, also while the run waits; an exception ends the run."""

    def close(self) -> None:
        """Stop showing: the run has ended."""


class Coordinator:
    """Driver's side of the conversation with the slots.

    The driver calls `step` in a loop. The decisions are made by pure parts: `Rendezvous` computes
    the world from the slots' reports, `RunWatch` judges failures and stalls.

    Args:
        plan: the slots' plan.
        server: their connections.
        observer: is shown their messages.
    """

    def __init__(self, plan: SlotPlan, server: ControlServer, observer: Observer) -> None:
        now = time.monotonic()
        self._server = server
        self._slots = range(plan.slots)
        self._observer = observer
        self._rendezvous = Rendezvous(plan.slots, share_gpus=plan.options.share_gpus)
        self.watch = RunWatch(plan.slots, plan.options, now)
        self.phases = PhaseTimer(plan.slots, plan.workers, now)
        self._warnings: set[str] = set()
        self._last_step = self._last_check = now
        self._result_bytes = 0
        self._preempting = False

    def step(self) -> Verdict:
        """Wait a moment for messages, answer them, check the clock, and judge the run."""
        with contextlib.suppress(queue.Empty):
            self._take(self._server.events.get(timeout=_WAIT_SECONDS))
            self.drain_messages()
        now = time.monotonic()
        self._note_activity(now)
        if now - self._last_check > CHECK_SECONDS:
            self._last_check = now
            self._server.send(self._rendezvous.check_timeout(now))
            for silent in self._server.silent_slots(self.watch.heartbeat_timeout):
                self.watch.take(silent, now)
        verdict = self.watch.decide(now)
        if verdict is Verdict.ASK_FOR_STACKS:
            self._server.broadcast(Stalled(self.watch.stall_reason))
        return verdict

    def _note_activity(self, now: float) -> None:
        """Restart the clocks of stalls and silence where no message could show activity."""
        if now - self._last_step > _SUSPENDED_SECONDS:
            self._server.reset_silence()
            self.watch.note_activity(now)
        self._last_step = now
        # Ranks that send a large result do not report progress meanwhile.
        if (received := self._server.result_bytes) != self._result_bytes:
            self._result_bytes = received
            self.watch.note_activity(now)

    def wake(self) -> None:
        """End the wait in `step` at once; for any thread."""
        self._server.events.wake()

    def poll_observer(self) -> None:
        """Let the observer act; an exception of it ends the run."""
        self._observer.poll()

    def drain_messages(self) -> None:
        """Take the messages that have arrived, without waiting."""
        for envelope in self._server.events.drain():
            self._take(envelope)

    def stop_slots(self) -> None:
        """Ask the slots to end their ranks, and themselves."""
        self._server.broadcast(Stop("ended by the driver"))

    def preempt_ranks(self) -> None:
        """Ask the ranks, once, to save their state and end.

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
        self._observer.on_message(from_driver(Notice(text, warn=False)))

    def await_leaving_slots(self, seconds: float) -> None:
        """Wait until slots whose executors are shutting down have disconnected, or for ``seconds``.

        For a job that Spark has ended by itself. Spark may have noticed that a machine is gone
        before the silence of its slots was long enough: silence shows which slots were lost.
        """
        self.drain_messages()
        deadline = time.monotonic() + seconds
        while self._server.has_any(self.watch.leaving) and time.monotonic() < deadline:
            self.step()
        for silent in self._server.silent_slots(LOST_SECONDS):
            self.watch.take(silent, time.monotonic())

    def await_disconnects(self, seconds: float) -> None:
        """Wait until all slots have disconnected, so that no message is missing, or ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._server.has_any(self._slots) and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        """Take the messages that have arrived, and show no more."""
        self.drain_messages()
        self._observer.close()

    def _take(self, envelope: Envelope) -> None:
        now = time.monotonic()
        self._observer.on_message(envelope)
        self.phases.take(envelope, now)
        if isinstance(envelope.message, Notice) and envelope.message.warn:
            self._warn(envelope.message.text)
        self.watch.take(envelope, now)
        # The last slot's report makes the world: all slots get their ranks at once.
        was_waiting = self._rendezvous.placed is None
        self._server.send(self._rendezvous.take(envelope, now))
        if was_waiting and self._rendezvous.placed is not None:
            self._take(from_driver(self._rendezvous.placed))

    def _warn(self, text: str) -> None:
        if text not in self._warnings:  # many ranks may warn of the same
            self._warnings.add(text)
            logger.warning("%s", text)
