"""The rows a plan is measured on, and how long writing all of them would take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..data.manifest import Manifest
from ..data.prepare.datasets import frame_of, lies_ready
from ..data.prepare.schema import quoted
from ..errors import DataError
from ..run.pipeline import prepare_data
from ..run.request import CheckedRequest
from ..spark.session import described
from ..storage.filesystem import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Written:
    """Rows to measure with.

    Attributes:
        data: all rows, or a sample.
        seconds: in which a training would write all; 0 where it finds them.
    """

    data: Manifest
    seconds: float


@contextlib.contextmanager
def written_rows(
    checked: CheckedRequest, folder: Location, rows: int, sample_rows: int
) -> Iterator[Written]:
    """Yield rows to measure with, until they are not needed any more.

    Args:
        checked: the training, on all rows.
        folder: where rows go if there is no cache directory; unless it was there before, it is
            deleted where measuring fails or nothing is kept in it.
        rows: how many there are.
        sample_rows: of more rows that have to be written, about so many are.

    Raises:
        DataError: the values cannot be trained on, or the sample is too small.
    """
    with left_as_found(folder), _written(checked, folder, rows, sample_rows) as written:
        yield written


@contextlib.contextmanager
def left_as_found(folder: Location, *, keeping: bool = False) -> Iterator[None]:
    """Delete a folder that is new, if it is empty in the end or what is done meanwhile fails.

    A training that fails leaves its rows to the next call. A plan is not gone on with, and the
    folder may be in the run directory of the training to come.

    Args:
        folder: the folder.
        keeping: whether it stays if there is something in it then.
    """
    there = folder.exists()
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # what has failed is to be told
            if not there and not (keeping and folder.list()):
                folder.delete_folder()
        raise
    if not there and not folder.list():
        folder.delete_folder()


@contextlib.contextmanager
def _written(
    checked: CheckedRequest, folder: Location, rows: int, sample_rows: int
) -> Iterator[Written]:
    """Yield rows to measure with: all, or a sample; see `written_rows`."""
    request = checked.request
    if rows <= sample_rows or lies_ready(request.frame, checked.roles, request.data):
        began = time.monotonic()
        with prepare_data(checked, folder) as data:
            yield Written(data.train, 0.0 if data.reused else time.monotonic() - began)
        return
    columns = [quoted(name) for name in checked.roles.columns]
    sample = frame_of(request.frame).select(*columns).sample(sample_rows / rows, seed=0).persist()
    try:
        with _written_sample(checked, sample, folder, rows, sample_rows) as written:
            yield written
    finally:
        sample.unpersist()


@contextlib.contextmanager
def _written_sample(
    checked: CheckedRequest, sample: DataFrame, folder: Location, rows: int, sample_rows: int
) -> Iterator[Written]:
    began = time.monotonic()
    with described(sample.sparkSession, "Horovod: taking a sample of the rows to plan with"):
        sample.count()
    looked = time.monotonic() - began
    part = sample.sample(0.25, seed=1)
    few = part.count()
    if not few or few == sample.count():
        raise DataError(
            f"sample_rows={sample_rows} of {rows:,} rows are too few to tell how long writing all "
            "takes; give more"
        )
    # The first job pays what Spark does once in a session; the same again pays no more than others.
    with _timed(checked, part, folder) as (_, first):
        pass
    with _timed(checked, sample, folder) as (data, took):
        with _timed(checked, part, folder) as (_, again):
            pass
        seconds = seconds_of_all(rows, looked, first, again, took, few=few, known=data.rows)
        yield Written(data, seconds)


@contextlib.contextmanager
def _timed(
    checked: CheckedRequest, frame: DataFrame, folder: Location
) -> Iterator[tuple[Manifest, float]]:
    """Write a DataFrame that nobody else is to find; yield what it is and the seconds it took."""
    request = checked.request
    request = replace(request, frame=frame, data=replace(request.data, keep_data=False))
    began = time.monotonic()
    with prepare_data(replace(checked, request=request), folder) as data:
        yield data.train, time.monotonic() - began


def seconds_of_all(
    rows: int, looked: float, first: float, again: float, took: float, *, few: int, known: int
) -> float:
    """Return the seconds in which all rows are written. Pure.

    What a job takes whatever its rows is no part of what grows with them, nor is looking at all
    rows, which taking the sample has done already.

    Args:
        rows: how many there are.
        looked: seconds of looking at all, and keeping a sample.
        first: of writing a part of the sample, as the first of a session.
        again: of writing the same part once more.
        took: of writing the sample.
        few: rows of the part.
        known: rows of the sample.
    """
    per_row = max(0.0, took - again) / (known - few)
    return looked + first + per_row * (rows - few)
