"""How many slots Spark can give at once, asked before anything is launched."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import LaunchOptions
from ..errors import EnvironmentProblem, NotEnoughSlotsError
from .session import classic_context, master_of
from .stage_resources import TaskShape, java_profile, task_shape

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_SECONDS = 0.25
# How long the executors of a new session may take to register, one after the other, unless
# start_timeout says; and how long a session counts as new.
REGISTRATION_SECONDS = 10.0
NEW_SESSION_SECONDS = 60.0
# How long Spark may take to replace a lost executor, unless start_timeout says.
REPLACEMENT_SECONDS = 30.0
# What a worker, node or queue must have for an executor to start.
_OF_EXECUTORS = (
    "spark.executor.cores",
    "spark.executor.memory",
    "spark.executor.memoryOverhead",
    "spark.executor.resource.gpu.amount",
)


@dataclass(frozen=True)
class Capacity:
    """What Spark can run at once.

    Attributes:
        slots: tasks with the needed cores (and GPUs, where Spark knows them).
        reason: where the number comes from, for the message.
    """

    slots: int
    reason: str


def local_capacity(master: str, task_cpus: int, machine_cpus: int) -> Capacity | None:
    """Return the fixed capacity of a ``local`` or ``local-cluster`` master, else ``None``. Pure.

    Args:
        master: Spark's master URL.
        task_cpus: ``spark.task.cpus``.
        machine_cpus: cores of this machine, for ``local[*]``.
    """
    if master == "local":
        return Capacity(1 // task_cpus, f"master {master} has 1 core")
    match = re.fullmatch(r"local\[\s*(\d+|\*)\s*(?:,\s*\d+\s*)?\]", master)
    if match:
        cores = machine_cpus if match[1] == "*" else int(match[1])
        reason = f"master {master} has {cores} cores, {task_cpus} per task"
        return Capacity(cores // task_cpus, reason)
    match = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master)
    if match:
        workers, cores = int(match[1]), int(match[2])
        reason = f"master {master} has {workers} workers of {cores} cores, {task_cpus} per task"
        return Capacity(workers * (cores // task_cpus), reason)
    return None


def check_slots(spark: SparkSession, options: LaunchOptions) -> TaskShape:
    """Make sure that Spark can run the ranks' tasks at once, and return what each holds.

    What can never be enough fails at once. A cluster whose executors are still registering is
    given time: ``options.start_timeout`` seconds, or, in a new session, `REGISTRATION_SECONDS`
    for each; in one that has lost all of them, `REPLACEMENT_SECONDS`.

    Raises:
        NotEnoughSlotsError: it cannot.
        InvalidInputError: resources and ranks do not go together.
        EnvironmentProblem: Spark's settings rule barrier scheduling or the resources out.
    """
    if str(spark.conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true":
        raise EnvironmentProblem(
            "spark.dynamicAllocation.enabled is true, but Spark starts the tasks of a barrier "
            "stage, all at once, only with a fixed set of executors; set it to false"
        )
    shape = task_shape(spark, options)
    slots = options.num_workers // shape.ranks
    master = master_of(spark)
    fixed = local_capacity(master, shape.cpus, os.cpu_count() or 1)
    if fixed is not None and fixed.slots < slots:
        raise _not_enough(slots, shape, fixed, f"master {master} more cores")
    context = classic_context(spark)
    if context is not None and not re.fullmatch(r"local(\[.*\])?", master):
        scala, profile = context._jsc.sc(), java_profile(spark, shape.profile)
        age = time.time() - context.startTime / 1000
        only_the_driver = scala.getExecutorMemoryStatus().size() <= 1
        _await_slots(
            lambda: int(scala.maxNumConcurrentTasks(profile)),
            slots,
            patience(options, age, none_there=only_the_driver),
            lambda found, waited: _not_enough(
                slots,
                shape,
                Capacity(found, _registered(spark, found, waited)),
                _more_executors(options, master),
            ),
        )
    return shape


def patience(options: LaunchOptions, session_age: float, *, none_there: bool) -> float:
    """Return for how many seconds the next executor is waited for. Pure.

    Args:
        options: the run's settings.
        session_age: of the session, in seconds.
        none_there: whether there is no executor at all: Spark replaces those that were lost.
    """
    if options.start_timeout is not None:
        return options.start_timeout
    if session_age < NEW_SESSION_SECONDS:
        return REGISTRATION_SECONDS
    return REPLACEMENT_SECONDS if none_there else 0.0


def _await_slots(
    count: Callable[[], int],
    slots: int,
    patience: float,
    refuse: Callable[[int, float], NotEnoughSlotsError],
) -> None:
    began = progress = time.monotonic()
    best = 0
    while (found := count()) < slots:
        now = time.monotonic()
        if found > best:
            best, progress = found, now
        if now - progress >= patience:
            raise refuse(found, now - began)
        time.sleep(POLL_SECONDS)


def _registered(spark: SparkSession, found: int, waited: float) -> str:
    after = f" after {waited:.0f} s of waiting" if waited >= 1 else ""
    if found:
        return f"that is what the executors registered with Spark{after} can run at once"
    settings = {name: spark.conf.get(name, "") for name in _OF_EXECUTORS}
    asked = ", ".join(f"{name}={value}" for name, value in settings.items() if value)
    return f"no executor that could run one has registered with Spark{after}" + (
        f"; no worker may have what an executor asks for ({asked})" if asked else ""
    )


def _more_executors(options: LaunchOptions, master: str) -> str:
    wait = "; start_timeout=… waits for executors that are to come"
    return f"Spark more executors (master {master})" + (
        wait if options.start_timeout is None else ""
    )


def _not_enough(slots: int, shape: TaskShape, capacity: Capacity, more: str) -> NotEnoughSlotsError:
    return NotEnoughSlotsError(
        f"asked for {slots} slots with {shape.describe()}, found {capacity.slots}: "
        f"{capacity.reason}. Lower num_workers or what a task asks for, or give {more}",
        asked=slots,
        found=capacity.slots,
    )
