"""Numbers that all ranks of one host read and add to without asking who holds them: by MPI.

Each operation is one of MPI's one-sided ones, in pieces, and is over at its target when it returns.
On one host these are copies within shared memory, in which the holder has no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from .board import divided, holder_of

# Numbers of one operation.
_PIECE = 1 << 16


class MpiMemory:
    """See `board.Memory`; its parts are held by some of the ranks. All ranks make it together.

    Args:
        values: what it is to begin with, flat and alike on all ranks.
        holders: the ranks that hold it, an equal part each.
    """

    def __init__(self, values: np.ndarray, holders: Sequence[int]) -> None:
        self._world = MPI.COMM_WORLD.Dup()
        rank = self._world.Get_rank()
        self._size, self._dtype = values.size, values.dtype
        self._parts = divided(values.size, holders)
        begin, end = self._parts.get(rank, (0, 0))
        width = values.dtype.itemsize
        self._window = MPI.Win.Allocate((end - begin) * width, width, comm=self._world)
        held: Any = self._window.tomemory()
        own = np.frombuffer(held, values.dtype)
        own[:] = values[begin:end]
        self._window.Lock_all()
        self._window.Sync()
        self._world.Barrier()

    def get(self) -> np.ndarray:
        found = np.empty(self._size, self._dtype)
        nothing = np.empty(0, self._dtype)
        for rank, at, begin, end in self._pieces():
            # A plain Get would be undefined beside what others add meanwhile.
            self._window.Get_accumulate(
                nothing, found[begin:end], rank, (at, end - begin), MPI.NO_OP
            )
        self._window.Flush_all()
        return found

    def add(self, values: np.ndarray) -> None:
        for rank, at, begin, end in self._pieces():
            self._window.Accumulate(values[begin:end], rank, (at, end - begin), MPI.SUM)
        self._window.Flush_all()

    def add_at(self, index: int, value: int) -> int:
        rank = holder_of(self._parts, index)
        before = np.empty(1, self._dtype)
        given = np.array([value], self._dtype)
        place = index - self._parts[rank][0]
        self._window.Fetch_and_op(given, before, rank, place, MPI.SUM)
        self._window.Flush(rank)
        return int(before[0])

    def _pieces(self) -> Sequence[tuple[int, int, int, int]]:
        """Return, for each operation: which rank, where in its part, and from where to where."""
        return [
            (rank, piece - begin, piece, min(piece + _PIECE, end))
            for rank, (begin, end) in self._parts.items()
            for piece in range(begin, end, _PIECE)
        ]

    def close(self) -> None:
        self._world.Barrier()
        self._window.Unlock_all()
        self._window.Free()
        self._world.Free()
