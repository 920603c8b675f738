"""What Parquet footers tell of files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import DataError
from ...storage.filesystem import FileStat, Location
from ..footer import read_footer
from ..manifest import Column, Manifest, RowGroup, in_memory
from .checks import Footer


@dataclass(frozen=True)
class FooterFacts:
    """What the footers of a dataset tell.

    Attributes:
        folder: where the files are.
        files: the files that hold rows.
        row_groups: their row groups that hold rows, in file order.
        columns: what is known of each column, in the order of the files' leaves.
        values: elements of each column by row group, nulls among them.
        sums: checksum of each file's footer.
    """

    folder: Location
    files: tuple[FileStat, ...]
    row_groups: tuple[RowGroup, ...]
    columns: tuple[Footer, ...]
    values: tuple[tuple[int, ...], ...]
    sums: tuple[str, ...]


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


def parquet_files(location: Location) -> tuple[Location, list[FileStat]]:
    """Return a folder and the Parquet files in it: those below ``location``, or it alone.

    Files that are hidden or aside are left out.
    """
    single = location.stat()
    if single is not None:
        return location.parent, [single]
    return location, [
        file
        for file in location.files()
        if file.name.endswith((".parquet", ".parq"))
        and not any(part.startswith(("_", ".")) for part in file.name.split("/"))
    ]


def read_footers(location: Location) -> FooterFacts:
    """Read the footers of all Parquet files at ``location``, a folder or one file.

    Raises:
        DataError: a file is no Parquet file.
    """
    folder, found = parquet_files(location)
    files: list[FileStat] = []
    sums: list[str] = []
    groups: list[RowGroup] = []
    leaves: list[list[_Leaf]] = []
    for file in found:
        metadata, footer = read_metadata(folder.join(file.name))
        leaves = leaves or [[] for _ in range(metadata.num_columns)]
        before = len(groups)
        for i in range(metadata.num_row_groups):
            group = metadata.row_group(i)
            if group.num_rows:
                groups.append(RowGroup(len(files), i, group.num_rows, group.total_byte_size))
                for number, leaf in enumerate(leaves):
                    leaf.append(_read_leaf(group.column(number)))
        if len(groups) > before:  # else an empty partition
            files.append(file)
            sums.append(footer)
    return FooterFacts(
        folder,
        tuple(files),
        tuple(groups),
        tuple(_summary(leaf) for leaf in leaves),
        tuple(tuple(chunk.values for chunk in leaf) for leaf in leaves),
        tuple(sums),
    )


def read_metadata(file: Location) -> tuple[pq.FileMetaData, str]:
    """Return the footer of one file, and its checksum.

    Raises:
        DataError: it is no Parquet file.
    """
    try:
        with file.open_input() as stream:
            return read_footer(stream)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file} is no Parquet file, or a damaged one: {error}") from error


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
