"""What a scored Parquet file holds: the columns of its source as they were, and predictions. Pure.

Spark's types are kept where the file names them (its row metadata); and what pyarrow would store
in another type than it was found in is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..data.prepare.schema import quote_all
from ..errors import DataError
from ..typed_json import load_json

# Where Spark keeps the types of a file's columns, and pandas what it knows of them.
SPARK_KEY = b"org.apache.spark.sql.parquet.row.metadata"
_PANDAS_KEY = b"pandas"
# Spark's names of numbers -> those in its JSON, and Arrow's.
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


@dataclass(frozen=True)
class ScoredColumn:
    """A column of predictions.

    Attributes:
        name: its name.
        spark_type: Spark's type of it: of a number or string, or ``array<…>`` of these.
    """

    name: str
    spark_type: str

    @property
    def _element(self) -> tuple[str, pa.DataType]:
        return _ELEMENTS[self.spark_type.removeprefix("array<").removesuffix(">")]

    @property
    def is_array(self) -> bool:
        return self.spark_type.startswith("array<")

    @property
    def arrow_type(self) -> pa.DataType:
        element = self._element[1]
        return pa.list_(pa.field("element", element)) if self.is_array else element

    def json(self) -> dict[str, Any]:
        """Return it as a field of Spark's JSON of a struct."""
        kind: Any = self._element[0]
        if self.is_array:
            kind = {"type": "array", "elementType": kind, "containsNull": True}
        return {"name": self.name, "type": kind, "nullable": True, "metadata": {}}


def has_old_timestamps(file: pq.ParquetFile, columns: Sequence[str]) -> bool:
    """Tell whether some columns hold timestamps of 96 bits, as Spark writes instants by default."""
    return bool(_columns_of("INT96", storage_of(file), columns))


def columns_of_leaves(schema: pa.Schema) -> list[str]:
    """Return the column that each leaf of a file is of, whose own name may have dots."""
    return [field.name for field in schema for _ in range(_leaves(field.type))]


def _leaves(kind: pa.DataType) -> int:
    if not pa.types.is_nested(kind):
        return 1
    return sum(_leaves(kind.field(number).type) for number in range(kind.num_fields))


def storage_of(file: pq.ParquetFile) -> dict[str, list[tuple[Any, ...]]]:
    """Return how each column is stored: type, annotation and nesting of its leaves."""
    stored: dict[str, list[tuple[Any, ...]]] = {}
    for number, name in enumerate(columns_of_leaves(file.schema_arrow)):
        leaf = file.schema.column(number)
        annotation = str(leaf.logical_type)
        # A decimal may be kept in an integer or in bytes: its annotation tells the values.
        physical = "decimal" if "Decimal" in annotation else leaf.physical_type
        size = leaf.length if physical == "FIXED_LEN_BYTE_ARRAY" else None
        levels = (leaf.max_definition_level, leaf.max_repetition_level)
        stored.setdefault(name, []).append((physical, annotation, size, *levels))
    return stored


def _columns_of(
    what: str, stored: dict[str, list[tuple[Any, ...]]], columns: Sequence[str]
) -> list[str]:
    """Return which columns have a leaf whose type or annotation begins so."""
    return [
        name
        for name in columns
        if any(str(leaf[part]).startswith(what) for leaf in stored[name] for part in (0, 1))
    ]


def _told(leaves: Sequence[tuple[Any, ...]]) -> str:
    """Return how a column is stored, for people."""
    told = []
    for physical, annotation, size, definition, repetition in leaves:
        length = "" if size is None else f"({size})"
        noted = "" if annotation == "None" else f" ({annotation})"
        told.append(f"{physical}{length}{noted} of levels {definition} and {repetition}")
    return ", ".join(told)


def kept_columns(
    schema: pa.Schema, columns: Sequence[str] | None, folders: Sequence[str], place: str
) -> list[str]:
    """Return which columns of a file are written again, in the file's order.

    Args:
        schema: the file's.
        columns: those asked for; ``None`` for all.
        folders: columns that the names of folders hold, which stay in any case.
        place: the file, for messages.

    Raises:
        DataError: one is not there, or several are called alike.
    """
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise DataError(f"{place} has several columns named {quote_all(twice)}")
    if columns is None:
        return list(schema.names)
    missing = [name for name in columns if name not in schema.names and name not in folders]
    if missing:
        raise DataError(
            f"{place} has no column {quote_all(missing)}, which columns names; it has "
            + quote_all([*schema.names, *folders])
        )
    return [name for name in schema.names if name in columns]


def scored_schema(
    schema: pa.Schema, kept: Sequence[str], added: Sequence[ScoredColumn]
) -> pa.Schema:
    """Return the schema of a scored file: the kept columns as they were, and the predictions."""
    fields = [schema.field(name) for name in kept]
    fields += [pa.field(column.name, column.arrow_type) for column in added]
    metadata = dict(schema.metadata or {})
    if len(kept) < len(schema.names):
        metadata.pop(_PANDAS_KEY, None)
    if SPARK_KEY in metadata:
        known = load_json(metadata[SPARK_KEY])
        by_name = {field["name"]: field for field in known["fields"]}
        known["fields"] = [by_name[name] for name in kept if name in by_name]
        known["fields"] += [column.json() for column in added]
        metadata[SPARK_KEY] = json.dumps(known).encode()
    return pa.schema(fields, metadata)


def check_stored_alike(
    file: pq.ParquetFile,
    schema: pa.Schema,
    kept: Sequence[str],
    options: dict[str, Any],
    place: str,
) -> None:
    """Check that pyarrow stores the kept columns as they were found.

    Args:
        file: where they were found.
        schema: of the file to write.
        kept: the columns that are written again.
        options: what it is written with.
        place: where ``file`` is, for messages.

    Raises:
        DataError: a column would be stored in another type.
    """
    sink = pa.BufferOutputStream()
    try:
        with pq.ParquetWriter(sink, schema, **options):
            pass
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{place} cannot be written again: {error}") from error
    before = storage_of(file)
    old, new = (_columns_of(what, before, kept) for what in ("INT96", "Timestamp"))
    if old and new:
        raise DataError(
            f"{place} has timestamps of 96 bits in {quote_all(old)} and of 64 bits in "
            f"{quote_all(new)}, which pyarrow does not write into one file: name the columns to "
            "keep without the ones or the others, columns=[…]; let Spark write the source with "
            "spark.sql.parquet.outputTimestampType=TIMESTAMP_MICROS; or read the files with Spark "
            "and use transform"
        )
    after = storage_of(pq.ParquetFile(pa.BufferReader(sink.getvalue())))
    for name in kept:
        if before[name] != after[name]:
            raise DataError(
                f"column {name!r} of {place} is stored as {_told(before[name])}, which would "
                f"become {_told(after[name])}: name the columns to keep without it, columns=[…], "
                "or read the files with Spark and use transform"
            )
