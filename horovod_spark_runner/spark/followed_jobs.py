"""Spark jobs that are told of while they last."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .session import classic_context

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Seconds from one word to the next.
EVERY = 5.0


@dataclass(frozen=True)
class StageProgress:
    """How far the newest stage is that writes rows.

    Attributes:
        done: tasks that have ended.
        tasks: of the stage.
        rows: that tasks have told to be written; Spark hears of it when a task ends, and every ten
            seconds.
    """

    done: int
    tasks: int
    rows: int

    def describe(self) -> str:
        """Say it for people."""
        return f"{self.rows:,} rows written, {self.done:,} of {self.tasks:,} tasks done"


@contextlib.contextmanager
def told_of(
    spark: SparkSession, say: Callable[[str], None], every: float = EVERY
) -> Iterator[None]:
    """Tell how far the jobs are that this thread starts inside; nothing on Spark Connect.

    Args:
        spark: session of the jobs.
        say: is told, in a thread of its own, a line every so many seconds.
        every: the seconds.
    """
    context = classic_context(spark)
    if context is None:
        yield
        return
    tag, ended = f"horovod-told-{uuid.uuid4().hex[:8]}", threading.Event()
    scala = context._jsc.sc()

    def tell() -> None:
        while not ended.wait(every):
            # Spark may be stopped meanwhile, and forgets old stages.
            with contextlib.suppress(Exception):
                found = _progress(scala, tag)
                if found is not None and not ended.is_set():
                    say(found.describe())

    context.addJobTag(tag)
    thread = threading.Thread(target=tell, name="hsr-told", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(Exception):
            context.removeJobTag(tag)


def _progress(scala: Any, tag: str) -> StageProgress | None:
    """Return how far the newest stage with a tag is; ``None`` if none is running."""
    tracker = scala.statusTracker()
    stages = [
        stage
        for job in tracker.getJobIdsForTag(tag)
        if (facts := tracker.getJobInfo(job)).isDefined()
        and facts.get().status().toString() == "RUNNING"
        for stage in facts.get().stageIds()
    ]
    for stage in sorted(stages, reverse=True):
        data = scala.statusStore().lastStageAttempt(stage)
        if data.status().toString() == "ACTIVE":
            return StageProgress(data.numCompleteTasks(), data.numTasks(), data.outputRecords())
    return None
