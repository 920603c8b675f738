"""Ranks that are threads of one process, for what needs the others but no MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


class Threads:
    """Ranks that are threads of this process; see `Wire`."""

    def __init__(self, rank: int, tables: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.sent = rank, len(tables), 0.0
        self._tables, self._barrier = tables, barrier

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        self._tables[self.rank] = array
        self._barrier.wait(20)
        found = list(self._tables)
        self._barrier.wait(20)
        self.sent += (self.size - 1) * array.nbytes
        return found

    def sum(self, array: np.ndarray) -> np.ndarray:
        total: np.ndarray = np.sum(self.gather(array), axis=0, dtype=array.dtype)
        return total

    def swap(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        given: list[Any] = self.gather(np.array([*parts, None], object))
        return [each[self.rank] for each in given]


def as_ranks(size: int, act: Callable[[Threads], Any]) -> list[Any]:
    """Return what ``act`` returns on each rank."""
    tables, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(act, [Threads(rank, tables, barrier) for rank in range(size)]))
