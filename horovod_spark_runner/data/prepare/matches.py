"""Find the first row of a DataFrame that fulfils a condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError
from .columns import SPARK_TYPES, Source, expression
from .schema import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

# Columns of a row that are shown of it, and characters of each.
_SHOWN_COLUMNS, _SHOWN_LENGTH = 4, 40
# Elements of an array by which a row is found, at most.
_COMPARED = 4096


@dataclass(frozen=True)
class Matches:
    """Where a condition holds in a DataFrame.

    Attributes:
        rows: rows of the DataFrame.
        count: rows in which it holds.
        row: number of the first, from 0, in the DataFrame's order; -1 if there is none.
        shown: some of that row's values.
    """

    rows: int
    count: int
    row: int
    shown: Mapping[str, Any]

    def describe(self) -> str:
        """Return "row 12 (id=3, name='x')"."""
        values = ", ".join(f"{k}={repr(v)[:_SHOWN_LENGTH]}" for k, v in self.shown.items())
        return f"row {self.row}" + (f" ({values})" if values else "")


def locate(frame: DataFrame, condition: SparkColumn) -> Matches:
    """Return in how many rows of ``frame`` ``condition`` holds, and the first of them."""
    from pyspark.sql import functions as F

    names = _shown_columns(frame)
    bad = F.coalesce(condition, F.lit(False))
    marked = frame.select(
        F.monotonically_increasing_id().alias("__id"),
        bad.alias("__bad"),
        *(F.col(quoted(name)).alias(f"__shown{i}") for i, name in enumerate(names)),
    )
    # The upper bits of the identifier are the partition, the lower ones the row in it.
    faulty = F.when(F.col("__bad"), F.col("__id"))
    values = F.struct(F.lit(1), *(F.col(f"__shown{i}") for i in range(len(names))))
    parts = (
        marked.groupBy(F.shiftright("__id", 33).alias("part"))
        .agg(
            F.count(F.lit(1)).alias("rows"),
            F.count(faulty).alias("count"),
            F.min(faulty).alias("first"),
            F.min_by(values, faulty).alias("shown"),
        )
        .orderBy("part")
        .collect()
    )
    before, row, shown = 0, -1, {}
    for part in parts:
        if part["count"] and row < 0:
            row = before + (part["first"] & ((1 << 33) - 1))
            shown = dict(zip(names, list(part["shown"])[1:], strict=True))
        before += part["rows"]
    return Matches(before, sum(part["count"] for part in parts), row, shown)


def name_row(error: DataError, frame: DataFrame, sources: Sequence[Source]) -> None:
    """Add to an error of a stored row which row of the DataFrame that is, if it can be found."""
    from pyspark.sql import functions as F

    condition = F.lit(True)
    for source in sources:
        if source.name not in error.row:  # the model does not take it
            continue
        stored, value = expression(source), error.row[source.name]
        if source.kind == "binary":
            if isinstance(value, str):
                condition &= F.md5(stored) == F.lit(value)
        elif np.size(value) <= _COMPARED:
            kind = "string" if source.is_text else SPARK_TYPES[source.dtype]
            wanted = F.lit(value).cast(kind)
            if isinstance(value, list):
                wanted = F.lit(np.ravel(value).tolist()).cast(f"array<{kind}>")
            condition &= stored.eqNullSafe(wanted)
    found = locate(frame, condition)
    if found.count:
        others = f", the first of {found.count} alike" if found.count > 1 else ""
        error.args = (f"{error}; in the DataFrame it is {found.describe()}{others}",)


def _shown_columns(frame: DataFrame) -> list[str]:
    """Return the columns by which a row is recognised: the first that hold one short value."""
    short = ("boolean", "byte", "short", "integer", "long", "float", "double", "string", "date")
    names = [f.name for f in frame.schema.fields if f.dataType.typeName() in short]
    known = [name.lower() for name in frame.columns]
    return [name for name in names if known.count(name.lower()) == 1][:_SHOWN_COLUMNS]
