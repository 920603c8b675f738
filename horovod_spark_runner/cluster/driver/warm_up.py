"""Frameworks are imported on the executors while the driver still prepares the data."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext

from ...config.launch import LaunchSettings
from ...machine import environment_at_start
from ..protocol.command import worker_environment
from ..slot.worker_pool import ask_to_import
from ..spark.capacity import Allotment
from ..spark.session import described, inheriting_thread
from ..spark.tasks import collect_from_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class HeadStart:
    """The body of a task: has its executor's ready process import."""

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
        ask_to_import(environment, self.modules, self.options.worker_idle_timeout)
        return ()


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
    slots, shape = allotment.slots, allotment.shape
    task = HeadStart(options, shape.ranks, tuple(modules))

    def run() -> None:
        with contextlib.suppress(Exception), described(spark, "Horovod: importing ahead of ranks"):
            collect_from_tasks(spark, slots, task, profile=shape.profile)

    inheriting_thread(spark, run, "hsr-head-start").start()
