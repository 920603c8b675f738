"""The Spark job that carries a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..protocol.outcome import RankOutcome
from ..protocol.slot_plan import SlotPlan
from ..slot.barrier import SlotTask, decode_outcomes
from ..spark.tagged_job import TaggedJob
from ..spark.tasks import collect_from_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkJob(TaggedJob[list[bytes]]):
    """One barrier stage.

    Args:
        spark: session to run in.
        plan: what the slots are told.
        profile: Spark's ``ResourceProfile`` of the stage, if not the session's own settings.
    """

    def __init__(self, spark: SparkSession, plan: SlotPlan, profile: object = None) -> None:
        def collect() -> list[bytes]:
            task = SlotTask(plan)
            return collect_from_tasks(spark, plan.slots, task, barrier=True, profile=profile)

        description = f"Horovod on {plan.workers} ranks ({plan.run_id})"
        super().__init__(spark, f"horovod-{plan.run_id}", description, collect)

    def outcomes(self) -> list[RankOutcome]:
        """Return what the slots returned; empty while the job runs or if it failed."""
        return decode_outcomes(self.result or ())
