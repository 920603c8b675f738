"""The body of the Spark barrier task; the only user of ``BarrierTaskContext``."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import BarrierTaskContext

from .outcome import LAUNCH, Failure, RankOutcome
from .slot import Slot, SlotPlan

OUTCOME_SCHEMA = "slot int, part int, data binary"
# An outcome travels as several rows: one Arrow buffer cannot hold a result of 2 GiB.
PART_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class SlotTask:
    """The function given to ``mapInArrow(barrier=True)``; runs one slot, yields its outcome."""

    plan: SlotPlan

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        context = BarrierTaskContext.get()
        yield from encode_outcome(run_slot(context, self.plan))


def run_slot(context: BarrierTaskContext, plan: SlotPlan) -> RankOutcome:
    """Run this task's slot to its end and return its outcome; nothing is left behind."""
    index = context.partitionId()
    if context.attemptNumber() > 0:
        # Spark repeats a whole barrier stage when one task was lost. The ranks of the first
        # attempt are gone and so is their state: restarting is a decision for the driver.
        message = "Spark lost a task of this run (its executor or Python worker died)"
        return RankOutcome(index, "?", failure=Failure(LAUNCH, time.time(), message))
    gpus: tuple[str, ...] = ()
    if plan.options.gpus_per_worker:
        gpus = tuple(context.resources()["gpu"].addresses)
    slot = Slot(plan, index, gpus, context.cpus())
    try:
        return slot.run(context.allGather)
    finally:
        slot.close()


def encode_outcome(outcome: RankOutcome) -> Iterator[pa.RecordBatch]:
    """Yield ``outcome`` as rows of `OUTCOME_SCHEMA`."""
    data = pickle.dumps(outcome, protocol=5)
    for part, begin in enumerate(range(0, len(data), PART_BYTES)):
        yield pa.RecordBatch.from_arrays(
            [
                pa.array([outcome.slot], pa.int32()),
                pa.array([part], pa.int32()),
                pa.array([data[begin : begin + PART_BYTES]], pa.binary()),
            ],
            names=["slot", "part", "data"],
        )


def decode_outcomes(rows: Iterable[tuple[int, int, bytes]]) -> list[RankOutcome]:
    """Return the outcomes held by collected rows of `OUTCOME_SCHEMA`, in slot order."""
    parts: dict[int, dict[int, bytes]] = {}
    for slot, part, data in rows:
        parts.setdefault(slot, {})[part] = bytes(data)
    return [
        pickle.loads(b"".join(pieces[i] for i in sorted(pieces)))
        for _, pieces in sorted(parts.items())
    ]
