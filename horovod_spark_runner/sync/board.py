"""Counters shared by ranks that step independently.

An epoch's batches lie in *shares*, one for each rank at the epoch's beginning. Who wants a
batch takes the next one of a share by counting up how many are taken, so each is one rank's. Steps
are numbered in the order they begin, over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

# Later than any step.
_NEVER = 1 << 40
_STARTED, _UPDATES = range(2)
# What ranks may ask of all; see `agreement`.
_REQUESTS = slice(2, 5)


class Memory(Protocol):
    """An array that all ranks share."""

    def get(self) -> np.ndarray:
        """Return a copy, which may include concurrent additions, or parts of them."""
        ...

    def add(self, values: np.ndarray) -> None:
        """Add an array of the same size: nothing that is added is lost or counts twice."""
        ...

    def add_at(self, index: int, value: int) -> int:
        """Add to one number atomically; return its previous value, which no other rank receives."""
        ...

    def close(self) -> None:
        """Release it, once no rank uses it any more; all ranks must call it."""
        ...


def divided(size: int, holders: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return from where to where each of some ranks holds an array: equal parts, in their order."""
    ends = [size * part // len(holders) for part in range(len(holders) + 1)]
    return dict(zip(holders, pairwise(ends), strict=True))


def holder_of(parts: Mapping[int, tuple[int, int]], index: int) -> int:
    """Return the rank that holds one of the `divided` numbers."""
    return next(rank for rank, (_, end) in parts.items() if index < end)


class Seen(NamedTuple):
    """A rank's reading of a `Board`.

    Attributes:
        updates: updates of the weights, of all ranks.
        requests: how many ranks have asked for each thing; see `agreement`.
        running: of each rank, the number of the step it is in, or of one that is before its next.
        taken: batches of each share that were taken, or more where there were no more.
    """

    updates: int
    requests: list[int]
    running: list[int]
    taken: list[int]


class Board:
    """The counters of an epoch, or of its remainder; all ranks create it together.

    Args:
        opened: returns memory of all ranks that begins with such values.
        rank: this rank.
        size: number of ranks.
        taken: batches of each share that were taken before.
    """

    def __init__(
        self, opened: Callable[[np.ndarray], Memory], rank: int, size: int, taken: Sequence[int]
    ) -> None:
        self._rank, self._size = rank, size
        self._first = _REQUESTS.stop
        self._running = 0
        values = np.zeros(self._first + size + len(taken), np.int64)
        values[self._first + size :] = taken
        self._memory = opened(values)

    def read(self) -> Seen:
        """Return the counters of all ranks."""
        values = self._memory.get().tolist()
        shares = self._first + self._size
        return Seen(
            values[_UPDATES], values[_REQUESTS], values[self._first : shares], values[shares:]
        )

    def take(self, share: int) -> int:
        """Take the next batch of a share; return its number, which may be beyond the last."""
        return self._memory.add_at(self._first + self._size + share, 1)

    def begin(self) -> int:
        """Begin a step; return its number."""
        number = self._memory.add_at(_STARTED, 1)
        self._run(number)
        return number

    def end(self) -> None:
        """End a step; the next one's number will be larger."""
        self._run(self._running + 1)

    def leave(self) -> None:
        """Begin no more steps."""
        self._run(_NEVER)

    def updated(self) -> int:
        """Count an update; return how many there were before it."""
        return self._memory.add_at(_UPDATES, 1)

    def ask(self, requests: Sequence[object]) -> None:
        """Ask all ranks for something."""
        for number, request in enumerate(requests):
            if request:
                self._memory.add_at(_REQUESTS.start + number, 1)

    def close(self) -> None:
        """Release it; all ranks must call it."""
        self._memory.close()

    def _run(self, number: int) -> None:
        # A sum like all else: MPI lets operations of one kind meet in one place.
        self._memory.add_at(self._first + self._rank, number - self._running)
        self._running = number
