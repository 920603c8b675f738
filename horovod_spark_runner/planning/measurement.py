"""What the launches of a measurement tell together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from ..data.read.sharding import groups_in_window
from ..training.spec import TrainingSpec
from ..training.sync.noise import noise_scale
from .exchange import FASTEST, exchange_of
from .figures import RankFigures
from .launched import Crowded, Launched
from .links import Link, link_of
from .model import Cluster, Prediction, StepTime, Workload, predict
from .waiting import Lying


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
    sums = {size: fmean([rank.sums[size] for rank in all_of]) for size in all_of[0].sums}
    steps = _steps(one, every, sums, cores / here)
    exchange = exchange_of(spec, every, steps[batch], sums, by_hosts)
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
        reader_rows={1: one.reader_rows, here: read * fmean([r.reader_rows for r in all_of])},
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
    seconds = max(fmean(computing), 0.5 * alone.seconds)
    # Ranks that wait for messages keep their cores busy: that is no computing.
    threads = min(max(1.0, alone.cpu_seconds / alone.seconds), cores)
    cpu = min(fmean([rank.steps[size].cpu_seconds for rank in ranks]), threads * seconds)
    # Computing varies no more than the whole steps did.
    varied = fmean([rank.steps[size].spread for rank in ranks])
    return StepTime(seconds, cpu, min(alone.spread * seconds / alone.seconds, varied))


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
            left = max(apart.transfer + longer, FASTEST * apart.transfer)
            return Link(between.latency, between.bandwidth * apart.transfer / left)
    return None
