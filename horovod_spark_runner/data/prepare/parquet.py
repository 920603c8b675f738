"""Parquet files that are trained on as they are, without writing them again.

Their footers tell most of what materializing checks; what they do not tell (NaN, the length of
every list) the reader checks, row group by row group.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import DataError
from ...storage.filesystem import Location
from ..manifest import TEXT, Manifest
from .checks import Footer, Layout, encoding_of
from .columns import Source
from .footers import FooterFacts, first_value, footers_of, manifest_of, parquet_files
from .layout import columns_of
from .materialize import DataRequest

_DTYPES = {"bool": "int8", "halffloat": "float32", "float": "float32", "double": "float32"}


def open_parquet(location: Location, request: DataRequest) -> Manifest | None:
    """Return the manifest of Parquet files that can be read as they are.

    Args:
        location: a folder of files, or one file; a Petastorm dataset's codecs (images, ndarrays)
            are understood.
        request: which columns, in which types and shapes.

    Returns:
        ``None`` if Spark has to convert or check the columns first: decimals, nested lists,
        vectors, partition columns, a type asked for, files without statistics, or whose columns
        differ; or to tell which files count: those of a stream's sink, or of a table.

    Raises:
        DataError: the files hold no rows, nulls, negative sample weights, or lists of differing
            length.
    """
    files = parquet_files(location)
    names = request.roles.columns
    folders = {name.lower() for name in files.partitions or ()}
    if files.log or any(name.lower() in folders for name in names):
        return None
    facts = footers_of(files)
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
    """Tell whether the footers show all that has to be checked."""
    return footer.nulls is not None and not (source.weight and footer.minimum is None)


def _leaf_numbers(paths: Sequence[str]) -> dict[str, int]:
    """Return the numbers of the leaves that are the only one below a name, by that name."""
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
            "them, or let them pass with allow_nan=True"
        )
    if source.weight and footer.minimum is not None and footer.minimum < 0:
        raise DataError(
            f"column {source.name!r} has negative sample weights, down to {footer.minimum:g}, in "
            f"{location}; a sample weight is at least 0; {drop}"
        )


def _layout(source: Source, leaf: int, facts: FooterFacts, value: Any) -> Layout:
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


def _identity(facts: FooterFacts) -> str:
    """Return the identity of the files: their names, sizes and times."""
    files: Sequence[Any] = [[f.name, f.size, f.changed] for f in facts.files]
    return "files." + hashlib.sha256(json.dumps(files).encode()).hexdigest()[:32]
