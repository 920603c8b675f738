"""The driver's part of a run: check, start, watch, and say how it ended."""

from __future__ import annotations

import pickle
import queue
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..config import LaunchOptions
from ..errors import EnvironmentProblem, LaunchError
from ..serialize import dump_call
from ..session import runs_on_this_machine, use_own_python
from .capacity import check_slots
from .channel import Message
from .control_server import ControlServer
from .outcome import LAUNCH, Failure, RankOutcome, failure_error, root_cause
from .slot import SlotPlan
from .spark_job import SparkJob
from .topology import RankPlacement

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# How long the slots may take to end by themselves before Spark is told to kill them.
STOP_GRACE = 5.0
# Once a rank has failed, mpirun ends the others within moments; the outcomes come after that.
FAILED_GRACE = 15.0


class Observer(Protocol):
    """Shows a run to people while it goes on."""

    def on_message(self, message: Message) -> None:
        """Take one message of a slot."""

    def close(self) -> None:
        """The run has ended."""


@dataclass(frozen=True)
class RunResult:
    """What a run of a function on all ranks gave.

    Attributes:
        results: the function's return values, by rank.
        placement: where each rank ran, by rank.
        timings: seconds per phase: ``check`` (slots), ``rendezvous`` (Spark's tasks find each
            other), ``mpirun`` (until the ranks are lent their MPI environment), ``import`` (of
            the frameworks, beside the two before), ``mpi_init``, ``total``. Of the slowest rank.
    """

    results: tuple[Any, ...]
    placement: tuple[RankPlacement, ...]
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def result(self) -> Any:
        """Return value of rank 0."""
        return self.results[0]


def launch(
    spark: SparkSession,
    options: LaunchOptions,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    observer: Observer,
    modules: Sequence[str] | None = None,
) -> RunResult:
    """Run ``function`` on every rank of a new MPI world and return what it returned.

    Args:
        spark: session to run in.
        options: how to start the ranks.
        function: what to run.
        args: its positional arguments.
        kwargs: its keyword arguments.
        observer: is shown what the ranks report meanwhile.
        modules: modules to import while the ranks find each other; by default, the frameworks
            that the function's code mentions.

    Raises:
        InvalidInputError: the function or its arguments cannot be pickled.
        NotEnoughSlotsError: Spark cannot run that many tasks at once.
        RankFailedError: a rank raised, exited or was killed.
        LaunchError: the ranks could not be started, or Spark lost them.
    """
    began = time.monotonic()
    payload, mentioned = dump_call(function, args, kwargs)
    check_slots(spark, options)
    use_own_python(spark)
    checked = time.monotonic()
    key = secrets.token_bytes(32)
    with ControlServer(control_host(spark), key) as server:
        plan = SlotPlan(
            run_id=secrets.token_hex(4),
            key=key,
            driver=server.address,
            options=options,
            payload=payload,
            modules=tuple(mentioned if modules is None else modules),
        )
        job = SparkJob(spark, plan)
        job.start()
        failures: dict[int, RankOutcome] = {}
        try:
            _watch(job, server, observer, failures)
        finally:
            _end(job, server)
            observer.close()
    outcomes = job.outcomes()
    if job.error is not None or root_cause(outcomes) is not None:
        raise _explain(outcomes, failures, job.error)
    ordered = sorted(outcomes, key=lambda outcome: outcome.rank)
    timings = {"check": checked - began, **_slowest(ordered), "total": time.monotonic() - began}
    return RunResult(
        results=tuple(pickle.loads(outcome.result or b"") for outcome in ordered),
        placement=tuple(o.placement for o in ordered if o.placement is not None),
        timings=timings,
    )


def control_host(spark: SparkSession) -> str:
    """Return the address the driver listens on for its slots: where executors reach it anyway."""
    if runs_on_this_machine(spark):
        return "127.0.0.1"
    return str(spark.conf.get("spark.driver.host", "127.0.0.1"))


def _watch(
    job: SparkJob, server: ControlServer, observer: Observer, failures: dict[int, RankOutcome]
) -> None:
    give_up: float | None = None
    while job.is_alive():
        try:
            message = server.events.get(timeout=0.1)
        except queue.Empty:
            pass
        else:
            observer.on_message(message)
            if message.get("type") == "failed" and "slot" in message:
                failures.setdefault(int(message["slot"]), _outcome_of(message))
                give_up = give_up or time.monotonic() + FAILED_GRACE
        if give_up is not None and time.monotonic() > give_up:
            return
    while not server.events.empty():
        observer.on_message(server.events.get())


def _outcome_of(message: Message) -> RankOutcome:
    failure = Failure(
        str(message.get("kind", LAUNCH)), time.time(), str(message.get("message", ""))
    )
    return RankOutcome(int(message["slot"]), str(message.get("host", "?")), failure=failure)


def _end(job: SparkJob, server: ControlServer) -> None:
    if not job.is_alive():
        return
    server.broadcast({"type": "stop", "reason": "ended by the driver"})
    job.join(STOP_GRACE)
    if job.is_alive():
        job.cancel()
        job.join(STOP_GRACE)


def _explain(
    outcomes: list[RankOutcome], failures: dict[int, RankOutcome], error: BaseException | None
) -> Exception:
    known = outcomes or list(failures.values())
    cause = root_cause(known)
    if cause is None:
        explained = explain_spark_error(error)
        explained.__cause__ = error
        return explained
    assert cause.failure is not None
    exception = None
    if cause.failure.exception is not None:
        exception = pickle.loads(cause.failure.exception)
    return failure_error(cause, known, exception)


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
    # The first lines name the cause; Java's stack, below, is kept in __cause__.
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("at ")]
    return LaunchError("Spark ended the run: " + "\n".join(lines[:20]).strip())


def _slowest(outcomes: Sequence[RankOutcome]) -> dict[str, float]:
    timings: dict[str, float] = {}
    for outcome in outcomes:
        for phase, seconds in outcome.timings.items():
            timings[phase] = max(seconds, timings.get(phase, 0.0))
    return timings
