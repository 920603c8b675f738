"""Parquet files: their footers, and files that are trained on without writing them again.

Footers show most of what materializing checks; the rest (NaN, the length of every list) the reader
checks, row group by row group.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import DataError
from ...storage.filesystem import FileStat, Location
from ..manifest import TEXT, Column, Manifest, RowGroup, with_memory_sizes
from ..read.row_groups import read_footer
from .checks import Footer, encoding_of
from .columns import DataRequest, Layout, Source, columns_of

# Folders of logs that decide which files count, and who writes them.
STREAM_LOG = "_spark_metadata"
_ICEBERG_LOG = "metadata"
_LOGS = {
    STREAM_LOG: "a stream",
    "_delta_log": "Delta Lake",
    ".hoodie": "Hudi",
    _ICEBERG_LOG: "Iceberg",
}
# Hint in errors about a file that is not Parquet.
EVERY_FILE = "of a folder, every file counts whose name does not begin with _ or ."
_DTYPES = {"bool": "int8", "halffloat": "float32", "float": "float32", "double": "float32"}


@dataclass(frozen=True)
class _FooterFacts:
    """Facts from the footers of a dataset.

    Attributes:
        folder: where the files are.
        files: the files that hold rows.
        row_groups: their row groups that hold rows, in file order.
        leaves: path of each leaf of the files' columns, in their order.
        columns: facts of each leaf.
        values: elements of each leaf by row group, nulls among them.
        sums: checksum of each file's footer.
        uniform: whether all files have the same columns in the same order and types; if not, the
            fields describe the first files.
    """

    folder: Location
    files: tuple[FileStat, ...]
    row_groups: tuple[RowGroup, ...]
    leaves: tuple[str, ...]
    columns: tuple[Footer, ...]
    values: tuple[tuple[int, ...], ...]
    sums: tuple[str, ...]
    uniform: bool


def manifest_of(
    facts: _FooterFacts,
    columns: Sequence[Column],
    checksum: str,
    *,
    verified: bool = True,
    allow_nan: bool = False,
) -> Manifest:
    """Return the manifest of files with these footers; see `Manifest` for the rest."""
    return Manifest(
        url=str(facts.folder),
        files=tuple(file.name for file in facts.files),
        columns=tuple(columns),
        row_groups=with_memory_sizes(facts.row_groups, columns),
        checksum=checksum,
        file_sizes=tuple(file.size for file in facts.files),
        verified=verified,
        allow_nan=allow_nan,
        footers=facts.sums,
    )


@dataclass(frozen=True)
class _ParquetFiles:
    """Parquet files at a location.

    Attributes:
        folder: where they are.
        files: the files, without hidden and empty ones.
        log: folder whose contents decide which files count, of a stream's sink or a table; ``""``
            if all do.
        partitions: the columns in the names of their folders (``key=value``); ``None`` if some
            folders have other names, or other columns than the rest.
    """

    folder: Location
    files: tuple[FileStat, ...]
    log: str = ""
    partitions: tuple[str, ...] | None = ()

    def check_all_count(self, advice: str) -> None:
        """Check that no log decides which of the files count.

        Args:
            advice: what to do if one does.

        Raises:
            DataError: a log decides.
        """
        if self.log:
            raise DataError(
                f"{self.folder} was written by {_LOGS[self.log]}: not all of its files count, "
                f"{self.log} lists them; {advice}"
            )


def parquet_files(location: Location) -> _ParquetFiles:
    """Return the Parquet files in a folder and those below it, or the one at ``location``.

    Their names do not matter, as in Spark; hidden and empty files are skipped.
    """
    single = location.stat()
    if single is not None:
        return _ParquetFiles(location.parent, (single,))
    listed = location.files()
    files = tuple(file for file in listed if _counts(file))
    log = _log_of(location, [file.name for file in listed])
    return _ParquetFiles(location, files, log, _partitions(files))


def _log_of(location: Location, names: Sequence[str]) -> str:
    """Return the folder that decides which files below ``location`` count; ``""`` if all do.

    Args:
        location: a folder; of a partition or of Iceberg's files, the table's is the folder above.
        names: all files below it.
    """
    within = {name.partition("/")[0] for name in names if "/" in name}
    metadata = [name for name in names if name.startswith(f"{_ICEBERG_LOG}/")]
    table = location
    while "=" in table.name or table.name == "data":
        table = table.parent
    if str(table) != str(location):
        with contextlib.suppress(OSError):  # others need not be readable
            within = {place.name for place in table.list()} - {STREAM_LOG}
            metadata = [place.name for place in table.join(_ICEBERG_LOG).list()]
    if not any(name.endswith(".metadata.json") for name in metadata):
        within -= {_ICEBERG_LOG}
    return next((name for name in _LOGS if name in within), "")


def _counts(file: FileStat) -> bool:
    hidden = any(
        part.startswith(".")
        or (part.startswith("_") and "=" not in part)
        or part.endswith("._COPYING_")
        for part in file.name.split("/")
    )
    # Empty files are marks, unless they are named like Parquet files.
    empty = not file.size and not file.name.endswith((".parquet", ".parq"))
    return not (hidden or empty)


def _partitions(files: Sequence[FileStat]) -> tuple[str, ...] | None:
    keys: set[tuple[str | None, ...]] = set()
    for file in files:
        pairs = [part.partition("=") for part in file.name.split("/")[:-1]]
        keys.add(tuple(unquote(key) if equals else None for key, equals, _ in pairs))
    if not keys:
        return ()
    first, *others = keys
    names = tuple(key for key in first if key is not None)
    return names if not others and len(names) == len(first) else None


def read_footers(location: Location) -> _FooterFacts:
    """Read the footers of all Parquet files at ``location``, a folder or one file.

    Raises:
        DataError: a file is not a Parquet file.
    """
    return _footers_of(parquet_files(location))


def _footers_of(source: _ParquetFiles) -> _FooterFacts:
    """Read the footers of Parquet files; see `read_footers`."""
    files: list[FileStat] = []
    sums: list[str] = []
    groups: list[RowGroup] = []
    kinds: list[tuple[str, ...]] = []
    leaves: list[list[_Leaf]] = []
    uniform = True
    for file in source.files:
        metadata, footer = read_metadata(source.folder.join(file.name))
        filled = [i for i in range(metadata.num_row_groups) if metadata.row_group(i).num_rows]
        if not filled:  # an empty partition
            continue
        file_kinds = _leaf_kinds(metadata)
        if not files:
            kinds, leaves = file_kinds, [[] for _ in file_kinds]
        elif file_kinds != kinds:
            uniform = False
            break
        for i in filled:
            group = metadata.row_group(i)
            groups.append(RowGroup(len(files), i, group.num_rows, group.total_byte_size))
            for number, leaf in enumerate(leaves):
                leaf.append(_read_leaf(group.column(number)))
        files.append(file)
        sums.append(footer)
    return _FooterFacts(
        source.folder,
        tuple(files),
        tuple(groups),
        tuple(path for path, *_ in kinds),
        tuple(_summary(leaf) for leaf in leaves),
        tuple(tuple(chunk.values for chunk in leaf) for leaf in leaves),
        tuple(sums),
        uniform,
    )


def _leaf_kinds(metadata: pq.FileMetaData) -> list[tuple[str, ...]]:
    """Return path and types of each leaf of a file."""
    schema = metadata.schema
    leaves = (schema.column(number) for number in range(metadata.num_columns))
    return [(leaf.path, leaf.physical_type, str(leaf.logical_type)) for leaf in leaves]


def read_metadata(file: Location) -> tuple[pq.FileMetaData, str]:
    """Return the footer of one file, and its checksum.

    Raises:
        DataError: it is not a Parquet file.
    """
    try:
        with file.open_input() as stream:
            return read_footer(stream)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{file} is not a Parquet file, or is damaged: {error}; {EVERY_FILE}"
        ) from error


@dataclass(frozen=True)
class _Leaf:
    """A column in one row group; ``None`` where the footer has no statistics."""

    values: int
    nulls: int | None
    finite: bool | None
    minimum: float | None


def _read_leaf(chunk: Any) -> _Leaf:
    statistics = chunk.statistics
    nulls = None
    if statistics is not None and statistics.has_null_count:
        nulls = statistics.null_count
    finite: bool | None = True
    minimum = None
    bounded = statistics is not None and statistics.has_min_max
    if bounded and isinstance(statistics.min, (int, float)):
        minimum = float(statistics.min)
    if chunk.physical_type in ("FLOAT", "DOUBLE"):
        finite = None
        if bounded:
            # parquet-mr counts NaN as the largest number; others leave it out.
            finite = math.isfinite(statistics.min) and math.isfinite(statistics.max)
    return _Leaf(chunk.num_values, nulls, finite, minimum)


def _summary(chunks: Sequence[_Leaf]) -> Footer:
    nulls = [chunk.nulls for chunk in chunks if chunk.nulls is not None]
    minima = [chunk.minimum for chunk in chunks if chunk.minimum is not None]
    return Footer(
        nulls=sum(nulls) if len(nulls) == len(chunks) else None,
        finite=all(chunk.finite for chunk in chunks),
        infinite=any(chunk.finite is False for chunk in chunks),
        minimum=min(minima) if minima and len(minima) == len(chunks) else None,
    )


def first_value(facts: _FooterFacts, name: str) -> Any:
    """Return the first row's value of column ``name``."""
    file = facts.files[facts.row_groups[0].file]
    with facts.folder.join(file.name).open_input() as stream:
        parquet = pq.ParquetFile(stream)
        table = parquet.read_row_group(facts.row_groups[0].index, columns=[name])
        return table.column(0)[0].as_py()


def open_parquet(location: Location, request: DataRequest) -> Manifest | None:
    """Return the manifest of Parquet files, if they can be read in place.

    Args:
        location: a folder of files, or one file; Petastorm's codecs (images, ndarrays) are
            supported.
        request: columns, types and shapes.

    Returns:
        ``None`` if Spark has to convert or check the columns first (decimals, nested lists,
        vectors, partition columns, requested types, files without statistics, or with differing
        columns) or decides which files count (of a stream's sink, or of a table).

    Raises:
        DataError: the files hold no rows, nulls, negative sample weights, or lists of differing
            length.
    """
    files = parquet_files(location)
    names = request.roles.columns
    folders = {name.lower() for name in files.partitions or ()}
    if files.log or any(name.lower() in folders for name in names):
        return None
    facts = _footers_of(files)
    if not facts.uniform:
        return None
    if not facts.row_groups:
        raise DataError(f"{location} holds no rows: there is nothing to train on")
    with facts.folder.join(facts.files[0].name).open_input() as stream:
        schema = pq.read_schema(stream)
    if any(name not in schema.names for name in names):
        return None
    weight = request.roles.weight
    sources = [_source(schema.field(name), request.dtypes.get(name), weight) for name in names]
    readable = [source for source in sources if source is not None]
    if len(readable) < len(sources):
        return None
    leaves = _leaf_numbers(facts.leaves)
    if any(name not in leaves for name in names):
        return None  # names with dots, which could be those of fields
    if not all(_has_statistics(source, facts.columns[leaves[source.name]]) for source in readable):
        return None
    for source in readable:
        _check_leaf(source, facts.columns[leaves[source.name]], location, request.allow_nan)
    first = functools.partial(first_value, facts)
    layouts = {s.name: _layout(s, leaves[s.name], facts, first(s.name)) for s in readable}
    columns = columns_of(readable, layouts, request.shapes, first)
    allow_nan = request.allow_nan
    identity = _identity(facts)
    return manifest_of(facts, columns, identity, verified=allow_nan, allow_nan=allow_nan)


def _source(field: pa.Field, requested: str | None, weight: str | None) -> Source | None:
    kind, element = "scalar", field.type
    if pa.types.is_list(element) or pa.types.is_fixed_size_list(element):
        kind, element = "array", element.value_type
    if kind == "scalar" and pa.types.is_binary(element):
        return Source(field.name, "binary", "binary", requested or "")
    if pa.types.is_string(element) or pa.types.is_large_string(element):
        return Source(field.name, kind, TEXT, TEXT, int(kind == "array"))
    if requested is not None:
        return None
    if pa.types.is_signed_integer(element):
        dtype = str(element)
    elif str(element) in _DTYPES:
        dtype = _DTYPES[str(element)]
    else:
        return None
    depth = int(kind == "array")
    return Source(field.name, kind, str(element), dtype, depth, weight=field.name == weight)


def _has_statistics(source: Source, footer: Footer) -> bool:
    """Return whether the footers suffice for all checks."""
    return footer.nulls is not None and not (source.weight and footer.minimum is None)


def _leaf_numbers(paths: Sequence[str]) -> dict[str, int]:
    """Return the numbers of leaves by name, for names with one leaf below."""
    below: dict[str, list[int]] = {}
    for number, path in enumerate(paths):
        for name in itertools.accumulate(path.split("."), lambda above, part: f"{above}.{part}"):
            below.setdefault(name, []).append(number)
    return {name: numbers[0] for name, numbers in below.items() if len(numbers) == 1}


def _check_leaf(source: Source, footer: Footer, location: Location, allow_nan: bool) -> None:
    drop = "leave those rows out (read the files with Spark, df.filter, and train on the DataFrame)"
    if footer.nulls:
        what = "null values" if source.kind != "array" else "null values, null elements or empty"
        raise DataError(f"column {source.name!r} has {footer.nulls} {what} in {location}; {drop}")
    if footer.infinite and not allow_nan:
        raise DataError(
            f"column {source.name!r} has values that are NaN or infinite in {location}; fill "
            "them, or allow them with allow_nan=True"
        )
    if source.weight and footer.minimum is not None and footer.minimum < 0:
        raise DataError(
            f"column {source.name!r} has negative sample weights, down to {footer.minimum:g}, in "
            f"{location}; a sample weight is at least 0; {drop}"
        )


def _layout(source: Source, leaf: int, facts: _FooterFacts, value: Any) -> Layout:
    if source.kind == "binary":
        encoding = encoding_of(value)
        return Layout((len(value),) if encoding == "raw" else (), encoding)
    if source.kind == "scalar":
        return Layout()
    width = len(value)
    for group, values in zip(facts.row_groups, facts.values[leaf], strict=True):
        if values != group.rows * width:
            raise DataError(
                f"column {source.name!r} holds lists of differing length: {width} elements in the "
                f"first row, {values} in the {group.rows} rows of row group {group.index} of "
                f"{facts.files[group.file].name}; all rows need the same number"
            )
    return Layout((width,))


def _identity(facts: _FooterFacts) -> str:
    """Return the identity of the files: their names, sizes and times."""
    files: Sequence[Any] = [[f.name, f.size, f.changed] for f in facts.files]
    return "files." + hashlib.sha256(json.dumps(files).encode()).hexdigest()[:32]
