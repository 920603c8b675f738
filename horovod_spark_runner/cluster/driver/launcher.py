"""The launcher that gives runs their ranks: Spark, or a substitute of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from ...config.launch import LaunchSettings
from ..spark.capacity import Allotment, check_slots
from ..spark.session import active_session
from .launch import RunResult, launch
from .talk import Observer
from .warm_up import import_meanwhile

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Launcher(Protocol):
    """Runs a function on ranks."""

    def prepare(
        self,
        spark: SparkSession,
        options: LaunchSettings,
        allotment: Allotment,
        modules: Sequence[str],
    ) -> None:
        """Make ready what the ranks of a later `launch` will need; returns at once."""
        ...

    def await_slots(self, spark: SparkSession, options: LaunchSettings, workers: int) -> None:
        """Wait for the executors that replace lost ones.

        Raises:
            NotEnoughSlotsError: there are too few for so many ranks.
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

    def prepare(
        self,
        spark: SparkSession,
        options: LaunchSettings,
        allotment: Allotment,
        modules: Sequence[str],
    ) -> None:
        import_meanwhile(spark, options, allotment, modules)

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


_chosen: ContextVar[Launcher] = ContextVar("launcher", default=SparkLauncher())  # noqa: B039


def chosen_launcher() -> Launcher:
    """Return what starts the ranks of the runs that are begun here."""
    return _chosen.get()


@contextlib.contextmanager
def using_launcher(launcher: Launcher) -> Iterator[None]:
    """Let ``launcher`` start the ranks of the runs that are begun inside, in this thread."""
    token = _chosen.set(launcher)
    try:
        yield
    finally:
        _chosen.reset(token)
