"""Capacity of Spark: the resources of a run's task, and how many tasks can run at once."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...config.launch import LaunchSettings
from ...errors import EnvironmentProblem, InvalidInputError, NotEnoughSlotsError
from .cluster_managers import describe_pods, describe_queue
from .session import (
    check_encryption,
    check_idle_limit,
    check_memory_limit,
    classic_context,
    master_of,
)

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

POLL_SECONDS = 0.25
# How long each executor of a new session may take to register, unless start_timeout is set; and how
# long a session counts as new.
REGISTRATION_SECONDS = 10.0
_NEW_SESSION_SECONDS = 60.0
# How long Spark may take to replace a lost executor, unless start_timeout is set.
REPLACEMENT_SECONDS = 30.0
# Resources that a worker, node or queue needs for an executor to start.
_OF_EXECUTORS = (
    "spark.executor.cores",
    "spark.executor.memory",
    "spark.executor.memoryOverhead",
    "spark.executor.resource.gpu.amount",
)


@dataclass(frozen=True)
class Allotment:
    """Slots that Spark gives a run.

    Attributes:
        slots: tasks that run at once.
        shape: resources of each of them.
        total: how many tasks of that shape Spark can run at once in all; ``None`` if unknown.
        reason: explanation of the number if as many as possible were requested; else empty.
    """

    slots: int
    shape: _TaskShape
    total: int | None
    reason: str = ""

    @property
    def workers(self) -> int:
        """Number of ranks."""
        return self.slots * self.shape.ranks

    def describe(self) -> str:
        """Return the number of ranks and its reason, for people."""
        return f"num_workers={self.workers}, as many as Spark can run at once: {self.reason}"


@dataclass(frozen=True)
class _Capacity:
    """Capacity of Spark: tasks at once.

    Attributes:
        slots: tasks with the needed cores (and GPUs, where Spark knows them).
        reason: explanation of the number, for the message.
    """

    slots: int
    reason: str


def _local_capacity(master: str, task_cpus: int, machine_cpus: int) -> _Capacity | None:
    """Return the fixed capacity of a ``local`` or ``local-cluster`` master, else ``None``. Pure.

    Args:
        master: Spark's master URL.
        task_cpus: ``spark.task.cpus``.
        machine_cpus: cores of this machine, for ``local[*]``.
    """
    if master == "local":
        return _Capacity(1 // task_cpus, f"master {master} has 1 core")
    match = re.fullmatch(r"local\[\s*(\d+|\*)\s*(?:,\s*\d+\s*)?\]", master)
    if match:
        cores = machine_cpus if match[1] == "*" else int(match[1])
        reason = f"master {master} has {cores} cores, {task_cpus} per task"
        return _Capacity(cores // task_cpus, reason)
    match = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master)
    if match:
        workers, cores = int(match[1]), int(match[2])
        reason = f"master {master} has {workers} workers of {cores} cores, {task_cpus} per task"
        return _Capacity(workers * (cores // task_cpus), reason)
    return None


def check_slots(
    spark: SparkSession, options: LaunchSettings, workers: int | None, *, replacing: bool = False
) -> Allotment:
    """Check the session, and that Spark can run the ranks' tasks at once; return their allotment.

    A fixed capacity that is too small fails at once. A cluster whose executors are still
    registering is given time: ``options.start_timeout`` seconds, or, in a new session,
    `REGISTRATION_SECONDS` for each; in one that has lost its executors, `REPLACEMENT_SECONDS`.

    Args:
        spark: session to run in.
        options: how the ranks are started.
        workers: ranks; ``None`` for as many as Spark can run at once.
        replacing: whether Spark may be replacing executors that were lost.

    Raises:
        NotEnoughSlotsError: Spark cannot run that many tasks at once.
        InvalidInputError: resources and ranks do not fit together, or the number of ranks is
            missing and Spark's capacity unknown.
        EnvironmentProblem: Spark's settings rule out barrier scheduling, the resources, the memory
            of ranks or unencrypted traffic.
    """
    check_encryption(spark, options)
    check_memory_limit(spark)
    check_idle_limit(spark)
    shape = _task_shape(spark, options)
    requested = None if workers is None else workers // shape.ranks
    master = master_of(spark)
    in_driver = re.fullmatch(r"local(\[.*\])?", master) is not None
    dynamic = str(spark.conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true"
    if dynamic and not in_driver:
        raise EnvironmentProblem(
            "spark.dynamicAllocation.enabled is true, but Spark starts the tasks of a barrier "
            "stage, all at once, only with a fixed set of executors; set it to false"
        )
    fixed = _local_capacity(master, shape.cpus, os.cpu_count() or 1)
    if fixed is not None and fixed.slots < (requested or 1):
        raise _not_enough(requested or 1, shape, fixed, f"master {master} more cores")
    context = classic_context(spark)
    if context is None or in_driver:
        if requested is not None:
            return Allotment(requested, shape, None if fixed is None else fixed.slots)
        if fixed is None:
            raise InvalidInputError(
                "num_workers is needed with Spark Connect, which does not report how many tasks "
                "its server can run at once"
            )
        return Allotment(fixed.slots, shape, fixed.slots, fixed.reason)
    scala, profile = context._jsc.sc(), _java_profile(spark, shape.profile)
    age = time.time() - context.startTime / 1000
    only_the_driver = scala.getExecutorMemoryStatus().size() <= 1
    slots, waited = _await_slots(
        lambda: int(scala.maxNumConcurrentTasks(profile)),
        requested or (fixed.slots if fixed is not None else None),
        _executor_timeout(options, age, none_there=only_the_driver, replacing=replacing),
        settle=requested is None,
    )
    reason = _explain_executors(spark, slots, waited)
    if slots < (requested or 1):
        if master == "yarn":
            reason += describe_queue(context)
        elif master.startswith("k8s://"):
            reason += describe_pods(context)
        more = _more_executors(options, master)
        raise _not_enough(requested or 1, shape, _Capacity(slots, reason), more)
    return Allotment(requested or slots, shape, slots, reason if requested is None else "")


def _executor_timeout(
    options: LaunchSettings, session_age: float, *, none_there: bool, replacing: bool = False
) -> float:
    """Return how many seconds to wait for the next executor. Pure.

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
    if session_age < _NEW_SESSION_SECONDS:
        return REGISTRATION_SECONDS
    return REPLACEMENT_SECONDS if none_there else 0.0


def _await_slots(
    count: Callable[[], int], enough: int | None, timeout: float, *, settle: bool
) -> tuple[int, float]:
    """Wait until there are enough slots, or no more come.

    Args:
        count: returns how many there are.
        enough: how many are needed; ``None`` if unknown.
        timeout: seconds to wait for the next one.
        settle: whether any number is enough, so that the wait for more is limited to the time that
            a new session's executors take.

    Returns:
        How many there are, and the seconds of the wait.
    """
    began = progress = time.monotonic()
    best = 0
    while True:
        slots, now = count(), time.monotonic()
        if slots > best:
            best, progress = slots, now
        limit = min(timeout, REGISTRATION_SECONDS) if settle and slots else timeout
        if (enough is not None and slots >= enough) or now - progress >= limit:
            return slots, now - began
        time.sleep(POLL_SECONDS)


def _explain_executors(spark: SparkSession, slots: int, waited: float) -> str:
    after = f" after {waited:.0f} s of waiting" if waited >= 1 else ""
    if slots:
        return f"that is what the executors registered with Spark{after} can run at once"
    settings = {name: spark.conf.get(name, "") for name in _OF_EXECUTORS}
    needs = ", ".join(f"{name}={value}" for name, value in settings.items() if value)
    return f"no executor that could run one has registered with Spark{after}" + (
        f"; no worker may have what an executor asks for ({needs})" if needs else ""
    )


def _more_executors(options: LaunchSettings, master: str) -> str:
    wait = "; start_timeout=… waits for executors that are to come"
    return f"Spark more executors (master {master})" + (
        wait if options.start_timeout is None else ""
    )


def _not_enough(
    slots: int, shape: _TaskShape, capacity: _Capacity, more: str
) -> NotEnoughSlotsError:
    return NotEnoughSlotsError(
        f"asked for {slots} slots with {shape.describe()}, found {capacity.slots}: "
        f"{capacity.reason}. Ask for fewer ranks, or less for each, or give {more}",
        requested=slots,
        available=capacity.slots,
    )


@dataclass(frozen=True)
class _TaskShape:
    """Resources of one task.

    Attributes:
        cpus: cores.
        gpus: GPUs.
        ranks: its ranks.
        profile: Spark's ``ResourceProfile`` if these are not the session's own settings.
    """

    cpus: int
    gpus: int
    ranks: int
    profile: ResourceProfile | None = None

    @property
    def demand(self) -> tuple[tuple[str, float], ...]:
        """Resources that a task takes; tasks of equal demand compete for the same slots."""
        others = {} if self.profile is None else _amounts(self.profile)
        return tuple(sorted({**others, "cpus": float(self.cpus), "gpu": float(self.gpus)}.items()))

    def describe(self) -> str:
        gpus = f" and {self.gpus} GPU{'s' * (self.gpus > 1)}" if self.gpus else ""
        return f"{self.cpus} core{'s' * (self.cpus > 1)}{gpus} each"


def _task_shape(spark: SparkSession, options: LaunchSettings) -> _TaskShape:
    """Return the resources of a task of this run.

    Raises:
        InvalidInputError: ``resources`` or the numbers of ranks and GPUs do not fit together.
        EnvironmentProblem: Spark's settings or kind of master rule the GPUs or the resources out.
    """
    master = master_of(spark)
    is_local = re.fullmatch(r"local(\[.*\])?", master) is not None
    if options.gpus_per_worker and is_local:
        raise EnvironmentProblem(
            f"master {master} schedules no GPUs (a task that asks for one waits for ever); use a "
            "standalone, YARN or Kubernetes cluster, or local-cluster[...] on one machine"
        )
    session_cpus = int(spark.conf.get("spark.task.cpus", "1") or 1)
    session_gpus = _configured(spark, "task", "gpu")
    if options.resources is not None:
        wanted = _amounts(options.resources)
        cpus = int(wanted.get("cpus", session_cpus))
        gpus = float(wanted.get("gpu", options.gpus_per_worker))
    elif options.gpus_per_worker and not _divides(options.gpus_per_worker, session_gpus):
        # The session's tasks hold another share of a GPU (for ETL): the ranks need a profile.
        executor = _configured(spark, "executor", "gpu")
        if executor < options.gpus_per_worker or master.startswith("local"):
            raise EnvironmentProblem(_too_few_gpus(options.gpus_per_worker, session_gpus, executor))
        cpus, gpus = session_cpus, float(options.gpus_per_worker)
    else:
        return _TaskShape(session_cpus, int(session_gpus), _count_ranks(options, session_gpus))
    ranks = _count_ranks(options, gpus)
    _check_profiles_work(spark, master)
    profile = options.resources
    if profile is None or isinstance(profile, Mapping):
        others = {k: v for k, v in (profile or {}).items() if k not in ("cpus", "gpu")}
        profile = _make_profile(cpus, gpus, others)
    _check_executors_have(spark, profile)
    return _TaskShape(cpus, int(gpus), ranks, profile)


def _count_ranks(options: LaunchSettings, task_gpus: float) -> int:
    """Return how many ranks a task with ``task_gpus`` GPUs holds. Pure.

    Raises:
        InvalidInputError: they do not fit together.
    """
    each = options.gpus_per_worker
    if not each:
        return 1
    if not _divides(each, task_gpus):
        raise InvalidInputError(
            f"gpus_per_worker={each}, but a task of resources={options.resources!r} holds "
            f"{task_gpus:g} GPUs; a task must hold one rank's GPUs, or those of several"
        )
    ranks = int(task_gpus) // each
    if (options.num_workers or 0) % ranks:
        raise InvalidInputError(
            f"num_workers={options.num_workers}, but Spark gives {task_gpus:g} GPUs to a task, "
            f"which makes {ranks} ranks of {each} GPU each; num_workers must be a multiple of "
            f"{ranks}"
        )
    return ranks


def _divides(each: int, total: float) -> bool:
    return total >= each and total % each == 0


def _too_few_gpus(each: int, task: float, executor: float) -> str:
    return (
        f"gpus_per_worker={each}, but Spark gives {task:g} GPU to a task "
        f"(spark.task.resource.gpu.amount) and {executor:g} to an executor "
        f"(spark.executor.resource.gpu.amount); set both to at least {each}, together with a GPU "
        "discovery script"
    )


def _amounts(resources: Mapping[str, float] | ResourceProfile) -> dict[str, float]:
    if isinstance(resources, Mapping):
        return dict(resources)
    try:
        requests = resources.taskResources
        return {name: float(request.amount) for name, request in requests.items()}
    except AttributeError as error:
        raise InvalidInputError(
            "resources must be amounts by name, such as {'cpus': 4, 'gpu': 1}, or a Spark "
            f"ResourceProfile, got {resources!r}"
        ) from error


def _check_profiles_work(spark: SparkSession, master: str) -> None:
    version = tuple(int(part) for part in str(spark.version).split(".")[:2])
    if version < (4, 0):
        raise EnvironmentProblem(
            f"resources for one stage need Spark 4.0 or newer, this is {spark.version}; set "
            "spark.task.cpus and spark.task.resource.gpu.amount for the whole session instead"
        )
    if master.startswith("local"):
        raise EnvironmentProblem(
            f"master {master} has no resources for one stage (Spark has them on standalone, YARN "
            "and Kubernetes clusters); set spark.task.cpus and spark.task.resource.gpu.amount for "
            "the whole session instead"
        )


def _make_profile(cpus: int, gpus: float, others: Mapping[str, float]) -> ResourceProfile:
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    requests = TaskResourceRequests().cpus(cpus)
    for name, amount in {**({"gpu": gpus} if gpus else {}), **others}.items():
        requests.resource(name, amount)
    return ResourceProfileBuilder().require(requests).build


def _check_executors_have(spark: SparkSession, profile: ResourceProfile) -> None:
    """Refuse resources that executors lack; Spark's own text names no setting."""
    for name in _amounts(profile).keys() - profile.executorResources.keys() - {"cpus"}:
        if not _configured(spark, "executor", name):
            raise EnvironmentProblem(
                f"resources ask for {name}, but Spark gives executors none: "
                f"spark.executor.resource.{name}.amount is not set. Set it, together with a "
                "discovery script"
            )


def _configured(spark: SparkSession, whose: str, resource: str) -> float:
    """Return how much of a resource Spark's settings give a task or an executor."""
    return float(spark.conf.get(f"spark.{whose}.resource.{resource}.amount", "0") or 0)


def _java_profile(spark: SparkSession, profile: ResourceProfile | None) -> JavaObject:
    """Return the JVM's object for ``profile``, or for the session's own settings."""
    context = classic_context(spark)
    assert context is not None
    if profile is None:
        return context._jsc.sc().resourceProfileManager().defaultResourceProfile()
    # Register it with the scheduler, under the id that the stage will use.
    java = profile._java_resource_profile
    context._jsc.sc().resourceProfileManager().addResourceProfile(java)
    return java
