"""Scoring of Parquet files into Parquet files, without their rows passing through the JVM.

The driver reads the footers and checks everything that can be checked. Spark's tasks score the
files into a temporary folder of the destination, and the driver commits the files of one attempt
per task: it moves them into place and writes ``_SUCCESS``. A lease keeps other calls out meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..cluster.spark.jobs import TaggedJob
from ..cluster.spark.session import classic_context, is_case_sensitive
from ..cluster.spark.tasks import raise_task_error
from ..config.prediction import PredictionSettings, added_columns
from ..config.validators import check_choice
from ..data.prepare.parquet import parquet_files
from ..errors import (
    DataError,
    InvalidInputError,
    RunCancelledError,
    RunFailedError,
)
from ..formatting import quote_all
from ..storage.filesystem import Location
from ..storage.lease import Lease, Terms
from .features import check_feature
from .inference import Predictor, spark_type
from .outputs import check_added
from .predict_files_task import (
    FileTask,
    Leaf,
    Unit,
    check_stored_types,
    open_source,
    parquet_file,
    scored_schema,
    stored_leaves,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODES = ("error", "overwrite")
# Bytes in memory of what is scored into one file: at least and at most.
_UNIT_BYTES = (1024 * 1024, 128 * 1024 * 1024)
# Tasks per slot, so that none is long alone at the end; slots where Spark does not tell.
_TASKS_PER_SLOT = 3
_SLOTS = 16
# The names of one kind of storage.
_S3 = re.compile("^s3[an]://")
# Threads that wait for storage on the driver.
_THREADS = 16
_TEMPORARY = "_temporary-"
_OF_A_CALL = re.compile(rf"{_TEMPORARY}[0-9a-f]{{32}}")
_LEASE = "_lease.json"
# The local file that is locked while the lease changes hands. It stays.
_GUARD = "._lease"
_SUCCESS = "_SUCCESS"


@dataclass(frozen=True)
class FilesRequest:
    """Source and destination of a call of `predict_files`.

    Attributes:
        source: a folder of Parquet files, or one of them.
        destination: the folder to write.
        columns: the columns to keep; ``None`` for all.
        mode: ``"error"`` or ``"overwrite"``, for a destination that is not empty.
        settings: settings of predictions.

    Raises:
        InvalidInputError: an argument is invalid.
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
    """Return one name, with a slash at its end, for a place that may have several."""
    text = os.path.realpath(str(place)) if place.is_local else _S3.sub("s3://", str(place))
    return text.rstrip("/") + "/"


def _check_plain(settings: PredictionSettings) -> None:
    """Refuse settings of columns that only Spark makes of the outputs."""
    unsupported = [
        f"{name}={value!r}"
        for name in ("probability_col", "raw_prediction_col")
        if (value := getattr(settings, name)) is not None
    ]
    if settings.output_form != "array":
        unsupported.append(f"output_form={settings.output_form!r}")
    if unsupported:
        raise InvalidInputError(
            "predict_files writes the outputs as numbers and arrays, not as "
            f"{' and '.join(unsupported)} asks for; leave it out, or read the files with Spark and "
            "use transform"
        )


@dataclass(frozen=True)
class _FilesPlan:
    """Work of a call, all of it checked.

    Attributes:
        task: body of the tasks.
        units: parts of files to score, each into a file of its own.
        tasks: number of tasks.
    """

    task: FileTask
    units: tuple[Unit, ...]
    tasks: int


def predict_files(spark: SparkSession, request: FilesRequest, predictor: Predictor) -> int:
    """Score Parquet files into others.

    Args:
        spark: session to run in.
        request: source and destination.
        predictor: the model.

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
    plan = _plan_files(request, predictor, _slots(spark), by_case=is_case_sensitive(spark))
    with _committing(request.destination, request.mode) as commit:
        scored = _run_plan(spark, plan, commit.staging, request.destination)
        commit.files.update({plan.units[number].target: name for number, name, _ in scored})
    return sum(rows for _, _, rows in scored)


def _run_plan(
    spark: SparkSession, plan: _FilesPlan, staging: Location, destination: Location
) -> list[tuple[int, str, int]]:
    """Run a plan's job; return the number of each unit, its file in ``staging``, and its rows.

    Raises:
        DataError, ModelError, RunFailedError, RunCancelledError: see `predict_files`.
    """

    def collect() -> list[Any]:
        numbers = spark.range(0, len(plan.units), 1, plan.tasks)
        return list(
            numbers.mapInArrow(plan.task.over(plan.units, staging), "text string").collect()
        )

    tag = f"horovod-files-{uuid.uuid4().hex[:12]}"
    job = TaggedJob(spark, tag, f"Horovod: predicting files into {destination}", collect)
    try:
        scored = [tuple(json.loads(row.text)) for row in job.run() or []]
    except Exception as error:
        if job.cancelled_elsewhere:
            raise RunCancelledError(
                f"the Spark job that writes {destination} was cancelled; the destination is as it "
                "was"
            ) from error
        raise_task_error(error)
        raise
    if sorted(number for number, *_ in scored) != list(range(len(plan.units))):
        raise RunFailedError(
            f"the Spark job that writes {destination} ended without telling of all files, as where "
            "its session was stopped meanwhile; the destination is as it was"
        )
    return scored


def _plan_files(
    request: FilesRequest, predictor: Predictor, slots: int, *, by_case: bool
) -> _FilesPlan:
    """Read the footers of all files, check them and divide the work.

    Args:
        request: source and destination.
        predictor: the model.
        slots: tasks that run at once, about.
        by_case: whether Spark tells upper from lower case.

    Raises:
        DataError, InvalidInputError, ModelError: see `predict_files`.
    """
    _check_destination(request.destination, request.mode)
    listing = parquet_files(request.source)
    listing.check_all_count("read them with Spark, and use transform")
    if not listing.files:
        there = "holds no Parquet files" if request.source.exists() else "does not exist"
        raise DataError(f"the source {request.source} {there}")
    with ThreadPoolExecutor(_THREADS, "hsr-footers") as pool:
        names = [file.name for file in listing.files]
        files = list(pool.map(lambda name: _read_source_file(listing.folder, name), names))
    first = files[0]
    for file in files:
        if (file.schema, file.leaves) != (first.schema, first.leaves):
            raise DataError(
                f"{file.place} has other columns than {first.place}, or has them in another order "
                "or in other types: put files of one schema into a folder each, or read them with "
                "Spark and use transform"
            )
    task = _make_task(
        request, predictor, listing.folder, files, listing.partitions or (), by_case=by_case
    )
    size = sum(sum(file.sizes) for file in files)
    low, high = _UNIT_BYTES
    tasks = max(slots * _TASKS_PER_SLOT, size // high)
    units = _split_files(files, min(max(size // tasks, low), high))
    return _FilesPlan(task, tuple(units), min(tasks, len(units)))


@dataclass(frozen=True)
class _SourceFile:
    """Footer of a file of the source.

    Attributes:
        name: the file, below the source.
        place: the file.
        schema: its columns.
        leaves: the storage of their leaves.
        metadata: the footer.
        checksum: checksum of the footer.
    """

    name: str
    place: Location
    schema: pa.Schema
    leaves: list[Leaf]
    metadata: pq.FileMetaData
    checksum: str

    @property
    def sizes(self) -> list[int]:
        """Bytes in memory of each row group."""
        groups = range(self.metadata.num_row_groups)
        return [self.metadata.row_group(number).total_byte_size for number in groups]


def _read_source_file(folder: Location, name: str) -> _SourceFile:
    place = folder.join(name)
    with open_source(place) as stream:
        file, checksum = parquet_file(stream, place)
        schema, leaves = file.schema_arrow, stored_leaves(file)
        return _SourceFile(name, place, schema, leaves, file.metadata, checksum)


def _make_task(
    request: FilesRequest,
    predictor: Predictor,
    folder: Location,
    files: Sequence[_SourceFile],
    partitions: Sequence[str],
    *,
    by_case: bool,
) -> FileTask:
    """Return the body of the tasks.

    Raises:
        DataError: a column is none that can be scored and written again.
    """
    place, schema = str(files[0].place), files[0].schema
    copied = _copied_columns(schema, request.columns, partitions, place)
    for name, column in zip(predictor.names, predictor.columns, strict=True):
        if name not in schema.names and name in partitions:
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
    outputs = [output.name for output in predictor.outputs]
    names = added_columns(outputs, request.settings.prediction_col)
    check_added(names, [*copied, *partitions], request.settings, by_case=by_case, outputs=outputs)
    types = [spark_type(output) for output in predictor.outputs]
    scored = scored_schema(schema, copied, dict(zip(names, types, strict=True)))
    leaves = [leaf for leaf in files[0].leaves if leaf[0] in copied]
    check_stored_types(leaves, scored, place)
    sample = next((file for file in files if file.metadata.num_row_groups), None)
    options = {} if sample is None else _writer_options(sample, copied)
    return FileTask(folder, predictor, copied, scored, options)


def _copied_columns(
    schema: pa.Schema, columns: Sequence[str] | None, folders: Sequence[str], place: str
) -> tuple[str, ...]:
    """Return the columns of a file to copy, in the file's order.

    Args:
        schema: schema of the file.
        columns: the columns to keep; ``None`` for all.
        folders: columns in the names of folders, which stay in any case.
        place: the file, for messages.

    Raises:
        DataError: a column is missing, or several have one name.
    """
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise DataError(f"{place} has several columns named {quote_all(twice)}")
    if columns is None:
        return tuple(schema.names)
    missing = [name for name in columns if name not in schema.names and name not in folders]
    if missing:
        raise DataError(
            f"{place} has no column {quote_all(missing)}, which columns names; it has "
            + quote_all([*schema.names, *folders])
        )
    return tuple(name for name in schema.names if name in columns)


def _writer_options(file: _SourceFile, copied: Sequence[str]) -> dict[str, object]:
    """Return options to write as the file is written.

    Its compression, and its dictionaries, but for numbers with a fraction, which hardly ever
    repeat.
    """
    group = file.metadata.row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    compression = chunks[0].compression.lower()
    return {
        "compression": "none" if compression == "uncompressed" else compression,
        "use_dictionary": [
            chunk.path_in_schema
            for (name, _), chunk in zip(file.leaves, chunks, strict=True)
            if name in copied
            and chunk.has_dictionary_page
            and chunk.physical_type not in ("FLOAT", "DOUBLE")
        ],
    }


def _split_files(files: Sequence[_SourceFile], limit: int) -> list[Unit]:
    """Return the units of files, in the order of their rows. Pure.

    Args:
        files: the files.
        limit: bytes in memory of a unit of several row groups.

    Raises:
        DataError: two units would be written to files of one name.
    """
    units = []
    for file in files:
        parts: list[list[int]] = [[]]
        filled = 0
        for number, size in enumerate(file.sizes):
            if parts[-1] and filled + size > limit:
                parts.append([])
                filled = 0
            parts[-1].append(number)
            filled += size
        stem, ending = posixpath.splitext(file.name)
        for index, part in enumerate(parts):
            target = file.name if len(parts) == 1 else f"{stem}-{index:05d}{ending}"
            units.append(Unit(file.name, tuple(part), target, file.checksum))
    counts = Counter(unit.target for unit in units)
    twice = sorted(target for target, count in counts.items() if count > 1)
    if twice:
        raise DataError(
            f"the parts of a large file would be called {quote_all(twice)}, as another file of the "
            "source is; rename that file"
        )
    return units


def _slots(spark: SparkSession) -> int:
    context = classic_context(spark)
    return _SLOTS if context is None else int(context.defaultParallelism)


@dataclass
class _Commit:
    """Files to be committed.

    Attributes:
        staging: the folder that tasks write into.
        files: for each file of the destination, its name in ``staging``.
    """

    staging: Location
    files: dict[str, str] = field(default_factory=dict)


def _check_destination(destination: Location, mode: str) -> None:
    """Check that a folder may be written.

    Args:
        destination: the folder.
        mode: ``"error"`` refuses a folder that is not empty.

    Raises:
        InvalidInputError: it is a file, not empty, or cannot be read.
    """
    with _failures_named(destination):
        if destination.stat() is not None:
            raise InvalidInputError(f"the destination {destination} is a file; name a folder")
        if mode != "error" or not _contents(destination):
            return
        partial = "" if destination.join(_SUCCESS).exists() else " and has no _SUCCESS"
        raise InvalidInputError(
            f"the destination {destination} is not empty{partial}; name another folder, or "
            "mode='overwrite' to replace its files"
        )


@contextlib.contextmanager
def _committing(destination: Location, mode: str) -> Iterator[_Commit]:
    """Lease a destination, yield a folder to fill, and move its files into place at the end.

    Args:
        destination: the folder to write.
        mode: ``"error"`` refuses a folder that is not empty, ``"overwrite"`` replaces its files.

    Raises:
        InvalidInputError: the destination cannot be written, another call is writing it, or it is
            not to be overwritten.
    """
    terms = Terms(
        resource=f"the destination {destination}",
        holder="call of predict_files",
        instead="name another folder",
        refused=InvalidInputError,
        failed=InvalidInputError,
    )
    with _failures_named(destination):
        destination.make_folder()
    with Lease(destination.join(_LEASE), destination.join(_GUARD), terms) as lease:
        # Another call may have ended since the plan was made.
        _check_destination(destination, mode)
        commit = _Commit(destination.join(_TEMPORARY + lease.token))
        with _failures_named(destination):
            for place in destination.list():
                if _OF_A_CALL.fullmatch(place.name):  # of a call that was killed
                    place.delete_folder()
            commit.staging.make_folder()
        try:
            yield commit
            _check_destination(destination, mode)
            with _failures_named(destination):
                lease.check()
                if mode == "overwrite":
                    _delete_contents(destination)
                _move_into_place(destination, commit)
                lease.check()
                destination.join(_SUCCESS).write_bytes(b"")
        finally:
            with contextlib.suppress(OSError):
                commit.staging.delete_folder()


@contextlib.contextmanager
def _failures_named(destination: Location) -> Iterator[None]:
    """Name the destination where storage fails."""
    try:
        yield
    except OSError as error:
        message = f"the destination {destination} cannot be written: {error}"
        raise InvalidInputError(message) from error


def _contents(destination: Location) -> list[Location]:
    """Return the files and folders in a destination, without those of calls in progress."""
    return [
        place
        for place in destination.list()
        if not place.name.startswith((_LEASE, _GUARD)) and not _OF_A_CALL.fullmatch(place.name)
    ]


def _delete_contents(destination: Location) -> None:
    # A destination with a part of the files must have no _SUCCESS.
    for place in sorted(_contents(destination), key=lambda place: place.name != _SUCCESS):
        if place.is_folder:
            place.delete_folder()
        else:
            place.delete_file()


def _move_into_place(destination: Location, commit: _Commit) -> None:
    if destination.has_atomic_rename:  # object stores have no folders
        for name in sorted({target.rpartition("/")[0] for target in commit.files} - {""}):
            destination.join(name).make_folder()

    def move(target: str) -> None:
        commit.staging.join(commit.files[target]).move_to(destination.join(target))

    with ThreadPoolExecutor(_THREADS, "hsr-commit") as pool:
        list(pool.map(move, commit.files))
