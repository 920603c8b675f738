"""Faults at chosen steps of a training, each of them once, however often it is started again."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.leftovers import own_task

# What a run recovers from by itself on any master.
KINDS = ("sigkill", "sigsegv", "oom", "exit", "spark worker", "mpirun", "sigterm", "sigterm slot")
# What shows by its silence only: it takes stall_timeout or heartbeat_timeout to be noticed.
SILENT_KINDS = ("sigstop", "sigstop slot", "gil")
# What a run does not even have to begin again for.
HARMLESS_KINDS = ("driver link",)
# What happens to the file system that is mounted at DISK, in the folder of faults.
DISK_KINDS = ("full disk", "frozen disk")
DISK = "disk"
BALLAST = "ballast"
# What needs executors of their own, or the call to be made again.
CLUSTER_KINDS = (
    "executor",
    "worker",
    "driver",
    "exception",
    "sigterm executor",
    "sigstop executor",
)
# How the files begin that say when an attempt has done its first step, in nanoseconds.
BEGUN = "begun-"


# The step of a fault that happens after the last one, before the model is saved.
AT_THE_END = 10**6
# Number of the system call, which Python does not have, on all of Linux' architectures.
PIDFD_GETFD = 438


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        step: the step of the whole run after which it happens, or AT_THE_END of the training.
        rank: where.
        kind: one of the kinds above.
    """

    step: int
    rank: int
    kind: str

    @property
    def text(self) -> str:
        """The fault as an argument of `job`."""
        return f"{self.step}:{self.rank}:{self.kind}"


def choose_faults(
    seed: int, count: int, steps: int, kinds: tuple[str, ...], first: int = 1
) -> list[Fault]:
    """Return ``count`` faults at different random steps, every kind about equally often.

    The steps are from ``first`` to before ``steps``.

    Which kinds are chosen where there are more than faults is random, too. The step after a
    SIGTERM, in which the ranks agree to end, has no fault: it would be another one's end. Nor is
    it the last one, after which a run has finished, asked or not.
    """
    generator = random.Random(seed)
    while True:
        chosen = sorted(generator.sample(range(first, steps), count))
        shuffled: list[str] = []
        while len(shuffled) < count:
            shuffled += generator.sample(kinds, len(kinds))
        faults = [
            Fault(step, generator.randrange(2), kind)
            for step, kind in zip(chosen, shuffled, strict=False)
        ]
        asked = (fault.step + 1 for fault in faults if fault.kind.startswith("sigterm"))
        if not {*chosen, steps}.intersection(asked):
            return faults


def callbacks_for(faults: Sequence[Fault], folder: str) -> Callable[[], list[Any]]:
    """Return what `run_training` takes as ``callbacks``: a function that makes the injector.

    Must be called on the driver: its process is what the fault ``"driver"`` kills.
    """
    driver = os.getpid()

    def make() -> list[Any]:
        import horovod.tensorflow as hvd
        import keras

        own = [fault for fault in faults if fault.rank == hvd.rank()]
        begun: list[int] = []  # of this process: what a callback holds is resumed

        class Injector(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                step = int(self.model.optimizer.iterations)
                if folder and hvd.rank() == 0 and not begun:
                    Path(folder, f"{BEGUN}{time.time_ns()}").touch()
                    begun.append(step)
                for fault in own:
                    if fault.step == step and first_time(folder, fault):
                        if fault.kind.endswith(" later"):
                            await_file(go_file(folder, fault))
                        strike(fault.kind.removesuffix(" later"), driver, folder)

            def on_train_end(self, logs: Any = None) -> None:
                for fault in own:
                    if fault.step == AT_THE_END and first_time(folder, fault):
                        time.sleep(1)  # the last checkpoint is being written
                        strike(fault.kind, driver, folder)

        return [Injector()]

    return make


def first_time(folder: str, fault: Fault) -> bool:
    """Note that a fault happens now; tell whether it had not happened before."""
    with contextlib.suppress(FileExistsError):
        note_of(folder, fault).touch(exist_ok=False)
        return True
    return False


def note_of(folder: str, fault: Fault) -> Path:
    """Return the file whose time of change is that of the fault."""
    return note_path(folder, f"step-{fault.step}-{fault.kind}")


def go_file(folder: str, fault: Fault) -> Path:
    """Return the file that a fault waits for if its kind ends in " later"."""
    return note_path(folder, f"go-{fault.step}")


def note_path(folder: str, name: str) -> Path:
    """Return the file that is there once something has happened."""
    return Path(folder, name.replace(" ", "-"))


def await_file(path: Path, seconds: float = 120) -> None:
    """Wait until the file is there, which the test or another rank makes."""
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def strike(kind: str, driver: int, folder: str) -> None:
    """Make the fault happen to this rank, or what it needs."""
    print(f"fault: {kind}", flush=True)
    if kind == "pause":
        return
    if kind == "full disk":
        fill(Path(folder, DISK))
        return
    if kind == "frozen disk":
        freeze(Path(folder, DISK))
        return
    if kind == "exception":
        raise ValueError("an injected fault")
    if kind == "exit":
        os._exit(7)
    if kind.startswith("sigterm"):
        asked = {
            "sigterm slot": _spark_worker,
            "sigterm executor": _executor,
        }
        _ask_to_end(asked.get(kind, _own)().pid)
        return
    if kind == "driver link":
        _cut_driver_link(driver)
        return
    if kind.startswith("sigstop"):
        stopped = {"sigstop slot": _spark_worker, "sigstop executor": _executor}
        os.kill(stopped.get(kind, _own)().pid, signal.SIGSTOP)
        while True:
            signal.pause()
    if kind == "gil":
        re.match("(a+)+$", 60 * "a" + "b")  # takes longer than the sun will shine
    if kind == "sigsegv":
        ctypes.string_at(0)
    if kind == "oom":
        _exhaust_memory()
    if kind == "worker":
        os.kill(_parent_of(_executor()).pid, signal.SIGKILL)
        kind = "executor"
    victims: dict[str, Callable[[], psutil.Process]] = {
        "sigkill": _own,
        "spark worker": _spark_worker,
        "mpirun": find_mpirun,
        "executor": _executor,
        "driver": lambda: psutil.Process(driver),
    }
    os.kill(victims[kind]().pid, signal.SIGKILL)
    signal.pause()  # whatever follows from it ends this process


def fill(disk: Path) -> None:
    """Take up all the room that is left."""
    with Path(disk, BALLAST).open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))


def freeze(disk: Path) -> None:
    """Make all that writes there hang, as a network file system does whose server is away."""
    subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True)


def _ask_to_end(process: int) -> None:
    """Send SIGTERM; return when this rank, too, has got it: steps are faster than slots tell."""
    heard: list[int] = []
    before: Any = signal.getsignal(signal.SIGTERM)

    def note(number: int, frame: Any) -> None:
        before(number, frame)
        heard.append(number)

    signal.signal(signal.SIGTERM, note)
    try:
        os.kill(process, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while not heard and time.monotonic() < deadline:
            time.sleep(0.01)  # not one long wait: a signal just before it would not end it
    finally:
        signal.signal(signal.SIGTERM, before)


def _own() -> psutil.Process:
    return psutil.Process()


def _spark_worker() -> psutil.Process:
    """Spark's Python worker, in which this rank's slot runs."""
    return psutil.Process(own_task())


def _executor() -> psutil.Process:
    """The JVM above this rank's slot."""
    return next(p for p in _spark_worker().parents() if p.name() == "java")


def _parent_of(process: psutil.Process) -> psutil.Process:
    parent = process.parent()
    assert parent is not None
    return parent


def find_mpirun() -> psutil.Process:
    """The mpirun of this world: started by a slot on this machine, above this rank's shim."""
    for process in _parent_of(_spark_worker()).children(recursive=True):
        if process.name() in ("mpirun", "prterun"):
            return process
    raise LookupError("no mpirun below Spark's Python daemon")


def _cut_driver_link(driver: int) -> None:
    """Shut the slot's connection to the driver down, as a network that forgets it does."""
    ports = {c.laddr.port for c in psutil.Process(driver).net_connections() if not c.raddr}
    slot = _spark_worker()
    links = [c.fd for c in slot.net_connections() if c.raddr and c.raddr.port in ports]
    assert links, "the slot has no connection to the driver"
    libc = ctypes.CDLL(None, use_errno=True)
    for number in links:
        process = os.pidfd_open(slot.pid)
        descriptor = libc.syscall(PIDFD_GETFD, process, number, 0)
        assert descriptor >= 0, os.strerror(ctypes.get_errno())
        with socket.socket(fileno=descriptor) as own:
            own.shutdown(socket.SHUT_RDWR)
        os.close(process)


def _exhaust_memory() -> None:
    """Die as the kernel's out-of-memory killer makes a process die.

    A limit of this process stands in for that of the container; what the kernel sends then is
    SIGKILL, which is sent here once an allocation has really failed.
    """
    import resource

    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20, used + 64 * 2**20))
    held = []
    try:
        while True:
            held.append(bytearray(16 * 2**20))
    except MemoryError:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
