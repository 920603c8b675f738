"""Scored Parquet files: their schema, and the tasks that write them.

A scored file has the columns of its source as they were, and predictions. Spark's types are copied
where the source names them (its row metadata); a column that pyarrow would store in another type is
refused. Each task is one reader, model and writer: one thread prefetches and one writes, so that
the network and the disk work while the model computes. Only kept columns and features are decoded.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..data.prepare.parquet import EVERY_FILE
from ..data.read.row_groups import read_footer
from ..errors import DataError
from ..storage.filesystem import Location
from ..typed_json import load_json
from .features import feature_array
from .inference import SKIP, Predictor

# Bytes held at a time at each of the three stations: read, computed, written.
_CHUNK_BYTES = 32 * 1024 * 1024
# Keys of Spark's types of a file's columns, and of pandas' metadata.
_SPARK_KEY = b"org.apache.spark.sql.parquet.row.metadata"
_PANDAS_KEY = b"pandas"
# Spark's names of types -> their names in its JSON, and Arrow's types.
_ELEMENTS: dict[str, tuple[str, pa.DataType]] = {
    "boolean": ("boolean", pa.bool_()),
    "tinyint": ("byte", pa.int8()),
    "smallint": ("short", pa.int16()),
    "int": ("integer", pa.int32()),
    "bigint": ("long", pa.int64()),
    "float": ("float", pa.float32()),
    "double": ("double", pa.float64()),
    "string": ("string", pa.string()),
}
# Leaf of a column: the column, and how its values are stored.
Leaf = tuple[str, tuple[object, ...]]


@dataclass(frozen=True)
class Unit:
    """Part of a file that is scored into one file.

    Attributes:
        file: the file, below the source.
        groups: its row groups.
        target: the file to write, below the destination.
        footer: checksum of the file's footer.
    """

    file: str
    groups: tuple[int, ...]
    target: str
    footer: str


@dataclass(frozen=True)
class FileTask:
    """Body of the tasks.

    Attributes:
        source: the folder to read.
        predictor: the model.
        copied: columns to copy.
        schema: schema of scored files: the copied columns, then the predictions.
        options: options of their writer.
    """

    source: Location
    predictor: Predictor
    copied: tuple[str, ...]
    schema: pa.Schema
    options: Mapping[str, object]

    def over(
        self, units: Sequence[Unit], staging: Location
    ) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        """Return the body of a job: numbers of units in, their scored files, as JSON, out.

        Args:
            units: all units.
            staging: see `score`.
        """

        def score(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    scored = json.dumps([number, *self.score(units[number], staging)])
                    yield pa.RecordBatch.from_pydict({"text": [scored]})

        return score

    def score(self, unit: Unit, staging: Location) -> tuple[str, int]:
        """Score a unit into a file.

        Args:
            unit: the unit.
            staging: the folder to write into; every attempt writes a file of its own.

        Returns:
            The file's name in the staging folder, and its rows.

        Raises:
            DataError: rows do not fit the model, or the source is damaged or has changed.
        """
        name, place = f"{uuid.uuid4().hex}.parquet", self.source.join(unit.file)
        with open_source(place) as stream, ThreadPoolExecutor(2, "hsr-files") as pool:
            file, footer = parquet_file(stream, place, pre_buffer=not place.is_local)
            if footer != unit.footer:
                raise DataError(
                    f"{place} has other rows than when predict_files began; call it again when "
                    "nothing changes the source"
                )
            with (
                staging.join(name).open_output() as output,
                pq.ParquetWriter(output, self.schema, **self.options) as sink,
            ):
                rows = self._score(self._chunks(file, unit), sink, pool, place)
        return name, rows

    def _score(
        self,
        chunks: Iterator[pa.Table],
        sink: pq.ParquetWriter,
        pool: ThreadPoolExecutor,
        place: Location,
    ) -> int:
        coming = pool.submit(next, chunks, None)
        written: Future[None] | None = None
        rows = 0
        try:
            while (chunk := coming.result()) is not None:
                coming = pool.submit(next, chunks, None)
                scored = self._score_chunk(chunk, place)
                rows += scored.num_rows
                if written is not None:
                    written.result()
                written = pool.submit(sink.write_table, scored)
        finally:
            if written is not None:
                wait([written])  # the sink is closed next
        if written is not None:
            written.result()
        return rows

    def _score_chunk(self, chunk: pa.Table, place: Location) -> pa.Table:
        arrays = tuple(
            feature_array(_whole(chunk.column(name)), column)
            for name, column in zip(self.predictor.names, self.predictor.columns, strict=True)
        )
        try:
            predicted = pa.chunked_array(list(self.predictor(iter([arrays]))))
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        single = len(self.predictor.outputs) == 1
        outputs = [predicted] if single else predicted.flatten()
        types = self.schema.types[len(self.copied) :]
        columns = [chunk.column(name) for name in self.copied]
        columns += [output.cast(kind) for output, kind in zip(outputs, types, strict=True)]
        table = pa.Table.from_arrays(columns, schema=self.schema)
        skips = self.predictor.handle_invalid == SKIP and predicted.null_count
        return table.filter(pc.is_valid(predicted)) if skips else table

    def _chunks(self, file: pq.ParquetFile, unit: Unit) -> Iterator[pa.Table]:
        """Yield the rows of a unit, as many at a time as memory is to hold.

        Raises:
            DataError: a row group cannot be read.
        """
        columns = list(dict.fromkeys([*self.copied, *self.predictor.names]))
        for number in unit.groups:
            try:
                yield from _chunks_of(file, number, columns)
            # Damaged pages raise the one or the other; so does failing storage.
            except (pa.ArrowInvalid, OSError) as error:
                raise DataError(
                    f"{self.source.join(unit.file)} cannot be read: row group {number} is damaged, "
                    f"or its storage fails ({type(error).__name__}: {error}); write the file "
                    "again, or call predict_files again if it is whole"
                ) from error


def open_source(place: Location) -> pa.NativeFile:
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
    """Return a reader of a file of the source, and the checksum of the file's footer.

    Args:
        stream: the opened file.
        place: its place, for messages.
        pre_buffer: see `pyarrow.parquet.ParquetFile`.

    Raises:
        DataError: it is not a Parquet file.
    """
    try:
        metadata, footer = read_footer(stream)
        return pq.ParquetFile(stream, metadata=metadata, pre_buffer=pre_buffer), footer
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{place} is not a Parquet file, or damaged: {error}; {EVERY_FILE}"
        ) from error


def _chunks_of(file: pq.ParquetFile, number: int, columns: Sequence[str]) -> Iterator[pa.Table]:
    group = file.metadata.row_group(number)
    if group.num_rows and group.total_byte_size <= _CHUNK_BYTES:
        yield file.read_row_group(number, columns=columns, use_threads=False)
    elif group.num_rows:
        rows = max(1, group.num_rows * _CHUNK_BYTES // group.total_byte_size)
        for batch in file.iter_batches(rows, [number], columns=columns, use_threads=False):
            yield pa.Table.from_batches([batch])


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def stored_leaves(file: pq.ParquetFile) -> list[Leaf]:
    """Return each leaf of a file with its column and storage: type, annotation and nesting."""
    # The path of a leaf does not tell its column, whose name may have dots.
    names = [field.name for field in file.schema_arrow for _ in range(_leaves(field.type))]
    leaves: list[Leaf] = []
    for number, name in enumerate(names):
        leaf = file.schema.column(number)
        annotation = str(leaf.logical_type)
        # A decimal may be stored as an integer or as bytes; its annotation tells the values.
        physical = "decimal" if "Decimal" in annotation else leaf.physical_type
        levels = (leaf.max_definition_level, leaf.max_repetition_level)
        leaves.append((name, (physical, annotation, *levels)))
    return leaves


def _leaves(kind: pa.DataType) -> int:
    if not pa.types.is_nested(kind):
        return 1
    return sum(_leaves(kind.field(number).type) for number in range(kind.num_fields))


def scored_schema(schema: pa.Schema, copied: Sequence[str], added: Mapping[str, str]) -> pa.Schema:
    """Return the schema of a scored file.

    Args:
        schema: schema of the source.
        copied: its columns to copy.
        added: columns of predictions, and Spark's types of them.
    """
    fields = [schema.field(name) for name in copied]
    spark_fields = []
    for name, spark_type in added.items():
        is_array = spark_type.startswith("array<")
        element, kind = _ELEMENTS[spark_type.removeprefix("array<").removesuffix(">")]
        json_type: Any = element
        if is_array:
            kind = pa.list_(pa.field("element", kind))
            json_type = {"type": "array", "elementType": element, "containsNull": True}
        fields.append(pa.field(name, kind))
        spark_fields.append({"name": name, "type": json_type, "nullable": True, "metadata": {}})
    metadata = dict(schema.metadata or {})
    if len(copied) < len(schema.names):
        metadata.pop(_PANDAS_KEY, None)
    if _SPARK_KEY in metadata:
        struct = load_json(metadata[_SPARK_KEY])
        by_name = {field["name"]: field for field in struct["fields"]}
        struct["fields"] = [by_name[name] for name in copied if name in by_name] + spark_fields
        metadata[_SPARK_KEY] = json.dumps(struct).encode()
    return pa.schema(fields, metadata)


def check_stored_types(leaves: Sequence[Leaf], schema: pa.Schema, place: str) -> None:
    """Check that pyarrow stores the copied columns as they are in the source.

    Args:
        leaves: the leaves of the copied columns in the source.
        schema: schema of the scored file.
        place: the source, for messages.

    Raises:
        DataError: a column would be stored in another type.
    """
    sink = pa.BufferOutputStream()
    try:
        pq.ParquetWriter(sink, schema).close()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{place} cannot be written again: {error}") from error
    after = stored_leaves(pq.ParquetFile(pa.BufferReader(sink.getvalue())))
    for (name, stored), (_, becomes) in zip(leaves, after, strict=False):
        if stored != becomes:
            hint = ""
            if stored[0] == "INT96":
                hint = (
                    "let Spark write the source with "
                    "spark.sql.parquet.outputTimestampType=TIMESTAMP_MICROS, "
                )
            raise DataError(
                f"column {name!r} of {place} is stored as {_describe(stored)}, and would become "
                f"{_describe(becomes)}: {hint}leave the column out with columns=[…], or read the "
                "files with Spark and use transform"
            )


def _describe(stored: tuple[object, ...]) -> str:
    physical, annotation, definition, repetition = stored
    noted = "" if annotation == "None" else f" ({annotation})"
    return f"{physical}{noted} of levels {definition} and {repetition}"
