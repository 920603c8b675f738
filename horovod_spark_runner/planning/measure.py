"""Measure a training on the cluster: one launch of a single rank, one of all."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..cluster.driver.console import Console
from ..cluster.driver.launcher import chosen_launcher
from ..cluster.protocol.topology import format_ranks
from ..cluster.spark.session import described
from ..config.fields import derive
from ..config.launch import LaunchSettings
from ..data.prepare.checks import NO_ROWS
from ..data.prepare.datasets import Prepared, session_of
from ..errors import DataError
from ..run.pipeline import import_ahead, training_spec
from ..run.resolve import ResolvedRun
from ..training.engine import modules_for
from ..training.spec import TrainingSpec
from .entry import measure_rank
from .measurement import MeasuredLaunch, Measurement, combine_launches
from .sample import written_sample


def measure_training(run: ResolvedRun, sample_rows: int, seconds: float, rows: int) -> Measurement:
    """Measure a training on the cluster.

    Args:
        run: the training.
        sample_rows: rows to measure with, about.
        seconds: how long a rank measures its steps.
        rows: rows of the whole training.

    Raises:
        DataError: the rows do not fill a step of all ranks.
        HorovodSparkError: see `run_training`.
    """
    _check_enough(run, rows, rows)
    began = time.monotonic()
    config, directory = run.config, run.directory
    console = Console(directory.location.name, quiet=not config.stream_logs)
    modules = modules_for(run.model.engine)
    import_ahead(run)
    place = directory.location.join("rows")
    with written_sample(run, place, rows, sample_rows) as sample:
        measured_rows = sample.data.rows
        _check_enough(run, measured_rows, rows)
        console.report(
            f"measuring on {measured_rows:,} rows, ready after {time.monotonic() - began:.1f} s; "
            f"writing all takes {sample.seconds:.1f} s"
        )
        spec = training_spec(run, Prepared(sample.data, None, False), "plan")
        cached = sample.data.size * rows / measured_rows <= config.data.window_bytes
        alone = every = _launch(run, spec, seconds, cached, 1, modules)
        if run.workers > 1:
            every = _launch(run, spec, seconds, cached, run.workers, modules)
    return combine_launches(
        spec,
        alone,
        every,
        rows=rows,
        measured_rows=measured_rows,
        cached=cached,
        materialize=sample.seconds,
        seconds=time.monotonic() - began,
        # NCCL and an explicit algorithm sum over all ranks.
        by_hosts=not config.gpus_per_worker and run.launch.mpi.algorithm == "auto",
        on_gpus=bool(config.gpus_per_worker),
    )


def _check_enough(run: ResolvedRun, available: int, rows: int) -> None:
    """Check that the available rows, of all rows of the training, fill a step of all ranks."""
    batch, ranks = run.fit.batch_size, run.workers
    if not rows:
        raise DataError(f"{NO_ROWS}, so nothing to plan for")
    if available < batch * ranks:
        advice = ["a smaller batch_size"]
        advice += ["a smaller num_workers"] * (ranks > 1)
        advice += ["a larger sample_rows"] * (available < rows)
        raise DataError(
            f"a step of {format_ranks(ranks)} takes {batch * ranks:,} rows, {batch:,} of each, but "
            f"there are {available:,} to measure with; give {' or '.join(advice)}"
        )


def _launch(
    run: ResolvedRun,
    spec: TrainingSpec,
    seconds: float,
    cached: bool,
    count: int,
    modules: Sequence[str],
) -> MeasuredLaunch:
    config, directory = run.config, run.directory
    launching = derive(LaunchSettings, run.launch, num_workers=count)
    spark, task = session_of(run.df), f"measuring steps, sums and reading, {format_ranks(count)}"
    console = Console(directory.location.name, quiet=not config.stream_logs, task=task)
    with described(spark, f"Horovod: planning {directory.location.name}"):
        result = chosen_launcher().launch(
            spark, launching, measure_rank, (spec, seconds, cached), {}, console, modules, count
        )
    hosts = tuple(one.host for one in result.placement)
    timings = result.timings
    return MeasuredLaunch(result.results, hosts, timings["total"] - timings["function"])
