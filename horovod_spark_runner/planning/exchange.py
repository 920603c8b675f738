"""What the exchange of a step takes, told by sums and by whole steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from ..frameworks import TORCH
from ..training.spec import TrainingSpec
from ..training.sync.buckets import BUCKET_BYTES
from .figures import RankFigures, StepFigures
from .launched import Launched
from .links import Link, doubling_rounds, fitted_link, ring_seconds, slowed, tree_seconds
from .model import StepTime
from .waiting import BACKWARD, waiting_seconds

# By how much messages of a step may take less than larger ones tell.
FASTEST = 0.5
# Bytes from which a sum goes around a ring, whatever the ranks.
_BY_RING = 1 << 20


class Exchange(NamedTuple):
    """What the exchange of a step takes.

    Attributes:
        link: that of its ring; ``None`` of one rank.
        overhead: seconds besides its messages; see `Workload`.
        overlap: which part of it hides; see `Workload`.
    """

    link: Link | None
    overhead: float
    overlap: float


def exchange_of(
    spec: TrainingSpec,
    every: Launched,
    steps: Mapping[int, StepTime],
    sums: Mapping[int, float],
    by_hosts: bool,
) -> Exchange:
    """Return what sums, and what steps took longer than computing, tell of the exchange.

    Args:
        spec: the training.
        every: what all ranks have measured.
        steps: what computes in a step, by ranks of a host.
        sums: seconds of sums, by bytes.
        by_hosts: whether sums are made within hosts first; see `Workload`.
    """
    ranks, all_of = len(every.ranks), every.ranks
    if ranks == 1:
        return Exchange(None, 0.0, 0.0)
    hosts = len(set(every.hosts))
    # How many a ring goes around.
    members = hosts if by_hosts and hosts > 1 else ranks
    link, waiting = _link(sums, all_of, members)
    step = steps.get(every.here, steps[1])
    longer = _longer([rank.steps[spec.fit.batch_size] for rank in all_of], step)
    if longer is None:
        return Exchange(link, waiting, 0.0)
    gradients = all_of[0].gradient_bytes
    # What fits in one bucket leaves after the backward pass, and all that Keras' ranks sum within a
    # host.
    hides = gradients > BUCKET_BYTES and (spec.engine == TORCH or hosts > 1)
    ring = ring_seconds(members, gradients, link) + tree_seconds(ranks, link)
    if not hides and longer < ring:
        # Links are no straight lines: what is sent in every step counts, not larger sums.
        faster = max(longer / ring, FASTEST)
        link, ring = slowed(link, faster), faster * ring
    # Waiting for slower ranks counts by itself.
    shown = max(0.0, longer - waiting_seconds(step.spread, ranks))
    return Exchange(link, *_hidden(shown, ring, waiting, step.seconds, hides=hides))


def _longer(figures: Sequence[StepFigures], step: StepTime) -> float | None:
    """Return the seconds that a step takes besides its computing.

    Args:
        figures: of the step of each rank.
        step: what of it is computing.

    Returns:
        The seconds; ``None`` where the framework does not tell computing from exchanging.
    """
    if any(rank.exchange is None for rank in figures):
        return None
    return fmean([rank.seconds for rank in figures]) - step.seconds


def _hidden(
    shown: float, ring: float, waiting: float, computing: float, *, hides: bool
) -> tuple[float, float]:
    """Return what an exchange takes besides its messages, and which part of it hides.

    Args:
        shown: seconds of it that a step was seen to wait for.
        ring: seconds of its messages.
        waiting: seconds that a sum takes besides its messages.
        computing: seconds of the step's computing.
        hides: whether it can hide at all.
    """
    whole = ring + waiting
    if not hides or whole <= shown:
        return max(0.0, shown - ring), 0.0
    # No more than the backward pass can have hidden it.
    whole = max(ring, min(whole, shown + BACKWARD * computing))
    return whole - ring, 1 - shown / whole


def _link(
    sums: Mapping[int, float], ranks: Sequence[RankFigures], members: int
) -> tuple[Link, float]:
    """Return the link of a ring of so many, and what a sum takes besides its messages."""
    latency = fmean([rank.latency for rank in ranks])
    # What a sum of nothing takes through Horovod, and not through MPI alone.
    waiting = max(0.0, min(sums.values()) - latency)
    large = {n: max(took - waiting, latency) for n, took in sums.items() if n >= _BY_RING}
    return fitted_link(large, members, latency / doubling_rounds(len(ranks))), waiting
