"""Measure a training on the cluster: one launch of a single rank, one of all."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..config.fields import derive
from ..config.launch import LaunchSettings
from ..data.prepare.checks import NO_ROWS
from ..data.prepare.datasets import Prepared, session_of
from ..errors import DataError
from ..launch.driver.console import Console
from ..launch.driver.launcher import chosen_launcher
from ..launch.shared.topology import in_words
from ..run.pipeline import import_ahead, training_spec
from ..run.request import CheckedRequest
from ..spark.session import described
from ..training.entry import modules_for
from ..training.spec import TrainingSpec
from .entry import measure_rank
from .measurement import MeasuredLaunch, Measurement, combine_launches
from .sample import written_sample


def measure_training(
    checked: CheckedRequest, sample_rows: int, seconds: float, rows: int
) -> Measurement:
    """Measure a training on the cluster.

    Args:
        checked: the training.
        sample_rows: rows to measure with, about.
        seconds: how long a rank measures its steps.
        rows: rows of the whole training.

    Raises:
        DataError: the rows do not fill a step of all ranks.
        HorovodSparkError: see `run_training`.
    """
    _check_enough(checked, rows, rows)
    began = time.monotonic()
    request, directory = checked.request, checked.directory
    console = Console(directory.location.name, quiet=not request.stream_logs)
    modules = modules_for(checked.source.engine)
    import_ahead(checked)
    place = directory.location.join("rows")
    with written_sample(checked, place, rows, sample_rows) as sample:
        measured_rows = sample.data.rows
        _check_enough(checked, measured_rows, rows)
        console.say(
            f"measuring on {measured_rows:,} rows, ready after {time.monotonic() - began:.1f} s; "
            f"writing all takes {sample.seconds:.1f} s"
        )
        spec = training_spec(checked, Prepared(sample.data, None, False), "plan", None, "")
        cached = sample.data.size * rows / measured_rows <= request.data.window_bytes
        alone = every = _launch(checked, spec, seconds, cached, 1, modules)
        if checked.workers > 1:
            every = _launch(checked, spec, seconds, cached, checked.workers, modules)
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
        by_hosts=not request.gpus_per_worker and checked.launching.mpi.algorithm == "auto",
        on_gpus=bool(request.gpus_per_worker),
    )


def _check_enough(checked: CheckedRequest, available: int, rows: int) -> None:
    """Check that the available rows, of all rows of the training, fill a step of all ranks."""
    batch, ranks = checked.fit.batch_size, checked.workers
    if not rows:
        raise DataError(f"{NO_ROWS}, so nothing to plan for")
    if available < batch * ranks:
        advice = ["a smaller batch_size"]
        advice += ["a smaller num_workers"] * (ranks > 1)
        advice += ["a larger sample_rows"] * (available < rows)
        raise DataError(
            f"a step of {in_words(ranks)} takes {batch * ranks:,} rows, {batch:,} of each, but "
            f"there are {available:,} to measure with; give {' or '.join(advice)}"
        )


def _launch(
    checked: CheckedRequest,
    spec: TrainingSpec,
    seconds: float,
    cached: bool,
    count: int,
    modules: Sequence[str],
) -> MeasuredLaunch:
    request, directory = checked.request, checked.directory
    launching = derive(LaunchSettings, checked.launching, num_workers=count)
    spark, task = session_of(request.frame), f"measuring steps, sums and reading, {in_words(count)}"
    console = Console(directory.location.name, quiet=not request.stream_logs, task=task)
    with described(spark, f"Horovod: planning {directory.location.name}"):
        result = chosen_launcher().launch(
            spark, launching, measure_rank, (spec, seconds, cached), {}, console, modules, count
        )
    hosts = tuple(one.host for one in result.placement)
    timings = result.timings
    return MeasuredLaunch(result.results, hosts, timings["total"] - timings["function"])
