"""Measure a training on the cluster: one launch of a single rank, one of all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..cluster.driver.launch import chosen_launcher
from ..cluster.protocol.topology import format_ranks
from ..cluster.spark.session import described
from ..config.fields import derive
from ..config.launch import LaunchSettings
from ..data.manifest import Manifest
from ..data.prepare.checks import NO_ROWS
from ..data.prepare.datasets import Prepared, frame_of, is_readable_in_place, session_of
from ..data.prepare.schema import quoted
from ..errors import DataError
from ..observe.console import Console
from ..run.pipeline import import_ahead, prepare_data, show_preparation, training_spec
from ..run.resolve import ResolvedRun
from ..storage.filesystem import Location
from ..training.engine import modules_for
from ..training.spec import TrainingSpec
from .measurement import MeasuredLaunch, Measurement, RankFigures, combine_launches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
    with _written_sample(run, place, rows, sample_rows) as sample:
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
            spark, launching, _measure_rank, (spec, seconds, cached), {}, console, modules, count
        )
    hosts = tuple(one.host for one in result.placement)
    timings = result.timings
    return MeasuredLaunch(result.results, hosts, timings["total"] - timings["function"])


def _measure_rank(spec: TrainingSpec, seconds: float, cached: bool) -> RankFigures:
    """Measure on this rank; see `horovod_spark_runner.planning.rank.measure`."""
    from .rank import measure

    return measure(spec, seconds, cached)


@dataclass(frozen=True)
class _Sample:
    """Rows to measure with.

    Attributes:
        data: all rows, or a sample.
        seconds: seconds in which a training writes all rows; 0 if it reads them where they are.
    """

    data: Manifest
    seconds: float


@contextlib.contextmanager
def _written_sample(
    run: ResolvedRun, folder: Location, rows: int, sample_rows: int
) -> Iterator[_Sample]:
    """Write rows to measure with, and remove them afterwards.

    Args:
        run: the training, on all rows.
        folder: folder for the rows if there is no cache directory. A new one is deleted if the
            measurement fails, or leaves nothing in it.
        rows: rows of the training.
        sample_rows: rows to write of a larger DataFrame, about.

    Raises:
        DataError: the values cannot be trained on, or the sample is too small.
    """
    with removed_on_failure(folder), _written(run, folder, rows, sample_rows) as written:
        yield written


@contextlib.contextmanager
def removed_on_failure(folder: Location, *, keeping: bool = False) -> Iterator[None]:
    """Delete a new folder if the block fails, or leaves it empty.

    Args:
        folder: the folder.
        keeping: whether a folder with contents survives a failure.
    """
    there = folder.exists()
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the failure is the error to report
            if not there and not (keeping and folder.list()):
                folder.delete_folder()
        raise
    if not there and not folder.list():
        folder.delete_folder()


@contextlib.contextmanager
def _written(run: ResolvedRun, folder: Location, rows: int, sample_rows: int) -> Iterator[_Sample]:
    """Write all rows, or a sample; see `_written_sample`."""
    config = run.config
    if rows <= sample_rows or is_readable_in_place(run.df, run.columns.roles, config.data):
        began = time.monotonic()
        with show_preparation(run, run.console, prepare_data(run, folder)) as data:
            yield _Sample(data.train, 0.0 if data.reused else time.monotonic() - began)
        return
    columns = [quoted(name) for name in run.columns.roles.columns]
    sample = frame_of(run.df).select(*columns).sample(sample_rows / rows, seed=0).persist()
    try:
        with _sampled(run, sample, folder, rows, sample_rows) as written:
            yield written
    finally:
        sample.unpersist()


@contextlib.contextmanager
def _sampled(
    run: ResolvedRun, sample: DataFrame, folder: Location, rows: int, sample_rows: int
) -> Iterator[_Sample]:
    began = time.monotonic()
    with described(sample.sparkSession, "Horovod: taking a sample of the rows to plan with"):
        sample.count()
    looked = time.monotonic() - began
    part = sample.sample(0.25, seed=1)
    few = part.count()
    if not few or few == sample.count():
        raise DataError(
            f"sample_rows={sample_rows} of {rows:,} rows are too few to extrapolate the "
            "time of writing all rows; give more"
        )
    # The first job of a session includes one-time work of Spark; the second one does not.
    with _timed(run, part, folder) as (_, first):
        pass
    with _timed(run, sample, folder) as (data, took):
        with _timed(run, part, folder) as (_, again):
            pass
        seconds = _extrapolate_writing(rows, looked, first, again, took, few=few, known=data.rows)
        yield _Sample(data, seconds)


@contextlib.contextmanager
def _timed(
    run: ResolvedRun, frame: DataFrame, folder: Location
) -> Iterator[tuple[Manifest, float]]:
    """Write a DataFrame outside the cache; yield its manifest and the seconds."""
    config = run.config
    config = replace(config, data=replace(config.data, keep_data=False))
    began = time.monotonic()
    with prepare_data(replace(run, df=frame, config=config), folder) as data:
        yield data.train, time.monotonic() - began


def _extrapolate_writing(
    rows: int, looked: float, first: float, again: float, took: float, *, few: int, known: int
) -> float:
    """Extrapolate the seconds of writing all rows; fixed costs of a job count once. Pure.

    Args:
        rows: rows of the training.
        looked: seconds of computing all rows once, to take the sample.
        first: seconds of writing a part of the sample, first in the session.
        again: seconds of writing the same part again.
        took: seconds of writing the sample.
        few: rows of the part.
        known: rows of the sample.
    """
    per_row = max(0.0, took - again) / (known - few)
    return looked + first + per_row * (rows - few)
