"""Sample of rows to measure a plan on, and the time of writing all rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..cluster.spark.session import described
from ..data.manifest import Manifest
from ..data.prepare.datasets import frame_of, is_readable_in_place
from ..data.prepare.schema import quoted
from ..errors import DataError
from ..run.pipeline import prepare_data
from ..run.resolve import ResolvedRun
from ..storage.filesystem import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Sample:
    """Rows to measure with.

    Attributes:
        data: all rows, or a sample.
        seconds: seconds in which a training writes all rows; 0 if it reads them where they are.
    """

    data: Manifest
    seconds: float


@contextlib.contextmanager
def written_sample(
    run: ResolvedRun, folder: Location, rows: int, sample_rows: int
) -> Iterator[Sample]:
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
def _written(run: ResolvedRun, folder: Location, rows: int, sample_rows: int) -> Iterator[Sample]:
    """Write all rows, or a sample; see `written_sample`."""
    config = run.config
    if rows <= sample_rows or is_readable_in_place(run.df, run.columns.roles, config.data):
        began = time.monotonic()
        with prepare_data(run, folder) as data:
            yield Sample(data.train, 0.0 if data.reused else time.monotonic() - began)
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
) -> Iterator[Sample]:
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
        seconds = extrapolate_writing(rows, looked, first, again, took, few=few, known=data.rows)
        yield Sample(data, seconds)


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


def extrapolate_writing(
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
