"""Agree among ranks on stopping, on saving a checkpoint and on ending early.

Requests ride on the collective of a step where there is one in every step, and cost nothing then.
Where there is none, ranks agree by one small collective of their own wherever they meet; what was
asked for in between is asked for until then.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from mpi4py import MPI
from numpy.typing import ArrayLike

from ..checkpoint.model_state import TrainingVariables, Variable
from ..cluster.worker.reporting import notify
from ..data.read.reader import Batch
from ..errors import ModelError, RanksDivergedError
from ..sync.synchroniser import SyncedState
from .epochs import NOTHING, Step

# Rows that a step is tried on.
_TRIED = 16


class Agreement:
    """Agrees on the requests of all ranks; all ranks call the same methods in the same order.

    Args:
        world: communicator of all ranks.
    """

    def __init__(self, world: MPI.Comm) -> None:
        self._world = world

    def after_step(self, requests: Sequence[object], meet: bool) -> Sequence[float]:
        """Return the agreed requests after a step that has carried none.

        Args:
            requests: what this rank asks for, in the order of ``epochs.NOTHING``.
            meet: whether the ranks meet after this step, on all ranks alike.

        Returns:
            In that order, another number than 0 for what any rank asks for.
        """
        if not meet:
            return NOTHING
        agreed = np.array([bool(request) for request in requests], np.uint8)
        self._world.Allreduce(MPI.IN_PLACE, agreed, op=MPI.MAX)
        return list(agreed)

    def any_requests(self, request: object) -> bool:
        """Return whether any rank makes this request."""
        return bool(self._world.allreduce(int(bool(request)), op=MPI.MAX))

    def at_epoch_end(self, stop: object, end: bool) -> tuple[bool, bool]:
        """Return whether any rank requests a stop, and whether any was asked to end soon."""
        agreed = self._world.allreduce(int(bool(stop)) | int(end) << 1, op=MPI.BOR)
        return bool(agreed & 1), bool(agreed & 2)


def _raise_together(world: MPI.Comm, check: Callable[[], object]) -> None:
    """Run a check on all ranks, which must all call this and raise the first error of any.

    Raises:
        ModelError: what the check raises.
    """
    error: ModelError | None = None
    try:
        check()
    except ModelError as raised:
        error = raised
    for each in world.allgather(error):
        if each is not None:
            raise each


def _rows_to_try(world: MPI.Comm, batch: Batch) -> Batch:
    """Return the same few rows on all ranks: rank 0's, or those of several if it has one.

    All ranks must call this.
    """
    alone = world.bcast(batch.rows) > 1
    gives = world.Get_rank() < (1 if alone else _TRIED) and batch.rows
    limit = _TRIED if alone else 1
    first = {name: array[:limit] for name, array in batch.arrays.items()} if gives else None
    rank_rows = [each for each in world.allgather(first) if each is not None]
    if not rank_rows:
        return batch
    arrays = {name: np.concatenate([each[name] for each in rank_rows]) for name in rank_rows[0]}
    return Batch(batch.step, len(next(iter(arrays.values()))), arrays)


class StepTrials:
    """Tries training steps on parts of a few rows: the 1st, 2nd, 4th, 8th, … of an attempt.

    The first alone would not do: a factor may rise from 0, as of a term that is annealed. So often,
    it is noticed before twice as many steps are made, and takes next to nothing of a long training.

    Args:
        world: communicator of all ranks.
        probe: tries a step that has the same few rows on all ranks; see `Trainee.probe`.
        alone: whether one rank tries, too.
    """

    def __init__(
        self, world: MPI.Comm, probe: Callable[[Step], Sequence[str]], alone: bool = False
    ) -> None:
        self._world = world
        self._probe = probe
        self._alone = alone
        self._made = self._tried = 0
        self._warned: set[str] = set()

    def is_due(self) -> bool:
        """Return whether to try the next step; call it before each."""
        self._made += 1
        together = self._world.Get_size() > 1 or self._alone
        return together and not self._made & (self._made - 1)

    def run(self, step: Step, number: int, *, together: bool) -> None:
        """Try a step; report results that are no mean over rows, each once.

        Args:
            step: this rank's part of the step.
            number: of the step in the run, counted from 1.
            together: whether all ranks call this, at the same step.

        Raises:
            ModelError: something is a sum over rows; on all ranks, if they call this together.
        """
        world = self._world if together else MPI.COMM_SELF
        tried = replace(step, batch=_rows_to_try(world, step.batch))
        _raise_together(world, lambda: self._try(tried, number))
        self._tried = number

    def _try(self, step: Step, number: int) -> None:
        later = self._made > 1
        try:
            messages = self._probe(step)
        except ModelError as error:
            if not later:
                raise
            raise ModelError(
                f"{error}. That was found at step {number} of the run, and not yet at step "
                f"{self._tried} (a factor that rises from 0, say): what was trained since then may "
                "be wrong"
            ) from None
        for text in messages:
            if text not in self._warned and self._world.Get_rank() == 0:
                notify(f"at step {number} of the run, {text}" if later else text)
            self._warned.add(text)


_SHOWN = 3


def checksums(
    variables: TrainingVariables, compared: Sequence[Variable] | None = None
) -> np.ndarray:
    """Return one checksum for the value of each of the ``compared`` variables, by default all."""
    chosen = variables.shared if compared is None else compared
    return np.array([checksum(variables.view(v)) for v in chosen], np.int64)


def checksum(value: ArrayLike) -> int:
    """Return the checksum of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def changed_since(
    before: np.ndarray,
    variables: TrainingVariables,
    compared: Sequence[Variable],
    world: MPI.Comm,
) -> bool:
    """Return whether, on any rank, ``compared`` variables have changed since these checksums."""
    changed = bool((checksums(variables, compared) != before).any())
    return bool(world.allreduce(changed, op=MPI.LOR))


def check_ranks_agree(
    variables: TrainingVariables,
    world: MPI.Comm,
    when: str,
    synced_state: SyncedState = SyncedState.EVERYTHING,
) -> None:
    """Check that variables are the same on all ranks; every rank must call it.

    Args:
        variables: those of this rank.
        world: communicator of all ranks.
        when: when this is, for the message.
        synced_state: what is to be the same.

    Raises:
        RanksDivergedError: they are not, on every rank.
    """
    if world.Get_size() == 1:
        return
    everything = synced_state is SyncedState.EVERYTHING
    shared = variables.shared if everything else variables.groups["model"]
    local_sums = checksums(variables, shared)
    low, high = np.empty_like(local_sums), np.empty_like(local_sums)
    world.Allreduce(local_sums, low, op=MPI.MIN)
    world.Allreduce(local_sums, high, op=MPI.MAX)
    different = [int(index) for index in np.flatnonzero(low != high)]
    if not different:
        return
    # Learning rates first: where they differ, they are the cause.
    different.sort(key=lambda index: not variables.is_rate(shared[index]))
    root = world.bcast(local_sums, root=0)
    ranks = world.allgather(bool((local_sums != root).any()))
    others = [rank for rank, other in enumerate(ranks) if other]
    names = [getattr(shared[i], "path", None) or str(i) for i in different]
    shown = ", ".join(map(repr, names[:_SHOWN])) + (" …" if len(names) > _SHOWN else "")
    cause = variables.likely_cause([shared[i] for i in different])
    raise RanksDivergedError(
        f"{when}, {len(names)} of {len(local_sums)} variables differ between rank 0 and rank "
        f"{', '.join(map(str, others))}: {shown}. {cause}"
    )
