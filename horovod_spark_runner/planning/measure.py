"""What a plan rests on, measured on the driver: one launch of a rank, one of all."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..data.prepare.datasets import session_of
from ..launch.driver.console import Console
from ..launch.driver.launch import RunResult
from ..launch.driver.launcher import chosen_launcher
from ..run.pipeline import prepare_data, training_spec
from ..run.request import CheckedRequest
from ..settings.launching import LaunchSettings
from ..settings.table import derive
from ..training.entry import modules_for
from ..training.spec import TrainingSpec
from ..training.sync.noise import noise_scale
from .figures import Question, RankFigures, measure_rank
from .links import Link, fitted_link, ring_seconds, tree_seconds
from .model import StepTime, Workload

# The exchange may hide behind the backward pass, which is no more of a step than this.
_MOST_OVERLAP = 2 / 3


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
class Measurement:
    """What was measured.

    Attributes:
        workload: the training as the model takes it.
        cores: of a host.
        ranks_per_host: ranks that a host held when all were launched.
        workers: ranks that were launched at once.
        between: the link between hosts; ``None`` if all ranks were on one.
        sums: seconds of sums over all ranks, by bytes.
        measured_rows: rows that were written and read.
        seconds: what measuring took.
        source: the run that told it all; empty where it was measured.
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
    noise_scale: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        found = asdict(self)
        found["workload"]["steps"] = {
            str(size): {str(here): time for here, time in by_ranks.items()}
            for size, by_ranks in found["workload"]["steps"].items()
        }
        return found


def measure(
    checked: CheckedRequest,
    batch_sizes: Sequence[int],
    seconds: float,
    rows: int,
    *,
    noise: bool = False,
) -> Measurement:
    """Measure a training on the cluster.

    Args:
        checked: the training, on all rows or a sample of them.
        batch_sizes: rows of a rank in a step; that of the training among them.
        seconds: how long a rank is to measure each of them.
        rows: rows of the whole training.
        noise: whether to tell the gradient noise scale.

    Raises:
        HorovodSparkError: as `run_training` does.
    """
    began = time.monotonic()
    request, directory = checked.request, checked.directory
    console = Console(directory.location.name, quiet=not request.stream_logs)
    spark, modules = session_of(request.frame), modules_for(checked.source.engine)
    chosen_launcher().prepare(spark, checked.launching, checked.allotment, modules)
    with prepare_data(checked, directory.location.join("rows")) as data:
        materialized = time.monotonic() - began
        known = data.train.rows
        console.say(f"measuring on {known:,} rows, written in {materialized:.1f} s")
        spec = training_spec(checked, data, "plan", None, "")
        question = Question(spec, batch_sizes, seconds)
        alone = _launch(checked, question, 1, modules)
        every = alone
        if checked.workers > 1:
            every = _launch(checked, replace(question, noise=noise), None, modules)
    written = 0.0 if data.reused else materialized * max(1.0, rows / known)
    return combined(spec, alone, every, rows=rows, known=known, materialize=written, began=began)


def _launch(
    checked: CheckedRequest, question: Question, workers: int | None, modules: Sequence[str]
) -> Launched:
    """Let ranks measure: so many, or all of the training."""
    request, directory = checked.request, checked.directory
    count = workers or checked.workers
    launching = derive(LaunchSettings, checked.launching, num_workers=count)
    result: RunResult = chosen_launcher().launch(
        session_of(request.frame),
        launching,
        measure_rank,
        (question,),
        {},
        Console(directory.location.name, quiet=not request.stream_logs),
        modules,
        count,
    )
    timings = result.timings
    hosts = tuple(one.host for one in result.placement)
    return Launched(result.results, hosts, timings["total"] - timings["function"])


def combined(
    spec: TrainingSpec,
    alone: Launched,
    every: Launched,
    *,
    rows: int,
    known: int,
    materialize: float,
    began: float,
) -> Measurement:
    """Return what two launches tell together.

    Args:
        spec: the training.
        alone: of one rank.
        every: of all ranks; the same as ``alone`` where one is all.
        rows: rows of the training.
        known: rows that were written.
        materialize: seconds of writing all rows.
        began: when measuring began, on the monotonic clock.
    """
    ranks, here = len(every.ranks), every.here
    one, all_of = alone.ranks[0], every.ranks
    sums = {size: _mean([rank.sums[size] for rank in all_of]) for size in all_of[0].sums}
    link, waiting = (None, 0.0) if ranks == 1 else _link(sums, all_of, ranks)
    steps: dict[int, dict[int, StepTime]] = {}
    for size, figures in one.steps.items():
        single = StepTime(figures.seconds, figures.cpu_seconds, figures.spread)
        steps[size] = {1: single}
        if here > 1 and all(size in rank.steps for rank in all_of):
            steps[size][here] = _shared(size, one, all_of, sums)
    gradients = one.gradient_bytes
    overhead, overlap = waiting, 0.0
    if link is not None and spec.fit.batch_size in all_of[0].steps:
        told = [rank.steps[spec.fit.batch_size].exchange for rank in all_of]
        ring = ring_seconds(ranks, gradients, link) + tree_seconds(ranks, link)
        if all(exchange is not None for exchange in told):
            # The last rank to come waits for nobody.
            shown = min(exchange for exchange in told if exchange is not None)
            computing = steps[spec.fit.batch_size][1].seconds
            hidden = max(0.0, ring + waiting - shown)
            overlap = min(_MOST_OVERLAP, hidden / computing) if _hides(spec) else 0.0
            overhead = max(0.0, shown + overlap * computing - ring)
    on_one_host = len(set(every.hosts)) == 1
    workload = Workload(
        rows=rows,
        epochs=spec.fit.epochs,
        batch_size=spec.fit.batch_size,
        steps=steps,
        gradient_bytes=gradients,
        model_bytes=one.model_bytes,
        reader_rows=_mean([rank.reader_rows for rank in all_of]),
        reader_cpu_seconds=one.reader_cpu_seconds,
        overhead=overhead,
        overlap=overlap,
        inside=link if on_one_host else None,
        launch={1: alone.seconds, here: every.seconds},
        materialize=materialize,
        build=max(rank.build + rank.first_step for rank in all_of),
    )
    return Measurement(
        workload=workload,
        cores=min(rank.cores for rank in all_of),
        ranks_per_host=here,
        workers=ranks,
        between=None if on_one_host else link,
        sums=sums,
        measured_rows=known,
        seconds=time.monotonic() - began,
        noise_scale=None
        if all_of[0].noise is None
        else noise_scale(*all_of[0].noise, spec.fit.batch_size, ranks),
    )


def _hides(spec: TrainingSpec) -> bool:
    """Tell whether the engine sends gradients while the backward pass goes on."""
    return spec.engine.endswith(".torch.engine")


def _link(sums: Mapping[int, float], ranks: Sequence[RankFigures], size: int) -> tuple[Link, float]:
    """Return the link between the ranks, and the seconds that a sum takes besides its messages."""
    latency = _mean([rank.latency for rank in ranks])
    # What a sum of nothing takes through Horovod, and not through MPI alone.
    waiting = max(0.0, min(sums.values()) - latency)
    fitted = fitted_link({n: max(took - waiting, latency) for n, took in sums.items()}, size)
    return Link(latency / (2 * (size - 1)), fitted.bandwidth), waiting


def _shared(
    size: int, one: RankFigures, ranks: Sequence[RankFigures], sums: Mapping[int, float]
) -> StepTime:
    """Return what a step computes while all ranks of the host do."""
    alone = one.steps[size]
    exchanged = sums.get(one.gradient_bytes, 0.0)
    computing = []
    for rank in ranks:
        figures = rank.steps[size]
        told = figures.exchange
        computing.append(figures.seconds - (exchanged if told is None else told))
    seconds = max(_mean(computing), 0.5 * alone.seconds)
    # Ranks that wait for messages keep their cores busy: that is no computing.
    threads = max(1.0, alone.cpu_seconds / alone.seconds)
    cpu = min(_mean([rank.steps[size].cpu_seconds for rank in ranks]), threads * seconds)
    return StepTime(seconds, cpu, alone.spread * seconds / alone.seconds)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)
