"""Slots that Spark can give at once, counted before anything is launched."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...config.launch import LaunchSettings
from ...errors import EnvironmentProblem, InvalidInputError, NotEnoughSlotsError
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
class Allotment:
    """What Spark gives a run.

    Attributes:
        slots: tasks that run at once.
        shape: what each of them holds.
        total: how many tasks of that shape Spark can run at once in all; ``None`` if it does not
            tell.
        reason: where the number comes from if Spark was to give as many as it can; else empty.
    """

    slots: int
    shape: TaskShape
    total: int | None
    reason: str = ""

    @property
    def workers(self) -> int:
        """How many ranks that makes."""
        return self.slots * self.shape.ranks

    def describe(self) -> str:
        """Say how many ranks there will be, and why."""
        return f"num_workers={self.workers}, as many as Spark can run at once: {self.reason}"


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


def check_slots(
    spark: SparkSession, options: LaunchSettings, workers: int | None, *, replacing: bool = False
) -> Allotment:
    """Make sure that Spark can run the ranks' tasks at once, and return what it gives them.

    What can never be enough fails at once. A cluster whose executors are still registering is
    given time: ``options.start_timeout`` seconds, or, in a new session, `REGISTRATION_SECONDS`
    for each; in one that has lost its executors, `REPLACEMENT_SECONDS`.

    Args:
        spark: session to run in.
        options: how the ranks are started.
        workers: ranks; ``None`` for as many as Spark can run at once.
        replacing: whether Spark may be replacing executors that were lost.

    Raises:
        NotEnoughSlotsError: it cannot.
        InvalidInputError: resources and ranks do not go together, or Spark does not tell how many
            it can run.
        EnvironmentProblem: Spark's settings rule barrier scheduling or the resources out.
    """
    shape = task_shape(spark, options)
    asked = None if workers is None else workers // shape.ranks
    master = master_of(spark)
    in_driver = re.fullmatch(r"local(\[.*\])?", master) is not None
    dynamic = str(spark.conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true"
    if dynamic and not in_driver:
        raise EnvironmentProblem(
            "spark.dynamicAllocation.enabled is true, but Spark starts the tasks of a barrier "
            "stage, all at once, only with a fixed set of executors; set it to false"
        )
    fixed = local_capacity(master, shape.cpus, os.cpu_count() or 1)
    if fixed is not None and fixed.slots < (asked or 1):
        raise _not_enough(asked or 1, shape, fixed, f"master {master} more cores")
    context = classic_context(spark)
    if context is None or in_driver:
        if asked is not None:
            return Allotment(asked, shape, None if fixed is None else fixed.slots)
        if fixed is None:
            raise InvalidInputError(
                "num_workers is needed with Spark Connect, which does not tell how many tasks its "
                "server can run at once"
            )
        return Allotment(fixed.slots, shape, fixed.slots, fixed.reason)
    scala, profile = context._jsc.sc(), java_profile(spark, shape.profile)
    age = time.time() - context.startTime / 1000
    only_the_driver = scala.getExecutorMemoryStatus().size() <= 1
    found, waited = _await_slots(
        lambda: int(scala.maxNumConcurrentTasks(profile)),
        asked or (fixed.slots if fixed is not None else None),
        patience(options, age, none_there=only_the_driver, replacing=replacing),
        settle=asked is None,
    )
    reason = _registered(spark, found, waited)
    if found < (asked or 1):
        more = _more_executors(options, master)
        raise _not_enough(asked or 1, shape, Capacity(found, reason), more)
    return Allotment(asked or found, shape, found, reason if asked is None else "")


def patience(
    options: LaunchSettings, session_age: float, *, none_there: bool, replacing: bool = False
) -> float:
    """Return for how many seconds the next executor is waited for. Pure.

    Args:
        options: the run's settings.
        session_age: of the session, in seconds.
        none_there: whether there is no executor at all: Spark replaces those that were lost.
        replacing: whether some may have been lost just now.
    """
    if options.start_timeout is not None:
        return options.start_timeout
    if replacing:
        return REPLACEMENT_SECONDS
    if session_age < NEW_SESSION_SECONDS:
        return REGISTRATION_SECONDS
    return REPLACEMENT_SECONDS if none_there else 0.0


def _await_slots(
    count: Callable[[], int], enough: int | None, patience: float, *, settle: bool
) -> tuple[int, float]:
    """Wait until there are enough slots, or no more come.

    Args:
        count: tells how many there are.
        enough: how many are; ``None`` if that is not known.
        patience: seconds to wait for the next one.
        settle: whether to make do with any number, and not to wait for more longer than a new
            session's executors take.

    Returns:
        How many there are, and for how many seconds they were waited for.
    """
    began = progress = time.monotonic()
    best = 0
    while True:
        found, now = count(), time.monotonic()
        if found > best:
            best, progress = found, now
        limit = min(patience, REGISTRATION_SECONDS) if settle and found else patience
        if (enough is not None and found >= enough) or now - progress >= limit:
            return found, now - began
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


def _more_executors(options: LaunchSettings, master: str) -> str:
    wait = "; start_timeout=… waits for executors that are to come"
    return f"Spark more executors (master {master})" + (
        wait if options.start_timeout is None else ""
    )


def _not_enough(slots: int, shape: TaskShape, capacity: Capacity, more: str) -> NotEnoughSlotsError:
    return NotEnoughSlotsError(
        f"asked for {slots} slots with {shape.describe()}, found {capacity.slots}: "
        f"{capacity.reason}. Ask for fewer ranks, or less for each, or give {more}",
        asked=slots,
        found=capacity.slots,
    )
