"""A rank among all of MPI's, and the memory they share, on one host or several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..cluster.protocol.network import ADDRESS
from .board import Memory
from .distributed_memory import DistributedMemory
from .wire import need_threads

_KEY_BYTES = 32


class MpiRanks:
    """All ranks of MPI's world; see `asynchronous.Ranks`.

    Raises:
        EnvironmentProblem: MPI was initialised without support for several threads.
    """

    def __init__(self) -> None:
        need_threads("sync=AsyncServer(…) uses MPI", "sync=Allreduce()")
        self._world = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        # By MPI, as the weights of all ranks: who can read the one can read the other.
        self._key: bytes = self._world.bcast(os.urandom(_KEY_BYTES))
        self._reached = False  # whether the others were

    def memory(self, values: np.ndarray, holders: Sequence[int]) -> Memory:
        address = os.environ.get(ADDRESS, "127.0.0.1")  # of a world on several hosts
        memory = DistributedMemory(values, holders, self, address, self._key, again=self._reached)
        self._reached = True
        return memory

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' values."""
        return self._world.allgather(value)

    def barrier(self) -> None:
        self._world.Barrier()
