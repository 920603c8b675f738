"""Failure detection: judge a run by the slots' messages and their silence. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from enum import Enum

from ...config.launch import LaunchOptions
from ...errors import NotEnoughSlotsError
from ..protocol.messages import (
    Alive,
    Back,
    Disconnected,
    Envelope,
    Failed,
    Hello,
    Leaving,
    Log,
    Progress,
    Silent,
    Started,
)
from ..protocol.outcome import LOG_TAIL_LINES, LOST, Failure, RankOutcome
from ..protocol.topology import RankPlacement

# How long Spark may take to start the tasks of a stage it has room for.
TASK_START_SECONDS = 60.0
# After a rank has failed, the others end within moments; their messages follow.
FAILED_GRACE = 5.0
KILLED = (
    "its Spark task was killed or lost: its Python worker or executor died (out of memory?), or "
    "its machine went away"
)


class Verdict(Enum):
    """Decision on a running run."""

    CONTINUE = "continue"
    ASK_FOR_STACKS = "stalled"
    GIVE_UP = "give up"


class RunWatch:
    """State of one run, from the messages of its slots.

    Args:
        slots: tasks of the run.
        options: its settings.
        now: the time, in seconds of any steady clock, as in all methods.
    """

    def __init__(self, slots: int, options: LaunchOptions, now: float) -> None:
        self._slots = slots
        self._options = options
        self._began = self._active = now
        self._seen: set[int] = set()
        self._absent: dict[int, tuple[float, RankOutcome]] = {}
        self._failed: dict[tuple[int, int], tuple[float, RankOutcome]] = {}
        self._failed_since: float | None = None
        self._running = False  # a rank has called the function
        self._asked_for_stacks: float | None = None
        self._repeated = False
        self._tails: dict[int, deque[str]] = {}
        self._leaving: dict[int, str] = {}  # slots whose executor shuts down, and the signal

    @property
    def failures(self) -> list[RankOutcome]:
        """Failures that slots reported, or that follow from their silence, in order of arrival."""
        reported = {slot for slot, _ in self._failed}
        absent = [each for slot, each in self._absent.items() if slot not in reported]
        dated = sorted([*self._failed.values(), *absent], key=lambda each: each[0])
        return [outcome for _, outcome in dated]

    @property
    def missing_slots(self) -> int:
        """Number of tasks that Spark has not started."""
        return self._slots - len(self._seen)

    @property
    def leaving(self) -> Collection[int]:
        """Slots whose executors shut down; their ranks may be saving their state."""
        return self._leaving.keys()

    @property
    def heartbeat_timeout(self) -> float:
        return self._options.heartbeat_timeout

    @property
    def is_running(self) -> bool:
        """True once a rank has called the function."""
        return self._running

    @property
    def stall_reason(self) -> str:
        limit = self._options.stall_timeout
        return (
            f"no rank reported progress for stall_timeout={limit:g} s (a training does so after "
            "its steps, a function with report_progress())"
        )

    def not_started(self) -> NotEnoughSlotsError:
        """Return the error for tasks that Spark did not start in time."""
        timeout = self._options.start_timeout or 0.0
        longer = f", or wait longer with start_timeout above {TASK_START_SECONDS:g}"
        return NotEnoughSlotsError(
            f"asked for {self._slots} slots, but Spark started {len(self._seen)} of their tasks "
            f"within {self._start_limit:g} s: it has too few, or other jobs hold them. Lower "
            "num_workers or end the other jobs" + (longer if timeout <= TASK_START_SECONDS else ""),
            requested=self._slots,
            available=len(self._seen),
        )

    def take(self, envelope: Envelope, now: float) -> None:
        """Take one message, also `Silent` and `Disconnected` of the driver itself."""
        slot = envelope.slot
        if isinstance(envelope.message, Hello):
            # Spark repeats the whole stage when one of its tasks was lost. The ranks and their
            # state are lost, too: a restart is the caller's decision.
            self._repeated |= slot in self._seen
        if slot >= 0 and not isinstance(envelope.message, Disconnected):
            self._seen.add(slot)
        match envelope.message:
            case Back():
                self._absent.pop(slot, None)
            case Disconnected(moment):
                number = self._leaving.get(slot)
                why = KILLED if number is None else f"its executor was asked to end ({number})"
                self._absent[slot] = now, self._lost(envelope, moment, why)
            case Leaving(signal):
                self._leaving[slot] = signal
            case Failed() as failed:
                self._fail(_outcome(envelope, failed.failure()), envelope.rank, now)
            case Silent(seconds):
                why = f"no sign of life for {seconds:g} s"
                self._fail(self._lost(envelope, time.time(), why), -1, now)
            case Log(lines):
                # No progress: Horovod prints, too, while it waits for a rank that never comes.
                self._tails.setdefault(slot, deque(maxlen=LOG_TAIL_LINES)).extend(lines)
            case Started() | Progress() | Alive():
                self._active = now
                self._running |= isinstance(envelope.message, Started)

    def note_activity(self, now: float) -> None:
        """Record activity that no message shows: results, or while the driver was suspended."""
        self._active = now

    def _fail(self, outcome: RankOutcome, rank: int, now: float) -> None:
        """Record a failure of ``rank``, or of the whole slot (-1); the first one counts."""
        self._failed.setdefault((outcome.slot, rank), (now, outcome))
        self._failed_since = self._failed_since or now

    def _lost(self, envelope: Envelope, moment: float, why: str) -> RankOutcome:
        """Return the outcome of a slot that was lost without a report."""
        tail = tuple(self._tails.get(envelope.slot, ()))
        return _outcome(envelope, Failure(LOST, moment, why, log_tail=tail))

    def decide(self, now: float) -> Verdict:
        """Return the decision at ``now``."""
        if self._repeated:
            return Verdict.GIVE_UP
        if self._failed_since is not None:
            waited = now - self._failed_since
            return Verdict.GIVE_UP if waited > FAILED_GRACE else Verdict.CONTINUE
        if self.missing_slots and now - self._began > self._start_limit:
            return Verdict.GIVE_UP
        # A slot that has only lost its connection reconnects; one that was killed does not.
        for since, _ in self._absent.values():
            if now - since > self._options.heartbeat_timeout:
                return Verdict.GIVE_UP
        return self._check_stall(now)

    @property
    def _start_limit(self) -> float:
        return max(self._options.start_timeout or 0.0, TASK_START_SECONDS)

    def _check_stall(self, now: float) -> Verdict:
        limit = self._options.stall_timeout
        # Until the ranks run, other limits hold: importing a framework is no stall.
        if limit is None or not self._running or now - self._active <= limit:
            return Verdict.CONTINUE
        if self._asked_for_stacks is None:
            self._asked_for_stacks = now
            return Verdict.ASK_FOR_STACKS
        return Verdict.GIVE_UP if now - self._asked_for_stacks > FAILED_GRACE else Verdict.CONTINUE


def _outcome(envelope: Envelope, failure: Failure) -> RankOutcome:
    placement = None
    if envelope.rank >= 0:
        placement = RankPlacement(
            envelope.rank, envelope.slot, envelope.host, local_rank=-1, cross_rank=-1
        )
    return RankOutcome(envelope.slot, envelope.host, placement, failure=failure)
