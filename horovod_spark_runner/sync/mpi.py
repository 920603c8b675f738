"""MPI between ranks: the `Wire` of compressed gradients, and the `Ranks` of asynchronous steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..cluster.protocol.network import ADDRESS
from ..errors import EnvironmentProblem
from .distributed_memory import DistributedMemory, Memory
from .synchroniser import bytes_of_sum


def _need_threads(what: str, others: str) -> None:
    """Check that several threads of this rank may be in MPI at once.

    Args:
        what: says what is done beside Horovod's own thread.
        others: ways of synchronising that do not need it.

    Raises:
        EnvironmentProblem: they may not.
    """
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise EnvironmentProblem(
            f"{what} beside Horovod's own thread, but this rank's MPI allows one thread at a time "
            "(its thread level is not MPI_THREAD_MULTIPLE); leave MPI4PY_RC_THREAD_LEVEL and "
            "HOROVOD_MPI_THREADS_DISABLE unset, take an Open MPI that was built with threads, or "
            f"use {others}"
        )


def shares_gpu(world: MPI.Comm) -> bool:
    """Return whether several ranks of this host compute on one GPU; all ranks must call it."""
    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    devices = host.allgather(os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0])
    host.Free()
    named = [device for device in devices if device]
    return bool(world.allreduce(len(named) > len(set(named)), MPI.LOR))


# Bytes of one MPI call, whose counts and offsets have 31 bits.
_MOST_ELEMENTS = 1 << 28
_MOST_BYTES = 1 << 30


class MpiWire:
    """MPI implementation of `Wire`, on a separate communicator, as other threads may use others.

    Bytes are counted as `Traffic` says; what each rank gives to all others is sent N−1 times.

    Raises:
        EnvironmentProblem: MPI was initialised without support for several threads.
    """

    def __init__(self) -> None:
        others = "sync=Allreduce(), LocalSGD(…) or DiLoCo(…)"
        _need_threads("compressed gradients travel by MPI", others)
        self._world = MPI.COMM_WORLD.Dup()
        self.size = self._world.Get_size()
        self.rank = self._world.Get_rank()
        self.sent = 0.0

    def sum(self, array: np.ndarray) -> np.ndarray:
        total = np.array(array, order="C")  # contiguous: its flat form is a view
        flat = total.reshape(-1)
        for begin in range(0, flat.size, _MOST_ELEMENTS):
            self._world.Allreduce(MPI.IN_PLACE, flat[begin : begin + _MOST_ELEMENTS])
        self.sent += bytes_of_sum(total.nbytes, self.size)
        return total

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        sent = np.ascontiguousarray(array).view(np.uint8)
        lengths = np.empty(self.size, np.int64)
        self._world.Allgather(np.array([sent.size], np.int64), lengths)
        buffers = [np.empty(length, np.uint8) for length in lengths]
        piece = _MOST_BYTES // self.size
        for begin in range(0, int(lengths.max()), piece):
            counts = np.clip(lengths - begin, 0, piece)
            joined = np.empty(counts.sum(), np.uint8)
            self._world.Allgatherv(sent[begin : begin + piece], (joined, counts.tolist()))
            for buffer, part in zip(buffers, np.split(joined, np.cumsum(counts)[:-1]), strict=True):
                buffer[begin : begin + piece] = part
        self.sent += (self.size - 1) * (sent.size + lengths.itemsize)
        return [buffer.view(array.dtype) for buffer in buffers]

    def swap(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        local = parts[self.rank]
        received = [np.empty_like(local) for _ in parts]
        waiting = []
        # Both ends split messages equally: all parts for a rank have one length.
        for begin in range(0, max(part.size for part in parts), _MOST_ELEMENTS):
            piece = slice(begin, begin + _MOST_ELEMENTS)
            for rank, part in enumerate(parts):
                waiting.append(self._world.Irecv(received[rank][piece].view(np.uint8), rank))
                waiting.append(self._world.Isend(part[piece].view(np.uint8), rank))
        MPI.Request.Waitall(waiting)
        self.sent += sum(part.nbytes for part in parts) - local.nbytes
        return received


_KEY_BYTES = 32


class MpiRanks:
    """All ranks of MPI's world; see `asynchronous.Ranks`.

    Raises:
        EnvironmentProblem: MPI was initialised without support for several threads.
    """

    def __init__(self) -> None:
        _need_threads("sync=AsyncServer(…) uses MPI", "sync=Allreduce()")
        self._world = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        # Sent by MPI, as the weights are: whoever can read the one can read the other.
        self._key: bytes = self._world.bcast(os.urandom(_KEY_BYTES))
        self._reached = False  # whether all other ranks were reached

    def memory(self, values: np.ndarray, holders: Sequence[int]) -> Memory:
        address = os.environ.get(ADDRESS, "127.0.0.1")  # of a world on several hosts
        memory = DistributedMemory(values, holders, self, address, self._key, again=self._reached)
        self._reached = True
        return memory

    def gather(self, value: object) -> list[Any]:
        """Return all ranks' values."""
        return self._world.allgather(value)

    def barrier(self) -> None:
        self._world.Barrier()
