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
from ..session import classic_context, master_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_SECONDS = 0.25


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


def check_slots(spark: SparkSession, options: LaunchOptions) -> None:
    """Make sure that Spark can run ``options.num_workers`` tasks at once.

    A cluster whose executors are still registering is given ``options.start_timeout`` seconds;
    what can never be enough fails at once.

    Raises:
        NotEnoughSlotsError: it cannot.
        EnvironmentProblem: Spark's settings rule barrier scheduling or the GPUs out.
    """
    conf = spark.conf
    if str(conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true":
        raise EnvironmentProblem(
            "spark.dynamicAllocation.enabled is true, but Spark starts the tasks of a barrier "
            "stage, all at once, only with a fixed set of executors; set it to false"
        )
    _check_gpu_settings(spark, options)
    task_cpus = int(conf.get("spark.task.cpus", "1") or 1)
    master = master_of(spark)
    fixed = local_capacity(master, task_cpus, os.cpu_count() or 1)
    _enough(options, fixed, master)
    if fixed is None or not fixed.reason.startswith("master local["):
        _await_slots(options, _registered_slots(spark), master)


def _enough(options: LaunchOptions, capacity: Capacity | None, master: str) -> None:
    if capacity is None or capacity.slots >= options.num_workers:
        return
    gpus = f" with {options.gpus_per_worker} GPU each" if options.gpus_per_worker else ""
    raise NotEnoughSlotsError(
        f"asked for {options.num_workers} slots{gpus}, found {capacity.slots}: {capacity.reason}. "
        "Lower num_workers or spark.task.cpus, or give Spark more cores"
        + (f" (now master {master})" if not master.startswith("local") else ""),
        asked=options.num_workers,
        found=capacity.slots,
    )


def _await_slots(options: LaunchOptions, count: Callable[[], int] | None, master: str) -> None:
    if count is None:
        return
    deadline = time.monotonic() + options.start_timeout
    while (found := count()) < options.num_workers:
        if time.monotonic() >= deadline:
            reason = (
                f"that is what the executors registered within start_timeout="
                f"{options.start_timeout:g} s can run at once"
            )
            _enough(options, Capacity(found, reason), master)
        time.sleep(POLL_SECONDS)


def _registered_slots(spark: SparkSession) -> Callable[[], int] | None:
    """Return a function that asks Spark's scheduler, or ``None`` on Spark Connect."""
    context = classic_context(spark)
    if context is None:
        return None
    scala = context._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    return lambda: int(scala.maxNumConcurrentTasks(profile))


def _check_gpu_settings(spark: SparkSession, options: LaunchOptions) -> None:
    if not options.gpus_per_worker:
        return
    amount = float(spark.conf.get("spark.task.resource.gpu.amount", "0") or 0)
    if amount != options.gpus_per_worker:
        raise EnvironmentProblem(
            f"gpus_per_worker={options.gpus_per_worker}, but Spark gives {amount:g} GPU to a task "
            f"(spark.task.resource.gpu.amount); set it to {options.gpus_per_worker}, together "
            "with spark.executor.resource.gpu.amount and a GPU discovery script"
        )
    master = master_of(spark)
    if re.fullmatch(r"local(\[.*\])?", master):
        raise EnvironmentProblem(
            f"master {master} schedules no GPUs (a task that asks for one waits for ever); use a "
            "standalone, YARN or Kubernetes cluster, or local-cluster[...] on one machine"
        )
