"""The body of the Spark barrier task; the only user of ``BarrierTaskContext``."""

from __future__ import annotations

import pickle
import signal
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import BarrierTaskContext

from ..shared.outcome import RankOutcome
from ..shared.slot_plan import SlotPlan
from .slot import Slot

OUTCOME_SCHEMA = "slot int, index int, part int, data binary"
OutcomeRow = tuple[int, int, int, bytes]  # as Spark collects it
# An outcome travels as several rows: one Arrow buffer cannot hold a result of 2 GiB.
PART_BYTES = 64 * 1024 * 1024
_INT = struct.Struct("=i")  # as Arrow keeps it


@dataclass(frozen=True)
class SlotTask:
    """The function given to ``mapInArrow(barrier=True)``; runs one slot, yields its outcome."""

    plan: SlotPlan

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        context = BarrierTaskContext.get()
        for index, outcome in enumerate(run_slot(context, self.plan)):
            yield from encode_outcome(outcome, index)


def run_slot(context: BarrierTaskContext, plan: SlotPlan) -> list[RankOutcome]:
    """Run this task's slot to its end and return its ranks' outcomes; nothing is left behind."""
    index = context.partitionId()
    gpus: tuple[str, ...] = ()
    if plan.options.gpus_per_worker:
        gpus = tuple(context.resources()["gpu"].addresses)
    peers = [info.address.rpartition(":")[0].strip("[]") for info in context.getTaskInfos()]
    slot = Slot(plan, index, gpus, context.cpus(), peers)
    # A host that is to be left sends SIGTERM; Spark's Python daemon passes the end of its executor
    # on as SIGHUP.
    before = {
        number: signal.signal(number, lambda number, frame: slot.ask_to_end(signal.Signals(number)))
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        return slot.run(context.allGather)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        slot.close()


def encode_outcome(outcome: RankOutcome, index: int) -> Iterator[pa.RecordBatch]:
    """Yield the outcome of a slot's rank at ``index`` as rows of `OUTCOME_SCHEMA`."""
    data = pickle.dumps(outcome, protocol=5)
    for part, begin in enumerate(range(0, len(data), PART_BYTES)):
        piece = memoryview(data)[begin : begin + PART_BYTES]
        yield pa.RecordBatch.from_arrays(
            [
                *(_column(pa.int32(), _INT.pack(n)) for n in (outcome.slot, index, part)),
                _column(pa.binary(), _INT.pack(0) + _INT.pack(len(piece)), piece),
            ],
            names=["slot", "index", "part", "data"],
        )


def _column(kind: pa.DataType, *buffers: bytes | memoryview) -> pa.Array:
    """Return a column of one row; ``pa.array`` would import pandas, a third of a second."""
    return pa.Array.from_buffers(kind, 1, [None, *map(pa.py_buffer, buffers)])


def decode_outcomes(rows: Iterable[OutcomeRow]) -> list[RankOutcome]:
    """Return the outcomes held by collected rows of `OUTCOME_SCHEMA`, by slot and index."""
    parts: dict[tuple[int, int], dict[int, bytes]] = {}
    for slot, index, part, data in rows:
        parts.setdefault((slot, index), {})[part] = bytes(data)
    return [
        pickle.loads(b"".join(pieces[i] for i in sorted(pieces)))
        for _, pieces in sorted(parts.items())
    ]
