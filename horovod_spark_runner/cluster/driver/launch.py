"""The driver's part of a run: check, start, watch, and say how it ended."""

from __future__ import annotations

import contextlib
import pickle
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ... import errors
from ...config.launch import LaunchSettings
from ...errors import (
    EnvironmentProblem,
    InvalidInputError,
    LaunchError,
    RunCancelledError,
)
from ...frameworks import FRAMEWORKS
from ...serialize import dump_call
from ..protocol.messages import Notice, Queued, by_driver
from ..protocol.network import LOOPBACK, route_to
from ..protocol.outcome import Failure, RankOutcome, failure_error, is_telling, root_cause
from ..protocol.processes import SignalWatch
from ..protocol.rendezvous import ORPHAN_GRACE, SlotPlan
from ..protocol.topology import RankPlacement, in_words
from ..slot.barrier import SlotTask, decode_outcomes
from ..spark.capacity import Allotment, check_slots
from ..spark.session import (
    application_of,
    check_encryption,
    check_memory_limit,
    connect_host,
    runs_on_this_machine,
    use_own_python,
)
from ..spark.tagged_job import TaggedJob
from ..spark.tasks import collect_from_tasks
from .control_server import ControlServer
from .slot_queue import Claim, Turns
from .talk import Observer, Talk
from .watch import RunWatch, Verdict

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkJob(TaggedJob[list[bytes]]):
    """One barrier stage.

    Args:
        spark: session to run in.
        plan: what the slots are told.
        profile: Spark's ``ResourceProfile`` of the stage, if not the session's own settings.
    """

    def __init__(self, spark: SparkSession, plan: SlotPlan, profile: object = None) -> None:
        def collect() -> list[bytes]:
            task = SlotTask(plan)
            return collect_from_tasks(spark, plan.slots, task, barrier=True, profile=profile)

        description = f"Horovod on {plan.workers} ranks ({plan.run_id})"
        super().__init__(spark, f"horovod-{plan.run_id}", description, collect)

    def outcomes(self) -> list[RankOutcome]:
        """Return what the slots returned; empty while the job runs or if it failed."""
        return decode_outcomes(self.result or ())


# How long the slots may take to end by themselves before Spark is told to kill them.
STOP_GRACE = 5.0
# How long what slots have said before they ended may take to be read.
LAST_WORDS = 1.0
# A larger call is fetched by the slots directly: above 1 MiB Spark would write it, and with it the
# run's key, to a file.
MAX_PLAN_PAYLOAD = 512 * 1024

# Spark's setting for the port at which slots reach the driver.
CONTROL_PORT_SETTING = "spark.horovod.controlPort"
# The driver loads none of them for an exception's sake.
_NOT_LOADED = {"horovod", *(name for known in FRAMEWORKS.values() for name in known.packages)}

_turns = Turns()


class Job(Protocol):
    """Runs the slots to their end, on a thread of its own; see `SparkJob`."""

    error: BaseException | None

    @property
    def cancelled_elsewhere(self) -> bool: ...

    @property
    def failed_by_itself(self) -> bool: ...

    @property
    def session_stopped(self) -> bool: ...

    def start(self, on_end: Callable[[], object]) -> None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...

    def cancel(self) -> None: ...

    def outcomes(self) -> list[RankOutcome]: ...


@dataclass(frozen=True)
class RunResult:
    """What a run of a function on all ranks gave.

    Attributes:
        results: the function's return values, by rank.
        placement: where each rank ran, by rank.
        timings: seconds per phase, one after the other: ``check`` (of the call and Spark's slots),
            ``slots`` (the wait for those that other runs of this process hold), ``tasks`` (Spark
            starts them),
            ``rendezvous`` (they find each other), ``start`` (of all ranks), ``function``,
            ``results`` (their way back), in all ``total``. Of ``start``, and partly at the same
            time, for the slowest rank: ``mpirun`` (until the rank is lent its MPI environment),
            ``import`` (of the frameworks, which begins with the tasks) and ``mpi_init``.
            ``all_gather`` is there if the tasks had to find each other through Spark: how long the
            slowest slot waited there.
        ready_bytes: memory that the largest of the executors' ready processes held when the ranks
            became copies of it, pages shared with others included; 0 where there was none.
    """

    results: tuple[Any, ...]
    placement: tuple[RankPlacement, ...]
    timings: dict[str, float] = field(default_factory=dict)
    ready_bytes: int = 0

    @property
    def result(self) -> Any:
        """Return value of rank 0."""
        return self.results[0]


def launch(
    spark: SparkSession,
    options: LaunchSettings,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    observer: Observer,
    modules: Sequence[str] | None = None,
    workers: int | None = None,
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
        workers: ranks; by default as many as Spark can run at once.

    Raises:
        InvalidInputError: the function or its arguments cannot be pickled.
        NotEnoughSlotsError: Spark cannot run that many tasks at once.
        RankFailedError: a rank raised, exited or was killed.
        LaunchError: the ranks could not be started, or Spark lost them.
    """
    began = time.monotonic()
    payload, mentioned = dump_call(function, args, kwargs)
    check_encryption(spark, options)
    check_memory_limit(spark)
    allotment = check_slots(spark, options, workers)
    bind, host, port = control_address(spark)
    claim = _claim(spark, allotment, one_at_a_time=bool(port))  # a port has room for one run
    asked = time.monotonic()
    with (
        contextlib.closing(observer),
        _turns.turn(claim, lambda: _say(observer, Queued()), observer.look) as waited,
    ):
        came = time.monotonic()
        if workers is None:
            _say(observer, Notice(allotment.describe(), warn=False))
        if waited:  # executors may have been lost meanwhile
            check_slots(spark, options, allotment.workers)
        use_own_python(spark)
        key = secrets.token_bytes(32)
        slots = allotment.slots
        with ControlServer(bind, key, payload, host=host, port=port, slots=slots) as server:
            plan = SlotPlan(
                run_id=secrets.token_hex(4),
                key=key,
                driver=server.address,
                options=options,
                workers=allotment.workers,
                slots=slots,
                payload=payload if len(payload) <= MAX_PLAN_PAYLOAD else None,
                payload_bytes=len(payload),
                modules=tuple(mentioned if modules is None else modules),
            )
            _say(observer, Notice(f"starting {in_words(plan.workers)}", warn=False))
            checked = time.monotonic()
            talk = Talk(plan, server, observer)
            outcomes = run_job(SparkJob(spark, plan, allotment.shape.profile), talk)
            results = tuple(_unpickle_result(outcome, server) for outcome in outcomes)
    ended = time.monotonic()
    waited_for_slots = came - asked
    phases = {"check": checked - began - waited_for_slots, "slots": waited_for_slots}
    return RunResult(
        results=results,
        placement=tuple(o.placement for o in outcomes if o.placement is not None),
        timings={
            **phases,
            **talk.phases.seconds(ended),
            **_slowest(outcomes),
            "total": ended - began,
        },
        ready_bytes=max(outcome.ready_bytes for outcome in outcomes),
    )


def _claim(spark: SparkSession, allotment: Allotment, *, one_at_a_time: bool) -> Claim:
    """Return what a run claims of the slots of its application."""
    total = None if one_at_a_time else allotment.total
    return Claim(application_of(spark), allotment.shape.demand, allotment.slots, total)


def _say(observer: Observer, message: Queued | Notice) -> None:
    observer.on_message(by_driver(message))


def control_address(spark: SparkSession) -> tuple[str, str, int]:
    """Return where the driver listens for its slots, and what they are told: bind, host, port.

    The host is the one executors reach the driver at anyway. Behind a translation of addresses it
    is not one of this machine's own: ``spark.driver.bindAddress`` is. The port is chosen by the
    system unless the setting ``spark.horovod.controlPort`` pins it, for firewalls.

    Raises:
        InvalidInputError: the port is no number of one.
    """
    setting = str(spark.conf.get(CONTROL_PORT_SETTING, "0"))
    if not setting.isdecimal() or int(setting) > 65535:
        raise InvalidInputError(f"{CONTROL_PORT_SETTING} must be a port, got {setting!r}")
    server = connect_host(spark)
    if server is not None:
        host = bind = route_to(server) or LOOPBACK
    elif runs_on_this_machine(spark):
        host = bind = LOOPBACK
    else:
        host = str(spark.conf.get("spark.driver.host", LOOPBACK)).strip("[]")
        bind = str(spark.conf.get("spark.driver.bindAddress", host)).strip("[]")
    return bind, host, int(setting)


def run_job(job: Job, talk: Talk) -> list[RankOutcome]:
    """Run the job to its end and return all ranks' outcomes, in rank order; raise if one failed.

    Raises:
        KeyboardInterrupt: Ctrl-C; at the first one the ranks save and end, at a second one at once.
    """
    job.start(talk.wake)
    with SignalWatch(signal.SIGINT, once=True) as interrupt:
        try:
            while job.is_alive() and talk.go_on() is not Verdict.GIVE_UP:
                talk.let_look()
                if interrupt.requested:
                    talk.preempt()
        finally:
            _end(job, talk)
            talk.close()
        if interrupt.requested:
            raise KeyboardInterrupt
    outcomes = job.outcomes()
    if job.error is not None or root_cause(outcomes) is not None or not outcomes:
        raise _explain(job, outcomes, talk.watch)
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def _end(job: Job, talk: Talk) -> None:
    if not job.is_alive():
        job.join(STOP_GRACE)
        if job.failed_by_itself:
            talk.see_off(ORPHAN_GRACE)
        else:
            talk.hear_out(LAST_WORDS)
        return
    talk.stop()
    job.join(STOP_GRACE)
    if job.is_alive():
        job.cancel()
        job.join(STOP_GRACE)


def _explain(job: Job, outcomes: list[RankOutcome], watch: RunWatch) -> Exception:
    if job.session_stopped:
        stopped = RunCancelledError("the Spark session was stopped during the run")
        stopped.__cause__ = job.error
        return stopped
    if job.cancelled_elsewhere:
        explained: Exception = RunCancelledError(
            "the run was cancelled through Spark (its UI, a job tag or group)"
        )
        explained.__cause__ = job.error
        return explained
    # What the slots told directly, and what their silence told, fills in for outcomes that did not
    # come through Spark or say only that the driver ended the run.
    known = outcomes
    if not is_telling(outcomes):
        told = [failure for failure in watch.failures if is_telling([failure])]
        slots = {failure.slot for failure in told}
        known = [*told, *(o for o in outcomes if o.slot not in slots)] or watch.failures
    if not is_telling(known):
        if job.failed_by_itself:
            explained = explain_spark_error(job.error)
            explained.__cause__ = job.error
            return explained
        if watch.missing_slots:
            return watch.not_started()
    cause = root_cause(known, watch.arrived)
    if cause is None or cause.failure is None:
        return LaunchError(f"the run ended without a result: {job.error}")
    return failure_error(cause, known, unpickle_exception(cause.failure))


def unpickle_exception(failure: Failure) -> BaseException | None:
    """Return the exception itself; ``None`` if it cannot be had here, or only with a framework."""
    module, _, name = (failure.exception_type or "").rpartition(".")
    if failure.exception is None:
        return _own_exception(name, failure.message) if module == errors.__name__ else None
    package = module.partition(".")[0]
    if package in _NOT_LOADED and package not in sys.modules:
        return None
    try:
        exception = pickle.loads(failure.exception)
    except Exception:  # its class may be known to the ranks only; its text and traceback are here
        return None
    return exception if isinstance(exception, BaseException) else None


def _own_exception(name: str, message: str) -> BaseException | None:
    """Return an exception of ours by its name: its slot could tell it only, not send it."""
    cls = getattr(errors, name, None)
    try:
        made = cls(message.removeprefix(f"{name}: ")) if cls is not None else None
    except TypeError:  # it says more than its text
        return None
    return made if isinstance(made, BaseException) else None


def _unpickle_result(outcome: RankOutcome, server: ControlServer) -> Any:
    try:
        return _load_result(outcome, server)
    except LaunchError:
        raise
    except Exception as error:
        raise LaunchError(
            f"all ranks have finished, but what rank {outcome.rank} on {outcome.host} returned "
            f"cannot be loaded on the driver ({type(error).__name__}: {error}); return plain "
            "values, or install on the driver what the ranks have"
        ) from error


def _load_result(outcome: RankOutcome, server: ControlServer) -> Any:
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
    # The first lines name the cause; Java's stack, below, is kept in __cause__. What the call was
    # named on its way to Java is not worth a line.
    said = re.sub(r"^An error occurred while calling \S+\s*:\s*", "", text)
    lines = [line for line in said.splitlines() if not line.lstrip().startswith("at ")]
    # Of a barrier stage, the first line tells only that a task has ended.
    lost = next((line.strip() for line in lines if line.startswith("ExecutorLostFailure")), None)
    lines = lines if lost is None else [lost, *lines]
    return LaunchError("Spark ended the run: " + "\n".join(lines[:20]).strip())


def _slowest(outcomes: Sequence[RankOutcome]) -> dict[str, float]:
    timings: dict[str, float] = {}
    for outcome in outcomes:
        for phase, seconds in outcome.timings.items():
            timings[phase] = max(seconds, timings.get(phase, 0.0))
    return timings
