"""Parquet files scored into other Parquet files, without their rows passing through the JVM.

Every attempt of a task writes files of its own into a hidden folder. Spark tells of one attempt per
task, also if tasks were repeated or speculated on: the driver makes the destination of its files,
see `horovod_spark_runner.ml.file_commit`.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import threading
import uuid
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import unquote

import pyarrow.parquet as pq
from tqdm import tqdm

from ..data.prepare.footers import parquet_files
from ..data.prepare.schema import quote_all
from ..errors import DataError, InvalidInputError, RunCancelledError, RunFailedError
from ..settings.kinds import check_choice
from ..settings.prediction import PredictionSettings
from ..spark.session import classic_context, is_case_sensitive
from ..spark.tagged_job import TaggedJob
from ..storage.filesystem import FileStat, Location
from .arrow_features import check_feature
from .file_commit import THREADS, Commit, check_destination, committing
from .file_schema import ScoredColumn, check_stored_alike, kept_columns
from .file_task import FileTask, Unit, opened, parquet_file, writing
from .inference import Predictor, spark_type
from .naming import added_columns, check_added

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODES = ("error", "overwrite")
# Of what one task scores, bytes in memory.
_UNIT_BYTES = (1024 * 1024, 128 * 1024 * 1024)
# Tasks per slot, so that none is long alone at the end; slots where Spark does not tell.
_TASKS_PER_SLOT = 3
_SLOTS = 16
# The names of one kind of storage.
_S3 = re.compile("^s3[an]://")
# What a task has done, among what it writes aside meanwhile.
_DONE = re.compile("([0-9]+)-")
# What opening, writing and moving a file costs, in bytes that are scored meanwhile.
_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class FilesRequest:
    """What is to be scored, and where it goes.

    Attributes:
        source: a folder of Parquet files, or one of them.
        destination: the folder to write.
        columns: the columns to keep; ``None`` for all.
        mode: what becomes of files that are in the destination.
        settings: how it is to be predicted.

    Raises:
        InvalidInputError: that cannot be done.
    """

    source: Location
    destination: Location
    columns: Sequence[str] | None
    mode: str
    settings: PredictionSettings

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        names = self.columns
        if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
            raise InvalidInputError(f"columns must be a list of columns' names, got {names!r}")
        _check_plain(self.settings)
        source, target = _real_place(self.source), _real_place(self.destination)
        if source.startswith(target) or target.startswith(source):
            raise InvalidInputError(
                f"the destination {self.destination} and the source {self.source} must not be one "
                "in the other"
            )


def _real_place(place: Location) -> str:
    """Return one name, with a slash at its end, for what may be called by several."""
    text = os.path.realpath(str(place)) if place.is_local else _S3.sub("s3://", str(place))
    return text.rstrip("/") + "/"


def _check_plain(settings: PredictionSettings) -> None:
    """Check that nothing is to be made of the outputs, which only Spark does."""
    asked = [
        f"{name}={given!r}"
        for name in ("probability_col", "raw_prediction_col")
        if (given := getattr(settings, name)) is not None
    ]
    if settings.output_form != "array":
        asked.append(f"output_form={settings.output_form!r}")
    if asked:
        raise InvalidInputError(
            f"predict_files writes the outputs as numbers and arrays, not as {' and '.join(asked)} "
            "asks for; leave it out, or read the files with Spark and use transform"
        )


def predict_files(
    spark: SparkSession, request: FilesRequest, predictor: Predictor, stream: TextIO
) -> int:
    """Score Parquet files into others.

    Args:
        spark: session to run in.
        request: what is asked for.
        predictor: predicts.
        stream: where the progress bar appears, if it is a terminal.

    Returns:
        Rows in the destination.

    Raises:
        DataError: there are no files, columns do not fit, or a file has changed meanwhile.
        InvalidInputError: the destination cannot be written, is being written by another call, or
            is not empty and not to be overwritten.
        ModelError: Spark has no type for an output.
        RunFailedError: the job ended before all was written.
        RunCancelledError: the job was cancelled through Spark.
    """
    plan = plan_files(request, predictor, _slots(spark), by_case=is_case_sensitive(spark))
    with plan.committing() as commit, _showing(plan, commit, stream):
        commit.told += _told(spark, plan, commit)
    return sum(rows for _, _, rows in commit.told)


def _told(spark: SparkSession, plan: FilesPlan, commit: Commit) -> list[tuple[int, str, int]]:
    """Return what the tasks tell of their files."""

    def collect() -> list[Any]:
        count = len(plan.shares)
        numbers = spark.range(0, count, 1, count)
        body = plan.task.over(plan.units, plan.shares, commit.staging)
        return list(numbers.mapInArrow(body, "text string").collect())

    target = plan.request.destination
    tag = f"horovod-files-{uuid.uuid4().hex[:12]}"
    job = TaggedJob(spark, tag, f"Horovod: predicting files into {target}", collect)
    try:
        rows = job.run() or []
    except Exception as error:
        if job.cancelled_elsewhere:
            raise RunCancelledError(
                f"the Spark job that writes {target} was cancelled; the destination is as it was"
            ) from error
        failure = commit.failure()
        if failure is not None:
            raise DataError(failure) from error
        raise
    told = [(number, name, count) for number, name, count in (json.loads(row.text) for row in rows)]
    if sorted(number for number, _, _ in told) != list(range(len(plan.units))):
        raise RunFailedError(
            f"the Spark job that writes {target} ended without telling of all files, as where its "
            "session was stopped meanwhile; the destination is as it was"
        )
    return told


@dataclass(frozen=True)
class FilesPlan:
    """What is to be done, all of it checked.

    Attributes:
        request: what was asked for.
        task: the body of the tasks.
        units: what is scored into a file each.
        shares: the numbers of the units that one task scores, for each task.
    """

    request: FilesRequest
    task: FileTask
    units: tuple[Unit, ...]
    shares: tuple[range, ...]

    def committing(self) -> AbstractContextManager[Commit]:
        """Make room for what tasks write; at the end put what they told of in its places."""
        targets = [unit.target for unit in self.units]
        return committing(self.request.destination, self.request.mode, targets)


def plan_files(
    request: FilesRequest, predictor: Predictor, slots: int, *, by_case: bool
) -> FilesPlan:
    """Return what is to be done, after a look at the footers of all files.

    Args:
        request: what is asked for.
        predictor: predicts.
        slots: tasks that run at once, about.
        by_case: whether Spark tells upper from lower case.

    Raises:
        DataError, InvalidInputError, ModelError: see `predict_files`.
    """
    check_destination(request.destination, request.mode)
    files = parquet_files(request.source)
    files.check_all_count("read them with Spark, and use transform")
    folder, found = files.folder, files.files
    if not found:
        there = "holds no Parquet files" if request.source.exists() else "does not exist"
        raise DataError(f"the source {request.source} {there}")
    outputs = [output.name for output in predictor.outputs]
    names = added_columns(outputs, request.settings.prediction_col)
    types = [spark_type(output) for output in predictor.outputs]
    added = tuple(ScoredColumn(*pair) for pair in zip(names, types, strict=True))
    keep = None if request.columns is None else tuple(request.columns)
    task = FileTask(folder, predictor, keep, added)
    with ThreadPoolExecutor(THREADS, "hsr-footers") as pool:
        footers = list(
            pool.map(lambda stat: _checked(stat, task, request.settings, by_case), found)
        )
    low, high = _UNIT_BYTES
    whole = sum(sum(_sizes(footer)) + _FILE_BYTES for footer, _ in footers)
    limit = min(max(whole // (slots * _TASKS_PER_SLOT), low), high)
    units, costs = _units(found, footers, limit)
    return FilesPlan(request, task, tuple(units), tuple(_shares(costs, limit)))


def _checked(
    stat: FileStat, task: FileTask, settings: PredictionSettings, by_case: bool
) -> tuple[pq.FileMetaData, str]:
    """Return a file's footer and its checksum.

    Raises:
        DataError: a column is none that can be scored and written again.
    """
    place = task.source.join(stat.name)
    folders = [name for name, _ in _partition(stat.name)]
    with opened(place) as stream:
        file, footer = parquet_file(stream, place)
        schema = file.schema_arrow
        kept = kept_columns(schema, task.keep, folders, str(place))
        for name, column in zip(task.predictor.names, task.predictor.columns, strict=True):
            if name not in schema.names and name in folders:
                raise DataError(
                    f"the model takes the column {name!r}, which {place} does not hold: it is in "
                    "the names of folders, which predict_files only keeps; read the files with "
                    "Spark and use transform"
                )
            if name not in schema.names:
                raise DataError(
                    f"{place} has no column {name!r}, which the model takes; it has "
                    + quote_all(schema.names)
                )
            check_feature(schema.field(name), column)
        names = [added.name for added in task.added]
        outputs = [output.name for output in task.predictor.outputs]
        check_added(names, [*kept, *folders], settings, by_case=by_case, outputs=outputs)
        written, options = writing(file, kept, task.added)
        check_stored_alike(file, written, kept, options, str(place))
        return file.metadata, footer


def _partition(name: str) -> Iterator[tuple[str, str]]:
    """Yield the columns that the names of a file's folders hold, as ``key=value``."""
    for part in name.split("/")[:-1]:
        key, equals, value = part.partition("=")
        if equals:
            yield unquote(key), unquote(value)


def _units(
    found: Sequence[FileStat], footers: Sequence[tuple[pq.FileMetaData, str]], limit: int
) -> tuple[list[Unit], list[int]]:
    """Return what is scored into a file each, in the order of the files, and its cost. Pure.

    Args:
        found: the files.
        footers: theirs, and the checksums of these.
        limit: of bytes in memory, for a unit of several row groups.
    """
    units, costs = [], []
    taken = {stat.name for stat in found}
    for stat, (footer, checksum) in zip(found, footers, strict=True):
        groups = _sizes(footer)
        parts: list[list[int]] = [[]]
        sizes = [0]
        for number, size in enumerate(groups):
            if parts[-1] and sizes[-1] + size > limit:
                parts.append([])
                sizes.append(0)
            parts[-1].append(number)
            sizes[-1] += size
        targets = _targets(stat.name, len(parts), taken)
        taken.update(targets)
        for part, size, target in zip(parts, sizes, targets, strict=True):
            rows = sum(footer.row_group(i).num_rows for i in part)
            units.append(Unit(stat.name, tuple(part), rows, target, checksum))
            costs.append(size + _FILE_BYTES)
    return units, costs


def _sizes(footer: pq.FileMetaData) -> list[int]:
    return [footer.row_group(i).total_byte_size for i in range(footer.num_row_groups)]


def _shares(costs: Sequence[int], limit: int) -> Iterator[range]:
    """Yield the numbers of the units that a task scores, one after the other. Pure."""
    begin, cost = 0, 0
    for number, own in enumerate(costs):
        if number > begin and cost + own > limit:
            yield range(begin, number)
            begin, cost = number, 0
        cost += own
    yield range(begin, len(costs))


def _targets(name: str, parts: int, taken: Container[str]) -> list[str]:
    """Return the files that the parts of the file ``name`` are written to. Pure.

    Args:
        name: the file.
        parts: how many there are.
        taken: what is, or will be, written for other files.
    """
    if parts == 1:
        return [name]
    stem, ending = posixpath.splitext(name)
    while True:
        found = [f"{stem}-{number:05d}{ending}" for number in range(parts)]
        if not any(target in taken for target in found):
            return found
        stem += "-part"


def _slots(spark: SparkSession) -> int:
    context = classic_context(spark)
    return _SLOTS if context is None else int(context.defaultParallelism)


@contextmanager
def _showing(plan: FilesPlan, commit: Commit, stream: TextIO) -> Iterator[None]:
    """Show a bar of the rows in files that are done, on a terminal."""
    if not stream.isatty():
        yield
        return
    ended = threading.Event()
    total = sum(unit.rows for unit in plan.units)
    with tqdm(total=total, unit="row", unit_scale=True, file=stream, leave=False) as bar:

        def look() -> None:
            while not ended.wait(1.0):
                with suppress(OSError):  # the next look may find what the storage does not give now
                    found = map(_DONE.match, (place.name for place in commit.staging.list()))
                    done = {int(name[1]) for name in found if name is not None}
                    bar.update(sum(plan.units[number].rows for number in done) - bar.n)

        watcher = threading.Thread(target=look, name="hsr-progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
