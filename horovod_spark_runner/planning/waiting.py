"""What a step waits for: slower ranks, its exchange, a turn on the core, and the reader. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist

import numpy as np

from ..data.read.sharding import lane_count

# The exchange may hide behind the backward pass, which is no more of a step's computing than this.
BACKWARD = 2 / 3


def waiting_seconds(spread: float, ranks: int) -> float:
    """Return the seconds by which the slowest of so many ranks comes later than the mean one."""
    return spread * expected_maximum(ranks)


@cache
def expected_maximum(count: int) -> float:
    """Return the mean of the largest of so many standard normal numbers (Blom's formula)."""
    if count < 2:
        return 0.0
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def hidden_seconds(overlap: float, exchange: float, computing: float) -> float:
    """Return what of an exchange hides behind computing; see `Workload`."""
    return min(overlap * exchange, BACKWARD * computing)


def longer_by_sharing(measured: Mapping[float, float], per_core: float) -> float:
    """Return the seconds that a step takes longer with so many ranks per core.

    Args:
        measured: by ranks per core, above 1; one alone on a core takes no longer. Beyond the most,
            each further one makes it as much longer as between the last two that are known, and no
            less than the mean of all.
        per_core: ranks per core.
    """
    known = sorted({1.0: 0.0, **measured}.items())
    (low, less), (high, more) = next(
        (pair for pair in pairwise(known) if per_core <= pair[1][0]), (known[-2], known[-1])
    )
    if per_core > high:
        # No less than as if each had added the same.
        each = max(more - less, 0.0) / (high - low), more / (high - 1)
        return more + (per_core - high) * max(each)
    return less + (per_core - low) * (more - less) / (high - low)


@dataclass(frozen=True)
class Lying:
    """How rows lie in storage.

    Attributes:
        row_groups: how many there are.
        in_window: how many fit the shuffle window of a rank.
    """

    row_groups: int
    in_window: int

    def lanes(self, global_batch: int) -> int:
        """Return in how many parts the rows are dealt out; see `data.read.sharding`."""
        return lane_count(range(self.row_groups), global_batch, self.in_window)

    def rows_read(self, ranks: int, batch: int) -> float:
        """Return how many rows a rank reads for each that it uses, if it has kept none.

        It reads the lanes of which it takes rows, and the row groups of which these have some,
        whole. The mean of all ranks.

        Args:
            ranks: how many there are.
            batch: rows of each in a step.
        """
        lanes = self.lanes(ranks * batch)
        rank = np.arange(ranks)
        first, end = rank * lanes // ranks, -(-(rank + 1) * lanes // ranks)
        groups = -(-end * self.row_groups // lanes) - first * self.row_groups // lanes
        return float(groups.mean()) * ranks / self.row_groups


def read_part(parts: int, passes: float) -> float:
    """Return which part of its rows a rank that keeps them reads, the mean of all passes over them.

    In every pass it is dealt others, by chance: of those of a second one, where the rows are dealt
    out in N parts, it has read an N-th already.
    """
    passes = max(1.0, passes)
    unread: float = (1 - 1 / parts) ** passes
    return parts * (1 - unread) / passes


def waited_for_reader(
    reads: float, step: float, parts: int, passes: float, *, kept: bool, cpu: float = 0.0
) -> float:
    """Return the seconds that a step waits for the reader, the mean of all passes over the rows.

    Rows that are kept are read from storage once by each rank; see `read_part`.

    Args:
        reads: seconds of reading the rows of a step from storage.
        step: seconds of all else.
        parts: in how many the rows are dealt out.
        passes: how many there are to be.
        kept: whether rows are kept.
        cpu: seconds by which a step is longer while all its rows are read.
    """
    if not kept:
        return max(0.0, reads - step - cpu)
    waited, passes = 0.0, max(1.0, passes)
    for number in range(math.ceil(passes)):
        unread = (1 - 1 / parts) ** number
        waited += min(1.0, passes - number) * max(0.0, (reads - cpu) * unread - step)
    return waited / passes
