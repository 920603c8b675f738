"""Read Parquet footers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import DataError
from ...storage.filesystem import FileStat, Location
from ..manifest import Column, Manifest, RowGroup, in_memory
from ..store import read_footer
from .checks import Footer

# What says of a folder's files which of them count, and who writes it.
STREAM_LOG = "_spark_metadata"
_LOGS = {STREAM_LOG: "a stream", "_delta_log": "Delta Lake", ".hoodie": "Hudi"}
# What an error says of a file that is no Parquet file.
EVERY_FILE = "of a folder, every file counts whose name does not begin with _ or ."


@dataclass(frozen=True)
class FooterFacts:
    """What the footers of a dataset tell.

    Attributes:
        folder: where the files are.
        files: the files that hold rows.
        row_groups: their row groups that hold rows, in file order.
        leaves: path of each leaf of the files' columns, in their order.
        columns: what is known of each leaf.
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
    facts: FooterFacts,
    columns: Sequence[Column],
    checksum: str,
    *,
    verified: bool = True,
    allow_nan: bool = False,
) -> Manifest:
    """Return the manifest of files of these footers; see `Manifest` for the rest."""
    return Manifest(
        url=str(facts.folder),
        files=tuple(file.name for file in facts.files),
        columns=tuple(columns),
        row_groups=in_memory(facts.row_groups, columns),
        checksum=checksum,
        file_sizes=tuple(file.size for file in facts.files),
        verified=verified,
        allow_nan=allow_nan,
        footers=facts.sums,
    )


@dataclass(frozen=True)
class ParquetFiles:
    """The Parquet files at a place.

    Attributes:
        folder: where they are.
        files: those of them that count.
        log: the folder among them whose contents say which files count, of a stream's sink or a
            table; ``""`` if all do.
        partitions: the columns in the names of their folders (``key=value``); ``None`` if some lie
            in folders of other names, or in others than the rest.
    """

    folder: Location
    files: tuple[FileStat, ...]
    log: str = ""
    partitions: tuple[str, ...] | None = ()

    def check_all_count(self, advice: str) -> None:
        """Check that no log says which of the files count.

        Args:
            advice: what to do where one does.

        Raises:
            DataError: one does.
        """
        if self.log:
            raise DataError(
                f"{self.folder} was written by {_LOGS[self.log]}: not all of its files count, "
                f"{self.log} says which; {advice}"
            )


def parquet_files(location: Location) -> ParquetFiles:
    """Return the Parquet files in a folder and those below it, or the one at ``location``.

    Whatever they are called, as for Spark; files that are hidden or empty are left out.
    """
    single = location.stat()
    if single is not None:
        return ParquetFiles(location.parent, (single,))
    listed = location.files()
    files = tuple(file for file in listed if _counts(file))
    within = {file.name.partition("/")[0] for file in listed if "/" in file.name}
    log = next((name for name in _LOGS if name in within), "")
    return ParquetFiles(location, files, log, _partitions(files))


def _counts(file: FileStat) -> bool:
    hidden = any(
        part.startswith(".")
        or (part.startswith("_") and "=" not in part)
        or part.endswith("._COPYING_")
        for part in file.name.split("/")
    )
    # Empty ones are marks, unless their names say that they were to hold rows.
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


def read_footers(location: Location) -> FooterFacts:
    """Read the footers of all Parquet files at ``location``, a folder or one file.

    Raises:
        DataError: a file is no Parquet file.
    """
    return footers_of(parquet_files(location))


def footers_of(source: ParquetFiles) -> FooterFacts:
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
    return FooterFacts(
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
        DataError: it is no Parquet file.
    """
    try:
        with file.open_input() as stream:
            return read_footer(stream)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{file} is no Parquet file, or a damaged one: {error}; {EVERY_FILE}"
        ) from error


@dataclass(frozen=True)
class _Leaf:
    """A column in one row group; ``None`` is what the footer does not tell."""

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


def first_value(facts: FooterFacts, name: str) -> Any:
    """Return the first row's value of column ``name``."""
    file = facts.files[facts.row_groups[0].file]
    with facts.folder.join(file.name).open_input() as stream:
        parquet = pq.ParquetFile(stream)
        table = parquet.read_row_group(facts.row_groups[0].index, columns=[name])
        return table.column(0)[0].as_py()
