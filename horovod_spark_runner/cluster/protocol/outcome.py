"""Outcome of a rank as a value, and the failure that explains a failed run. Pure."""

from __future__ import annotations

import itertools
import os
import signal
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import (
    CheckpointError,
    EnvironmentProblem,
    HorovodSparkError,
    InvalidInputError,
    LaunchError,
    RankFailedError,
    RanksDivergedError,
    StalledError,
)
from ...frameworks import FRAMEWORKS
from .topology import RankPlacement

# Kinds of failure.
RAISED = "raised"  # the function raised an exception
DIED = "died"  # the process exited or was killed
LOST = "lost"  # the Spark task, its executor or its host went away
LAUNCH = "launch"  # mpirun or the slot could not do its part
ENVIRONMENT = "environment"  # nor can it before something is installed or set up
STALLED = "stalled"  # no rank made any progress
MPI_ENDED = "mpi ended"  # ended with mpirun, and what became of that is known
ABORTED = "aborted"  # ended because another rank had failed, or the driver asked
# Kinds that follow from something else, the less telling the higher.
_FOLLOWING = {MPI_ENDED: 1, ABORTED: 2}
# In exceptions of ranks that tell only that something happened to another one, or to mpirun.
_SECONDARY = (
    "HorovodInternal",
    "Horovod has been shut down",
    "horovod_spark_runner.errors.LaunchError",
)
# How the names of exceptions begin that may follow from what happened to another one.
_MAY_FOLLOW = (
    "horovod.",
    "mpi4py.",
    *(prefix for known in FRAMEWORKS.values() for prefix in known.may_follow),
)

LOG_TAIL_LINES = 20
# Ranks besides the first to fail whose end an error tells.
MAX_OTHERS = 16
# Characters of an exception's message and traceback that are kept.
MAX_MESSAGE, MAX_TRACEBACK = 8 * 1024, 64 * 1024

# Files by which a worker tells its slot what became of it, in the rank's private directory.
OUTCOME_FILE = "outcome"
RESULT_FILE = "result"
STACKS_FILE = "stacks"
# Where Python's stacks are written when a worker crashes, and the signals on which they are.
CRASH_FILE = "crash"
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
# The signal on which a worker writes its Python stacks.
STACKS_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class Failure:
    """Why a rank has no result.

    Attributes:
        kind: one of the kinds above.
        time: seconds since the epoch, on the rank's host.
        message: one line for people.
        exception_type: qualified name of the exception, if one was raised.
        traceback: its formatted traceback, or the Python stacks of a rank that stalled or crashed.
        exception: the pickled exception, where it could be pickled.
        log_tail: last output lines of the rank.
    """

    kind: str
    time: float
    message: str
    exception_type: str | None = None
    traceback: str = ""
    exception: bytes | None = None
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        slot: Spark barrier task.
        host: where it ran.
        placement: its rank and devices; ``None`` if the slot never learnt them.
        result: pickled return value, if the function returned.
        result_bytes: size of a result that was sent to the driver directly, else 0.
        failure: why not, otherwise.
        timings: seconds spent per phase of the start.
        ready_bytes: memory of the ready process that the rank's is a copy of; 0 where none is.
    """

    slot: int
    host: str
    placement: RankPlacement | None = None
    result: bytes | None = None
    result_bytes: int = 0
    failure: Failure | None = None
    timings: dict[str, float] = field(default_factory=dict)
    ready_bytes: int = 0

    @property
    def rank(self) -> int:
        """Place in the world; ``-1`` if it was never learnt."""
        return -1 if self.placement is None else self.placement.rank


def kind_of(error: Exception) -> str:
    """Return the kind of failure that an error of a slot itself is."""
    return ENVIRONMENT if isinstance(error, EnvironmentProblem) else LAUNCH


def in_short(error: Exception) -> str:
    """Return an error of a slot itself as one line."""
    # Of other errors (a full disk, no descriptors) the kind says as much as the text.
    kind = "" if isinstance(error, HorovodSparkError) else f"{type(error).__name__}: "
    return f"{kind}{error}"


def describe_exception(error: BaseException) -> tuple[str, str, str]:
    """Return the qualified type name, one-line message and formatted traceback of ``error``."""
    cls = type(error)
    name = cls.__qualname__
    if cls.__module__ not in ("builtins", "__main__"):
        name = f"{cls.__module__}.{name}"
    try:
        text = str(error)
    except Exception as broken:  # its class is the user's
        text = f"(its text cannot be had: {type(broken).__name__})"
    try:
        trace = "".join(
            _without_internals(traceback.TracebackException.from_exception(error)).format()
        )
    except Exception:
        trace = "".join(traceback.format_tb(error.__traceback__))
    message = f"{cls.__qualname__}: {text}" if text else cls.__qualname__
    return name, shortened(message, MAX_MESSAGE), shortened(trace, MAX_TRACEBACK)


def _without_internals(
    told: traceback.TracebackException,
) -> traceback.TracebackException:
    """Drop the frames of this package before the user's, also in the causes of an exception."""
    own = f"{Path(__file__).parents[2]}{os.sep}"
    frames = list(itertools.dropwhile(lambda frame: frame.filename.startswith(own), told.stack))
    if frames:
        told.stack = traceback.StackSummary.from_list(frames)
    for other in filter(None, (told.__cause__, told.__context__)):
        _without_internals(other)
    return told


def shortened(text: str, limit: int) -> str:
    """Return ``text``, or its beginning and end if it has more than ``limit`` characters."""
    if len(text) <= limit:
        return text
    left_out = f" … ({len(text) - limit:,} characters left out) … "
    return text[: limit // 2] + left_out + text[-limit // 2 :]


def root_cause(
    outcomes: Iterable[RankOutcome], arrived: Sequence[tuple[int, int]] = ()
) -> RankOutcome | None:
    """Return the failed rank that explains the run.

    An exception explains more than the death of a process, unless it is a framework's, which may
    follow from that; and either more than what Horovod says to the ranks that are left. Among
    equals it is the first.

    Args:
        outcomes: what became of the ranks.
        arrived: slots and ranks in the order in which the driver heard of their failures; clocks of
            different hosts do not tell it.
    """
    order = {index: number for number, index in reversed([*enumerate(arrived)])}
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    return min(failed, key=lambda outcome: _telling(outcome, order), default=None)


def _telling(
    outcome: RankOutcome, order: Mapping[tuple[int, int], int]
) -> tuple[int, bool, bool, int, float, int]:
    failure = outcome.failure
    assert failure is not None
    text = f"{failure.exception_type} {failure.message}"
    secondary = any(words in text for words in _SECONDARY)
    may_follow = (failure.exception_type or "").startswith(_MAY_FOLLOW)
    return (
        _FOLLOWING.get(failure.kind, 0),
        secondary,
        failure.kind != RAISED or may_follow,
        order.get((outcome.slot, outcome.rank), len(order)),
        failure.time,
        outcome.rank,
    )


def is_telling(outcomes: Iterable[RankOutcome]) -> bool:
    """Tell whether ``outcomes`` name a cause, rather than only what followed from one."""
    return any(o.failure is not None and o.failure.kind not in _FOLLOWING for o in outcomes)


def failure_error(
    cause: RankOutcome, outcomes: Sequence[RankOutcome], exception: BaseException | None
) -> HorovodSparkError:
    """Return the exception the driver raises for a failed run.

    Args:
        cause: the outcome found by `root_cause`.
        outcomes: all outcomes known.
        exception: the remote exception, unpickled, if there is one.
    """
    failure = cause.failure
    assert failure is not None
    if isinstance(exception, (InvalidInputError, CheckpointError, RanksDivergedError)):
        # Not one rank's: the caller's input, which took the built model to judge, the storage's,
        # or what all ranks found together.
        return exception
    if isinstance(exception, EnvironmentProblem):
        problem = EnvironmentProblem(f"{_who(cause)} on {cause.host}: {exception}")
        problem.__cause__ = exception
        return problem
    if failure.kind == ENVIRONMENT:
        return EnvironmentProblem(f"{_who(cause)} on {cause.host}: {failure.message}")
    if failure.kind == STALLED:
        return _stalled_error(outcomes)
    others = _summarise_others(cause, outcomes)
    if failure.kind == LAUNCH or failure.kind in _FOLLOWING:
        text = [f"slot {cause.slot} on {cause.host}: {failure.message}"]
        return LaunchError("\n".join(text + _log_lines(failure) + others))
    lines = [f"{_who(cause)} on {cause.host} failed: {failure.message}"]
    if failure.traceback:
        lines += ["", f"Traceback of rank {cause.rank}:", failure.traceback.rstrip()]
    lines += _log_lines(failure)
    error = RankFailedError(
        "\n".join(lines + others),
        rank=cause.rank,
        host=cause.host,
        exception_type=failure.exception_type,
        remote_traceback=failure.traceback,
    )
    error.__cause__ = exception
    return error


def _stalled_error(outcomes: Sequence[RankOutcome]) -> StalledError:
    ordered = sorted(outcomes, key=lambda outcome: outcome.rank)
    stacks = {o.rank: o.failure.traceback for o in ordered if o.failure is not None}
    hosts = {o.rank: o.host for o in ordered}
    parts = [
        f"Python stacks of rank {rank} on {hosts[rank]}:\n{text}" for rank, text in stacks.items()
    ]
    # All say the same, but one that also knows why.
    told = [o.failure.message for o in ordered if o.failure and o.failure.kind == STALLED]
    return StalledError("\n\n".join([max(told, key=len), *parts]), stacks=stacks)


def _log_lines(failure: Failure) -> list[str]:
    if not failure.log_tail:
        return []
    return ["", "Last lines of its log:", *(f"  {line}" for line in failure.log_tail)]


def _summarise_others(cause: RankOutcome, outcomes: Sequence[RankOutcome]) -> list[str]:
    lines = []
    for other in sorted(outcomes, key=lambda o: (o.rank, o.slot)):
        if other is cause or other.slot == cause.slot:
            continue
        state = "finished" if other.failure is None else other.failure.message
        if other.failure is not None and other.failure.kind in (DIED, LAUNCH, ENVIRONMENT, LOST):
            state += " after that"
        lines.append(f"  {_who(other)} on {other.host}: {state}")
    if len(lines) > MAX_OTHERS:
        lines = [*lines[:MAX_OTHERS], f"  and {len(lines) - MAX_OTHERS:,} more"]
    return ["", "The other ranks:", *lines] if lines else []


def _who(outcome: RankOutcome) -> str:
    return f"rank {outcome.rank}" if outcome.rank >= 0 else f"slot {outcome.slot}"
