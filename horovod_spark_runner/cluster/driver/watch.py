"""Judge a run by the slots' messages, and by their absence. Pure."""

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
    Failed,
    Gone,
    Hello,
    Leaving,
    Log,
    Progress,
    Silent,
    Started,
    Told,
)
from ..protocol.outcome import LOG_TAIL_LINES, LOST, Failure, RankOutcome
from ..protocol.topology import RankPlacement

# How long Spark may take to start the tasks of a stage it has room for.
TASK_START_SECONDS = 60.0
# Once a rank has failed, the others are ended within moments; what they tell comes after that.
FAILED_GRACE = 5.0
KILLED = (
    "its Spark task was killed or lost: its Python worker or executor died (out of memory?), or "
    "its machine went away"
)


class Verdict(Enum):
    """What to do next."""

    GO_ON = "go on"
    ASK_FOR_STACKS = "stalled"
    GIVE_UP = "give up"


class RunWatch:
    """The state of one run as far as the driver knows.

    Args:
        slots: tasks of the run.
        options: its settings.
        now: the present, in seconds of any steady clock, as in all methods.
    """

    def __init__(self, slots: int, options: LaunchOptions, now: float) -> None:
        self._slots = slots
        self._options = options
        self._began = self._active = now
        self._seen: set[int] = set()
        self._absent: dict[int, tuple[float, RankOutcome]] = {}
        self._failed: dict[tuple[int, int], RankOutcome] = {}
        self._failed_since: float | None = None
        self._running = False  # a rank has called the function
        self._asked_for_stacks: float | None = None
        self._repeated = False
        self._tails: dict[int, deque[str]] = {}
        self._leaving: dict[int, str] = {}  # slots that were asked to end, and the signal

    @property
    def failures(self) -> list[RankOutcome]:
        """What went wrong, as far as the slots told or their silence tells."""
        told = {slot for slot, _ in self._failed}
        absent = [outcome for slot, (_, outcome) in self._absent.items() if slot not in told]
        return [*self._failed.values(), *absent]

    @property
    def arrived(self) -> list[tuple[int, int]]:
        """Slots and ranks in the order in which they told of failures."""
        return [*self._failed]

    @property
    def missing_slots(self) -> int:
        """How many of the tasks Spark has not started."""
        return self._slots - len(self._seen)

    @property
    def leaving(self) -> Collection[int]:
        """Slots whose executors are to be left; their ranks may be saving what they have."""
        return self._leaving.keys()

    @property
    def heartbeat_timeout(self) -> float:
        return self._options.heartbeat_timeout

    @property
    def is_running(self) -> bool:
        """Whether a rank has called the function."""
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
        given = self._options.start_timeout or 0.0
        longer = f", or wait longer with start_timeout above {TASK_START_SECONDS:g}"
        return NotEnoughSlotsError(
            f"asked for {self._slots} slots, but Spark started {len(self._seen)} of their tasks "
            f"within {self._start_limit:g} s: it has too few, or other jobs hold them. Lower "
            "num_workers or end the other jobs" + (longer if given <= TASK_START_SECONDS else ""),
            asked=self._slots,
            found=len(self._seen),
        )

    def take(self, told: Told, now: float) -> None:
        """Take one message, or that a connected slot has been silent for too long."""
        slot = told.slot
        if isinstance(told.message, Hello):
            # Spark repeats the whole stage when one of its tasks was lost. The ranks are gone,
            # and so is their state: going on is a decision for whoever asked for the run.
            self._repeated |= slot in self._seen
        if slot >= 0 and not isinstance(told.message, Gone):
            self._seen.add(slot)
        match told.message:
            case Back():
                self._absent.pop(slot, None)
            case Gone(moment):
                asked = self._leaving.get(slot)
                why = KILLED if asked is None else f"its executor was asked to end ({asked})"
                self._absent[slot] = now, self._lost(told, moment, why)
            case Leaving(signal):
                self._leaving[slot] = signal
            case Failed() as failed:
                self._fail(_outcome(told, failed.failure()), told.rank, now)
            case Silent(seconds):
                why = f"no sign of life for {seconds:g} s"
                self._fail(self._lost(told, time.time(), why), -1, now)
            case Log(lines):
                # No progress: Horovod prints, too, while it waits for a rank that never comes.
                self._tails.setdefault(slot, deque(maxlen=LOG_TAIL_LINES)).extend(lines)
            case Started() | Progress() | Alive():
                self._active = now
                self._running |= isinstance(told.message, Started)

    def hear_anew(self, now: float) -> None:
        """Take note of progress that no message tells: of results, or missed by the driver."""
        self._active = now

    def _fail(self, outcome: RankOutcome, rank: int, now: float) -> None:
        """Take note of a failure of ``rank``, or of the whole slot (-1); the first one counts."""
        self._failed.setdefault((outcome.slot, rank), outcome)
        self._failed_since = self._failed_since or now

    def _lost(self, told: Told, moment: float, why: str) -> RankOutcome:
        """Return the outcome of a slot that went away without a word."""
        tail = tuple(self._tails.get(told.slot, ()))
        return _outcome(told, Failure(LOST, moment, why, log_tail=tail))

    def decide(self, now: float) -> Verdict:
        """Return what to do at ``now``."""
        if self._repeated:
            return Verdict.GIVE_UP
        if self._failed_since is not None:
            waited = now - self._failed_since
            return Verdict.GIVE_UP if waited > FAILED_GRACE else Verdict.GO_ON
        if self.missing_slots and now - self._began > self._start_limit:
            return Verdict.GIVE_UP
        # A slot that has only lost its connection comes back; one that was killed does not.
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
            return Verdict.GO_ON
        if self._asked_for_stacks is None:
            self._asked_for_stacks = now
            return Verdict.ASK_FOR_STACKS
        return Verdict.GIVE_UP if now - self._asked_for_stacks > FAILED_GRACE else Verdict.GO_ON


def _outcome(told: Told, failure: Failure) -> RankOutcome:
    placement = None
    if told.rank >= 0:
        placement = RankPlacement(told.rank, told.slot, told.host, local_rank=-1, cross_rank=-1)
    return RankOutcome(told.slot, told.host, placement, failure=failure)
