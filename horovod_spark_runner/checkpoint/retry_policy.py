"""Decide whether and when an interrupted run is restarted. Pure.

Exceptions of the user's code are not retried: it would raise again. A killed or lost rank, a lost
executor, a killed mpirun, failing storage and preemption do not depend on the code: the run
restarts from its newest checkpoint, up to `max_restarts` times, after pauses that double while no
attempt gets further than the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..config.training import RestartOptions
from ..errors import (
    CheckpointError,
    HorovodSparkError,
    NotEnoughSlotsError,
    PreemptedError,
    RankFailedError,
    RanksDivergedError,
    RunCancelledError,
    RunFailedError,
    StalledError,
    UnreachableError,
)
from ..frameworks import FRAMEWORKS

RUNNING = "running"  # recorded until an attempt has ended
# Endings of attempts.
FINISHED = "finished"
USER_ERROR = "user error"  # the run's own code or input
_CANCELLED = "cancelled"
STOPPED = "stopped"  # by its caller, such as a search that prunes it
KILLED = "rank killed or lost"
LOST = "launch failed or Spark lost it"
_STALLED = "stalled"
_STORAGE = "storage failed"
PREEMPTED = "preempted"
NO_SLOTS = "too few slots"

RETRIED = frozenset({KILLED, LOST, _STALLED, _STORAGE, PREEMPTED, NO_SLOTS})
_MAX_BACKOFF_SECONDS = 60.0

# Exceptions on a rank that come from its surroundings, not from its code.
_SURROUNDINGS = (
    "horovod.common.exceptions.HorovodInternalError",
    # MPI gave it another rank than planned: mpirun was ending.
    "horovod_spark_runner.errors.LaunchError",
    "mpi4py.MPI.Exception",
    "MemoryError",
    "ConnectionError",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "BrokenPipeError",
    "TimeoutError",
    # Storage, networks and devices raise this; missing files have other types.
    "OSError",
    "horovod_spark_runner.storage.retries.HungError",
    *(name for framework in FRAMEWORKS.values() for name in framework.surroundings),
)


@dataclass(frozen=True)
class Attempt:
    """One attempt at a run.

    Attributes:
        number: from 1, over all calls with the same run directory.
        workers: ranks.
        started: seconds since the epoch.
        ended: likewise.
        first_step: step of the run that it resumed from; 0 for a new run.
        last_step: last step of the run that it reported.
        ending: one of the words above.
        cause: what ended it, in one line; empty if it finished.
    """

    number: int
    workers: int
    started: float
    ended: float
    first_step: int
    last_step: int
    ending: str
    cause: str = ""


@dataclass(frozen=True)
class Decision:
    """Decision after a failed attempt.

    Attributes:
        restart_at: when to restart, in seconds since the epoch; ``None`` to give up.
        reason: why, for the log.
    """

    restart_at: float | None
    reason: str


def classify(error: HorovodSparkError) -> str:
    """Return the ending of an attempt that raised ``error``."""
    if isinstance(error, RankFailedError):
        kind = error.exception_type
        # TensorFlow's own error, of several types, around that of Horovod.
        lost = kind is None or kind in _SURROUNDINGS or "Horovod has been shut down" in str(error)
        return KILLED if lost else USER_ERROR
    for cls, ending in (
        (RunCancelledError, _CANCELLED),
        (RanksDivergedError, USER_ERROR),
        (PreemptedError, PREEMPTED),
        (CheckpointError, _STORAGE),
        (UnreachableError, _STORAGE),  # of a rank: the driver had reached it
        (StalledError, _STALLED),
        (RunFailedError, LOST),
        (NotEnoughSlotsError, NO_SLOTS),
    ):
        if isinstance(error, cls):
            return ending
    return USER_ERROR


def decide(attempts: Sequence[Attempt], options: RestartOptions, now: float) -> Decision:
    """Decide what to do after the last of the call's ``attempts`` failed.

    Args:
        attempts: all attempts of this call, the failed one last.
        options: how often and how soon.
        now: seconds since the epoch.
    """
    last, used = attempts[-1], len(attempts) - 1
    if last.ending not in RETRIED:
        return Decision(None, f"{last.ending}: a retry would not help")
    if last.ending == NO_SLOTS and used == 0:
        return Decision(None, "there were never enough slots")
    if used >= options.max_restarts:
        return Decision(None, f"max_restarts={options.max_restarts} used up")
    pause = min(options.backoff_seconds * 2.0 ** _fruitless(attempts), _MAX_BACKOFF_SECONDS)
    return Decision(now + pause, f"{last.ending}; restart {used + 1} of {options.max_restarts}")


def _fruitless(attempts: Sequence[Attempt]) -> int:
    """Return how many attempts before the last began no later in the run than it did."""
    count = 0
    for attempt in reversed(attempts[:-1]):
        if attempt.first_step < attempts[-1].first_step:
            break
        count += 1
    return count


def steps_lost(attempts: Sequence[Attempt]) -> int:
    """Return how many steps were repeated because no checkpoint held them."""
    return sum(max(0, before.last_step - after.first_step) for before, after in pairwise(attempts))


def describe_attempts(attempts: Sequence[Attempt]) -> list[str]:
    """Return one line per attempt, for messages."""
    lines = []
    for attempt in attempts:
        cause = f": {attempt.cause}" if attempt.cause else ""
        steps = f", steps {attempt.first_step} to {attempt.last_step}" if attempt.last_step else ""
        lines.append(
            f"  attempt {attempt.number}, {attempt.workers} ranks, "
            f"{attempt.ended - attempt.started:.0f} s{steps}: {attempt.ending}{cause}"
        )
    return lines
