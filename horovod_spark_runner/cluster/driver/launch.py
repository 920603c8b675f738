"""Launch of a run: from a function to its return value on every rank. Read `launch` first."""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ...config.launch import LaunchSettings
from ...errors import InvalidInputError, LaunchError, RunCancelledError
from ...serialize import dump_call
from ..protocol.command import worker_environment
from ..protocol.messages import Notice, Queued, from_driver
from ..protocol.network import LOOPBACK, route_to
from ..protocol.outcome import (
    DIED,
    LOST,
    RankOutcome,
    decode_outcomes,
    failure_error,
    has_root_cause,
    root_cause,
)
from ..protocol.processes import SignalWatch, environment_at_start
from ..protocol.rendezvous import ORPHAN_GRACE, SlotPlan
from ..protocol.topology import format_ranks
from ..slot.slot import SlotTask
from ..slot.worker_pool import request_import
from ..slot.workspace import Workspace
from ..spark.capacity import Allotment, check_slots
from ..spark.jobs import TaggedJob
from ..spark.session import (
    active_session,
    application_of,
    connect_host,
    described,
    inheriting_thread,
    mute_console_progress,
    runs_on_this_machine,
    use_driver_python,
)
from ..spark.tasks import collect_from_tasks
from .control_server import ControlServer
from .coordinator import Coordinator, Observer
from .result import (
    RunResult,
    describe_executor_loss,
    explain_spark_error,
    load_result,
    slowest_timings,
    unpickle_exception,
)
from .slot_queue import SlotDemand, SlotQueue
from .watch import RunWatch, Verdict

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

# How long the slots may take to end by themselves before Spark kills them.
_STOP_GRACE = 5.0
# How long the last messages of slots that have ended may take to arrive.
_LAST_MESSAGES_SECONDS = 1.0
# A larger call is fetched by the slots directly: above 1 MiB Spark would write it, and with it the
# run's key, to a file.
_MAX_PLAN_PAYLOAD = 512 * 1024
# Spark's setting for the port at which slots reach the driver.
_CONTROL_PORT_SETTING = "spark.horovod.controlPort"

_slot_queue = SlotQueue()


def launch(
    spark: SparkSession,
    options: LaunchSettings,
    function: Callable[..., Any],
    args: Sequence[object],
    kwargs: dict[str, object],
    observer: Observer,
    modules: Sequence[str] | None = None,
    workers: int | None = None,
) -> RunResult:
    """Run ``function`` on every rank of a new MPI world and return its values.

    In order: check the call and count the slots, queue for them, listen, run the Spark job whose
    tasks are the slots (`run_job`), load the results. `_SparkLauncher.warm_up` may have started the
    imports on the executors before, while the data were prepared.

    Args:
        spark: session to run in.
        options: how to start the ranks.
        function: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        observer: is shown what the ranks report meanwhile.
        modules: modules to import while the ranks find each other; by default, for a user's
            function, the frameworks that its code mentions.
        workers: ranks; by default as many as Spark can run at once.

    Raises:
        InvalidInputError: the function or its arguments cannot be pickled.
        NotEnoughSlotsError: Spark cannot run that many tasks at once.
        RankFailedError: a rank raised, exited or was killed.
        LaunchError: the ranks could not be started, or Spark lost them.
    """
    began = time.monotonic()
    # Check: pickle the call, check the session, count the slots.
    payload, mentioned = dump_call(function, args, kwargs)
    allotment = check_slots(spark, options, workers)
    bind, host, port = _control_address(spark)
    queued = time.monotonic()

    # Queue for slots that other runs of this process hold; a fixed port has room for one run.
    with (
        contextlib.closing(observer),
        mute_console_progress(spark if options.stream_logs else None),
        _hold_slots(spark, allotment, port, observer) as waited,
    ):
        admitted = time.monotonic()
        if workers is None:
            _show(observer, Notice(allotment.describe(), warn=False))
        if waited:  # executors may have been lost meanwhile
            check_slots(spark, options, allotment.workers)
        use_driver_python(spark)

        # Listen. The key reaches the slots inside their plan, so no stranger can connect.
        key, slots = secrets.token_bytes(32), allotment.slots
        with ControlServer(bind, key, payload, host=host, port=port, slots=slots) as server:
            plan = SlotPlan(
                run_id=secrets.token_hex(4),
                key=key,
                driver=server.address,
                options=options,
                workers=allotment.workers,
                slots=slots,
                payload=payload if len(payload) <= _MAX_PLAN_PAYLOAD else None,
                payload_bytes=len(payload),
                modules=tuple(mentioned if modules is None else modules),
                torch_variables=modules is None,
                side_process=getattr(function, "needs_side_process", False),
            )
            _show(observer, Notice(f"starting {format_ranks(plan.workers)}", warn=False))
            listening = time.monotonic()

            # Run the slots to their end; the coordinator answers them.
            coordinator = Coordinator(plan, server, observer)
            job = _SparkJob(spark, plan, allotment.shape.profile)
            outcomes = run_job(job, coordinator)

            # Load the results before the server closes: large ones have come to it directly.
            results = tuple(load_result(outcome, server) for outcome in outcomes)
    ended = time.monotonic()
    in_queue = admitted - queued
    return RunResult(
        results=results,
        placement=tuple(o.placement for o in outcomes if o.placement is not None),
        timings={
            "check": listening - began - in_queue,
            "slots": in_queue,
            **coordinator.phases.seconds(ended),
            **slowest_timings(outcomes),
            "total": ended - began,
        },
        ready_bytes=max(outcome.ready_bytes for outcome in outcomes),
    )


def run_job(job: _Job, coordinator: Coordinator) -> list[RankOutcome]:
    """Run the slots to their end and return all ranks' outcomes, by rank.

    Raises:
        KeyboardInterrupt: Ctrl-C; at the first one the ranks save and end, at a second one at once.
        RankFailedError: a rank failed; and other errors, see `launch`.
    """
    with (
        contextlib.closing(coordinator),
        SignalWatch(signal.SIGINT, once=True) as interrupt,
    ):
        # Start the Spark job. Each task is a slot: it starts its workers, which import the
        # frameworks at once, and reports its host and GPUs (`Slot.run` in ``cluster/slot/slot.py``)
        job.start(coordinator.wake)
        try:
            # Gather the reports; the last one makes the world, and each slot is sent its ranks.
            # Slot 0 starts mpirun, which makes an MPI world of the workers: they call the function.
            # All this happens inside of `step`, as messages arrive. Wait for the end.
            while job.is_alive():
                try:
                    if coordinator.step() is Verdict.GIVE_UP:
                        break
                    coordinator.poll_observer()
                except KeyboardInterrupt:  # by another handler, such as a notebook's
                    if interrupt.requested:
                        raise
                    interrupt.requested = True
                if interrupt.requested:
                    coordinator.preempt_ranks()
        finally:
            # Clean up, however the wait ended: slots end their processes and remove their files.
            _end_job(job, coordinator)
        if interrupt.requested:
            raise KeyboardInterrupt
    return _collect_outcomes(job, coordinator.watch)


class _Job(Protocol):
    """Job that runs the slots to their end, on its own thread; see `_SparkJob`."""

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


class _SparkJob(TaggedJob[list[bytes]]):
    """Spark job of one barrier stage, whose tasks are the slots.

    Args:
        spark: session to run in.
        plan: the slots' plan.
        profile: Spark's ``ResourceProfile`` of the stage, if not the session's own settings.
    """

    def __init__(self, spark: SparkSession, plan: SlotPlan, profile: object = None) -> None:
        def collect() -> list[bytes]:
            task = SlotTask(plan)
            return collect_from_tasks(spark, plan.slots, task, barrier=True, profile=profile)

        description = f"Horovod on {plan.workers} ranks ({plan.run_id})"
        super().__init__(spark, f"horovod-{plan.run_id}", description, collect)

    def outcomes(self) -> list[RankOutcome]:
        """Return the outcomes that the slots returned; empty while the job runs or if it failed."""
        return decode_outcomes(self.result or ())


def _control_address(spark: SparkSession) -> tuple[str, str, int]:
    """Return the driver's address for its slots: where to bind, the host they connect to, the port.

    The host is the one executors reach the driver at anyway. Behind address translation (NAT) it is
    not an address of this machine: ``spark.driver.bindAddress`` is. The port is chosen by the
    system unless the setting ``spark.horovod.controlPort`` fixes it, for firewalls.

    Raises:
        InvalidInputError: the port is not a port number.
    """
    setting = str(spark.conf.get(_CONTROL_PORT_SETTING, "0"))
    if not setting.isdecimal() or int(setting) > 65535:
        raise InvalidInputError(f"{_CONTROL_PORT_SETTING} must be a port, got {setting!r}")
    server = connect_host(spark)
    if server is not None:
        host = bind = route_to(server) or LOOPBACK
    elif runs_on_this_machine(spark):
        host = bind = LOOPBACK
    else:
        host = str(spark.conf.get("spark.driver.host", LOOPBACK)).strip("[]")
        bind = str(spark.conf.get("spark.driver.bindAddress", host)).strip("[]")
    return bind, host, int(setting)


def _hold_slots(
    spark: SparkSession, allotment: Allotment, port: int, observer: Observer
) -> contextlib.AbstractContextManager[bool]:
    """Wait in the queue for the run's slots and hold them; yields whether it had to wait."""
    total = None if port else allotment.total
    demand = SlotDemand(application_of(spark), allotment.shape.demand, allotment.slots, total)
    return _slot_queue.hold(demand, lambda: _show(observer, Queued()), observer.poll)


def _show(observer: Observer, message: Queued | Notice) -> None:
    observer.on_message(from_driver(message))


def _end_job(job: _Job, coordinator: Coordinator) -> None:
    """End the Spark job, the gentlest way first."""
    if not job.is_alive():
        job.join(_STOP_GRACE)
        coordinator.await_disconnects(_LAST_MESSAGES_SECONDS)
        if job.failed_by_itself:
            # Slots that are shutting down may still be saving: their connections show who was lost.
            coordinator.await_leaving_slots(ORPHAN_GRACE)
        return
    coordinator.stop_slots()
    try:
        job.join(_STOP_GRACE)
    finally:  # also after Ctrl-C: a job that Spark has not begun would hold slots later
        if job.is_alive():
            job.cancel()
            job.join(_STOP_GRACE)


def _collect_outcomes(job: _Job, watch: RunWatch) -> list[RankOutcome]:
    """Return the ranks' outcomes, by rank; raise the error of a failed run."""
    outcomes = job.outcomes()
    if job.error is not None or root_cause(outcomes) is not None or not outcomes:
        raise _explain_failure(job, outcomes, watch)
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def _explain_failure(job: _Job, outcomes: list[RankOutcome], watch: RunWatch) -> Exception:
    """Return the error that explains a failed run."""
    if job.session_stopped:
        stopped = RunCancelledError("the Spark session was stopped during the run")
        stopped.__cause__ = job.error
        return stopped
    if job.cancelled_elsewhere:
        cancelled = RunCancelledError(
            "the run was cancelled through Spark (its UI, a job tag or group)"
        )
        cancelled.__cause__ = job.error
        return cancelled
    # The slots' own messages, and their silence, replace outcomes that did not come through Spark
    # or report only that the driver ended the run.
    evidence = outcomes
    if not has_root_cause(outcomes):
        reported = [failure for failure in watch.failures if has_root_cause([failure])]
        slots = {failure.slot for failure in reported}
        evidence = [*reported, *(o for o in outcomes if o.slot not in slots)] or watch.failures
    if not has_root_cause(evidence):
        if job.failed_by_itself:
            explained = explain_spark_error(job.error)
            explained.__cause__ = job.error
            return explained
        if watch.missing_slots:
            return watch.not_started()
    cause = root_cause(evidence, [(failure.slot, failure.rank) for failure in watch.failures])
    failure = None if cause is None else cause.failure
    if cause is None or failure is None:
        return LaunchError(f"the run ended without a result: {job.error}")
    if failure.kind in (DIED, LOST) and (reason := describe_executor_loss(job.error)):
        failure = replace(failure, message=f"{failure.message}. Spark: {reason}")
        cause = replace(cause, failure=failure)
    return failure_error(cause, evidence, unpickle_exception(failure))


class Launcher(Protocol):
    """Runs a function on ranks."""

    def warm_up(
        self,
        spark: SparkSession,
        options: LaunchSettings,
        allotment: Allotment,
        modules: Sequence[str],
    ) -> None:
        """Prepare the ranks of a later `launch`; returns at once."""
        ...

    def await_slots(
        self, spark: SparkSession | None, options: LaunchSettings, workers: int
    ) -> None:
        """Wait for the executors that replace lost ones.

        Raises:
            NotEnoughSlotsError: there are too few for ``workers`` ranks.
        """
        ...

    def launch(
        self,
        spark: SparkSession | None,
        options: LaunchSettings,
        function: Callable[..., Any],
        args: Sequence[object],
        kwargs: dict[str, object],
        observer: Observer,
        modules: Sequence[str] | None = None,
        workers: int | None = None,
    ) -> RunResult:
        """Run ``function`` on every rank; see `launch.launch`. By default in the active session."""
        ...


class _SparkLauncher:
    """Runs ranks in the tasks of a Spark barrier stage."""

    def warm_up(
        self,
        spark: SparkSession,
        options: LaunchSettings,
        allotment: Allotment,
        modules: Sequence[str],
    ) -> None:
        """Import ``modules`` on the executors while the driver still prepares the data.

        It saves time, and warns early of hosts with little shared memory: whatever goes wrong here
        shows again when the ranks are started.
        """
        if not options.worker_idle_timeout:
            return
        slots, shape = allotment.slots, allotment.shape
        task = _WarmUpTask(options, shape.ranks, tuple(modules))

        def run() -> None:
            description = "Horovod: importing ahead of ranks"
            with contextlib.suppress(Exception), described(spark, description):
                for lacking in set(collect_from_tasks(spark, slots, task, profile=shape.profile)):
                    logger.warning(
                        "MPI may not start: %s; make it larger (docker run --shm-size, "
                        "in Kubernetes an emptyDir of medium Memory)",
                        lacking.decode(),
                    )

        inheriting_thread(spark, run, "hsr-warm-up").start()

    def await_slots(
        self, spark: SparkSession | None, options: LaunchSettings, workers: int
    ) -> None:
        check_slots(spark or active_session(), options, workers, replacing=True)

    def launch(
        self,
        spark: SparkSession | None,
        options: LaunchSettings,
        function: Callable[..., Any],
        args: Sequence[object],
        kwargs: dict[str, object],
        observer: Observer,
        modules: Sequence[str] | None = None,
        workers: int | None = None,
    ) -> RunResult:
        session = spark or active_session()
        return launch(session, options, function, args, kwargs, observer, modules, workers)


@dataclass(frozen=True)
class _WarmUpTask:
    """Spark task that makes its executor's prefork process import modules.

    It returns what may keep MPI from starting there.
    """

    options: LaunchSettings
    ranks: int
    modules: tuple[str, ...]

    def __call__(self) -> tuple[bytes, ...]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        environment = worker_environment(
            environment_at_start(),
            self.options,
            gpus=(),
            cpus=max(1, context.cpus() // self.ranks),
            python_path=sys.path,
            temporary="",
        )
        request_import(environment, self.modules, self.options.worker_idle_timeout)
        lacking = Workspace.lacking_shared_memory()
        return (f"{lacking} (host {socket.gethostname()})".encode(),) if lacking else ()


_chosen: ContextVar[Launcher] = ContextVar("launcher", default=_SparkLauncher())  # noqa: B039


def chosen_launcher() -> Launcher:
    """Return the launcher of runs that start in this context."""
    return _chosen.get()


@contextlib.contextmanager
def using_launcher(launcher: Launcher) -> Iterator[None]:
    """Use ``launcher`` for the runs that start inside, in this thread."""
    token = _chosen.set(launcher)
    try:
        yield
    finally:
        _chosen.reset(token)
