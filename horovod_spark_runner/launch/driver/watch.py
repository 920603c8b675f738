"""What the driver concludes from the slots' messages, and from their absence. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from enum import Enum

from ...errors import NotEnoughSlotsError
from ...settings.launching import LaunchOptions
from ..shared.channel import Message
from ..shared.outcome import LAUNCH, LOG_TAIL_LINES, LOST, Failure, RankOutcome
from ..shared.topology import RankPlacement

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

    def take(self, message: Message, now: float) -> None:
        """Take one message of a slot."""
        kind, slot = message.get("type"), int(message.get("slot", -1))
        if kind == "hello":
            # Spark repeats the whole stage when one of its tasks was lost. The ranks are gone,
            # and so is their state: going on is a decision for whoever asked for the run.
            self._repeated |= slot in self._seen
        if slot >= 0 and kind != "gone":
            self._seen.add(slot)
        if kind == "back":
            self._absent.pop(slot, None)
        elif kind == "gone":
            asked = self._leaving.get(slot)
            why = KILLED if asked is None else f"its executor was asked to end ({asked})"
            self._absent[slot] = now, self._lost(message, why)
        elif kind == "leaving":
            self._leaving[slot] = str(message.get("signal", ""))
        elif kind == "failed":
            outcome = _outcome_of(message)
            self._failed.setdefault((slot, outcome.rank), outcome)
            self._failed_since = self._failed_since or now
        elif kind == "log":
            # No progress: Horovod prints, too, while it waits for a rank that never comes.
            tail = self._tails.setdefault(slot, deque(maxlen=LOG_TAIL_LINES))
            tail.extend(message["lines"])
        elif kind in ("started", "progress", "alive"):
            self._active = now
            self._running |= kind == "started"

    def hear_anew(self, now: float) -> None:
        """Take note that the driver itself was stopped until ``now``: it heard of no progress."""
        self._active = now

    def take_silence(self, silent: Sequence[Message], now: float) -> None:
        """Take which connected slots have been silent for longer than the heartbeat timeout."""
        for message in silent:
            slot = int(message["slot"])
            why = f"no sign of life for {self._options.heartbeat_timeout:g} s"
            self._failed.setdefault((slot, -1), self._lost(message, why))
            self._failed_since = self._failed_since or now

    def _lost(self, message: Message, why: str) -> RankOutcome:
        """Return the outcome of a slot that went away without a word."""
        slot, moment = int(message["slot"]), float(message.get("time", time.time()))
        tail = tuple(self._tails.get(slot, ()))
        failure = Failure(LOST, moment, why, log_tail=tail)
        return RankOutcome(slot, str(message["host"]), _place(message), failure=failure)

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


def _outcome_of(message: Message) -> RankOutcome:
    failure = Failure(
        str(message.get("kind", LAUNCH)),
        float(message.get("time", 0.0)),
        str(message.get("message", "")),
        message.get("exception_type"),
        str(message.get("traceback", "")),
        None,
        tuple(message.get("log_tail", ())),
    )
    slot, host = int(message["slot"]), str(message.get("host", "?"))
    return RankOutcome(slot, host, _place(message), failure=failure)


def _place(message: Message) -> RankPlacement | None:
    rank = int(message.get("rank", -1))
    if rank < 0:
        return None
    slot, host = int(message["slot"]), str(message.get("host", "?"))
    return RankPlacement(rank, slot, host, local_rank=-1, cross_rank=-1)
