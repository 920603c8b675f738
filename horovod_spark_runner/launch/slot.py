"""One slot of a run: everything that happens inside one Spark barrier task.

The slot starts its worker process, finds out its rank, lets mpirun's shim lend the worker its
MPI identity, and watches all of them in one loop until the rank has an outcome. Slot 0 runs
mpirun as well. Whatever was started is ended, and whatever was created is removed, by `close`.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import LaunchOptions
from .command import worker_environment
from .driver_link import DriverLink
from .mpirun import Mpirun
from .outcome import ABORTED, LAUNCH, Failure, RankOutcome
from .rank_process import RankProcess
from .shim_door import ShimDoor
from .topology import RankPlacement, SlotInfo, World, arrange, format_placement

# How long a rank may go on after the world ended, to tell of its own failure first.
ABORT_GRACE = 2.0
# How long mpirun may take to end the other ranks after one of them failed.
MPIRUN_GRACE = 5.0
HEARTBEAT_SECONDS = 5.0
POLL_MILLISECONDS = 200


@dataclass(frozen=True)
class SlotPlan:
    """What every slot of a run is told by the driver.

    Attributes:
        run_id: short name of the run.
        key: secret of the run's control messages.
        driver: address of the driver's control server.
        options: see `LaunchOptions`.
        payload: pickled ``(function, args, kwargs)``.
        modules: modules the worker imports while the ranks find each other.
        rank_timeout: seconds mpirun may take to start the ranks.
    """

    run_id: str
    key: bytes = field(repr=False)
    driver: tuple[str, int]
    options: LaunchOptions
    payload: bytes = field(repr=False)
    modules: tuple[str, ...] = ()
    rank_timeout: float = 120.0


class Slot:
    """The processes and connections of one slot.

    Args:
        plan: what the driver asked for.
        index: this barrier task.
        gpus: GPU addresses Spark gave to it.
        cpus: cores of the task.
    """

    def __init__(self, plan: SlotPlan, index: int, gpus: tuple[str, ...], cpus: int) -> None:
        self._plan = plan
        self._index = index
        self._gpus = gpus
        self._host = socket.gethostname()
        self._began = time.monotonic()
        self._timings: dict[str, float] = {}
        self._placement: RankPlacement | None = None
        self._failure: Failure | None = None
        self._result: bytes | None = None
        self._settled = False  # the rank has an outcome
        self._world_ended: float | None = None
        self._last_beat = 0.0
        self._mpirun: Mpirun | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="hsr-", dir=_short_temporary()))
        self._link = DriverLink(plan.driver, plan.key)
        self._door = ShimDoor(self._directory, self._on_environment)
        environment = worker_environment(
            os.environ, plan.options, gpus=gpus, cpus=cpus, python_path=sys.path
        )
        self._process = RankProcess(
            plan.payload,
            plan.modules,
            environment,
            self._directory,
            on_report=self._tell,
            on_lines=self._on_lines,
        )

    def run(self, exchange: Callable[[str], list[str]]) -> RankOutcome:
        """Take part in the run and return how this slot's rank ended.

        Args:
            exchange: gives every slot the texts of all slots (Spark's ``allGather``).
        """
        try:
            world = arrange([SlotInfo.from_json(json.loads(t)) for t in exchange(self._info())])
            self._timings["rendezvous"] = time.monotonic() - self._began
            self._placement = world.of_slot(self._index)
            if self._index == 0:
                placed = format_placement(world.placements)
                self._tell({"type": "placed", "size": world.size, "placement": placed})
                self._mpirun = Mpirun(world, self._plan.options, self._directory)
            self._watch(world)
        except Exception as error:  # becomes the slot's outcome; the driver raises it
            self._settle(None, self._failed(LAUNCH, f"{type(error).__name__}: {error}"))
        return RankOutcome(
            slot=self._index,
            host=self._host,
            placement=self._placement,
            result=self._result,
            failure=self._failure,
            timings=self._timings,
        )

    def close(self) -> None:
        """End what was started and remove what was created; safe to call at any time."""
        self._process.close()
        if self._mpirun is not None:
            self._mpirun.close()
        self._door.close()
        self._link.drain(timeout=1.0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _info(self) -> str:
        info = SlotInfo(
            slot=self._index,
            host=self._host,
            node=node_identity(),
            address=self._link.local_address or "127.0.0.1",
            socket=self._door.path,
            gpus=self._gpus,
        )
        return json.dumps(info.to_json())

    # -- the loop ------------------------------------------------------------------------------

    def _watch(self, world: World) -> None:
        started = time.monotonic()
        while not (self._settled and (self._mpirun is None or self._mpirun.ended)):
            self._handle_events()
            self._link.flush()
            now = time.monotonic()
            if now - self._last_beat > HEARTBEAT_SECONDS:
                self._last_beat = now
                self._tell({"type": "heartbeat"})
            if self._process.ended and not self._settled:
                self._settle_by_process()
            if not self._door.connected:
                self._check_start(now - started, world)
            elif self._door.ended or self._settled:
                self._check_end(now)

    def _handle_events(self) -> None:
        handlers = self._handlers()
        poll = select.poll()
        for descriptor in handlers:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(POLL_MILLISECONDS):
            # An earlier handler of this round may have closed what this one reads.
            if descriptor in self._handlers():
                handlers[descriptor]()

    def _handlers(self) -> dict[int, Callable[[], None]]:
        handlers = {**self._process.handlers(), **self._door.handlers()}
        if self._mpirun is not None:
            handlers.update(self._mpirun.handlers())
        link = self._link.fileno()
        if link is not None:
            handlers[link] = self._on_driver_message
        return handlers

    def _check_start(self, waited: float, world: World) -> None:
        """Give up on a rank that mpirun did not, or cannot any more, start."""
        if self._settled:  # by the worker's own death: there is no shim to tell
            if self._mpirun is not None:
                self._mpirun.end()
        elif self._mpirun is not None and self._mpirun.ended:
            self._abandon(f"{self._mpirun.describe_end()} before it started all ranks")
        elif waited > self._plan.rank_timeout:
            limit = self._plan.rank_timeout
            self._abandon(f"mpirun did not start the {world.size} ranks within {limit:.0f} s")

    def _abandon(self, message: str) -> None:
        tail = () if self._mpirun is None else self._mpirun.log_tail
        self._settle(None, self._failed(LAUNCH, message, tail))

    def _check_end(self, now: float) -> None:
        """After the world ended: give the rank and mpirun a moment, then end them."""
        if self._world_ended is None:
            self._world_ended = now
        waited = now - self._world_ended
        if not self._settled and waited > ABORT_GRACE:
            self._settle(None, self._failed(ABORTED, "ended because another rank failed"))
        if self._failure is not None and waited > MPIRUN_GRACE and self._mpirun is not None:
            self._mpirun.end()

    # -- events --------------------------------------------------------------------------------

    def _on_environment(self, environment: dict[str, str]) -> None:
        assert self._placement is not None
        self._timings["mpirun"] = time.monotonic() - self._began - self._timings["rendezvous"]
        size = self._plan.options.num_workers
        self._process.begin(environment, self._placement.rank, size)

    def _on_lines(self, lines: list[str]) -> None:
        self._tell({"type": "log", "lines": lines}, droppable=True)

    def _on_driver_message(self) -> None:
        for message in self._link.receive():
            if message.get("type") == "stop":
                reason = str(message.get("reason", "the driver ended the run"))
                self._settle(None, self._failed(ABORTED, reason))

    # -- the outcome ---------------------------------------------------------------------------

    def _settle_by_process(self) -> None:
        result, failure, timings = self._process.outcome()
        self._timings.update(timings)
        self._settle(result, failure)

    def _settle(self, result: bytes | None, failure: Failure | None) -> None:
        """Take the rank's outcome, once; its process has ended or is ended."""
        if self._settled:
            return
        self._settled = True
        self._result, self._failure = (result, None) if failure is None else (None, failure)
        self._process.kill()
        self._door.release(0 if failure is None else 1)
        if failure is not None:
            self._tell({"type": "failed", "kind": failure.kind, "message": failure.message})

    @staticmethod
    def _failed(kind: str, message: str, log_tail: tuple[str, ...] = ()) -> Failure:
        return Failure(kind, time.time(), message, log_tail=log_tail)

    def _tell(self, message: dict[str, Any], *, droppable: bool = False) -> None:
        rank = -1 if self._placement is None else self._placement.rank
        envelope = {"slot": self._index, "rank": rank, "host": self._host}
        self._link.send({**message, **envelope}, droppable=droppable)


def node_identity() -> str:
    """Return what is equal for all slots that share this machine's or container's network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.readlink('/proc/self/ns/uts')}"


def _short_temporary() -> str:
    # A Unix socket's path holds 107 bytes at most, and some clusters' temporary paths are long.
    base = tempfile.gettempdir()
    return base if len(base.encode()) < 60 else "/tmp"
