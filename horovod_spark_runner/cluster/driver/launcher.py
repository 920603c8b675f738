"""Launcher of a run's ranks: Spark, or a fake in tests."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pyspark import TaskContext

from ...config.launch import LaunchSettings
from ...machine import environment_at_start
from ..protocol.command import worker_environment
from ..slot.worker_pool import request_import
from ..spark.capacity import Allotment, check_slots
from ..spark.session import active_session, described, inheriting_thread
from ..spark.tasks import collect_from_tasks
from .coordinator import Observer
from .launch import launch
from .result import RunResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Launcher(Protocol):
    """Runs a function on ranks."""

    def warm_up(
        self,
        spark: SparkSession,
        options: LaunchSettings,
        allotment: Allotment,
        modules: Sequence[str],
    ) -> None:
        """Prepare the ranks of a later `launch`; returns at once."""
        ...

    def await_slots(self, spark: SparkSession, options: LaunchSettings, workers: int) -> None:
        """Wait for the executors that replace lost ones.

        Raises:
            NotEnoughSlotsError: there are too few for ``workers`` ranks.
        """
        ...

    def launch(
        self,
        spark: SparkSession | None,
        options: LaunchSettings,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        observer: Observer,
        modules: Sequence[str] | None = None,
        workers: int | None = None,
    ) -> RunResult:
        """Run ``function`` on every rank; see `launch.launch`. By default in the active session."""
        ...


class SparkLauncher:
    """Runs ranks in the tasks of a Spark barrier stage."""

    def warm_up(
        self,
        spark: SparkSession,
        options: LaunchSettings,
        allotment: Allotment,
        modules: Sequence[str],
    ) -> None:
        """Import ``modules`` on the executors while the driver still prepares the data.

        It only saves time: whatever goes wrong here shows again when the ranks are started.
        """
        if not options.worker_idle_timeout:
            return
        slots, shape = allotment.slots, allotment.shape
        task = _WarmUpTask(options, shape.ranks, tuple(modules))

        def run() -> None:
            description = "Horovod: importing ahead of ranks"
            with contextlib.suppress(Exception), described(spark, description):
                collect_from_tasks(spark, slots, task, profile=shape.profile)

        inheriting_thread(spark, run, "hsr-warm-up").start()

    def await_slots(self, spark: SparkSession, options: LaunchSettings, workers: int) -> None:
        check_slots(spark, options, workers, replacing=True)

    def launch(
        self,
        spark: SparkSession | None,
        options: LaunchSettings,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        observer: Observer,
        modules: Sequence[str] | None = None,
        workers: int | None = None,
    ) -> RunResult:
        session = spark or active_session()
        return launch(session, options, function, args, kwargs, observer, modules, workers)


@dataclass(frozen=True)
class _WarmUpTask:
    """Spark task that makes its executor's prefork process import modules."""

    options: LaunchSettings
    ranks: int
    modules: tuple[str, ...]

    def __call__(self) -> tuple[bytes, ...]:
        context = TaskContext.get()
        assert context is not None
        environment = worker_environment(
            environment_at_start(),
            self.options,
            gpus=(),
            cpus=max(1, context.cpus() // self.ranks),
            python_path=sys.path,
            temporary="",
        )
        request_import(environment, self.modules, self.options.worker_idle_timeout)
        return ()


_chosen: ContextVar[Launcher] = ContextVar("launcher", default=SparkLauncher())  # noqa: B039


def chosen_launcher() -> Launcher:
    """Return the launcher of runs that start in this context."""
    return _chosen.get()


@contextlib.contextmanager
def using_launcher(launcher: Launcher) -> Iterator[None]:
    """Use ``launcher`` for the runs that start inside, in this thread."""
    token = _chosen.set(launcher)
    try:
        yield
    finally:
        _chosen.reset(token)
