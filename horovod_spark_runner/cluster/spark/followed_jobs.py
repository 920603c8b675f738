"""Spark jobs that are told of while they last."""

from __future__ import annotations

import contextlib
import threading
import time
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
    """How far the rows are that a thread's jobs write.

    Attributes:
        done: tasks of the newest stage that have ended.
        tasks: of that stage.
        rows: that tasks have told to be written, of all stages; Spark hears of it when a task ends,
            and every ten seconds.
        expected: how many rows there will be; ``None`` if that is not known.
    """

    done: int
    tasks: int
    rows: int
    expected: int | None = None

    def describe(self) -> str:
        """Say it for people."""
        of = f" of {self.expected:,}" if self.expected and self.rows <= self.expected else ""
        tasks = f"{self.done:,} of {self.tasks:,} tasks done"
        if not self.rows:
            return f"computing the rows, {tasks}"
        return f"materializing {self.rows:,}{of} rows, {tasks}"


@contextlib.contextmanager
def told_of(
    spark: SparkSession,
    say: Callable[[str], None],
    expected: int | None = None,
    every: float = EVERY,
) -> Iterator[None]:
    """Tell how far the jobs are that this thread starts inside, and that it still goes on.

    Spark Connect tells nothing of jobs: there only the time is said.

    Args:
        spark: session of the jobs.
        say: is told, in a thread of its own, a line every so many seconds.
        expected: how many rows these jobs will write, if that is known.
        every: the seconds; the first line comes after half of them.
    """
    context = classic_context(spark)
    tag, ended = f"horovod-told-{uuid.uuid4().hex[:8]}", threading.Event()
    scala = None if context is None else context._jsc.sc()
    began = time.monotonic()

    def tell() -> None:
        wait = every / 2
        while not ended.wait(wait):
            wait, found = every, None
            # Spark may be stopped meanwhile, and forgets old stages.
            with contextlib.suppress(Exception):
                found = None if scala is None else _progress(scala, tag, expected)
            if not ended.is_set():
                passed = f"preparing the data, {time.monotonic() - began:.0f} s so far"
                say(passed if found is None else found.describe())

    if context is not None:
        context.addJobTag(tag)
    thread = threading.Thread(target=tell, name="hsr-told", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(Exception):
            if context is not None:
                context.removeJobTag(tag)


def _progress(scala: Any, tag: str, expected: int | None) -> StageProgress | None:
    """Return how far the jobs with a tag are; ``None`` if no stage of them is running."""
    tracker = scala.statusTracker()
    infos = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(tag)]
    jobs = [info.get() for info in infos if info.isDefined()]
    running = {s for job in jobs if job.status().toString() == "RUNNING" for s in job.stageIds()}
    ended = {s for job in jobs if job.status().toString() == "SUCCEEDED" for s in job.stageIds()}
    active = []
    for stage in running:
        with contextlib.suppress(Exception):  # one that has not begun
            data = scala.statusStore().lastStageAttempt(stage)
            if data.status().toString() == "ACTIVE":
                active.append((stage, data))
    if not active:
        return None
    _, newest = max(active, key=lambda one: one[0])
    rows = newest.outputRecords() + sum(_written(scala, stage) for stage in ended - running)
    return StageProgress(newest.numCompleteTasks(), newest.numTasks(), rows, expected)


def _written(scala: Any, stage: int) -> int:
    """Return the rows that a stage has written; of one that was skipped, none."""
    with contextlib.suppress(Exception):
        return int(scala.statusStore().lastStageAttempt(stage).outputRecords())
    return 0
