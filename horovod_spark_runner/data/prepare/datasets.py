"""Prepare datasets: from the data of `run_training` to those that the ranks read."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import numpy as np

from ...cluster.spark.session import active_session, check_is_frame, classic_context, described
from ...config.data import DataOptions
from ...errors import DataError, EnvironmentProblem, RunDirectoryError
from ...storage.filesystem import Location
from ...storage.paths import redact_url
from ..manifest import Manifest
from ..store import delete_dataset, sweep_incomplete
from .checks import NO_ROWS, add_row_number, encoding_of
from .columns import DataRequest, missing_image_shape, sources_of
from .fingerprint import table_versions
from .materialize import Materialized, RowsIdentity, materialize
from .parquet import STREAM_LOG, open_parquet, parquet_files, read_metadata
from .schema import Roles, check_named, quoted
from .split import check_validation, split_rows

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

# Rows of a training: a DataFrame, or the place of Parquet files.
Rows: TypeAlias = "DataFrame | str | os.PathLike[str]"

# Spark setting of the cache directory, if `data_dir` is not set.
DATA_DIR_SETTING = "spark.horovod.dataDir"
# What Spark says of a file that a DataFrame was made of, and its name.
_CHANGED_FILES = re.compile("underlying files have been updated|FILE_NOT_EXIST|FILE_NOT_FOUND")
_NAMED_FILE = re.compile(r"\b((?:file|hdfs|s3a?|abfss?|gs):/[^\s'\"]+)")


@dataclass(frozen=True)
class Prepared:
    """Datasets that can be read.

    Attributes:
        train: the training rows.
        validation: the validation rows.
        reused: whether all existed already and nothing was written.
    """

    train: Manifest
    validation: Manifest | None
    reused: bool


def _is_place(data: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(data, (str, os.PathLike))


def session_of(data: Rows) -> SparkSession:
    """Return the session of a DataFrame; for a path, the active one.

    Raises:
        DataError: it is neither.
    """
    if isinstance(data, (str, os.PathLike)):
        return active_session()
    check_is_frame(
        data,
        "the data must be a Spark DataFrame, or the path or URL of Parquet files (a folder, or one "
        "file)",
    )
    return data.sparkSession


def frame_of(data: Rows) -> DataFrame:
    """Return ``data``, a DataFrame or the place of Parquet files, as a DataFrame.

    Raises:
        DataError: there are no such files, or they cannot be read.
    """
    if not isinstance(data, (str, os.PathLike)):
        check_is_frame(data, "the data must be a Spark DataFrame")
        return data
    from pyspark.errors import AnalysisException

    place, spark = Location(data), active_session()
    _check_spark_reaches(spark, place)
    files = parquet_files(place)
    if files.log != STREAM_LOG:  # which Spark reads
        files.check_all_count("read the table with Spark, and train on the DataFrame")
        if not files.files:
            raise DataError(f"{place} holds no Parquet files")
        # Spark's message about other files is long.
        read_metadata(files.folder.join(files.files[0].name))
    reader = spark.read
    if files.partitions is None and not files.log:
        # By default, Spark skips files in folders of such names.
        reader = reader.option("recursiveFileLookup", "true")
    try:
        return reader.parquet(place.spark_url)
    except AnalysisException as error:
        raise DataError(f"the Parquet files in {place} cannot be read: {error}") from error


def check_has_an_end(frame: DataFrame, use: str) -> None:
    """Check that a DataFrame is not a stream.

    Args:
        frame: the DataFrame.
        use: its intended use, for the message.

    Raises:
        DataError: it is a stream.
    """
    if frame.isStreaming:
        raise DataError(
            f"a streaming DataFrame cannot be {use}, as its rows have no end; use those of a "
            "batch, stream.writeStream.foreachBatch(…), or read their source with spark.read"
        )


def _check_spark_reaches(spark: SparkSession, place: Location) -> None:
    """Check that Spark's JVM has the file system of ``place``; Python has another client.

    Raises:
        EnvironmentProblem: the JVM does not have it, or cannot name files there.
    """
    context = classic_context(spark)
    if context is None:  # unknown on Spark Connect
        return
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import IllegalArgumentException

    if place.is_local:
        try:
            context._jvm.java.io.File(str(place)).toPath()
        except IllegalArgumentException as error:  # InvalidPathException is one
            raise EnvironmentProblem(
                f"Spark cannot name files in {place}: {error}. Its Java "
                "supports the characters of its locale only: set LC_ALL=C.UTF-8 before the Spark "
                "session is made, or choose a path in ASCII"
            ) from error
        return
    try:
        path = context._jvm.org.apache.hadoop.fs.Path(place.spark_url)
        path.getFileSystem(context._jsc.hadoopConfiguration())
    except Py4JJavaError as error:
        raise EnvironmentProblem(
            f"Spark cannot reach {place}: {error.java_exception.toString()}. Its Hadoop needs the "
            "module of that storage (for s3a: --packages org.apache.hadoop:hadoop-aws in the "
            "version of Spark's own hadoop-client), and its settings (fs.s3a.…)"
        ) from error


@contextlib.contextmanager
def _explain_changed_files() -> Iterator[None]:
    """Name the cause where a DataFrame's files have changed since it was made.

    Raises:
        DataError: Spark did not find a file that the DataFrame was made of.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        # Its text has the whole stack; the causes are within it.
        if not _CHANGED_FILES.search(str(error)):
            raise
        named = _NAMED_FILE.search(str(error))
        raise DataError(
            "files that the DataFrame was made of are gone or were overwritten since"
            f"{f', such as {named[1]}' if named else ''}: read the table again "
            "(spark.read…, after spark.catalog.refreshTable(name) for a table), and call this with "
            "the new DataFrame"
        ) from error


def check_data(data: object, roles: Roles, options: DataOptions, validation: object = None) -> None:
    """Check the data as far as the schema allows.

    Args:
        data: a DataFrame, or the path of Parquet files.
        roles: the columns and their roles.
        options: how to prepare them.
        validation: which rows to validate with; see `run_training`.

    Raises:
        DataError: the columns cannot be trained on.
    """
    frame = frame_of(data)
    check_has_an_end(frame, "trained on")
    if hasattr(validation, "isStreaming"):
        check_has_an_end(validation, "validated with")
    sources_of(frame, roles, options.dtypes)
    check_named("shapes", options.shapes, roles)
    check_named("transforms", options.transforms, roles)
    check_validation(frame, validation, roles, options.stratify)
    _check_image_shapes(frame, roles, options)


def _check_image_shapes(frame: DataFrame, roles: Roles, options: DataOptions) -> None:
    """Check, by the first row, that columns of encoded images have a shape."""
    names = [
        field.name
        for field in frame.schema.fields
        if field.dataType.typeName() == "binary"
        and field.name in roles.columns
        and field.name not in options.shapes
    ]
    row = frame.select(*map(quoted, names)).first() if names else None
    first = {} if row is None else row.asDict()
    for name, value in first.items():
        if value is not None and encoding_of(bytes(value)) == "image":
            raise missing_image_shape(name)


def add_faulty_row_number(
    error: DataError, data: object, roles: Roles, options: DataOptions
) -> None:
    """Add to an error of a rank the number of the row that cannot be read.

    Args:
        error: the rank's error.
        data: a DataFrame, or the path of Parquet files.
        roles: the columns and their roles.
        options: how they were prepared.
    """
    if error.row:
        # If the rows cannot be computed again, the error itself is enough.
        with contextlib.suppress(Exception):
            frame = frame_of(data)
            add_row_number(error, frame, sources_of(frame, roles, options.dtypes))


def data_folder(options: DataOptions, run_folder: Location, spark: SparkSession) -> Location:
    """Return the folder of the data: ``data_dir``, Spark's setting, or in the run directory."""
    directory = options.data_dir or spark.conf.get(DATA_DIR_SETTING, None)
    folder = Location(directory) if directory else run_folder
    _check_spark_reaches(spark, folder)
    return folder


@contextlib.contextmanager
def prepare_datasets(
    data: object,
    roles: Roles,
    options: DataOptions,
    validation: object,
    run_folder: Location,
    seed: int,
    say: Callable[[str], object] = logger.debug,
) -> Iterator[Prepared]:
    """Yield the datasets, written now or reused; delete those that are not kept afterwards.

    In a cache directory, data stay for other runs until they are cleared, unless ``keep_data`` is
    false. In the run directory they stay until the run has succeeded, so that a failed one resumes
    without writing them again.

    Args:
        data: a DataFrame, or the path of Parquet files.
        roles: the columns and their roles.
        options: how to prepare them.
        validation: which rows to validate with; see `run_training`.
        run_folder: the run's own folder for data.
        seed: seed of the split.
        say: prints a line for the user.

    Raises:
        DataError: the values cannot be trained on.
    """
    with track_datasets(data, roles, options, run_folder) as tracked:
        place = redact_url(str(tracked.folder))
        with described(session_of(data), f"Horovod: writing rows to train on to {place}"):
            datasets = _prepare(data, roles, options, validation, tracked, seed, say)
        tracked.ready = True
        yield datasets


@dataclass
class _TrackedDatasets:
    """Datasets in preparation.

    Attributes:
        folder: their folder.
        request: the request for them.
        made: the finished ones, written now or reused.
        ready: whether all are finished, and can be trained on.
    """

    folder: Location
    request: DataRequest
    made: list[Materialized] = field(default_factory=list)
    ready: bool = False


@contextlib.contextmanager
def track_datasets(
    data: object, roles: Roles, options: DataOptions, run_folder: Location
) -> Iterator[_TrackedDatasets]:
    """Yield a `_TrackedDatasets`, to which the caller adds its datasets; see `prepare_datasets`.

    They are deleted at the end, if they are not kept.
    """
    folder = data_folder(options, run_folder, session_of(data))
    shared = str(folder) != str(run_folder)
    keep = shared if options.keep_data is None else options.keep_data
    # A dataset that is deleted at the end must not be another run's.
    tracked = _TrackedDatasets(folder, _request(roles, options, reuse=keep or not shared))
    if not shared:  # nobody else writes there: incomplete ones are of a killed call
        sweep_incomplete(folder, float("-inf"), time.time())
    try:
        yield tracked
    except BaseException as error:
        if not shared:
            # A checkpoint may be resumed with these rows, unless they were refused just now: they
            # are invalid, or others than before.
            refused = isinstance(error, RunDirectoryError) or (
                isinstance(error, DataError) and not tracked.ready
            )
            tracked.made = [one for one in tracked.made if refused and not one.reused]
        raise
    finally:
        if not keep:
            for one in tracked.made:
                delete_dataset(one.manifest, quietly=True)


@_explain_changed_files()
def prepare_one(data: Rows, roles: Roles, options: DataOptions, folder: Location) -> Manifest:
    """Return the dataset of all rows, in ``folder`` or, for Parquet files, in place.

    Raises:
        DataError: the values cannot be read.
    """
    request = _request(roles, options, reuse=True)
    direct = open_parquet(Location(data), request) if _is_place(data) else None
    return direct or materialize(frame_of(data), request, folder).manifest


def is_readable_in_place(data: Rows, roles: Roles, options: DataOptions) -> bool:
    """Return whether all rows can be read in place, so that nothing is written.

    Raises:
        DataError: they are Parquet files whose values cannot be read.
    """
    request = _request(roles, options, reuse=True)
    return _is_place(data) and open_parquet(Location(data), request) is not None


def _request(roles: Roles, options: DataOptions, *, reuse: bool) -> DataRequest:
    return DataRequest(
        roles, options.shapes, options.materializer, options.dtypes, options.allow_nan, reuse
    )


@_explain_changed_files()
def holds_rows(
    data: Rows,
    roles: Roles,
    options: DataOptions,
    validation: object,
    seed: int,
    known: RowsIdentity,
    say: Callable[[str], object],
) -> bool:
    """Return whether the training rows are those of an earlier dataset; nothing is written.

    Args:
        data: a DataFrame, or the path of Parquet files.
        roles: the columns and their roles.
        options: how to prepare them.
        validation: which rows to validate with; see `run_training`.
        seed: seed of the split.
        known: identity of the earlier dataset.
        say: prints a line for the user.

    Raises:
        DataError: the columns cannot be trained on.
    """
    request = _request(roles, options, reuse=True)
    direct = _open_in_place(data, validation, request)
    if direct is not None:
        return direct.fingerprint == known.fingerprint
    with split_rows(frame_of(data), validation, roles, seed, options.stratify) as (train, _):
        return known.fits(train, request, say)


def _open_in_place(data: Rows, validation: object, request: DataRequest) -> Manifest | None:
    """Return the training rows, if they are Parquet files that can be read in place."""
    if _is_place(data) and not isinstance(validation, (str, int, float)):
        return open_parquet(Location(data), request)
    return None


@_explain_changed_files()
def _prepare(
    data: Rows,
    roles: Roles,
    options: DataOptions,
    validation: object,
    tracked: _TrackedDatasets,
    seed: int,
    say: Callable[[str], object],
) -> Prepared:
    folder, request = tracked.folder, tracked.request
    direct = _open_in_place(data, validation, request)
    reused: list[bool] = []
    parts: list[Manifest] = []
    frame = frame_of(data)
    tables = {} if direct else table_versions(frame)
    with split_rows(frame, validation, roles, seed, options.stratify) as frames:
        for part, rows in zip(("train", "validation"), frames, strict=True):
            if part == "train" and direct is not None:
                parts.append(direct)
            elif rows is not None:
                dataset = _materialize_part(rows, request, folder, part, validation, say)
                tracked.made.append(dataset)
                parts.append(dataset.manifest)
                reused.append(dataset.reused)
    held_out = match_columns(parts[1], parts[0]) if len(parts) > 1 else None
    return Prepared(replace(parts[0], tables=tables), held_out, all(reused))


def _materialize_part(
    frame: DataFrame,
    request: DataRequest,
    folder: Location,
    part: str,
    validation: object,
    say: Callable[[str], object],
) -> Materialized:
    try:
        return materialize(frame, request, folder, say)
    except DataError as error:
        if validation is None:
            raise
        plain = isinstance(validation, (str, int, float))
        name = repr(validation) if plain else "a DataFrame"
        text = str(error)
        if text.startswith(NO_ROWS):
            use, other = ("train on", "smaller") if part == "train" else ("validate with", "larger")
            advice = f"; give a {other} fraction" if isinstance(validation, float) else ""
            text = f"{NO_ROWS} to {use}{advice}"
        raise DataError(f"{part} rows (validation={name}): {text}") from error


def match_columns(
    rows: Manifest,
    first: Manifest,
    names: tuple[str, str] = ("the validation rows", "the training rows"),
) -> Manifest:
    """Return ``rows`` with the columns of ``first``, if they are the same.

    Args:
        rows: a dataset.
        first: the dataset whose types hold for both.
        names: names of the two in a message.

    Raises:
        DataError: its columns are others.
    """
    for ours, theirs in zip(rows.columns, first.columns, strict=True):
        same = (ours.shape, ours.encoding, ours.is_text) == (
            theirs.shape,
            theirs.encoding,
            theirs.is_text,  # numbers can be cast to objects, which strings are
        )
        # Numbers of other sizes are read as those of the training rows, and have to fit.
        fits = np.can_cast(ours.numpy_dtype, theirs.numpy_dtype, "same_kind")
        if not same or not (fits or ours.is_encoded):
            raise DataError(
                f"{names[0]} have column {ours.describe()}, {names[1]} {theirs.describe()}"
            )
    return replace(rows, columns=first.columns)


def count_passes(validation: object) -> int:
    """Return how often the rows of a DataFrame are read to prepare them, without earlier datasets.

    Rows that are split are read once to find the split, and once for each part.

    Args:
        validation: which rows to validate with; see `run_training`.
    """
    return 3 if isinstance(validation, (str, int, float)) else 1


# Most Parquet files whose footers are read to count rows.
_MOST_FILES = 16
# Plan nodes that keep the number of rows.
_SAME_ROWS = {
    *("Project", "SubqueryAlias", "View", "Sort", "Window", "Repartition"),
    *("RepartitionByExpression", "LogicalRelation"),
}


def rows_to_write(data: object, validation: object) -> int | None:
    """Return how many rows will be written of `run_training`'s data, for the progress display.

    Args:
        data: a DataFrame, or the place of Parquet files.
        validation: which rows to validate with; see `run_training`.

    Returns:
        The number; ``None`` if that needs the rows to be computed, or many files to be read.
    """
    frames = [data]
    if validation is not None and not isinstance(validation, (str, int, float)):
        frames.append(validation)
    total = 0
    for frame in frames:
        count = _count_from_footers(frame_of(frame))
        if count is None:
            return None
        total += count
    return total


def _count_from_footers(frame: DataFrame) -> int | None:
    """Return how many rows a frame has, if a few Parquet footers suffice."""
    if classic_context(frame.sparkSession) is None:
        return None  # Spark Connect shows no plan
    # For display only: any error means unknown.
    with contextlib.suppress(Exception):
        execution = getattr(frame, "_jdf").queryExecution()  # noqa: B009 (as Petastorm does)
        if _reads_rows_of_files(execution.analyzed()):
            return _sum_footers(frame.inputFiles())
    return None


def _reads_rows_of_files(plan: JavaObject) -> bool:
    """Return whether a plan returns all rows of the Parquet files that it reads, once each."""
    while True:
        if plan.getClass().getSimpleName() not in _SAME_ROWS:
            return False
        children = plan.children()
        if not children.size():
            return "parquet" in str(plan.relation().fileFormat()).lower()
        plan = children.apply(0)


def _sum_footers(files: list[str]) -> int | None:
    if not 0 < len(files) <= _MOST_FILES:
        return None
    return sum(int(read_metadata(Location(file))[0].num_rows) for file in files)
