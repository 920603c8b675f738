"""The body of the Spark barrier task; the only user of PySpark in a slot."""

from __future__ import annotations

import os
import pickle
import signal
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pyspark import BarrierTaskContext, SparkFiles

from ..protocol.outcome import RankOutcome
from ..protocol.rendezvous import SlotPlan
from .slot import Slot

# An outcome travels in pieces: Spark takes none of 2 GiB.
PIECE_BYTES = 64 * 1024 * 1024
# Of the outcome: its slot, its index there, the piece's place in it.
_HEAD = struct.Struct("!III")


@dataclass(frozen=True)
class SlotTask:
    """The body of the barrier stage's tasks: runs one slot, yields its outcome."""

    plan: SlotPlan

    def __call__(self) -> Iterator[bytes]:
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
    files = os.path.abspath(SparkFiles.getRootDirectory())
    slot = Slot(plan, index, gpus, context.cpus(), peers, files)
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


def encode_outcome(outcome: RankOutcome, index: int) -> Iterator[bytes]:
    """Yield the outcome of a slot's rank at ``index`` in pieces."""
    data = pickle.dumps(outcome, protocol=5)
    for place, begin in enumerate(range(0, len(data), PIECE_BYTES)):
        yield _HEAD.pack(outcome.slot, index, place) + data[begin : begin + PIECE_BYTES]


def decode_outcomes(pieces: Iterable[bytes]) -> list[RankOutcome]:
    """Return the outcomes made of pieces, in any order, by slot and index."""
    found: dict[tuple[int, int], dict[int, memoryview]] = {}
    for piece in pieces:
        slot, index, place = _HEAD.unpack_from(piece)
        found.setdefault((slot, index), {})[place] = memoryview(piece)[_HEAD.size :]
    return [
        pickle.loads(b"".join(parts[place] for place in sorted(parts)))
        for _, parts in sorted(found.items())
    ]
