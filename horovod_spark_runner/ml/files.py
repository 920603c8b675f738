"""Parquet files scored into other Parquet files, without their rows passing through the JVM.

Every attempt of a task writes a file of its own into a hidden folder in the destination. Spark
tells of one attempt per task, also if tasks were repeated or speculated on: the driver moves those
files to their places, and writes ``_SUCCESS`` last.
"""

from __future__ import annotations

import json
import posixpath
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from ..data.prepare.footers import parquet_files
from ..data.prepare.schema import quote_all
from ..errors import DataError, InvalidInputError
from ..settings.kinds import check_choice
from ..settings.prediction import PredictionSettings
from ..spark.session import classic_context, is_case_sensitive
from ..storage.filesystem import FileStat, Location
from .arrow_features import check_feature
from .file_schema import ScoredColumn, check_stored_alike, kept_columns
from .file_task import FileTask, Unit, writing
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
# Threads that wait for storage on the driver.
_THREADS = 16
_STAGING = "_staging-"
_SUCCESS = "_SUCCESS"


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
        source, target = (str(p).rstrip("/") + "/" for p in (self.source, self.destination))
        if source.startswith(target) or target.startswith(source):
            raise InvalidInputError(
                f"the destination {self.destination} and the source {self.source} must not be one "
                "in the other"
            )


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
        DataError: there are no files, or columns that do not fit.
        InvalidInputError: the destination is not empty, and is not to be overwritten.
        ModelError: Spark has no type for an output.
    """
    plan = plan_files(request, predictor, _slots(spark), by_case=is_case_sensitive(spark))
    with plan.committing() as told, _showing(plan, stream):
        # A partition for each unit, which has its number.
        numbers = spark.range(0, len(plan.units), 1, len(plan.units))
        rows = numbers.mapInArrow(plan.task.over(plan.units), "text string").collect()
        told += [json.loads(row.text) for row in rows]
    return sum(rows for _, _, rows in told)


@dataclass(frozen=True)
class FilesPlan:
    """What is to be done, all of it checked.

    Attributes:
        request: what was asked for.
        task: the body of the tasks.
        units: what each of them scores.
    """

    request: FilesRequest
    task: FileTask
    units: tuple[Unit, ...]

    @contextmanager
    def committing(self) -> Iterator[list[tuple[int, str, int]]]:
        """Make room for what tasks write; at the end put what they told of in its places.

        They have told of the number of each unit, the name of its file and the rows in it.
        """
        self.task.staging.make_folder()
        try:
            told: list[tuple[int, str, int]] = []
            yield told
            written = {number: name for number, name, _ in told}
            _commit(self.request, self.task.staging, written, self.units)
        finally:
            self.task.staging.delete_folder()


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
    if request.mode == "error" and _placed_in(request.destination):
        raise InvalidInputError(
            f"the destination {request.destination} is not empty; name another folder, or "
            "mode='overwrite' to replace what is there"
        )
    folder, found = parquet_files(request.source)
    if not found:
        raise DataError(f"{request.source} holds no Parquet files")
    outputs = [output.name for output in predictor.outputs]
    names = added_columns(outputs, request.settings.prediction_col)
    types = [spark_type(output) for output in predictor.outputs]
    added = tuple(ScoredColumn(*pair) for pair in zip(names, types, strict=True))
    keep = None if request.columns is None else tuple(request.columns)
    staging = request.destination.join(_STAGING + uuid.uuid4().hex[:12])
    task = FileTask(folder, staging, predictor, keep, added)
    with ThreadPoolExecutor(_THREADS, "hsr-footers") as pool:
        footers = list(pool.map(lambda stat: _checked(stat, task, by_case), found))
    return FilesPlan(request, task, tuple(_units(found, footers, slots)))


def _checked(stat: FileStat, task: FileTask, by_case: bool) -> pq.FileMetaData:
    """Return a file's footer, all columns being such as can be scored and written again."""
    place = task.source.join(stat.name)
    folders = [name for name, _ in _partition(stat.name)]
    with place.open_input() as stream:
        try:
            file = pq.ParquetFile(stream, coerce_int96_timestamp_unit="us")
        except pa.ArrowInvalid as error:
            message = f"{place} is no Parquet file, or a damaged one: {error}"
            raise DataError(message) from error
        schema = file.schema_arrow
        kept = kept_columns(schema, task.keep, folders, str(place))
        for name, column in zip(task.predictor.names, task.predictor.columns, strict=True):
            if name not in schema.names:
                raise DataError(
                    f"{place} has no column {name!r}, which the model takes; it has "
                    + quote_all(schema.names)
                )
            check_feature(schema.field(name), column)
        names = [added.name for added in task.added]
        outputs = [output.name for output in task.predictor.outputs]
        check_added(names, outputs, [*kept, *folders], by_case=by_case)
        written, options = writing(file, kept, task.added)
        check_stored_alike(file, written, kept, options, str(place))
        return file.metadata


def _partition(name: str) -> Iterator[tuple[str, str]]:
    """Yield the columns that the names of a file's folders hold, as ``key=value``."""
    for part in name.split("/")[:-1]:
        key, equals, value = part.partition("=")
        if equals:
            yield unquote(key), unquote(value)


def _units(found: Sequence[FileStat], footers: Sequence[pq.FileMetaData], slots: int) -> list[Unit]:
    """Return the parts that are scored by a task each, in the order of the files. Pure."""
    sizes = [
        [footer.row_group(i).total_byte_size for i in range(footer.num_row_groups)]
        for footer in footers
    ]
    low, high = _UNIT_BYTES
    limit = min(max(sum(map(sum, sizes)) // (slots * _TASKS_PER_SLOT), low), high)
    units = []
    for stat, footer, groups in zip(found, footers, sizes, strict=True):
        parts: list[list[int]] = [[]]
        for number, size in enumerate(groups):
            if parts[-1] and sum(groups[i] for i in parts[-1]) + size > limit:
                parts.append([])
            parts[-1].append(number)
        for number, part in enumerate(parts):
            rows = sum(footer.row_group(i).num_rows for i in part)
            units.append(Unit(stat.name, tuple(part), rows, _target(stat.name, number, len(parts))))
    return units


def _target(name: str, number: int, parts: int) -> str:
    """Return the file that a part of the file ``name`` is written to. Pure."""
    if parts == 1:
        return name
    stem, ending = posixpath.splitext(name)
    return f"{stem}-{number:05d}{ending}"


def _slots(spark: SparkSession) -> int:
    context = classic_context(spark)
    return _SLOTS if context is None else int(context.defaultParallelism)


def _placed_in(place: Location) -> list[Location]:
    """Return what lies in a folder, without what other calls are at, or were when killed."""
    return [found for found in place.list() if not found.name.startswith(_STAGING)]


def _commit(
    request: FilesRequest, staging: Location, written: dict[int, str], units: Sequence[Unit]
) -> None:
    """Put what was written in its places, in place of what was there before."""
    target = request.destination
    # What says that all is there goes first, and comes last.
    for place in sorted(_placed_in(target), key=lambda place: place.name != _SUCCESS):
        if place.is_folder:
            place.delete_folder()
        else:
            place.delete_file()
    if target.renames_whole:  # object stores have no folders
        for folder in sorted({unit.target.rpartition("/")[0] for unit in units} - {""}):
            target.join(folder).make_folder()

    def move(number: int) -> None:
        staging.join(written[number]).move_to(target.join(units[number].target))

    with ThreadPoolExecutor(_THREADS, "hsr-commit") as pool:
        list(pool.map(move, range(len(units))))
    target.join(_SUCCESS).write_bytes(b"")


@contextmanager
def _showing(plan: FilesPlan, stream: TextIO) -> Iterator[None]:
    """Show a bar of the rows in files that are done, on a terminal."""
    if not stream.isatty():
        yield
        return
    ended = threading.Event()
    total = sum(unit.rows for unit in plan.units)
    with tqdm(total=total, unit="row", unit_scale=True, file=stream, leave=False) as bar:

        def look() -> None:
            while not ended.wait(1.0):
                names = (place.name for place in plan.task.staging.list())
                done = {int(name.partition("-")[0]) for name in names if name[0] != "_"}
                bar.update(sum(plan.units[number].rows for number in done) - bar.n)

        watcher = threading.Thread(target=look, name="hsr-progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
