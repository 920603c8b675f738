"""DataFrame to Parquet, checked on the way.

One Spark job writes the rows and, while it does, counts them, looks for nulls and ragged arrays
and sums up a checksum (``DataFrame.observe``), so that the data are computed once. What fails the
checks is deleted and reported; what passes is moved to its final place and described by a
manifest, written last: a folder without a manifest is not a dataset.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from ..errors import DataError
from ..storage.filesystem import Location
from . import petastorm_compat
from .manifest import Column, Manifest, RowGroup
from .schema import Roles, Source, check_shapes, expression, quoted, sources_of

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

MANIFEST_FILE = "manifest.json"
# Small row groups shuffle well, and were measured to read faster than large ones.
ROW_GROUP_BYTES = 2 * 1024 * 1024
CODEC = "snappy"


@dataclass(frozen=True)
class DataRequest:
    """What to make of a DataFrame.

    Attributes:
        roles: the columns and their parts.
        shapes: shapes of array columns; flat where not given.
        materializer: ``"petastorm"`` or ``"spark"`` (needed on Spark Connect).
    """

    roles: Roles
    shapes: Mapping[str, tuple[int, ...]]
    materializer: str = "petastorm"


def materialize(frame: DataFrame, request: DataRequest, folder: Location, name: str) -> Manifest:
    """Write ``frame``'s columns under ``folder`` and return their manifest.

    Args:
        frame: the data; every row is written once.
        request: which columns, in which shapes.
        folder: storage that the driver and all executors reach.
        name: what the data are for ("train", "validation"); begins the dataset's folder name.

    Raises:
        DataError: the columns or values cannot be trained on; nothing is left behind.
    """
    from pyspark.sql import Observation

    sources = sources_of(frame, request.roles)
    observation = Observation(f"horovod_{uuid.uuid4().hex[:8]}")
    prepared = frame.select(*(expression(source) for source in sources))
    observed = prepared.observe(observation, *_observations(sources))
    folder.make_folder()
    written = _write(observed, request.materializer, folder)
    try:
        facts = observation.get
        widths = check_values(sources, facts, request.roles)
        shapes = check_shapes(request.shapes, widths)
        target = folder.join(f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}")
        columns = tuple(Column(s.name, s.dtype, shapes[s.name]) for s in sources)
        files, groups = read_footers(written)
        checksum = f"{facts['xor']:x}.{facts['sum']:x}"
        written.move_to(target)
    except BaseException:
        written.delete_folder()
        raise
    manifest = Manifest(str(target), files, columns, groups, checksum)
    target.join(MANIFEST_FILE).write_text(manifest.to_json())
    return manifest


def _write(frame: DataFrame, materializer: str, folder: Location) -> Location:
    if materializer == "petastorm":
        url = petastorm_compat.convert(
            frame.sparkSession, frame, folder.spark_url, ROW_GROUP_BYTES, CODEC
        )
        return folder.join(url.rpartition("/")[2])  # its own folder under ours
    target = folder.join(f"spark-{uuid.uuid4().hex}")
    writer = frame.write.option("compression", CODEC)
    writer = writer.option("parquet.block.size", ROW_GROUP_BYTES)
    writer.option("parquet.enable.dictionary", "false").parquet(target.spark_url)
    return target


def _observations(sources: Sequence[Source]) -> list[SparkColumn]:
    from pyspark.sql import functions as F

    hashed = F.xxhash64(*(F.col(quoted(source.name)) for source in sources))
    columns = [
        F.count(F.lit(1)).alias("rows"),
        # Both are the same for every order of the rows; the second tells doubled rows apart.
        F.coalesce(F.bit_xor(hashed), F.lit(0)).alias("xor"),
        F.coalesce(F.sum(F.pmod(hashed, F.lit(2**31))), F.lit(0)).alias("sum"),
    ]
    for number, source in enumerate(sources):
        column = F.col(quoted(source.name))
        columns.append(F.count_if(column.isNull()).alias(f"null{number}"))
        if source.kind != "scalar":
            columns += [
                F.min(F.size(column)).alias(f"min{number}"),
                F.max(F.size(column)).alias(f"max{number}"),
            ]
        if source.kind == "array":
            inner = F.exists(column, lambda element: element.isNull())
            columns.append(F.count_if(inner).alias(f"inner{number}"))
    return columns


def check_values(
    sources: Sequence[Source], facts: Mapping[str, Any], roles: Roles
) -> dict[str, int]:
    """Return the elements per row of every column, 0 for scalars. Pure.

    Args:
        sources: the columns.
        facts: what was observed while they were written.
        roles: their parts, for the messages.

    Raises:
        DataError: there are no rows, nulls, or arrays of differing length.
    """
    rows = facts["rows"]
    if not rows:
        raise DataError("the DataFrame has no rows: there is nothing to train on")
    widths: dict[str, int] = {}
    for number, source in enumerate(sources):
        nulls, inner = facts[f"null{number}"], facts.get(f"inner{number}") or 0
        if nulls or inner:
            what = "null values" if nulls else "arrays with null elements"
            raise DataError(
                f"column {source.name!r} has {nulls or inner} {what} in {rows} rows; fill them "
                "(df.fillna) or leave those rows out (df.dropna)"
            )
        if source.kind == "scalar":
            widths[source.name] = 0
            continue
        low, high = facts[f"min{number}"], facts[f"max{number}"]
        if low != high:
            raise DataError(
                f"column {source.name!r} holds {source.kind}s of {low} to {high} elements; all "
                "rows need the same number (pad or cut them)"
            )
        if not high:
            raise DataError(f"column {source.name!r} holds empty {source.kind}s only")
        widths[source.name] = high
    return widths


def read_footers(folder: Location) -> tuple[tuple[str, ...], tuple[RowGroup, ...]]:
    """Return the Parquet files in ``folder`` that hold rows, and all their row groups."""
    files: list[str] = []
    groups: list[RowGroup] = []
    for file in folder.list():
        if not file.name.endswith(".parquet"):
            continue
        with file.open_input() as stream:
            metadata = pq.read_metadata(stream)
        found = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        if not any(group.num_rows for group in found):
            continue  # an empty partition
        groups += [
            RowGroup(len(files), i, group.num_rows, group.total_byte_size)
            for i, group in enumerate(found)
            if group.num_rows
        ]
        files.append(file.name)
    return tuple(files), tuple(groups)
