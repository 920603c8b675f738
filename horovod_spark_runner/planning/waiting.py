"""What a step waits for: slower ranks, its exchange, a turn on the core, and the reader. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from statistics import NormalDist

from ..data.read.sharding import MAX_LANES

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


def lanes_of(row_groups: int) -> int:
    """Return in how many parts, at most, so many row groups are dealt out."""
    return max(1, min(row_groups, MAX_LANES))


def rows_read(ranks: int, lanes: int) -> float:
    """Return how many rows a rank reads for each that it uses, if it has kept none.

    Where there are more ranks than ``lanes``, several read the whole of each.
    """
    return max(1.0, ranks / lanes)


def read_part(parts: int, passes: float) -> float:
    """Return which part of its rows a rank that keeps them reads, the mean of all passes over them.

    In every pass it is dealt others, by chance: of those of a second one, where the rows are dealt
    out in N parts, it has read an N-th already.
    """
    passes = max(1.0, passes)
    unread: float = (1 - 1 / parts) ** passes
    return parts * (1 - unread) / passes


def waited_for_reader(reads: float, step: float, parts: int, passes: float, *, kept: bool) -> float:
    """Return the seconds that a step waits for the reader, the mean of all passes over the rows.

    Rows that are kept are read from storage once by each rank; see `read_part`.

    Args:
        reads: seconds of reading the rows of a step from storage.
        step: seconds of all else.
        parts: in how many the rows are dealt out.
        passes: how many there are to be.
        kept: whether rows are kept.
    """
    if not kept:
        return max(0.0, reads - step)
    waited, whole = 0.0, max(1, round(passes))
    for _ in range(whole):
        if reads <= step:
            break
        waited += reads - step
        reads *= 1 - 1 / parts
    return waited / whole
