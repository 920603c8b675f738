"""What the ranks agree on while they train: to stop, to save a checkpoint, to end soon.

Requests ride on the collective of a step where there is one in every step, and cost nothing then.
Where there is none, ranks agree by one small collective of their own wherever they meet; what was
asked for in between is asked for until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from ..data.read.reader import Batch
from ..errors import ModelError

# What a rank may ask of all ranks at a step, in this order.
STOP, SAVE, PREEMPT = range(3)
NOTHING = (False, False, False)

# Ranks that give a row for a trial, where each has one.
_TRIED = 8


class Agreement:
    """Tells what any of the ranks asks for; all ranks call the same in the same order.

    Args:
        world: communicator of all ranks.
    """

    def __init__(self, world: MPI.Comm) -> None:
        self._world = world

    def after_step(self, asked: Sequence[object], meet: bool) -> Sequence[float]:
        """Return what is agreed on after a step that has carried no requests.

        Args:
            asked: what this rank asks for, in the order of ``NOTHING``.
            meet: whether the ranks meet after this step, on all ranks alike.

        Returns:
            In that order, another number than 0 for what any rank asks for.
        """
        if not meet:
            return NOTHING
        agreed = np.array([bool(request) for request in asked], np.uint8)
        self._world.Allreduce(MPI.IN_PLACE, agreed, op=MPI.MAX)
        return list(agreed)

    def any_asks(self, asked: object) -> bool:
        """Tell whether any rank asks for the one thing that is in question."""
        return bool(self._world.allreduce(int(bool(asked)), op=MPI.MAX))

    def at_epoch_end(self, stop: object, end: bool) -> tuple[bool, bool]:
        """Tell whether any rank asks to stop, and whether any was asked to end soon."""
        agreed = self._world.allreduce(int(bool(stop)) | int(end) << 1, op=MPI.BOR)
        return bool(agreed & 1), bool(agreed & 2)


def raise_together(world: MPI.Comm, check: Callable[[], object]) -> None:
    """Run a check on rank 0; all ranks, which must all call this, raise what it finds.

    Raises:
        ModelError: what the check raises.
    """
    error: ModelError | None = None
    if world.Get_rank() == 0:
        try:
            check()
        except ModelError as raised:
            error = raised
    error = world.bcast(error)
    if error is not None:
        raise error


def enough_to_try(world: MPI.Comm, batch: Batch) -> Batch:
    """Return what rank 0 may try in parts: its batch, or the rows of several ranks if it has one.

    All ranks must call this.
    """
    if world.bcast(batch.rows) > 1:
        return batch
    gives = batch.rows and world.Get_rank() < _TRIED
    first = {name: array[:1] for name, array in batch.arrays.items()} if gives else None
    found = [each for each in world.gather(first) or () if each is not None]
    if len(found) < 2:
        return batch
    arrays = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    return Batch(batch.step, len(found), arrays)
