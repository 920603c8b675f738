"""Faults at chosen steps of a training, each of them once, however often it is started again."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
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
# What needs executors of their own, or the call to be made again.
CLUSTER_KINDS = ("executor", "worker", "driver", "exception", "sigterm executor")
# What a fault of a kind that ends in " later" waits for, in the folder of faults.
GO_FILE = "go"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        step: the step of the whole run after which it happens.
        rank: where.
        kind: one of `KINDS` or `CLUSTER_KINDS`.
    """

    step: int
    rank: int
    kind: str


def choose_faults(seed: int, count: int, steps: int, kinds: tuple[str, ...]) -> list[Fault]:
    """Return ``count`` faults at different random steps, every kind about equally often."""
    generator = random.Random(seed)
    chosen = sorted(generator.sample(range(1, steps), count))
    shuffled = [kinds[n % len(kinds)] for n in range(count)]
    generator.shuffle(shuffled)
    return [
        Fault(step, generator.randrange(2), kind)
        for step, kind in zip(chosen, shuffled, strict=True)
    ]


def callbacks_for(faults: Sequence[Fault], folder: str) -> Callable[[], list[Any]]:
    """Return what `run_training` takes as ``callbacks``: a function that makes the injector.

    Must be called on the driver: its process is what the fault ``"driver"`` kills.
    """
    driver = os.getpid()

    def make() -> list[Any]:
        import horovod.tensorflow as hvd
        import keras

        own = [fault for fault in faults if fault.rank == hvd.rank()]

        class Injector(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                step = int(self.model.optimizer.iterations)
                for fault in own:
                    if fault.step == step and first_time(folder, fault):
                        if fault.kind.endswith(" later"):
                            await_file(Path(folder, GO_FILE))
                        strike(fault.kind.removesuffix(" later"), driver)

        return [Injector()]

    return make


def first_time(folder: str, fault: Fault) -> bool:
    """Note that a fault happens now; tell whether it had not happened before."""
    with contextlib.suppress(FileExistsError):
        Path(folder, f"step-{fault.step}-{fault.kind}".replace(" ", "-")).touch(exist_ok=False)
        return True
    return False


def await_file(path: Path) -> None:
    """Wait until the test has made the file."""
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def strike(kind: str, driver: int) -> None:
    """Make the fault happen to this rank."""
    print(f"fault: {kind}", flush=True)
    if kind == "exception":
        raise ValueError("an injected fault")
    if kind == "exit":
        os._exit(7)
    if kind.startswith("sigterm"):
        asked = {"sigterm slot": _spark_worker, "sigterm executor": _executor}
        os.kill(asked.get(kind, _own)().pid, signal.SIGTERM)
        return
    if kind == "sigsegv":
        ctypes.string_at(0)
    if kind == "oom":
        _exhaust_memory()
    if kind == "worker":
        os.kill(_executor().parent().pid, signal.SIGKILL)
        kind = "executor"
    victims = {
        "sigkill": _own,
        "spark worker": _spark_worker,
        "mpirun": _mpirun,
        "executor": _executor,
        "driver": lambda: psutil.Process(driver),
    }
    os.kill(victims[kind]().pid, signal.SIGKILL)
    signal.pause()  # whatever follows from it ends this process


def _own() -> psutil.Process:
    return psutil.Process()


def _spark_worker() -> psutil.Process:
    """Spark's Python worker, in which this rank's slot runs."""
    return psutil.Process(own_task())


def _executor() -> psutil.Process:
    """The JVM above this rank's slot."""
    return next(p for p in _spark_worker().parents() if p.name() == "java")


def _mpirun() -> psutil.Process:
    """The mpirun of this world: started by a slot on this machine, above this rank's shim."""
    for process in _spark_worker().parent().children(recursive=True):
        if process.name() in ("mpirun", "prterun"):
            return process
    raise LookupError("no mpirun below Spark's Python daemon")


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
