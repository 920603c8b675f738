"""Frameworks are imported on the executors while the driver still prepares the data."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext

from ...machine import environment_at_start
from ...settings.launching import LaunchSettings
from ...spark.capacity import Allotment
from ...spark.session import described, inheriting_thread, use_own_python
from ..shared.command import worker_environment
from ..slot.ready import ask_to_import

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class HeadStart:
    """The function given to ``mapInArrow``: has its executor's ready process import."""

    options: LaunchSettings
    ranks: int
    modules: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
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
        ask_to_import(environment, self.modules, self.options.worker_idle_timeout)


def import_meanwhile(
    spark: SparkSession, options: LaunchSettings, allotment: Allotment, modules: Sequence[str]
) -> None:
    """Have the executors import what ranks will need; returns at once.

    It is an advantage only: what goes wrong will show when the ranks are started.

    Args:
        spark: session to run in.
        options: how the ranks will be started.
        allotment: what Spark gives them.
        modules: what they will import.
    """
    if not options.worker_idle_timeout:
        return
    use_own_python(spark)
    slots, shape = allotment.slots, allotment.shape
    task = HeadStart(options, shape.ranks, tuple(modules))

    def run() -> None:
        profile = {} if shape.profile is None else {"profile": shape.profile}
        with contextlib.suppress(Exception), described(spark, "Horovod: importing ahead of ranks"):
            spark.range(0, slots, 1, slots).mapInArrow(task, "id long", **profile).collect()

    inheriting_thread(spark, run, "hsr-head-start").start()
