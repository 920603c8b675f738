"""Outcome of a rank as a value, and the failure that explains a failed run. Pure."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import struct
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
MPI_ENDED = "mpi ended"  # ended with mpirun, whose end is explained
ABORTED = "aborted"  # ended because another rank had failed, or the driver requested it
# Kinds that follow from another failure; a higher number explains less.
_FOLLOWING = {MPI_ENDED: 1, ABORTED: 2}
# Text in exceptions of ranks that only follow from the failure of another rank, or of mpirun.
_SECONDARY = (
    "HorovodInternal",
    "Horovod has been shut down",
    "horovod_spark_runner.errors.LaunchError",
)
# Prefixes of exceptions' names that may follow from the failure of another rank.
_MAY_FOLLOW = (
    "horovod.",
    "mpi4py.",
    *(prefix for framework in FRAMEWORKS.values() for prefix in framework.may_follow),
)

LOG_TAIL_LINES = 20
# Ranks besides the first failed one that an error lists.
_MAX_OTHERS = 16
# PyTorch's and TensorFlow's exceptions where a GPU has too little memory.
_OUT_OF_GPU_MEMORY = (".OutOfMemoryError", ".ResourceExhaustedError")
# Characters to which an exception's message and traceback are shortened.
MAX_MESSAGE, MAX_TRACEBACK = 8 * 1024, 64 * 1024

# An outcome travels through Spark in pieces: Spark takes none of 2 GiB.
PIECE_BYTES = 64 * 1024 * 1024
# Header of a piece: slot of the outcome, its index there, number of the piece.
_PIECE_HEADER = struct.Struct("!III")

# Files in the rank's private directory by which a worker reports its outcome to its slot.
OUTCOME_FILE = "outcome"
RESULT_FILE = "result"
STACKS_FILE = "stacks"
# File for Python's stacks when a worker crashes, and the signals on which they are written.
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
    """Outcome of one rank: a result or a failure.

    Attributes:
        slot: Spark barrier task.
        host: its machine or container.
        placement: its rank and devices; ``None`` if the slot never received them.
        result: pickled return value, if the function returned.
        result_bytes: size of a result that was sent to the driver directly, else 0.
        failure: why there is no result, otherwise.
        timings: seconds spent per phase of the start.
        ready_bytes: memory of the prefork process that forked the worker; 0 where there is none.
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
        """Number in the world; ``-1`` if the slot never received it."""
        return -1 if self.placement is None else self.placement.rank


def encode_outcome(outcome: RankOutcome, index: int) -> Iterator[bytes]:
    """Yield the outcome of a slot's rank at ``index`` in pieces."""
    data = pickle.dumps(outcome, protocol=5)
    for number, begin in enumerate(range(0, len(data), PIECE_BYTES)):
        header = _PIECE_HEADER.pack(outcome.slot, index, number)
        yield header + data[begin : begin + PIECE_BYTES]


def decode_outcomes(pieces: Iterable[bytes]) -> list[RankOutcome]:
    """Return the outcomes made of pieces, in any order, by slot and index."""
    outcomes: dict[tuple[int, int], dict[int, memoryview]] = {}
    for piece in pieces:
        slot, index, number = _PIECE_HEADER.unpack_from(piece)
        outcomes.setdefault((slot, index), {})[number] = memoryview(piece)[_PIECE_HEADER.size :]
    return [
        pickle.loads(b"".join(parts[number] for number in sorted(parts)))
        for _, parts in sorted(outcomes.items())
    ]


def failure_kind(error: Exception) -> str:
    """Return the kind of failure for a slot's own error."""
    return ENVIRONMENT if isinstance(error, EnvironmentProblem) else LAUNCH


def summarize_error(error: Exception) -> str:
    """Return a slot's own error as one line."""
    # For other errors (a full disk, no descriptors) the class says as much as the text.
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
        text = f"(its text cannot be shown: {type(broken).__name__})"
    try:
        trace = "".join(
            _without_internals(traceback.TracebackException.from_exception(error)).format()
        )
    except Exception:
        trace = "".join(traceback.format_tb(error.__traceback__))
    message = f"{cls.__qualname__}: {text}" if text else cls.__qualname__
    return name, shortened(message, MAX_MESSAGE), shortened(trace, MAX_TRACEBACK)


def _without_internals(
    trace: traceback.TracebackException,
) -> traceback.TracebackException:
    """Drop the frames of this package before the user's, also in the causes of an exception."""
    package = f"{Path(__file__).parents[2]}{os.sep}"
    frames = itertools.dropwhile(lambda frame: frame.filename.startswith(package), trace.stack)
    if remaining := list(frames):
        trace.stack = traceback.StackSummary.from_list(remaining)
    for other in filter(None, (trace.__cause__, trace.__context__)):
        _without_internals(other)
    return trace


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
    follow from that. Both explain more than Horovod's errors on the remaining ranks. Among equals,
    the first one counts.

    Args:
        outcomes: outcomes of the ranks.
        arrived: slots and ranks in the order in which their failures reached the driver; clocks of
            different hosts do not show it.
    """
    order = {index: number for number, index in reversed([*enumerate(arrived)])}
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    return min(failed, key=lambda outcome: _cause_order(outcome, order), default=None)


def _cause_order(
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


def has_root_cause(outcomes: Iterable[RankOutcome]) -> bool:
    """Tell whether ``outcomes`` name a cause, not only its consequences."""
    return any(o.failure is not None and o.failure.kind not in _FOLLOWING for o in outcomes)


def failure_error(
    cause: RankOutcome, outcomes: Sequence[RankOutcome], exception: BaseException | None
) -> HorovodSparkError:
    """Return the exception the driver raises for a failed run.

    Args:
        cause: the outcome found by `root_cause`.
        outcomes: all outcomes.
        exception: the remote exception, unpickled, if there is one.
    """
    failure = cause.failure
    assert failure is not None
    if isinstance(exception, (InvalidInputError, CheckpointError, RanksDivergedError)):
        # Not a failure of one rank: invalid input that only the built model shows, the storage, or
        # a difference between ranks.
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
    if (failure.exception_type or "").endswith(_OUT_OF_GPU_MEMORY):
        lines.append("The GPU is out of memory: use a smaller batch_size, or a larger GPU.")
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
    # All messages are equal, except a longer one that also names the reason.
    messages = [o.failure.message for o in ordered if o.failure and o.failure.kind == STALLED]
    return StalledError("\n\n".join([max(messages, key=len), *parts]), stacks=stacks)


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
    if len(lines) > _MAX_OTHERS:
        lines = [*lines[:_MAX_OTHERS], f"  and {len(lines) - _MAX_OTHERS:,} more"]
    return ["", "The other ranks:", *lines] if lines else []


def _who(outcome: RankOutcome) -> str:
    return f"rank {outcome.rank}" if outcome.rank >= 0 else f"slot {outcome.slot}"
