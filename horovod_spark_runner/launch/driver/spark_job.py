"""The Spark job that carries a run, from a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...spark.session import classic_context, inheriting_thread, is_stopped
from ..shared.outcome import RankOutcome
from ..shared.slot_plan import SlotPlan
from ..slot.barrier import OUTCOME_SCHEMA, OutcomeRow, SlotTask, decode_outcomes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkJob:
    """One barrier stage.

    The job runs in a thread so that the driver's own thread stays free for messages and Ctrl-C.

    Args:
        spark: session to run in.
        plan: what the slots are told.
        profile: Spark's ``ResourceProfile`` of the stage, if not the session's own settings.
    """

    def __init__(self, spark: SparkSession, plan: SlotPlan, profile: object = None) -> None:
        self._spark = spark
        self._plan = plan
        self._profile = profile
        self._tag = f"horovod-{plan.run_id}"
        self._rows: Iterable[OutcomeRow] | None = None
        self._cancelled = False
        self.error: BaseException | None = None
        self._thread = self._make_thread()

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def outcomes(self) -> list[RankOutcome]:
        """Return what the slots returned; empty while the job runs or if it failed."""
        return decode_outcomes(self._rows or ())

    @property
    def cancelled_elsewhere(self) -> bool:
        """Whether someone else, at Spark's UI or through its API, cancelled the job."""
        return not self._cancelled and "SPARK_JOB_CANCELLED" in str(self.error)

    @property
    def failed_by_itself(self) -> bool:
        """Whether Spark ended the job, for reasons of its own."""
        return self.error is not None and not self._cancelled

    @property
    def session_stopped(self) -> bool:
        """Whether the session, or its connection, was stopped meanwhile."""
        return self.error is not None and is_stopped(self._spark)

    def cancel(self) -> None:
        """Make Spark kill the job's tasks."""
        self._cancelled = True
        context = classic_context(self._spark)
        if context is not None:
            context.cancelJobsWithTag(self._tag)
        else:
            self._spark.interruptTag(self._tag)

    def _make_thread(self) -> threading.Thread:
        """Return the job's thread; others may cancel the job by the caller's group and tags."""
        classic = classic_context(self._spark) is not None
        run = self._run_described if classic else self._run_tagged
        return inheriting_thread(self._spark, run, self._tag)

    def _run_described(self) -> None:
        context = self._spark.sparkContext
        context.addJobTag(self._tag)
        context.setInterruptOnCancel(True)
        context.setJobDescription(f"Horovod on {self._plan.workers} ranks ({self._plan.run_id})")
        self._collect()

    def _run_tagged(self) -> None:
        self._spark.addTag(self._tag)
        self._collect()

    def _collect(self) -> None:
        size = self._plan.slots
        profile = {} if self._profile is None else {"profile": self._profile}
        try:
            frame = self._spark.range(0, size, 1, size)
            self._rows = frame.mapInArrow(
                SlotTask(self._plan), OUTCOME_SCHEMA, barrier=True, **profile
            ).collect()
        except BaseException as error:  # handed to the driver's thread, which raises
            self.error = error
