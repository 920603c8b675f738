"""Spark jobs: on a thread of their own with a tag, by which they are cancelled; their progress."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from .session import classic_context, described, inheriting_thread, is_stopped

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark.sql import SparkSession

T = TypeVar("T")
# How long a job that is cancelled may take to end, in seconds.
CANCEL_GRACE = 10.0


class TaggedJob(Generic[T]):
    """A job with a tag, by which it is cancelled and no other one.

    It runs in a thread so that the caller's own stays free for messages and Ctrl-C, and keeps the
    caller's group and tags, by which others cancel it.

    Args:
        spark: session to run in.
        tag: unique to this job.
        description: its text in Spark's UI.
        act: runs the job and returns its result.
    """

    def __init__(
        self, spark: SparkSession, tag: str, description: str, act: Callable[[], T]
    ) -> None:
        self._spark = spark
        self._tag = tag
        self._description = description
        self._act = act
        self._on_end: Callable[[], object] = lambda: None
        self._cancelled = self._ended = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self._thread = self._make_thread()

    def start(self, on_end: Callable[[], object] = lambda: None) -> None:
        """Start the job.

        Args:
            on_end: is called once it has ended, by the thread that ran it.
        """
        self._on_end = on_end
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._ended

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    @property
    def cancelled_elsewhere(self) -> bool:
        """True if the job was cancelled elsewhere: at Spark's UI or through its API."""
        return not self._cancelled and "SPARK_JOB_CANCELLED" in str(self.error)

    @property
    def failed_by_itself(self) -> bool:
        """True if Spark ended the job by itself."""
        return self.error is not None and not self._cancelled

    @property
    def session_stopped(self) -> bool:
        """True if the session, or its connection, was stopped meanwhile."""
        return self.error is not None and is_stopped(self._spark)

    def cancel(self) -> None:
        """Make Spark kill the job's tasks."""
        self._cancelled = True
        context = classic_context(self._spark)
        if context is not None:
            context.cancelJobsWithTag(self._tag)
        else:
            self._spark.interruptTag(self._tag)

    def run(self) -> T | None:
        """Run the job to its end and return its result; an interrupted wait cancels it.

        Where it fails or is interrupted, its tasks have ended when this raises: on classic Spark,
        which reports them, if that takes no longer than ten seconds.
        """
        self.start()
        try:
            self.join()
        except BaseException:
            self.cancel()
            self._wait_for_tasks()
            raise
        if self.error is not None:
            self._wait_for_tasks()
            raise self.error
        return self.result

    def _wait_for_tasks(self) -> None:
        context = classic_context(self._spark)
        end = time.monotonic() + CANCEL_GRACE
        while self.is_alive() and time.monotonic() < end:
            self.join(0.5)
            with contextlib.suppress(Exception):
                self.cancel()  # again: while Spark plans, there is no job to cancel yet
        if context is None:
            return
        with contextlib.suppress(Exception):  # Spark may be stopped, which ends all tasks
            tracker = context._jsc.sc().statusTracker()
            while time.monotonic() < end and _is_active(tracker, self._tag):
                time.sleep(0.1)

    def _make_thread(self) -> threading.Thread:
        classic = classic_context(self._spark) is not None
        act = self._act_described if classic else self._act_tagged
        return inheriting_thread(self._spark, functools.partial(self._run, act), self._tag)

    def _act_described(self) -> T:
        context = self._spark.sparkContext
        context.addJobTag(self._tag)
        with contextlib.suppress(Exception):  # older Sparks have none
            # SparkSession.interruptAll finds jobs that are not queries by this tag.
            context.addJobTag(self._spark._jsparkSession.sessionJobTag())
        context.setInterruptOnCancel(True)
        with described(self._spark, self._description):
            return self._act()

    def _act_tagged(self) -> T:
        self._spark.addTag(self._tag)
        return self._act()

    def _run(self, act: Callable[[], T]) -> None:
        try:
            self.result = act()
        except BaseException as error:  # the caller's thread raises it
            self.error = error
        # Reported before the thread itself has ended, which it cannot report.
        self._ended = True
        self._on_end()


def _is_active(tracker: JavaObject, tag: str) -> bool:
    """Return whether tasks of the jobs with a tag are running, by Spark's ``statusTracker``.

    A stage's count of tasks is late until its job has ended: Spark's listener is asynchronous, and
    writes the count with the stage's end at the latest.
    """
    for job in tracker.getJobIdsForTag(tag):
        facts = tracker.getJobInfo(job)
        if not facts.isDefined():
            continue
        if facts.get().status().name() == "RUNNING":
            return True
        for stage in facts.get().stageIds():
            info = tracker.getStageInfo(stage)
            if info.isDefined() and info.get().numActiveTasks():
                return True
    return False


@dataclass(frozen=True)
class _StageProgress:
    """Progress of a thread's jobs.

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
        rows = f"{self.rows:,}{of} rows written, " if self.rows else ""
        return f"{rows}{self.done:,} of {self.tasks:,} tasks done"


@contextlib.contextmanager
def watch_jobs(spark: SparkSession, expected: int | None = None) -> Iterator[Callable[[], str]]:
    """Yield a function that describes the progress of the jobs that this thread starts inside.

    It returns nothing while no job runs, and on Spark Connect, which has no such information. An
    interrupted block cancels its jobs.

    Args:
        spark: session of the jobs.
        expected: how many rows these jobs will write, if that is known.
    """
    context = classic_context(spark)
    if context is None:
        yield str
        return
    tag, scala = f"horovod-progress-{uuid.uuid4().hex[:8]}", context._jsc.sc()

    def describe() -> str:
        progress = None
        # Spark may be stopped meanwhile, and forgets old stages.
        with contextlib.suppress(Exception):
            progress = _progress(scala, tag, expected)
        return "" if progress is None else progress.describe()

    context.addJobTag(tag)
    try:
        yield describe
    except KeyboardInterrupt:
        # A notebook's kernel has another handler of Ctrl-C than PySpark's, which would do it.
        with contextlib.suppress(Exception):
            context.cancelJobsWithTag(tag)
        raise
    finally:
        with contextlib.suppress(Exception):
            context.removeJobTag(tag)


def _progress(scala: JavaObject, tag: str, expected: int | None) -> _StageProgress | None:
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


def _written(scala: JavaObject, stage: int) -> int:
    """Return the rows that a stage has written; a skipped stage has written none."""
    with contextlib.suppress(Exception):
        return int(scala.statusStore().lastStageAttempt(stage).outputRecords())
    return 0
