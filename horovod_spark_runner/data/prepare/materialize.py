"""Materialize a DataFrame: write it to Parquet, checked on the way, or reuse an earlier dataset.

One Spark job writes the rows and, while it does, counts them, measures arrays and adds up a
checksum (``DataFrame.observe``), so that the data are computed once. Invalid datasets are deleted
and reported. Valid ones get a manifest, written last: a folder without one is not a dataset.

A dataset is reused for an equal request if it has the same rows: its plan and input files are the
same or, for plans without a fingerprint, its checksum is.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...cluster.spark.session import classic_context
from ...errors import DataError, InvalidInputError
from ...storage.filesystem import Location
from ...storage.folders import delete_quietly
from ..manifest import Manifest
from ..store import find_datasets, key_of, mark_used, new_folder, publish, sweep_incomplete
from . import petastorm_compat
from .checks import check_values, levels, nested_observations, observations
from .columns import ROW_GROUP_BYTES, DataRequest, Source, columns_of, expression, sources_of
from .fingerprint import is_computed_anew, source_fingerprint, table_versions
from .parquet import first_value, manifest_of, read_footers
from .schema import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

_guard = threading.Lock()
# Deleted with the last thread that holds or awaits one.
_writers: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()

# Messages of operating systems, through Java.
_STORAGE_FAULTS = (
    "No space left on device",
    "Disk quota exceeded",
    "Read-only file system",
    "Permission denied",
    "Input/output error",
    "Mkdirs failed to create",
)

CODEC = "snappy"
# Seconds after which the next writer deletes incomplete datasets of killed ones.
_INCOMPLETE_AFTER = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Materialized:
    """A dataset that can be read.

    Attributes:
        manifest: its manifest.
        reused: whether it existed already.
    """

    manifest: Manifest
    reused: bool


@dataclass(frozen=True)
class RowsIdentity:
    """What the rows of a dataset are known by once they are deleted.

    Attributes:
        key: that of the request; see `DataRequest.key`.
        source: see `Manifest.source`.
        checksum: see `Manifest.checksum`.
        fingerprint: see `Manifest.fingerprint`.
    """

    key: str
    source: str
    checksum: str
    fingerprint: str

    @classmethod
    def of(cls, manifest: Manifest) -> RowsIdentity:
        return cls(key_of(manifest), manifest.source, manifest.checksum, manifest.fingerprint)

    def fits(self, frame: DataFrame, request: DataRequest, say: Callable[[str], object]) -> bool:
        """Return whether a dataset of ``frame`` would be this one; nothing is written.

        Args:
            frame: the data.
            request: which columns, in which types and shapes.
            say: prints a line for the user.

        Raises:
            DataError: the columns cannot be trained on.
        """
        sources = sources_of(frame, request.roles, request.dtypes)
        # Of nested arrays, the sizes are not kept here; see `_fits`.
        if request.key(sources) != self.key or any(levels(one) > 1 for one in sources):
            return False
        chosen = frame.select(*(quoted(source.name) for source in sources))
        if self.source and source_fingerprint(chosen) == self.source:
            return True
        if is_computed_anew(frame):
            say("comparing the rows with those of the finished run: 1 pass over the DataFrame")
        return _checksum(_read_contents(frame, sources)) == self.checksum


def materialize(
    frame: DataFrame,
    request: DataRequest,
    folder: Location,
    say: Callable[[str], object] = logger.debug,
) -> Materialized:
    """Return ``frame``'s columns as a dataset under ``folder``, written now or earlier.

    Args:
        frame: the data; every row is written once.
        request: which columns, in which types and shapes.
        folder: storage that the driver and all executors reach.
        say: prints a line for the user.

    Raises:
        DataError: the columns or values cannot be trained on; nothing is left behind.
        InvalidInputError: ``folder`` cannot be written to.
    """
    sources = sources_of(frame, request.roles, request.dtypes)
    # A dataset that is deleted at the end of this run must not be found by others.
    key = request.key(sources) if request.reuse else uuid.uuid4().hex[:16]
    chosen = frame.select(*(quoted(source.name) for source in sources))
    origin = source_fingerprint(chosen) if request.reuse else ""
    prepared = frame.select(*(expression(source) for source in sources))
    with _writing_to(folder):
        folder.make_folder()
    with _alone(f"{folder}/{key}"):
        if request.reuse:
            existing = _find(folder, key, origin, frame, sources, request.shapes, say)
            if existing is not None:
                mark_used(existing)
                return Materialized(existing, reused=True)
        sweep_incomplete(folder, _INCOMPLETE_AFTER, time.time())
        with _writing_to(folder):
            target = new_folder(folder, key)
        try:
            with _writing_to(folder):
                tables = table_versions(chosen)
                manifest = _write_dataset(frame, prepared, sources, request, target)
                if table_versions(chosen) != tables:
                    origin = ""  # which version the rows are of is not known
                manifest = replace(manifest, source=origin)
                publish(manifest)
        except BaseException:
            delete_quietly(target)
            raise
    return Materialized(manifest, reused=False)


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Wait for threads that may write the same dataset: one writes, all use it."""
    with _guard:
        lock = _writers.setdefault(name, threading.Lock())
    with lock:
        yield


@contextlib.contextmanager
def _writing_to(folder: Location) -> Iterator[None]:
    """Name ``folder`` in the error if it cannot be written to."""
    try:
        yield
    except OSError as error:
        raise InvalidInputError(
            f"the rows cannot be written to {folder}: {error}; data_dir must be a folder that the "
            "driver and all executors can write to"
        ) from error
    except Exception as error:
        reason = _of_storage(error)
        if reason is None:  # such as a failure to compute the rows, which Spark reports
            raise
        raise DataError(f"the rows cannot be written to {folder}: {reason}") from error


def _of_storage(error: Exception) -> str | None:
    """Return the storage's message, if storage is why Spark could not write the rows."""
    if not type(error).__module__.startswith(("py4j.", "pyspark.")):
        return None
    match = re.search(f"(?m)^.*?([^:\n]*(?:{'|'.join(_STORAGE_FAULTS)})[^\n]*)$", str(error))
    return None if match is None else match[1].strip()


def _find(
    folder: Location,
    key: str,
    origin: str,
    frame: DataFrame,
    sources: Sequence[Source],
    shapes: Mapping[str, tuple[int, ...]],
    say: Callable[[str], object],
) -> Manifest | None:
    """Return the dataset in ``folder`` that holds the rows of ``frame``, in these shapes."""
    candidates = list(find_datasets(folder, key))
    if not candidates:
        return None
    if origin:
        return next((candidate for candidate in candidates if candidate.source == origin), None)
    # No fingerprint: compute the rows, but write them only if they are others.
    if is_computed_anew(frame):
        say(
            f"comparing the rows with those in {folder}: 1 pass over the DataFrame, and a second "
            "one if they differ; df.cache() before the call computes them once"
        )
    facts = _read_contents(frame, sources)
    same = [candidate for candidate in candidates if candidate.checksum == _checksum(facts)]
    return next((candidate for candidate in same if _fits(candidate, sources, shapes, facts)), None)


def _read_contents(frame: DataFrame, sources: Sequence[Source]) -> dict[str, object]:
    """Return what identifies the rows of a frame, and the sizes of nested arrays, in one pass."""
    hashed = _hashed(sources, [expression(source) for source in sources])
    row = frame.agg(*_contents(hashed), *nested_observations(sources)).first()
    return {} if row is None else row.asDict()


def _fits(
    manifest: Manifest,
    sources: Sequence[Source],
    shapes: Mapping[str, tuple[int, ...]],
    facts: Mapping[str, object],
) -> bool:
    """Return whether nested arrays, which are hashed flat, have the dataset's sizes. Pure."""
    for number, source in enumerate(sources):
        depth = levels(source)
        if depth > 1:
            low, high = (
                tuple(facts[f"{end}{number}_{level}"] for level in range(1, depth + 1))
                for end in ("min", "max")
            )
            if low != high or (
                source.name not in shapes and low != manifest.column(source.name).shape
            ):
                return False
    return True


def _write_dataset(
    frame: DataFrame,
    prepared: DataFrame,
    sources: Sequence[Source],
    request: DataRequest,
    target: Location,
) -> Manifest:
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    observation = Observation(f"horovod_{uuid.uuid4().hex[:8]}")
    nested = nested_observations(sources)
    if nested:  # the sizes of inner arrays, before they are flattened
        inner = Observation(f"horovod_{uuid.uuid4().hex[:8]}")
        frame_seen = frame.observe(inner, *nested)
        prepared = frame_seen.select(*(expression(source) for source in sources))
    hashed = _hashed(sources, [F.col(quoted(source.name)) for source in sources])
    observed = [*_contents(hashed), _order(hashed), *observations(sources)]
    watched = prepared.observe(observation, *observed)
    _write(watched, request.materializer, target)
    facts = {**observation.get, **(inner.get if nested else {})}
    footers = read_footers(target)
    if not footers.uniform:
        raise DataError(
            f"files with other columns appeared in {target} while rows were written there; make "
            "sure that nothing else writes into that folder"
        )
    _check_all_there(facts["rows"], sum(group.rows for group in footers.row_groups), target)
    columns_facts = dict(zip((s.name for s in sources), footers.columns, strict=False))
    layouts = check_values(sources, facts, columns_facts, frame, allow_nan=request.allow_nan)
    first = functools.partial(first_value, footers)
    columns = columns_of(sources, layouts, request.shapes, first)
    manifest = manifest_of(footers, columns, _checksum(facts), allow_nan=request.allow_nan)
    return replace(manifest, row_order=f"{facts['order'] or 0:x}")


def _check_all_there(written: int, found: int, target: Location) -> None:
    """Check that the driver finds all rows: executors may have written to disks of their own."""
    if found < written:
        raise DataError(
            f"the executors wrote {written:,} rows to {target}, but the driver finds {found:,} "
            "there; run_dir (or data_dir) must be a folder or URL that the driver and all "
            "executors reach, not a folder of each machine"
        )


def _write(frame: DataFrame, materializer: str, target: Location) -> None:
    """Write ``frame`` into a folder below ``target`` that the writer names."""
    connected = classic_context(frame.sparkSession) is None
    if connected and materializer == "petastorm":
        _log_writer()
    elif materializer == "petastorm":
        petastorm_compat.convert(
            frame.sparkSession, frame, target.spark_url, ROW_GROUP_BYTES, CODEC
        )
        return
    writer = frame.write.option("compression", CODEC)
    writer = writer.option("parquet.block.size", ROW_GROUP_BYTES)
    writer = writer.option("parquet.enable.dictionary", "false")
    writer.parquet(target.join("rows").spark_url)


@functools.cache  # once is enough
def _log_writer() -> None:
    logger.info(
        "Spark Connect gives no access to the JVM that Petastorm's converter needs: Spark's own "
        "writer writes the rows (materializer='spark')"
    )


def _contents(hashed: SparkColumn) -> list[SparkColumn]:
    """Return aggregates of row hashes that identify the rows, in any order."""
    from pyspark.sql import functions as F

    return [
        F.count(F.lit(1)).alias("rows"),
        # The second detects doubled rows.
        F.coalesce(F.bit_xor(hashed), F.lit(0)).alias("xor"),
        F.coalesce(F.sum(F.pmod(hashed, F.lit(2**31))), F.lit(0)).alias("sum"),
    ]


def _order(hashed: SparkColumn) -> SparkColumn:
    """Return an aggregate of row hashes that identifies their order."""
    from pyspark.sql import functions as F

    # Partition and row within it: files and rows are written in this order.
    placed = F.xxhash64(hashed, F.monotonically_increasing_id())
    return F.sum(F.pmod(placed, F.lit(2**31))).alias("order")


def _hashed(sources: Sequence[Source], stored: Sequence[SparkColumn]) -> SparkColumn:
    """Return a hash of each row.

    Args:
        sources: the columns.
        stored: their stored forms.
    """
    from pyspark.sql import functions as F

    # Spark hashes an array's elements only: those of [1] and [2, 3] as those of [1, 2] and [3].
    arrays = (column for source, column in zip(sources, stored, strict=True) if levels(source))
    return F.xxhash64(*stored, *map(F.size, arrays))


def _checksum(facts: Mapping[str, object]) -> str:
    return f"{facts['rows']}.{facts['xor']:x}.{facts['sum']:x}"


def join_checksums(checksums: Sequence[str]) -> str:
    """Return the checksum of the rows of several datasets together. Pure."""
    rows = xor = total = 0
    for checksum in checksums:
        count, bits, added = checksum.split(".")
        rows, xor, total = rows + int(count), xor ^ int(bits, 16), total + int(added, 16)
    return _checksum({"rows": rows, "xor": xor, "sum": total})
