"""What the launches of a measurement tell together. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ..data.read.sharding import groups_in_window
from ..frameworks import TORCH
from ..training.spec import TrainingSpec
from ..training.sync.buckets import BUCKET_BYTES
from ..training.sync.noise import noise_scale
from .figures import RankFigures, Shared, StepFigures
from .links import (
    Link,
    doubling_rounds,
    fitted_link,
    link_of,
    ring_seconds,
    slowed,
    tree_seconds,
)
from .model import Cluster, Prediction, StepTime, Workload, predict
from .waiting import BACKWARD, Lying, waiting_seconds

# By how much messages of a step may take less than larger ones tell.
_FASTEST = 0.5
# Bytes from which a sum goes around a ring, whatever the ranks.
_BY_RING = 1 << 20


@dataclass(frozen=True)
class Launched:
    """What one launch has measured.

    Attributes:
        ranks: what each rank has.
        hosts: the host of each.
        seconds: of the launch, without what the ranks did.
    """

    ranks: tuple[RankFigures, ...]
    hosts: tuple[str, ...]
    seconds: float

    @property
    def here(self) -> int:
        """Ranks on the fullest host."""
        return max(Counter(self.hosts).values())


@dataclass(frozen=True)
class Crowded:
    """What one launch of ranks that share cores has measured.

    Attributes:
        ranks: what each rank has.
        hosts: the host of each.
    """

    ranks: tuple[Shared, ...]
    hosts: tuple[str, ...]

    @property
    def per_core(self) -> float:
        """Ranks per core; 1 where all came to hosts alone."""
        shared = [rank.per_core for rank in self.ranks if rank.per_core > 1]
        return statistics.fmean(shared or [1.0])

    @property
    def seconds(self) -> float:
        """Of a step of those that shared a core; one that had its own tells nothing."""
        return statistics.fmean(rank.seconds for rank in self.ranks if rank.per_core > 1)

    @property
    def reader_cpu_seconds(self) -> float:
        """Processor time in which those read a row."""
        return _mean([rank.reader_cpu_seconds for rank in self.ranks if rank.per_core > 1])


@dataclass(frozen=True)
class Measurement:
    """What was measured.

    Attributes:
        workload: the training as the model takes it.
        cores: of a host.
        ranks_per_host: ranks that a host held when all were launched.
        workers: ranks that were launched at once.
        between: the link between hosts; ``None`` if all ranks were on one.
        between_many: the same where each host has several ranks, if these were seen to use it
            better than one on each.
        sums: seconds of sums over all ranks, by bytes.
        measured_rows: rows that were there to be read.
        seconds: what measuring took.
        source: the run that told it all; empty where it was measured.
        noise_asked: whether the gradient noise scale was asked for.
        noise_scale: the gradient noise scale in rows; ``None`` where it was not asked for, or the
            mean gradient cannot be told from noise.
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
    noise_asked: bool = False
    noise_scale: float | None = None
    between_many: Link | None = None

    def link_between(self, ranks_per_host: int) -> Link | None:
        """Return the link between hosts of so many ranks; ``None`` if all were on one."""
        many = self.between_many if ranks_per_host > 1 else None
        return many or self.between

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        found = asdict(self)
        found["workload"]["steps"] = {
            str(size): {str(here): time for here, time in by_ranks.items()}
            for size, by_ranks in found["workload"]["steps"].items()
        }
        return found


def combined(
    spec: TrainingSpec,
    alone: Launched,
    every: Launched,
    *,
    rows: int,
    known: int,
    kept: bool,
    materialize: float,
    seconds: float,
    by_hosts: bool = False,
    shared: Sequence[Crowded] = (),
) -> Measurement:
    """Return what the launches tell together.

    Args:
        spec: the training.
        alone: of one rank.
        every: of all ranks; the same as ``alone`` where one is all.
        rows: rows of the training.
        known: rows that were measured with.
        kept: whether a rank keeps the rows it has read.
        materialize: seconds of writing all rows.
        seconds: what measuring took.
        by_hosts: whether sums are made within hosts first; see `Workload`.
        shared: what ranks that share cores have measured, by launches.
    """
    ranks, here, batch = len(every.ranks), every.here, spec.fit.batch_size
    one, all_of = alone.ranks[0], every.ranks
    cores = min(rank.cores for rank in all_of)
    sums = {size: _mean([rank.sums[size] for rank in all_of]) for size in all_of[0].sums}
    steps = _steps(one, every, sums, cores / here)
    exchange = _exchange(spec, every, steps[batch], sums, by_hosts)
    on_one_host = len(set(every.hosts)) == 1
    sizes = [group.size for group in spec.train.row_groups]
    measured = Lying(len(sizes), groups_in_window(sizes, spec.window_bytes))
    read = measured.rows_read(ranks, batch)
    steps_per_epoch = spec.fit.steps_per_epoch
    of_epoch = rows if steps_per_epoch is None else steps_per_epoch * ranks * batch
    workload = Workload(
        rows=of_epoch,
        epochs=spec.fit.epochs,
        passes=spec.fit.epochs * of_epoch / rows,
        batch_size=batch,
        steps=steps,
        gradient_bytes=one.gradient_bytes,
        model_bytes=one.model_bytes,
        reader_rows={1: one.reader_rows, here: read * _mean([r.reader_rows for r in all_of])},
        reader_cpu_seconds={1.0: one.reader_cpu_seconds},
        lying=replace(measured, row_groups=max(1, len(sizes) * rows // known)),
        overhead=exchange.overhead,
        overlap=exchange.overlap,
        crowding=max(1.0, here / cores),
        kept=kept,
        inside=exchange.link if on_one_host else None,
        # The first launch may have imported the framework, as that of a training to come will,
        # whatever the number of its ranks.
        launch={1: alone.seconds, here: max(alone.seconds, every.seconds)},
        materialize=materialize,
        build=max(rank.build + rank.first_step for rank in all_of),
        by_hosts=by_hosts,
    )
    between = None if on_one_host else exchange.link
    workload, many = _with_shared(workload, every, shared, between, measured)
    return Measurement(
        workload=workload,
        cores=cores,
        ranks_per_host=here,
        workers=ranks,
        between=between,
        between_many=many,
        sums=sums,
        measured_rows=known,
        seconds=seconds,
        noise_asked=all_of[0].noise is not None,
        noise_scale=None
        if all_of[0].noise is None
        else noise_scale(*all_of[0].noise, batch, ranks),
    )


class _Exchange(NamedTuple):
    """What the exchange of a step takes.

    Attributes:
        link: that of its ring; ``None`` of one rank.
        overhead: seconds besides its messages; see `Workload`.
        overlap: which part of it hides; see `Workload`.
    """

    link: Link | None
    overhead: float
    overlap: float


def _exchange(
    spec: TrainingSpec,
    every: Launched,
    steps: Mapping[int, StepTime],
    sums: Mapping[int, float],
    by_hosts: bool,
) -> _Exchange:
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
        return _Exchange(None, 0.0, 0.0)
    hosts = len(set(every.hosts))
    # How many a ring goes around.
    members = hosts if by_hosts and hosts > 1 else ranks
    link, waiting = _link(sums, all_of, members)
    step = steps.get(every.here, steps[1])
    longer = _longer([rank.steps[spec.fit.batch_size] for rank in all_of], step)
    if longer is None:
        return _Exchange(link, waiting, 0.0)
    gradients = all_of[0].gradient_bytes
    # What fits in one bucket leaves after the backward pass, and all that Keras' ranks sum within a
    # host.
    hides = gradients > BUCKET_BYTES and (spec.engine == TORCH or hosts > 1)
    ring = ring_seconds(members, gradients, link) + tree_seconds(ranks, link)
    if not hides and longer < ring:
        # Links are no straight lines: what is sent in every step counts, not larger sums.
        faster = max(longer / ring, _FASTEST)
        link, ring = slowed(link, faster), faster * ring
    # Waiting for slower ranks counts by itself.
    shown = max(0.0, longer - waiting_seconds(step.spread, ranks))
    return _Exchange(link, *_hidden(shown, ring, waiting, step.seconds, hides=hides))


def _with_shared(
    work: Workload,
    every: Launched,
    shared: Sequence[Crowded],
    between: Link | None,
    lying: Lying,
) -> tuple[Workload, Link | None]:
    """Return the training with what ranks that share cores have measured.

    Args:
        work: what ranks with a core each have measured.
        every: those.
        shared: what others have measured, by launches.
        between: the link between hosts, if there are several.
        lying: how the rows lay that were read.

    Returns:
        The training, and the link between hosts of several ranks, if it was seen to be better.
    """
    hosts = len(set(every.hosts))
    usable = [one for one in shared if one.per_core > 1 and len(set(one.hosts)) == hosts]
    many = _link_of_many(work, usable, between)
    sharing = {
        one.per_core: max(0.0, _against_apart(work, one, many or between)[0]) for one in usable
    }
    reading = {
        one.per_core: one.reader_cpu_seconds / lying.rows_read(len(one.ranks), work.batch_size)
        for one in usable
    }
    cpu = {**work.reader_cpu_seconds, **reading}
    return replace(work, sharing=sharing, reader_cpu_seconds=cpu), many


def _steps(
    one: RankFigures, every: Launched, sums: Mapping[int, float], cores: float
) -> dict[int, dict[int, StepTime]]:
    """Return what a step computes, by batch size and ranks of a host with so many cores each."""
    steps: dict[int, dict[int, StepTime]] = {}
    for size, figures in one.steps.items():
        steps[size] = {1: StepTime(figures.seconds, figures.cpu_seconds, figures.spread)}
        if every.here > 1 and all(size in rank.steps for rank in every.ranks):
            steps[size][every.here] = _beside_others(size, one, every.ranks, sums, cores)
    return steps


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
    return _mean([rank.seconds for rank in figures]) - step.seconds


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
    latency = _mean([rank.latency for rank in ranks])
    # What a sum of nothing takes through Horovod, and not through MPI alone.
    waiting = max(0.0, min(sums.values()) - latency)
    large = {n: max(took - waiting, latency) for n, took in sums.items() if n >= _BY_RING}
    return fitted_link(large, members, latency / doubling_rounds(len(ranks))), waiting


def _beside_others(
    size: int,
    one: RankFigures,
    ranks: Sequence[RankFigures],
    sums: Mapping[int, float],
    cores: float,
) -> StepTime:
    """Return what a step computes while all ranks of the host do, who have so many cores each."""
    alone = one.steps[size]
    exchanged = sums.get(one.gradient_bytes, 0.0)
    computing = []
    for rank in ranks:
        figures = rank.steps[size]
        told = figures.exchange
        computing.append(figures.seconds - (exchanged if told is None else told))
    seconds = max(_mean(computing), 0.5 * alone.seconds)
    # Ranks that wait for messages keep their cores busy: that is no computing.
    threads = min(max(1.0, alone.cpu_seconds / alone.seconds), cores)
    cpu = min(_mean([rank.steps[size].cpu_seconds for rank in ranks]), threads * seconds)
    # Computing varies no more than the whole steps did.
    varied = _mean([rank.steps[size].spread for rank in ranks])
    return StepTime(seconds, cpu, min(alone.spread * seconds / alone.seconds, varied))


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _against_apart(
    work: Workload, crowded: Crowded, between: Link | None
) -> tuple[float, Prediction]:
    """Return what a step takes longer than if each rank had a core, and what it would be then."""
    here = max(Counter(crowded.hosts).values())
    cluster = Cluster(here, here, between or link_of("10gbit"))
    # What was measured was in memory already.
    apart = predict(replace(work, reader_cpu_seconds={1.0: 0.0}), cluster, len(crowded.ranks))
    return crowded.seconds - (apart.step_seconds - apart.reading), apart


def _link_of_many(work: Workload, launches: Sequence[Crowded], between: Link | None) -> Link | None:
    """Return the link between hosts of several ranks, if it is better than that of one on each.

    Where ranks of a host add up among themselves first, Open MPI sends in another way.
    """
    if between is None:
        return None
    for one in launches:
        longer, apart = _against_apart(work, one, between)
        if longer < 0 and apart.transfer > 0:
            left = max(apart.transfer + longer, _FASTEST * apart.transfer)
            return Link(between.latency, between.bandwidth * apart.transfer / left)
    return None
