"""Scoring a part of one Parquet file into another, in one of Spark's Python workers.

One thread reads ahead and one writes behind, so that the network and the disk work while the model
computes. Nothing is decoded that is neither kept nor a feature.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..data.footer import read_footer
from ..data.prepare.footers import EVERY_FILE
from ..errors import DataError
from ..storage.filesystem import Location
from .arrow_features import feature_array
from .file_schema import (
    ScoredColumn,
    columns_of_leaves,
    has_old_timestamps,
    scored_schema,
)
from .inference import SKIP, Predictor

# Bytes that are held at a time at each of the three stations: read, computed, written.
CHUNK_BYTES = 32 * 1024 * 1024
# Parquet's types, and the bytes of a number of each.
_REAL, _BYTES = ("FLOAT", "DOUBLE"), {"INT32": 4, "INT64": 8, "INT96": 12}
# In the staging folder: what a task has found wrong with the data, for the driver.
FAILED = "_failed-"


@dataclass(frozen=True)
class Unit:
    """A part of a file: what is scored into one file.

    Attributes:
        file: the file, below the source.
        groups: its row groups.
        rows: rows in them.
        target: the file to write, below the destination.
        footer: checksum of the file's footer.
    """

    file: str
    groups: tuple[int, ...]
    rows: int
    target: str
    footer: str


@dataclass(frozen=True)
class FileTask:
    """The body of the tasks.

    Attributes:
        source: the folder to read.
        predictor: predicts.
        keep: columns to write again; ``None`` for all.
        added: the columns of predictions.
    """

    source: Location
    predictor: Predictor
    keep: tuple[str, ...] | None
    added: tuple[ScoredColumn, ...]

    def over(
        self, units: Sequence[Unit], shares: Sequence[range], staging: Location
    ) -> Callable[[Iterator[Any]], Iterator[pa.RecordBatch]]:
        """Return the body of a job: numbers of shares in, what became of their units, as JSON, out.

        Args:
            units: all of them.
            shares: the numbers of those that a task scores, for each task.
            staging: see `score`.
        """

        def score(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for share in batch.column(0).to_pylist():
                    for number in shares[share]:
                        name, rows = self._told(number, units[number], staging)
                        told = json.dumps([number, name, rows])
                        yield pa.RecordBatch.from_pydict({"text": [told]})

        return score

    def _told(self, number: int, unit: Unit, staging: Location) -> tuple[str, int]:
        """Score a unit; the driver can read what is wrong with the data, which Spark hides."""
        try:
            return self.score(number, unit, staging)
        except DataError as error:
            with contextlib.suppress(OSError):
                staging.join(f"{FAILED}{number:06d}").write_text(str(error))
            raise

    def score(self, number: int, unit: Unit, staging: Location) -> tuple[str, int]:
        """Score a unit into a file.

        Args:
            number: of the unit.
            unit: what is scored.
            staging: the folder to write into; every attempt writes a file of its own.

        Returns:
            The file's name in the staging folder, and its rows.

        Raises:
            DataError: rows are no features of the model, or the source is damaged or has changed.
        """
        name = f"{number:06d}-{uuid.uuid4().hex}.parquet"
        aside, place = staging.join("_" + name), self.source.join(unit.file)
        with opened(place) as stream, ThreadPoolExecutor(2, "hsr-files") as pool:
            file, footer = parquet_file(stream, place, pre_buffer=not place.is_local)
            if footer != unit.footer:
                raise DataError(
                    f"{place} has other rows than when predict_files began; call it again when "
                    "nothing changes the source"
                )
            kept = kept_in(file.schema_arrow, self.keep)
            schema, options = writing(file, kept, self.added)
            with aside.open_output() as output, pq.ParquetWriter(output, schema, **options) as sink:
                rows = self._score(file, unit, schema, sink, pool)
        aside.move_to(staging.join(name))
        return name, rows

    def _score(
        self,
        file: pq.ParquetFile,
        unit: Unit,
        schema: pa.Schema,
        sink: pq.ParquetWriter,
        pool: ThreadPoolExecutor,
    ) -> int:
        kept = schema.names[: len(schema.names) - len(self.added)]
        wanted = list(dict.fromkeys([*kept, *self.predictor.names]))
        chunks = _chunks(file, unit, wanted, self.source.join(unit.file))
        coming = pool.submit(next, chunks, None)
        written: Future[None] | None = None
        rows = 0
        try:
            while (chunk := coming.result()) is not None:
                coming = pool.submit(next, chunks, None)
                scored = self._scored(chunk, kept, schema, unit)
                rows += scored.num_rows
                if written is not None:
                    written.result()
                written = pool.submit(sink.write_table, scored)
        finally:
            if written is not None:
                wait([written])  # whatever ends this closes the sink next
        if written is not None:
            written.result()
        return rows

    def _scored(
        self, chunk: pa.Table, kept: Sequence[str], schema: pa.Schema, unit: Unit
    ) -> pa.Table:
        arrays = tuple(
            feature_array(_whole(chunk.column(name)), column)
            for name, column in zip(self.predictor.names, self.predictor.columns, strict=True)
        )
        try:
            parts = list(self.predictor(iter([arrays])))
        except DataError as error:
            raise DataError(f"{self.source.join(unit.file)}: {error}") from error
        predicted = pa.chunked_array(parts)
        single = len(self.added) == 1
        outputs = [predicted] if single else predicted.flatten()
        columns = [chunk.column(name) for name in kept]
        pairs = zip(outputs, self.added, strict=True)
        columns += [output.cast(added.arrow_type) for output, added in pairs]
        table = pa.Table.from_arrays(columns, schema=schema)
        skips = self.predictor.handle_invalid == SKIP and predicted.null_count
        return table.filter(pc.is_valid(predicted)) if skips else table


def opened(place: Location) -> pa.NativeFile:
    """Open a file of the source.

    Raises:
        DataError: it is gone.
    """
    try:
        return place.open_input()
    except FileNotFoundError as error:
        raise DataError(
            f"{place} has vanished since predict_files listed the source; call it again when "
            "nothing changes the source"
        ) from error


def parquet_file(
    stream: pa.NativeFile, place: Location, *, pre_buffer: bool = False
) -> tuple[pq.ParquetFile, str]:
    """Return a file of the source to be read, and the checksum of its footer.

    Args:
        stream: the file, opened.
        place: where it is, for messages.
        pre_buffer: see `pyarrow.parquet.ParquetFile`.

    Raises:
        DataError: it is no Parquet file.
    """
    try:
        metadata, footer = read_footer(stream)
        options = {"coerce_int96_timestamp_unit": "us", "pre_buffer": pre_buffer}
        return pq.ParquetFile(stream, metadata=metadata, **options), footer
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{place} is no Parquet file, or a damaged one: {error}; {EVERY_FILE}"
        ) from error


def kept_in(schema: pa.Schema, keep: Sequence[str] | None) -> list[str]:
    """Return which columns of a file are written again, in the file's order."""
    return [name for name in schema.names if keep is None or name in keep]


def writing(
    file: pq.ParquetFile, kept: Sequence[str], added: Sequence[ScoredColumn]
) -> tuple[pa.Schema, dict[str, Any]]:
    """Return the schema of the scored file, and the options to write it with."""
    options: dict[str, Any] = {
        "compression": _compression(file),
        "use_dictionary": _dictionaries(file, kept),
        # As they were; a file with both kinds is refused, see `check_stored_alike`.
        "use_deprecated_int96_timestamps": has_old_timestamps(file, kept),
    }
    return scored_schema(file.schema_arrow, kept, added), options


def _compression(file: pq.ParquetFile) -> str:
    """Return the compression that the file's first column has."""
    if not file.metadata.num_row_groups:
        return "snappy"
    name = file.metadata.row_group(0).column(0).compression.lower()
    return "none" if name == "uncompressed" else str(name)


def _dictionaries(file: pq.ParquetFile, kept: Sequence[str]) -> list[str]:
    """Return the leaves to write with a dictionary: those that had one, and were smaller by it."""
    if not file.metadata.num_row_groups:
        return []
    group = file.metadata.row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    return [
        chunk.path_in_schema
        for name, chunk in zip(columns_of_leaves(file.schema_arrow), chunks, strict=True)
        if name in kept and chunk.has_dictionary_page and _is_smaller_by_it(chunk)
    ]


def _is_smaller_by_it(chunk: pq.ColumnChunkMetaData) -> bool:
    """Tell whether a dictionary pays; nearly every real number, and every key, is another one."""
    kind = chunk.physical_type
    plain = chunk.num_values * _BYTES.get(kind, 0)
    return kind not in _REAL and (not plain or chunk.total_uncompressed_size < plain)


def _chunks(
    file: pq.ParquetFile, unit: Unit, columns: Sequence[str], place: Location
) -> Iterator[pa.Table]:
    """Yield the rows of a unit, so many at a time as memory is to hold.

    Raises:
        DataError: a row group cannot be read.
    """
    for number in unit.groups:
        try:
            yield from _chunks_of(file, number, columns)
        # Damaged pages are the one or the other; so is what the storage cannot give.
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{place} cannot be read: row group {number} is damaged, or its storage fails "
                f"({type(error).__name__}: {error}); write the file again, or call predict_files "
                "again if it is whole"
            ) from error


def _chunks_of(file: pq.ParquetFile, number: int, columns: Sequence[str]) -> Iterator[pa.Table]:
    group = file.metadata.row_group(number)
    if group.num_rows and group.total_byte_size <= CHUNK_BYTES:
        yield file.read_row_group(number, columns=columns, use_threads=False)
    elif group.num_rows:
        rows = max(1, group.num_rows * CHUNK_BYTES // group.total_byte_size)
        for batch in file.iter_batches(rows, [number], columns=columns, use_threads=False):
            yield pa.Table.from_batches([batch])


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
