"""Resources of one Spark task of a training: cores, GPUs, ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...config.launch import LaunchSettings
from ...errors import EnvironmentProblem, InvalidInputError
from .session import classic_context, master_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class TaskShape:
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
    profile: Any = None

    @property
    def demand(self) -> tuple[tuple[str, float], ...]:
        """Resources that a task takes; tasks of equal demand compete for the same slots."""
        others = {} if self.profile is None else _amounts(self.profile)
        return tuple(sorted({**others, "cpus": float(self.cpus), "gpu": float(self.gpus)}.items()))

    def describe(self) -> str:
        gpus = f" and {self.gpus} GPU{'s' * (self.gpus > 1)}" if self.gpus else ""
        return f"{self.cpus} core{'s' * (self.cpus > 1)}{gpus} each"


def task_shape(spark: SparkSession, options: LaunchSettings) -> TaskShape:
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
    session_gpus = float(spark.conf.get("spark.task.resource.gpu.amount", "0") or 0)
    if options.resources is not None:
        wanted = _amounts(options.resources)
        cpus = int(wanted.get("cpus", session_cpus))
        gpus = float(wanted.get("gpu", options.gpus_per_worker))
    elif options.gpus_per_worker and not _divides(options.gpus_per_worker, session_gpus):
        # The session's tasks hold another share of a GPU (for ETL): the ranks need a profile.
        executor = float(spark.conf.get("spark.executor.resource.gpu.amount", "0") or 0)
        if executor < options.gpus_per_worker or master.startswith("local"):
            raise EnvironmentProblem(_too_few_gpus(options.gpus_per_worker, session_gpus, executor))
        cpus, gpus = session_cpus, float(options.gpus_per_worker)
    else:
        return TaskShape(session_cpus, int(session_gpus), _count_ranks(options, session_gpus))
    ranks = _count_ranks(options, gpus)
    _check_profiles_work(spark, master)
    profile = options.resources
    if profile is None or isinstance(profile, Mapping):
        others = {k: v for k, v in (profile or {}).items() if k not in ("cpus", "gpu")}
        profile = _make_profile(cpus, gpus, others)
    return TaskShape(cpus, int(gpus), ranks, profile)


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


def _amounts(resources: Any) -> dict[str, float]:
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


def _make_profile(cpus: int, gpus: float, others: Mapping[str, float]) -> Any:
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    requests = TaskResourceRequests().cpus(cpus)
    for name, amount in {**({"gpu": gpus} if gpus else {}), **others}.items():
        requests.resource(name, amount)
    return ResourceProfileBuilder().require(requests).build


def java_profile(spark: SparkSession, profile: Any) -> Any:
    """Return the JVM's object for ``profile``, or for the session's own settings."""
    context = classic_context(spark)
    assert context is not None
    if profile is None:
        return context._jsc.sc().resourceProfileManager().defaultResourceProfile()
    # Register it with the scheduler, under the id that the stage will use.
    java = profile._java_resource_profile
    context._jsc.sc().resourceProfileManager().addResourceProfile(java)
    return java
