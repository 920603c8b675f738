"""Combine the figures of measured launches into a workload. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from ..frameworks import TORCH
from ..sync.allreduce import BUCKET_BYTES
from ..training.spec import TrainingSpec
from .model import (
    BACKWARD,
    Link,
    StepTime,
    Workload,
    doubling_rounds,
    expected_maximum,
    fit_link,
    ring_seconds,
    slow_link,
    tree_seconds,
)

# A step's own messages may be this much faster than larger sums suggest, at most.
_FASTEST = 0.5
# Sums of at least this many bytes go around a ring, whatever the number of ranks.
_RING_BYTES = 1 << 20


@dataclass(frozen=True)
class RankFigures:
    """Measurements of one rank.

    Attributes:
        build: seconds of building the model.
        first_step: seconds of the first step.
        step: step time, with the exchange.
        exchange: seconds of a step's exchange; ``None`` if the framework does not separate it.
        sums: seconds of a sum over all ranks through the framework, by bytes; empty for one rank.
        latency: seconds of MPI's own sum of one number.
        gradient_bytes: bytes of all trainable weights.
        reader_rows: rows per second read from storage, with nothing else to do.
        reader_cpu_seconds: processor time of reading a row.
        cores: cores of the host that this process may use.
    """

    build: float
    first_step: float
    step: StepTime
    exchange: float | None
    sums: Mapping[int, float]
    latency: float
    gradient_bytes: int
    reader_rows: float
    reader_cpu_seconds: float
    cores: int


@dataclass(frozen=True)
class MeasuredLaunch:
    """One launch of ranks.

    Attributes:
        ranks: figures of each rank.
        hosts: host of each rank.
        seconds: duration of the launch, without the ranks' work.
    """

    ranks: tuple[RankFigures, ...]
    hosts: tuple[str, ...]
    seconds: float

    @property
    def ranks_per_host(self) -> int:
        """Ranks on the fullest host."""
        return max(Counter(self.hosts).values())


@dataclass(frozen=True)
class Measurement:
    """Result of measuring a training.

    Attributes:
        workload: input of the model.
        cores: cores of a host.
        ranks_per_host: ranks on the fullest host when all were launched.
        workers: ranks that were launched at once.
        between: link between hosts; ``None`` if all ranks were on one.
        sums: seconds of sums over all ranks, by bytes.
        measured_rows: rows of the measured sample.
        seconds: duration of the measurement.
        source: the run directory it was read from; empty if it was measured.
        on_gpus: whether each rank has a GPU, so that ranks may share cores.
    """

    workload: Workload
    cores: int
    ranks_per_host: int
    workers: int
    between: Link | None
    sums: Mapping[int, float]
    measured_rows: int
    seconds: float
    source: str = ""
    on_gpus: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def combine_launches(
    spec: TrainingSpec,
    alone: MeasuredLaunch,
    every: MeasuredLaunch,
    *,
    rows: int,
    measured_rows: int,
    cached: bool,
    materialize: float,
    seconds: float,
    by_hosts: bool = False,
    on_gpus: bool = False,
) -> Measurement:
    """Combine the launch of one rank and the launch of all.

    Args:
        spec: the training.
        alone: launch of one rank.
        every: launch of all ranks; the same as ``alone`` for ``num_workers=1``.
        rows: rows of the training.
        measured_rows: rows of the sample.
        cached: see `Workload`.
        materialize: seconds of writing all rows.
        seconds: duration of the measurement.
        by_hosts: see `Workload`.
        on_gpus: whether each rank has a GPU.
    """
    ranks, here, batch = len(every.ranks), every.ranks_per_host, spec.fit.batch_size
    one = alone.ranks[0]
    sums = {size: fmean([rank.sums[size] for rank in every.ranks]) for size in every.ranks[0].sums}
    steps = {1: one.step}
    if here > 1:
        steps[here] = _computation(one, every.ranks, sums)
    link, overhead, overlap = _exchange(spec, every, steps.get(here, one.step), sums, by_hosts)
    on_one_host = len(set(every.hosts)) == 1
    steps_per_epoch = spec.fit.steps_per_epoch
    epoch_rows = rows if steps_per_epoch is None else steps_per_epoch * ranks * batch
    workload = Workload(
        rows=epoch_rows,
        epochs=spec.fit.epochs,
        passes=spec.fit.epochs * epoch_rows / rows,
        batch_size=batch,
        steps=steps,
        gradient_bytes=one.gradient_bytes,
        reader_rows={1: one.reader_rows, here: fmean([r.reader_rows for r in every.ranks])},
        reader_cpu_seconds=one.reader_cpu_seconds,
        overhead=overhead,
        overlap=overlap,
        cached=cached,
        inside=link if on_one_host else None,
        # The first launch may have imported the framework, as that of a training to come will,
        # whatever the number of its ranks.
        launch={1: alone.seconds, here: max(alone.seconds, every.seconds)},
        materialize=materialize,
        build=max(rank.build + rank.first_step for rank in every.ranks),
        by_hosts=by_hosts,
    )
    return Measurement(
        workload=workload,
        cores=min(rank.cores for rank in every.ranks),
        ranks_per_host=here,
        workers=ranks,
        between=None if on_one_host else link,
        sums=sums,
        measured_rows=measured_rows,
        seconds=seconds,
        on_gpus=on_gpus,
    )


def _computation(
    one: RankFigures, ranks: Sequence[RankFigures], sums: Mapping[int, float]
) -> StepTime:
    """Return the step time without exchange while all ranks of a host compute."""
    exchange = sums.get(one.gradient_bytes, 0.0)
    alone = one.step
    seconds = fmean(
        [r.step.seconds - (exchange if r.exchange is None else r.exchange) for r in ranks]
    )
    seconds = max(seconds, 0.5 * alone.seconds)
    # A rank that waits for messages keeps its core busy; that is no computation.
    threads = alone.cpu_seconds / alone.seconds
    cpu = min(fmean([rank.step.cpu_seconds for rank in ranks]), threads * seconds)
    # Computation varies no more than the whole step did.
    spread = min(
        alone.spread * seconds / alone.seconds, fmean([rank.step.spread for rank in ranks])
    )
    return StepTime(seconds, cpu, spread)


def _exchange(
    spec: TrainingSpec,
    every: MeasuredLaunch,
    step: StepTime,
    sums: Mapping[int, float],
    by_hosts: bool,
) -> tuple[Link | None, float, float]:
    """Return the link of the ring, the overhead of an exchange and the part that overlaps."""
    ranks, hosts = len(every.ranks), len(set(every.hosts))
    if ranks == 1:
        return None, 0.0, 0.0
    members = hosts if by_hosts and hosts > 1 else ranks
    link, overhead = _fit_sums(sums, every.ranks, members)
    if any(rank.exchange is None for rank in every.ranks):
        return link, overhead, 0.0
    longer = fmean([rank.step.seconds for rank in every.ranks]) - step.seconds
    gradients = every.ranks[0].gradient_bytes
    # A single bucket leaves after the backward pass, and so do all of Keras within one host.
    overlaps = gradients > BUCKET_BYTES and (spec.engine == TORCH or hosts > 1)
    ring = ring_seconds(members, gradients, link) + tree_seconds(ranks, link)
    if not overlaps and longer < ring:
        # Links are not linear: the messages of a step count, not larger sums.
        factor = max(longer / ring, _FASTEST)
        link, ring = slow_link(link, factor), factor * ring
    # The prediction adds the wait for slower ranks itself.
    shown = max(0.0, longer - step.spread * expected_maximum(ranks))
    if not overlaps or ring + overhead <= shown:
        return link, max(0.0, shown - ring), 0.0
    # The backward pass bounds what can have overlapped.
    whole = max(ring, min(ring + overhead, shown + BACKWARD * step.seconds))
    return link, whole - ring, 1 - shown / whole


def _fit_sums(
    sums: Mapping[int, float], ranks: Sequence[RankFigures], members: int
) -> tuple[Link, float]:
    """Return the link of a ring of so many members, and the overhead of a sum."""
    latency = fmean([rank.latency for rank in ranks])
    # Horovod's own time: what the smallest sum takes longer than MPI's.
    overhead = max(0.0, min(sums.values()) - latency)
    large = {n: max(took - overhead, latency) for n, took in sums.items() if n >= _RING_BYTES}
    return fit_link(large, members, latency / doubling_rounds(len(ranks))), overhead
