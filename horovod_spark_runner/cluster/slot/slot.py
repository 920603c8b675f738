"""One slot of a run: the body of one Spark barrier task. Read `Slot.run` first.

The slot starts the workers of its ranks, learns which ranks they are, lets mpirun's shims lend them
their MPI identities, and watches all of them in one loop until each has an outcome. Slot 0 runs
mpirun as well, and the first slot on each other host runs MPI's daemon there. Whatever was started
is ended, and whatever was created is removed, by `close`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark import BarrierTaskContext, SparkFiles

from ...errors import HorovodSparkError, LaunchError
from ...typed_json import parse, to_json
from ..protocol.channel import AbortNoticeFilter
from ..protocol.command import SET_TORCH_VARIABLES, SIDE_PROCESS, SPARK_FILES, worker_environment
from ..protocol.messages import (
    JOIN_REPORTS,
    CannotJoin,
    Failed,
    Gather,
    Hello,
    JoinReport,
    Leaving,
    Located,
    Notice,
    Preempt,
    RankReport,
    Refused,
    Stalled,
    Started,
    Stop,
)
from ..protocol.network import active_interfaces, choose_interface, node_identity, route_to
from ..protocol.outcome import (
    ABORTED,
    LAUNCH,
    STALLED,
    Failure,
    RankOutcome,
    encode_outcome,
    failure_kind,
    summarize_error,
)
from ..protocol.processes import can_be_read, environment_at_start
from ..protocol.rendezvous import ORPHAN_GRACE, SlotPlan, placement_message, read_slot_info
from ..protocol.topology import Part, RankPlacement, SlotInfo, arrange, split_devices
from .node_door import MpiIdentity, Shim, ShimDoor
from .node_runtime import NodeRuntime
from .rank_log import RankLog
from .rank_process import STACKS_GRACE, Rank, RankProcess
from .slot_link import EXECUTOR_ENDED, POLL_SECONDS, SlotLink, StoppedError
from .workspace import Workspace

# How long mpirun may take to end the other ranks after one of them failed.
_MPIRUN_GRACE = 3.0
# How long a rank that MPI has started may take to call its function: imports, MPI_Init.
_BEGIN_SECONDS = 300.0


@dataclass(frozen=True)
class SlotTask:
    """Body of the barrier stage's tasks: runs one slot and yields its ranks' outcomes."""

    plan: SlotPlan

    def __call__(self) -> Iterator[bytes]:
        context = BarrierTaskContext.get()
        for index, outcome in enumerate(_run_slot(context, self.plan)):
            yield from encode_outcome(outcome, index)


def _run_slot(context: BarrierTaskContext, plan: SlotPlan) -> list[RankOutcome]:
    """Run this task's slot to its end, clean up, and return its ranks' outcomes."""
    gpus: tuple[str, ...] = ()
    if plan.options.gpus_per_worker:
        gpus = tuple(context.resources()["gpu"].addresses)
    peers = [info.address.rpartition(":")[0].strip("[]") for info in context.getTaskInfos()]
    files = os.path.abspath(SparkFiles.getRootDirectory())
    slot = Slot(plan, context.partitionId(), gpus, context.cpus(), peers, files)
    # A host that shuts down sends SIGTERM; Spark's Python daemon passes the end of its executor on
    # as SIGHUP.
    before = {
        number: signal.signal(
            number, lambda number, frame: slot.request_end(signal.Signals(number))
        )
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        return slot.run(context.allGather)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        slot.close()


class Slot:
    """The processes and connections of one slot.

    Args:
        plan: the driver's plan.
        index: number of this barrier task.
        gpus: GPU addresses Spark gave to it.
        cpus: cores of the task.
        peers: hosts of all slots, as Spark knows them.
        files: folder in which Spark has put the files that were added to it.
    """

    def __init__(
        self,
        plan: SlotPlan,
        index: int,
        gpus: tuple[str, ...],
        cpus: int,
        peers: Sequence[str],
        files: str,
    ) -> None:
        self._plan = plan
        self._index = index
        self._gpus = gpus
        self._cpus = cpus
        self._peers = peers
        self._files = files
        self._timings: dict[str, float] = {}
        self._part: Part | None = None
        self._failure: Failure | None = None  # of the slot, before it had its ranks
        self._failed_since: float | None = None
        self._orphan_since: float | None = None
        self._stall: tuple[float, str] | None = None
        self._end_signal: signal.Signals | None = None
        self._reported_signal: signal.Signals | None = None
        self._closing = contextlib.ExitStack()
        self._doors: list[ShimDoor] = []
        self._filters = [AbortNoticeFilter() for _ in range(plan.ranks_per_slot)]
        self._ranks: list[Rank] = []
        self._link = SlotLink(plan, index)
        self._closing.callback(self._link.leave)
        self._link.report(Hello())

    def run(self, gather: Callable[[str], list[str]]) -> list[RankOutcome]:
        """Take part in the run and return the outcomes of this slot's ranks.

        Args:
            gather: gives every slot the texts of all slots (Spark's ``allGather``).
        """
        try:
            # Start the workers at once: their imports overlap with all that follows.
            report = self._start()
            # Report this host and its GPUs; the driver's answer assigns the ranks.
            part = self._await_part(report, gather)
            # Take the call, and start mpirun in slot 0; its shims lend the workers MPI identities.
            self._join(part)
            self._watch()
        except StoppedError as stopped:
            self._fail(ABORTED, str(stopped))
        except Exception as error:  # becomes the ranks' outcome; the driver raises it
            self._fail(failure_kind(error), summarize_error(error))
        self._explain_aborts()
        # Large results go to the driver directly, the others and the outcomes through Spark.
        self._send_large_results()
        return self._outcomes()

    # -- the start -----------------------------------------------------------------------------

    def _start(self) -> JoinReport:
        """Start the workers and open the network; return the slot's report to the driver."""
        try:
            self._start_workers()
            self._open_network()
            return Located(self._info())
        except (HorovodSparkError, OSError) as error:
            self._fail(failure_kind(error), summarize_error(error))
            return CannotJoin(self._index, summarize_error(error))

    def _start_workers(self) -> None:
        """Start the processes of the slot's ranks.

        Raises:
            LaunchError: a setting does not fit this host, or the driver cannot be reached.
        """
        plan, count = self._plan, self._plan.ranks_per_slot
        self._link.check()
        self._workspace = Workspace(plan.run_id)
        self._closing.callback(self._workspace.close)
        self._devices = split_devices(self._gpus, count)
        self._folders = [self._workspace.folder(f"rank-{index}") for index in range(count)]
        self._payload = self._workspace.path / "payload"
        self._logs = [RankLog(plan.options.log_dir, folder) for folder in self._folders]
        self._closing.callback(self._close_logs)
        for index in range(count):
            door = ShimDoor(self._folders[index] / "shim", self._on_shim(index))
            self._doors.append(door)
            self._closing.callback(door.close)
            process = self._start_process(index, max(1, self._cpus // count))
            rank = Rank(process, self._on_failure)
            self._ranks.append(rank)
            self._closing.callback(rank.close)

    def _start_process(self, index: int, cpus: int) -> RankProcess:
        plan, folder = self._plan, self._folders[index]
        temporary = folder / "tmp"
        temporary.mkdir()
        environment = worker_environment(
            environment_at_start(),
            plan.options,
            gpus=self._devices[index],
            cpus=cpus,
            python_path=sys.path,
            temporary=str(temporary),
        )
        return RankProcess(
            self._payload,
            plan.modules,
            {**environment, SPARK_FILES: self._files},
            folder,
            self._workspace,
            max_result_bytes=plan.max_result_bytes,
            idle_timeout=plan.options.worker_idle_timeout,
            on_report=lambda report: self._on_report(index, report),
            on_lines=lambda lines: self._on_lines(index, lines),
        )

    def _open_network(self) -> None:
        """Choose the network interface and open the ports for MPI.

        Raises:
            LaunchError: no interface fits the setting.
        """
        hosts = dict.fromkeys(self._peers)
        routed = itertools.chain(map(route_to, hosts), [self._link.local_address])
        interface = choose_interface(
            active_interfaces(), self._plan.options.mpi.network_interface, filter(None, routed)
        )
        self._mpi = NodeRuntime(interface, self._plan.key, self._workspace)
        self._closing.callback(self._mpi.close)

    def _info(self) -> SlotInfo:
        return SlotInfo(
            slot=self._index,
            host=self._link.host,
            node=node_identity(),
            address=self._mpi.interface.address,
            port=self._mpi.port,
            folder=str(self._workspace.path),
            doors=tuple(door.path for door in self._doors),
            gpus=self._devices,
        )

    def _await_part(self, report: JoinReport, gather: Callable[[str], list[str]]) -> Part:
        """Send the report and return this slot's part of the world.

        Raises:
            LaunchError: this slot cannot take part, or another.
            StoppedError: the driver has ended the run.
        """
        answer = self._link.await_answer(report)
        if isinstance(answer, Refused):
            raise LaunchError(answer.reason)
        return self._gather(gather, report) if isinstance(answer, Gather) else answer.part

    def _gather(self, gather: Callable[[str], list[str]], report: JoinReport) -> Part:
        """Exchange the reports through Spark, which is slower; each slot computes the world."""
        began = time.monotonic()
        with self._link.keep_alive():
            infos = [read_slot_info(parse(text, *JOIN_REPORTS)) for text in gather(to_json(report))]
        self._timings["all_gather"] = time.monotonic() - began
        world = arrange(infos, share_gpus=self._plan.options.share_gpus)
        if self._index == 0:
            self._link.report(placement_message(world))
        return world.parts()[self._index]

    def _join(self, part: Part) -> None:
        """Take the ranks and the call; start MPI where that falls to this slot."""
        self._part = part
        for index, placement in enumerate(part.placements):
            self._ranks[index].placement = placement
            title = f"rank {placement.rank} of {part.size} on {self._link.host}"
            self._logs[index].open(placement.rank, title)
        self._link.fetch_call(self._payload, Path(part.leader_folder))
        self._joined = time.monotonic()
        self._mpi.join(part, self._plan.options.mpi)

    # -- the loop ------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Handle events and check deadlines until each rank has an outcome and MPI has ended."""
        while not (self._settled and self._mpi.is_over):
            self._handle_events()
            self._link.beat()
            self._report_leaving()
            now = time.monotonic()
            self._check_executor(now)
            self._check_daemon(now)  # first: the ranks die of its death
            for rank in self._ranks:
                rank.check(now)
            self._check_start(now)
            self._check_stall(now)
            self._check_end(now)

    @property
    def _settled(self) -> bool:
        return all(rank.settled for rank in self._ranks)

    def _handle_events(self) -> None:
        poll = select.poll()
        for descriptor in self._handlers():
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(POLL_SECONDS * 1000):
            # An earlier handler of this round may have closed this descriptor, and another file
            # may have its number now.
            handler = self._handlers().get(descriptor)
            if handler is not None and can_be_read(descriptor):
                handler()

    def _handlers(self) -> dict[int, Callable[[], None]]:
        handlers = self._mpi.handlers()
        for rank, door in zip(self._ranks, self._doors, strict=True):
            handlers.update(rank.process.handlers())
            handlers.update(door.handlers())
        link = self._link.fileno()
        if link is not None:
            handlers[link] = self._on_driver_message
        return handlers

    def _report_leaving(self) -> None:
        """Make the driver wait while the ranks save, even if Spark loses the executor first."""
        number = self._end_signal
        if number is not None and number is not self._reported_signal:
            self._reported_signal = number
            self._link.report(Leaving(number.name))

    def _check_executor(self, now: float) -> None:
        """End ranks that outlive the executor; a training gets time to save."""
        if not self._link.executor_has_ended:
            return
        self._orphan_since = self._orphan_since or now
        if now - self._orphan_since > ORPHAN_GRACE:
            self._abort(ABORTED, EXECUTOR_ENDED)
            self._mpi.end()

    def _check_daemon(self, now: float) -> None:
        if warning := self._mpi.check_stopped(now):
            self._link.report(Notice(warning, warn=True))
        if self._mpi.problem:
            self._abort(LAUNCH, self._mpi.problem)
        if self._mpi.was_killed and not self._settled:
            self._abort(LAUNCH, self._mpi.describe_end(), self._mpi.log_tail)

    def _check_start(self, now: float) -> None:
        """Give up on ranks that MPI did not or cannot start, or that never call the function."""
        all_running = all(rank.is_running or rank.settled for rank in self._ranks)
        if not all_running and now - self._joined > _BEGIN_SECONDS + self._plan.rank_timeout:
            self._abort(LAUNCH, "the process of a rank does not begin: does an import hang?")
        if all(rank.started or rank.settled for rank in self._ranks):
            return
        waited, limit = now - self._joined, self._plan.rank_timeout
        if self._mpi.has_ended:
            end = self._mpi.describe_end()
            self._abort(LAUNCH, f"{end} before it started all ranks", self._mpi.log_tail)
        elif waited > limit:
            ranks = self._plan.workers
            message = f"mpirun did not start the {ranks} ranks in {limit:.0f} s"
            self._abort(LAUNCH, message, self._mpi.log_tail)

    def _check_stall(self, now: float) -> None:
        if self._stall is not None and now - self._stall[0] > STACKS_GRACE:
            reasons = filter(None, (self._stall[1], self._mpi.stopped))
            self._abort(STALLED, "; ".join(reasons))

    def _check_end(self, now: float) -> None:
        """After a rank failed: give MPI a moment to end the others, then end it."""
        if not any(rank.failed for rank in self._ranks):
            return
        self._failed_since = self._failed_since or now
        if now - self._failed_since > _MPIRUN_GRACE:
            self._mpi.end()
            self._abort(ABORTED, "ended because another rank failed")

    # -- events --------------------------------------------------------------------------------

    def _on_shim(self, index: int) -> Callable[[Shim, MpiIdentity], None]:
        return lambda shim, identity: self._begin(index, shim, identity)

    def _begin(self, index: int, shim: Shim, identity: MpiIdentity) -> None:
        self._timings["mpirun"] = time.monotonic() - self._joined
        # The user's settings of MPI, also in the environment, override our defaults.
        user = {**environment_at_start(), **self._plan.options.env}
        defaults = self._mpi.rank_environment()
        overrides = {name: user[name] for name in defaults if name in user}
        environment = {**defaults, **overrides, **identity.environment}
        if self._plan.torch_variables:
            environment[SET_TORCH_VARIABLES] = "1"
        if self._plan.side_process:
            environment[SIDE_PROCESS] = "1"
        self._ranks[index].begin(shim, environment, self._plan.workers)

    def _on_report(self, index: int, report: RankReport) -> None:
        self._ranks[index].is_running |= isinstance(report, Started)
        self._link.report(report, self._rank_at(index))

    def _on_lines(self, index: int, lines: list[str]) -> None:
        self._logs[index].write(lines)
        if lines := self._filters[index].filter(lines):
            self._link.report_lines(lines, self._rank_at(index))

    def _on_driver_message(self) -> None:
        for message in self._link.receive():
            if isinstance(message, Stop):
                self._abort(ABORTED, message.reason)
                self._mpi.end()
            elif isinstance(message, Preempt):
                for rank in self._ranks:
                    rank.process.request_end(signal.SIGTERM)
            elif isinstance(message, Stalled) and self._stall is None:
                self._stall = time.monotonic(), message.reason
                for rank in self._ranks:
                    rank.dump_stacks()

    # -- the outcome ---------------------------------------------------------------------------

    def _abort(self, kind: str, message: str, log_tail: tuple[str, ...] = ()) -> None:
        for rank in self._ranks:
            rank.abort(kind, message, log_tail)

    def _fail(self, kind: str, message: str) -> None:
        """Record why this slot failed; the first reason counts."""
        if self._part is not None:
            self._abort(kind, message)
        elif self._failure is None:
            self._failure = Failure(kind, time.time(), message)
            self._on_failure(None, self._failure)

    def _on_failure(self, placement: RankPlacement | None, failure: Failure) -> None:
        self._link.report(Failed.of(failure), -1 if placement is None else placement.rank)

    def _explain_aborts(self) -> None:
        """Add to the outcomes of aborted ranks how MPI ended."""
        if self._part is not None and self._mpi.has_ended:
            end = self._mpi.describe_end()
            for rank in self._ranks:
                rank.explain_abort(end, self._mpi.log_tail)

    def _outcomes(self) -> list[RankOutcome]:
        if self._failure is not None:
            return [RankOutcome(self._index, self._link.host, failure=self._failure)]
        return [rank.outcome(self._index, self._link.host, self._timings) for rank in self._ranks]

    def _send_large_results(self) -> None:
        for rank in self._ranks:
            if rank.large is None or rank.placement is None:
                continue
            large = rank.large
            if not self._link.send_result(rank.placement.rank, large.path, large.size):
                rank.fail_result()

    def _rank_at(self, index: int) -> int:
        placement = self._ranks[index].placement if index < len(self._ranks) else None
        return -1 if placement is None else placement.rank

    # -- the end -------------------------------------------------------------------------------

    def request_end(self, number: signal.Signals) -> None:
        """Pass on to the ranks that this host shuts down; safe in a signal handler."""
        self._end_signal = number
        for rank in self._ranks:
            rank.process.request_end(number)

    def close(self) -> None:
        """End all processes and remove all files of the slot; safe to call at any time."""
        self._closing.close()

    def _close_logs(self) -> None:
        for log in self._logs:
            log.end()  # all at once: storage may be slow, and silence is a failure
        for log in self._logs:
            log.close()
            self._link.beat()
            if log.problem:
                self._link.report(Notice(log.problem, warn=True))
