"""The Spark job that carries a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...spark.tagged_job import TaggedJob
from ..shared.outcome import RankOutcome
from ..shared.slot_plan import SlotPlan
from ..slot.barrier import OUTCOME_SCHEMA, OutcomeRow, SlotTask, decode_outcomes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkJob(TaggedJob[Iterable[OutcomeRow]]):
    """One barrier stage.

    Args:
        spark: session to run in.
        plan: what the slots are told.
        profile: Spark's ``ResourceProfile`` of the stage, if not the session's own settings.
    """

    def __init__(self, spark: SparkSession, plan: SlotPlan, profile: object = None) -> None:
        def collect() -> Iterable[OutcomeRow]:
            size = plan.slots
            options = {} if profile is None else {"profile": profile}
            frame = spark.range(0, size, 1, size)
            rows: Iterable[OutcomeRow] = frame.mapInArrow(
                SlotTask(plan), OUTCOME_SCHEMA, barrier=True, **options
            ).collect()
            return rows

        description = f"Horovod on {plan.workers} ranks ({plan.run_id})"
        super().__init__(spark, f"horovod-{plan.run_id}", description, collect)

    def outcomes(self) -> list[RankOutcome]:
        """Return what the slots returned; empty while the job runs or if it failed."""
        return decode_outcomes(self.result or ())
