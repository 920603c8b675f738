"""Result of a run: return values and time breakdown, or the error that explains its failure."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ... import errors
from ...errors import EnvironmentProblem, LaunchError
from ...frameworks import FRAMEWORKS
from ..protocol.messages import Envelope, Finished, Hello, Placed, Started
from ..protocol.outcome import Failure, RankOutcome
from ..protocol.topology import RankPlacement
from .control_server import ControlServer

# In order. Each phase ends when the last of its slots or ranks has reported its end.
TASKS, RENDEZVOUS, START, FUNCTION, RESULTS = PHASES = (
    "tasks",
    "rendezvous",
    "start",
    "function",
    "results",
)
# The driver does not import a framework to unpickle an exception.
_NOT_LOADED = {
    "horovod",
    *(name for framework in FRAMEWORKS.values() for name in framework.packages),
}


@dataclass(frozen=True)
class RunResult:
    """Return values of a function that ran on all ranks.

    Attributes:
        results: the function's return values, by rank.
        placement: where each rank ran, by rank.
        timings: seconds per phase, one after the other: ``check`` (of the call and Spark's slots),
            ``slots`` (the wait for those that other runs of this process hold), ``tasks`` (Spark
            starts them), ``rendezvous`` (they find each other), ``start`` (of all ranks),
            ``function``, ``results`` (their way back), in all ``total``. Of ``start``, and partly
            at the same time, for the slowest rank: ``mpirun`` (until the rank is lent its MPI
            environment), ``import`` (of the frameworks, which begins with the tasks) and
            ``mpi_init``. ``all_gather`` is there if the tasks had to find each other through Spark:
            how long the slowest slot waited there.
        ready_bytes: memory of the largest prefork process of the executors when it forked the
            ranks, pages shared with others included; 0 where there was none.
    """

    results: tuple[Any, ...]
    placement: tuple[RankPlacement, ...]
    timings: dict[str, float] = field(default_factory=dict)
    ready_bytes: int = 0

    @property
    def result(self) -> Any:
        """Return value of rank 0."""
        return self.results[0]


class PhaseTimer:
    """Time breakdown of a launch, from the messages the driver receives. Pure.

    The phases follow each other without gaps, so together they take all of the run's time.

    Args:
        slots: tasks of the run.
        ranks: ranks of the run.
        now: when its job starts, by any steady clock, as in all methods.
    """

    def __init__(self, slots: int, ranks: int, now: float) -> None:
        self._expected: dict[type, tuple[str, int]] = {
            Hello: (TASKS, slots),
            Placed: (RENDEZVOUS, 1),
            Started: (START, ranks),
            Finished: (FUNCTION, ranks),
        }
        self._began = now
        self._senders: dict[type, set[tuple[int, int]]] = {}
        self._ends: dict[str, float] = {}

    def take(self, envelope: Envelope, now: float) -> None:
        """Take one message."""
        kind = type(envelope.message)
        if kind not in self._expected:
            return
        phase, count = self._expected[kind]
        senders = self._senders.setdefault(kind, set())
        senders.add((envelope.slot, envelope.rank))
        if len(senders) == count:
            self._ends.setdefault(phase, now)

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds of each phase up to ``now``; a phase without an end is left out."""
        seconds, before = {}, self._began
        for phase in PHASES:
            end = now if phase == RESULTS else self._ends.get(phase)
            if end is not None:
                seconds[phase], before = max(0.0, end - before), max(before, end)
        return seconds


def slowest_timings(outcomes: Sequence[RankOutcome]) -> dict[str, float]:
    """Return the seconds that the slowest rank spent in each phase of its start."""
    timings: dict[str, float] = {}
    for outcome in outcomes:
        for phase, seconds in outcome.timings.items():
            timings[phase] = max(seconds, timings.get(phase, 0.0))
    return timings


def load_result(outcome: RankOutcome, server: ControlServer) -> object:
    """Return the value that a rank returned.

    Raises:
        LaunchError: it did not arrive, or cannot be unpickled here.
        EnvironmentProblem: this machine could not keep it.
    """
    try:
        return _unpickle_result(outcome, server)
    except (LaunchError, EnvironmentProblem):
        raise
    except Exception as error:
        raise LaunchError(
            f"all ranks have finished, but what rank {outcome.rank} on {outcome.host} returned "
            f"cannot be loaded on the driver ({type(error).__name__}: {error}); return plain "
            "values, or install on the driver what the ranks have"
        ) from error


def _unpickle_result(outcome: RankOutcome, server: ControlServer) -> object:
    if not outcome.result_bytes:
        return pickle.loads(outcome.result or b"")
    stream = server.result(outcome.rank)
    if stream is None:
        raise LaunchError(
            f"the result of rank {outcome.rank}, {outcome.result_bytes:,} bytes, did not arrive "
            f"from {outcome.host}"
        )
    with stream:
        return pickle.load(stream)


def unpickle_exception(failure: Failure) -> BaseException | None:
    """Return a rank's exception; ``None`` if it cannot be loaded, or only with a framework."""
    module, _, name = (failure.exception_type or "").rpartition(".")
    if failure.exception is None:
        return _rebuild_error(name, failure.message) if module == errors.__name__ else None
    package = module.partition(".")[0]
    if package in _NOT_LOADED and package not in sys.modules:
        return None
    try:
        exception = pickle.loads(failure.exception)
    except Exception:  # its class may exist on the ranks only; its text and traceback are here
        return None
    return exception if isinstance(exception, BaseException) else None


def _rebuild_error(name: str, message: str) -> BaseException | None:
    """Return an exception of this package from its name and text: a slot sends no pickled one."""
    cls = getattr(errors, name, None)
    try:
        error = cls(message.removeprefix(f"{name}: ")) if cls is not None else None
    except TypeError:  # its constructor needs more than the text
        return None
    return error if isinstance(error, BaseException) else None


def explain_spark_error(error: BaseException | None) -> Exception:
    """Return the exception for a job that Spark ended before any rank had an outcome."""
    text = str(error)
    missing = re.search(r"ModuleNotFoundError: No module named '([^']+)'", text)
    if missing:
        return EnvironmentProblem(
            f"the Python of Spark's executors has no module {missing[1]!r}; install the same "
            "packages there, or name the right interpreter in PYSPARK_PYTHON (or "
            "spark.pyspark.python) before the Spark session is made"
        )
    if isinstance(error, ConnectionError) or type(error).__name__ == "Py4JNetworkError":
        return LaunchError(
            f"the driver's JVM has ended, and with it the Spark session ({text}): its own log, or "
            "that of YARN's application master, says why"
        )
    # The first lines name the cause; __cause__ has Java's stack, below. The name of the call on
    # its way to Java is not worth a line.
    cause = re.sub(r"^An error occurred while calling \S+\s*:\s*", "", text)
    lines = [line for line in cause.splitlines() if not line.lstrip().startswith("at ")]
    # Of a barrier stage, the first line reports only that a task has ended.
    if lost := describe_executor_loss(error):
        lines = [lost, *lines]
    return LaunchError("Spark ended the run: " + "\n".join(lines[:20]).strip())


def describe_executor_loss(error: BaseException | None) -> str:
    """Return Spark's reason for the loss of an executor in one line; empty if it gives none."""
    lost = re.compile(r"^ExecutorLostFailure.*?(?=^\s*at |^Driver stacktrace|\Z)", re.M | re.S)
    found = lost.search(str(error))
    return " ".join(found[0].split()) if found else ""
