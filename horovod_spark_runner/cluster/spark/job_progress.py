"""Progress of Spark jobs, reported while they run."""

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

# Seconds between reports.
_REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class _StageProgress:
    """Progress of a thread's jobs that write rows.

    Attributes:
        done: tasks of the newest stage that have ended.
        tasks: tasks of that stage.
        rows: rows written so far, by all stages; tasks report them to Spark when they end, and
            every ten seconds.
        expected: how many rows there will be; ``None`` if that is unknown.
    """

    done: int
    tasks: int
    rows: int
    expected: int | None = None

    def describe(self) -> str:
        """Return it as text for people."""
        of = f" of {self.expected:,}" if self.expected and self.rows <= self.expected else ""
        tasks = f"{self.done:,} of {self.tasks:,} tasks done"
        if not self.rows:
            return f"computing the rows, {tasks}"
        return f"materializing {self.rows:,}{of} rows, {tasks}"


@contextlib.contextmanager
def report_job_progress(
    spark: SparkSession,
    say: Callable[[str], None],
    expected: int | None = None,
    every: float = _REPORT_SECONDS,
) -> Iterator[None]:
    """Report the progress of the jobs that this thread starts inside.

    Spark Connect has no such information: there only the elapsed time is reported.

    Args:
        spark: session of the jobs.
        say: takes a line of text every so many seconds, on its own thread.
        expected: how many rows these jobs will write, if that is known.
        every: seconds between lines; the first one comes after half of them.
    """
    context = classic_context(spark)
    tag, ended = f"horovod-progress-{uuid.uuid4().hex[:8]}", threading.Event()
    scala = None if context is None else context._jsc.sc()
    began = time.monotonic()

    def report() -> None:
        wait = every / 2
        while not ended.wait(wait):
            wait, progress = every, None
            # Spark may be stopped meanwhile, and forgets old stages.
            with contextlib.suppress(Exception):
                progress = None if scala is None else _progress(scala, tag, expected)
            if not ended.is_set():
                elapsed = f"preparing the data, {time.monotonic() - began:.0f} s so far"
                say(elapsed if progress is None else progress.describe())

    if context is not None:
        context.addJobTag(tag)
    thread = threading.Thread(target=report, name="hsr-job-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(Exception):
            if context is not None:
                context.removeJobTag(tag)


def _progress(scala: Any, tag: str, expected: int | None) -> _StageProgress | None:
    """Return the progress of the jobs with a tag; ``None`` if no stage of them is running."""
    tracker = scala.statusTracker()
    infos = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(tag)]
    jobs = [info.get() for info in infos if info.isDefined()]
    running = {s for job in jobs if job.status().toString() == "RUNNING" for s in job.stageIds()}
    ended = {s for job in jobs if job.status().toString() == "SUCCEEDED" for s in job.stageIds()}
    active = []
    for stage in running:
        with contextlib.suppress(Exception):  # it has not begun
            data = scala.statusStore().lastStageAttempt(stage)
            if data.status().toString() == "ACTIVE":
                active.append((stage, data))
    if not active:
        return None
    _, newest = max(active, key=lambda entry: entry[0])
    rows = newest.outputRecords() + sum(_written(scala, stage) for stage in ended - running)
    return _StageProgress(newest.numCompleteTasks(), newest.numTasks(), rows, expected)


def _written(scala: Any, stage: int) -> int:
    """Return the rows that a stage has written; a skipped stage has written none."""
    with contextlib.suppress(Exception):
        return int(scala.statusStore().lastStageAttempt(stage).outputRecords())
    return 0
