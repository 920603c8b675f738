"""One slot of a run: everything that happens inside one Spark barrier task.

The slot starts its worker process, finds out its rank, lets mpirun's shim lend the worker its
MPI identity, and watches all of them in one loop until the rank has an outcome. Slot 0 runs
mpirun as well. Whatever was started is ended, and whatever was created is removed, by `close`.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import LaunchOptions
from .command import mpirun_command, mpirun_environment, worker_environment
from .driver_link import DriverLink
from .lines import LineSplitter
from .outcome import ABORTED, DIED, LAUNCH, LOG_TAIL_LINES, Failure, RankOutcome
from .processes import describe_exit, end_group, find_mpirun, shim_command, start_tethered
from .topology import RankPlacement, SlotInfo, World, arrange
from .worker import OUTCOME_FILE, PAYLOAD_FILE

# How long a rank may go on after the world ended, to tell of its own failure first.
ABORT_GRACE = 2.0
# How long mpirun may take to end the other ranks after one of them failed.
MPIRUN_GRACE = 5.0
HEARTBEAT_SECONDS = 5.0


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
        rank_timeout: seconds mpirun may take to start the ranks once their workers are ready.
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
        self._host = socket.gethostname()
        self._began = time.monotonic()
        self._timings: dict[str, float] = {}
        self._placement: RankPlacement | None = None
        self._failure: Failure | None = None
        self._result: bytes | None = None
        self._shim: socket.socket | None = None
        self._shim_hello = b""
        self._world_ended: float | None = None
        self._mpirun: subprocess.Popen[bytes] | None = None
        self._mpirun_log = LineSplitter(LOG_TAIL_LINES)
        self._worker_log = LineSplitter(LOG_TAIL_LINES)
        self._reports = LineSplitter(1)
        self._last_beat = 0.0
        self._directory = Path(tempfile.mkdtemp(prefix="hsr-", dir=_short_temporary()))
        self._gpus = gpus
        self._link = DriverLink(plan.driver, plan.key)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._directory / "shim"))
        self._listener.listen(1)
        self._worker_socket, worker_end = socket.socketpair()
        (self._directory / PAYLOAD_FILE).write_bytes(plan.payload)
        self._worker = start_tethered(
            [sys.executable, "-m", f"{__package__}.worker", str(worker_end.fileno()),
             str(self._directory), *plan.modules],
            worker_environment(
                os.environ, plan.options, gpus=gpus, cpus=cpus, python_path=sys.path
            ),
            directory=os.getcwd(),
            inherit=(worker_end.fileno(),),
        )  # fmt: skip
        worker_end.close()
        self._worker_done = False

    # -- the run -------------------------------------------------------------------------------

    def run(self, exchange: Callable[[str], list[str]]) -> RankOutcome:
        """Take part in the run and return how this slot's rank ended.

        Args:
            exchange: gives every slot the texts of all slots (Spark's ``allGather``).
        """
        try:
            world = arrange([SlotInfo.from_json(json.loads(t)) for t in exchange(self._info())])
            self._timings["rendezvous"] = time.monotonic() - self._began
            self._placement = world.of_slot(self._index)
            self._tell({"type": "placed"})
            if self._index == 0:
                self._start_mpirun(world)
            self._watch()
        except Exception as error:  # becomes the slot's outcome; the driver raises it
            self._fail(LAUNCH, f"{type(error).__name__}: {error}")
        return self._outcome()

    def close(self) -> None:
        """End what was started and remove what was created; safe to call at any time."""
        end_group(self._worker, grace=0)
        if self._mpirun is not None:
            end_group(self._mpirun, grace=2.0)
        for connection in (self._shim, self._listener, self._worker_socket):
            if connection is not None:
                connection.close()
        self._link.drain(timeout=1.0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _info(self) -> str:
        info = SlotInfo(
            slot=self._index,
            host=self._host,
            node=node_identity(),
            address=self._link.local_address or "127.0.0.1",
            socket=str(self._directory / "shim"),
            gpus=self._gpus,
        )
        return json.dumps(info.to_json())

    def _start_mpirun(self, world: World) -> None:
        command = mpirun_command(
            find_mpirun(),
            world,
            self._plan.options,
            shim_command(world.sockets),
            as_root=os.geteuid() == 0,
        )
        self._mpirun = start_tethered(
            command,
            mpirun_environment(os.environ, str(self._directory)),
            directory=str(self._directory),
        )

    def _outcome(self) -> RankOutcome:
        return RankOutcome(
            slot=self._index,
            host=self._host,
            placement=self._placement,
            result=self._result if self._failure is None else None,
            failure=self._failure,
            timings=self._timings,
        )

    # -- the loop ------------------------------------------------------------------------------

    def _watch(self) -> None:
        started = time.monotonic()
        while not self._finished():
            handlers = self._handlers()
            poll = select.poll()
            for descriptor in handlers:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(200):
                # An earlier handler of this round may have ended what this one reads.
                if descriptor in self._handlers():
                    handlers[descriptor]()
            self._link.flush()
            self._check_clock(time.monotonic(), started)

    def _finished(self) -> bool:
        return self._worker_done and (self._mpirun is None or self._mpirun.poll() is not None)

    def _handlers(self) -> dict[int, Callable[[], None]]:
        handlers: dict[int, Callable[[], None]] = {}
        if not self._worker_done:
            handlers[self._worker_socket.fileno()] = self._on_worker_report
        if self._shim is None:
            handlers[self._listener.fileno()] = self._on_shim_connect
        elif self._world_ended is None:
            handlers[self._shim.fileno()] = self._on_shim_data
        for process, reader in (
            (self._worker, self._on_worker_log),
            (self._mpirun, self._on_mpirun_log),
        ):
            if process is not None and process.stdout is not None and not process.stdout.closed:
                handlers[process.stdout.fileno()] = reader
        link = self._link.fileno()
        if link is not None:
            handlers[link] = self._on_driver_message
        return handlers

    def _check_clock(self, now: float, started: float) -> None:
        if now - self._last_beat > HEARTBEAT_SECONDS:
            self._last_beat = now
            self._tell({"type": "heartbeat"})
        if self._world_ended is not None and now - self._world_ended > ABORT_GRACE:
            if not self._worker_done:
                self._abort("ended because another rank failed")
            elif self._mpirun is not None and now - self._world_ended > MPIRUN_GRACE:
                end_group(self._mpirun, grace=1.0)
        if self._mpirun is not None and self._mpirun.poll() is not None and self._shim is None:
            self._drain_mpirun_log()
            self._fail(
                LAUNCH,
                f"mpirun {describe_exit(self._mpirun.returncode)} before it started this rank",
                self._mpirun_log,
            )
            self._stop_worker()
        if self._shim is None and now - started > self._plan.rank_timeout:
            self._fail(
                LAUNCH,
                f"mpirun did not start this rank within {self._plan.rank_timeout:.0f} s",
                self._mpirun_log,
            )
            self._stop_worker()
            self._world_ended = now

    # -- events --------------------------------------------------------------------------------

    def _on_shim_connect(self) -> None:
        self._shim, _ = self._listener.accept()
        self._timings["mpirun"] = time.monotonic() - self._began - self._timings["rendezvous"]

    def _on_shim_data(self) -> None:
        assert self._shim is not None
        data = self._shim.recv(65536)
        if not data:  # mpirun ended the shim: another rank failed, or mpirun died
            self._world_ended = time.monotonic()
            return
        self._shim_hello += data
        if self._shim_hello.endswith(b"\n"):
            environment = json.loads(self._shim_hello)
            self._send_worker({"environment": environment})

    def _on_worker_report(self) -> None:
        data = self._worker_socket.recv(65536)
        for line in self._reports.feed(data):
            if line:
                self._tell(json.loads(line))
        if not data:
            self._on_worker_exit()

    def _on_worker_exit(self) -> None:
        code = self._worker.wait()
        self._worker_done = True
        self._drain_worker_log()
        self._read_outcome(code)
        if self._failure is not None:
            self._world_ended = self._world_ended or time.monotonic()
            self._announce_failure()
        self._release_shim(0 if self._failure is None else 1)

    def _read_outcome(self, code: int) -> None:
        path = self._directory / OUTCOME_FILE
        if self._failure is not None:
            return
        if path.exists():
            with path.open("rb") as stream:
                self._result, failure, timings = pickle.load(stream)
            self._timings.update(timings)
            if failure is not None:
                self._fail_with(failure)
            elif code != 0:
                self._fail(DIED, f"the worker {describe_exit(code)} while it left the MPI world")
            return
        hint = " (out of memory?)" if code == -9 else ""
        self._fail(DIED, f"the worker process {describe_exit(code)}{hint}", self._worker_log)

    def _on_worker_log(self) -> None:
        assert self._worker.stdout is not None
        self._log(self._worker_log, os.read(self._worker.stdout.fileno(), 65536), self._worker)

    def _on_mpirun_log(self) -> None:
        assert self._mpirun is not None and self._mpirun.stdout is not None
        data = os.read(self._mpirun.stdout.fileno(), 65536)
        self._mpirun_log.feed(data)
        if not data:
            self._mpirun_log.finish()
            self._mpirun.stdout.close()

    def _on_driver_message(self) -> None:
        for message in self._link.receive():
            if message.get("type") == "stop":
                self._abort(str(message.get("reason", "the driver ended the run")))

    # -- acts ----------------------------------------------------------------------------------

    def _abort(self, reason: str) -> None:
        if not self._worker_done:
            self._fail(ABORTED, reason)
            self._stop_worker()

    def _stop_worker(self) -> None:
        if not self._worker_done:
            end_group(self._worker, grace=0)
            self._worker_done = True
            self._world_ended = self._world_ended or time.monotonic()
            self._release_shim(1)
            self._announce_failure()

    def _release_shim(self, code: int) -> None:
        """Let the shim end with ``code``; anything but 0 makes mpirun end the other ranks."""
        if self._shim is not None:
            try:
                self._shim.sendall(bytes([code]))
            except OSError:
                pass  # mpirun has ended it already
        self._listener.close() if self._shim is not None else None

    def _send_worker(self, message: dict[str, Any]) -> None:
        try:
            self._worker_socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # it has just died; its exit is noticed by the loop

    def _fail(self, kind: str, message: str, log: LineSplitter | None = None) -> None:
        tail = tuple(log.tail) if log is not None else ()
        self._fail_with(Failure(kind, time.time(), message, log_tail=tail))

    def _fail_with(self, failure: Failure) -> None:
        self._failure = self._failure or failure

    def _announce_failure(self) -> None:
        if self._failure is not None:
            self._tell(
                {"type": "failed", "kind": self._failure.kind, "message": self._failure.message}
            )

    def _drain_worker_log(self) -> None:
        stdout = self._worker.stdout
        if stdout is None or stdout.closed:
            return
        os.set_blocking(stdout.fileno(), False)  # what the worker started may hold it open
        try:
            while data := os.read(stdout.fileno(), 65536):
                self._log(self._worker_log, data, self._worker)
        except BlockingIOError:
            pass
        self._log(self._worker_log, b"", self._worker)

    def _drain_mpirun_log(self) -> None:
        while self._mpirun is not None and self._mpirun.stdout and not self._mpirun.stdout.closed:
            self._on_mpirun_log()

    def _log(self, splitter: LineSplitter, data: bytes, source: subprocess.Popen[bytes]) -> None:
        lines = splitter.feed(data) if data else splitter.finish()
        if not data and source.stdout is not None:
            source.stdout.close()
        if lines:
            self._tell({"type": "log", "lines": lines}, droppable=True)

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
