"""Check the values of a DataFrame; name the first invalid row.

The rows are observed while they are written, at almost no cost: Spark observes sizes, and the
Parquet footers have nulls and whether all is finite. Only if these show a fault, the DataFrame is
read once more to locate it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError
from .columns import SPARK_TYPES, Layout, Source, elements, expression, sizes
from .schema import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame


# Columns of a row that messages show, and characters of each.
_SHOWN_COLUMNS, _SHOWN_LENGTH = 4, 40
# Elements of the largest array by which a row is located.
_COMPARED = 4096


@dataclass(frozen=True)
class _Matches:
    """Rows of a DataFrame in which a condition holds.

    Attributes:
        rows: rows of the DataFrame.
        count: rows in which it holds.
        row: number of the first, from 0, in the DataFrame's order; -1 if there is none.
        shown: some of that row's values.
    """

    rows: int
    count: int
    row: int
    shown: Mapping[str, object]

    def describe(self) -> str:
        """Return "row 12 (id=3, name='x')"."""
        values = ", ".join(f"{k}={repr(v)[:_SHOWN_LENGTH]}" for k, v in self.shown.items())
        return f"row {self.row}" + (f" ({values})" if values else "")


def _locate(frame: DataFrame, condition: SparkColumn) -> _Matches:
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
    return _Matches(before, sum(part["count"] for part in parts), row, shown)


def add_row_number(error: DataError, frame: DataFrame, sources: Sequence[Source]) -> None:
    """Add to an error of a stored row its number in the DataFrame, if it can be located."""
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
    matches = _locate(frame, condition)
    if matches.count:
        others = f", the first of {matches.count} equal ones" if matches.count > 1 else ""
        error.args = (f"{error}; in the DataFrame it is {matches.describe()}{others}",)


def _shown_columns(frame: DataFrame) -> list[str]:
    """Return the columns that identify a row in messages: the first with one short value."""
    short = ("boolean", "byte", "short", "integer", "long", "float", "double", "string", "date")
    names = [f.name for f in frame.schema.fields if f.dataType.typeName() in short]
    lower_names = [name.lower() for name in frame.columns]
    return [name for name in names if lower_names.count(name.lower()) == 1][:_SHOWN_COLUMNS]


# Bytes at a value's beginning that identify its encoding.
_HEAD_BYTES = 16
# Regular expressions on the beginning in hexadecimal, two digits per byte, in which Java and Python
# agree. "npy" and "npz" are NumPy's own formats, in which Petastorm's NdarrayCodec and
# CompressedNdarrayCodec write.
_SIGNATURES = {
    "image": "|".join(
        (
            "89504E470D0A1A0A",  # PNG
            "FFD8FF",  # JPEG
            "474946383",  # GIF
            "52494646.{8}57454250",  # WebP: a RIFF file, its size, "WEBP"
            "424D.{8}00000000",  # BMP: its size, then two reserved fields
            "49492A00|4D4D002A|49492B00|4D4D002B",  # TIFF and BigTIFF, in both byte orders
            "0000000C6A5020200D0A870A",  # JPEG 2000
            # AVIF and HEIF: a box's size, "ftyp", the brand
            ".{8}66747970(?:61766966|61766973|68656963|68656978|6D696631)",
        )
    ),
    "npy": "934E554D5059",
    "npz": "504B0304",
}
# Names of an encoding's values in messages.
_TITLES = {
    "image": "PNG, JPEG, GIF, WebP, BMP or TIFF images",
    "npy": "npy arrays",
    "npz": "npz arrays",
}


def encoding_of(data: bytes) -> str:
    """Return the encoding whose signature ``data`` begin with; ``"raw"`` if none."""
    head = data[:_HEAD_BYTES].hex().upper()
    return next((e for e, start in _SIGNATURES.items() if re.match(start, head)), "raw")


# Beginning of the message about missing rows.
NO_ROWS = "there are no rows"
_FLOAT32_MAX = 3.4028234663852886e38
_UNSTEADY = (
    "the DataFrame returns other rows each time (random numbers without a seed, a source that "
    "changes): write it to files, or cache it (df.cache), and train on those rows"
)


@dataclass(frozen=True)
class Footer:
    """Facts about one column in the footers of a dataset.

    Attributes:
        nulls: null values, null elements and empty arrays; ``None`` if unknown.
        finite: whether all its values are known to be finite.
        infinite: whether some are known not to be.
        minimum: the smallest value, or a smaller one; ``None`` if unknown.
    """

    nulls: int | None
    finite: bool = True
    infinite: bool = False
    minimum: float | None = None


def observations(sources: Sequence[Source]) -> list[SparkColumn]:
    """Return the observations of ``sources`` in their stored form."""
    from pyspark.sql import functions as F

    columns = []
    for number, source in enumerate(sources):
        column = F.col(quoted(source.name))
        if source.kind == "binary":
            columns += [
                F.min(F.length(column)).alias(f"min{number}_1"),
                F.max(F.length(column)).alias(f"max{number}_1"),
                # Footers lack statistics of columns with long values.
                F.count_if(column.isNull()).alias(f"null{number}"),
            ]
            columns += [
                F.count_if(_begins(column, encoding)).alias(f"{encoding}{number}")
                for encoding in _SIGNATURES
            ]
        elif levels(source) == 1:
            columns += [
                F.min(F.size(column)).alias(f"min{number}_1"),
                F.max(F.size(column)).alias(f"max{number}_1"),
            ]
        if source.is_text:  # likewise
            columns.append(F.count_if(_holds_null(source)).alias(f"null{number}"))
        if source.weight:
            columns.append(F.count_if(_is_negative(source)).alias(f"negative{number}"))
    return columns


def _holds_null(source: Source) -> SparkColumn:
    """Return whether a stored value is null, or an array with a null element."""
    from pyspark.sql import functions as F

    column = F.col(quoted(source.name))
    if source.kind != "array":
        return column.isNull()
    return F.coalesce(F.exists(column, lambda value: value.isNull()), F.lit(True))


def nested_observations(sources: Sequence[Source]) -> list[SparkColumn]:
    """Return the observations of nested arrays among ``sources``, before they are stored."""
    from pyspark.sql import functions as F

    columns = []
    for number, source in enumerate(sources):
        if levels(source) > 1:
            for level in range(1, levels(source) + 1):
                lengths = sizes(source, level)
                columns += [
                    F.min(F.array_min(lengths)).alias(f"min{number}_{level}"),
                    F.max(F.array_max(lengths)).alias(f"max{number}_{level}"),
                ]
    return columns


def levels(source: Source) -> int:
    """Return how many levels of arrays the column has."""
    return {"array": source.depth, "vector": 1}.get(source.kind, 0)


def check_values(
    sources: Sequence[Source],
    facts: Mapping[str, Any],
    footers: Mapping[str, Footer],
    frame: DataFrame | None,
    *,
    allow_nan: bool = False,
) -> dict[str, Layout]:
    """Check the values of every column, and return their layouts.

    Args:
        sources: the columns.
        facts: the observations while they were written.
        footers: the footers' facts about each.
        frame: the DataFrame, to locate the first faulty row.
        allow_nan: allow NaN and infinite values.

    Raises:
        DataError: there are no rows, nulls, values that are not finite or do not fit their type,
            negative sample weights, or arrays of differing sizes.
    """
    if not facts["rows"]:
        raise DataError(f"{NO_ROWS}, so nothing to train on")
    for number, source in enumerate(sources):
        footer = footers[source.name]
        nulls = facts.get(f"null{number}", footer.nulls)
        negative = facts.get(f"negative{number}", 0)
        if nulls != 0 or negative or not (footer.finite or allow_nan):
            for fault in _faults(source, allow_nan):
                _refuse_fault(frame, source, fault)
            _refuse_recorded_faults(source, nulls, negative, footer.infinite and not allow_nan)
    return {
        source.name: _layout(number, source, facts, frame) for number, source in enumerate(sources)
    }


def _refuse_recorded_faults(
    source: Source, nulls: int | None, negative: int, infinite: bool
) -> None:
    """Refuse faults that were written, but do not occur when the rows are computed again."""
    empty = ", null elements or empty arrays" if source.kind == "array" else ""
    # Values that do not fit were written as null in integers, as infinite in floats.
    unfit = f", or too large for {source.dtype}"
    real = source.dtype.startswith("float")
    whole = not (real or source.is_text or source.kind == "binary")
    faults = [
        *([f"{nulls} values that are null{empty}{unfit if whole else ''}"] if nulls else []),
        *([f"{negative} negative sample weights"] if negative else []),
        *([f"values that are NaN or infinite{unfit if real else ''}"] if infinite else []),
    ]
    if faults:
        raise DataError(
            f"column {source.name!r} had {' and '.join(faults)} when the rows were written, but "
            f"none when they were computed again to find them; {_UNSTEADY}"
        )


def _layout(
    number: int, source: Source, facts: Mapping[str, Any], frame: DataFrame | None
) -> Layout:
    if source.kind == "binary":
        encoding = _encoding(number, source, facts, frame)
        size = facts[f"min{number}_1"]
        if encoding == "raw" and size != facts[f"max{number}_1"]:
            what = "byte strings"
            raise _ragged(number, source, facts, frame, 1, what)
        return Layout((size,) if encoding == "raw" else (), encoding)
    for level in range(1, levels(source) + 1):
        if facts[f"min{number}_{level}"] != facts[f"max{number}_{level}"]:
            nested = "nested " if level > 1 else ""
            what = nested + ("vectors" if source.kind == "vector" else "arrays")
            raise _ragged(number, source, facts, frame, level, what)
    return Layout(tuple(facts[f"min{number}_{k}"] for k in range(1, levels(source) + 1)))


def _encoding(
    number: int, source: Source, facts: Mapping[str, Any], frame: DataFrame | None
) -> str:
    rows = facts["rows"]
    for encoding in _SIGNATURES:
        count = facts[f"{encoding}{number}"]
        if count == rows:
            return encoding
        if count and 2 * count > rows:  # most rows are
            fault = _Fault(
                f"values other than {_TITLES[encoding]}, as {count} rows are,",
                "leave those rows out",
                _NotEncoded(encoding),
            )
            _refuse_fault(frame, source, fault)
            raise DataError(
                f"column {source.name!r} had {rows - count} values other than {_TITLES[encoding]} "
                f"when the rows were written, but none when they were computed again; {_UNSTEADY}"
            )
    return "raw"


@dataclass(frozen=True)
class _Fault:
    """A fault that values of a column may have.

    Attributes:
        title: the values' description, after "has".
        advice: what to do.
        condition: true for faulty rows.
    """

    title: str
    advice: str
    condition: Callable[[Source], SparkColumn]


def _faults(source: Source, allow_nan: bool) -> Iterator[_Fault]:
    # df.fillna and df.dropna do not look into arrays, nor does df.fillna make any.
    repair = f"leave those rows out (df.filter) or repair the {source.kind}s"
    filled = "fill them (df.fillna) or " if source.kind == "scalar" else ""
    yield _Fault("null values", f"{filled}leave those rows out (df.dropna)", _is_null)
    if source.kind == "array":
        yield _Fault("arrays with null elements", repair, _has_inner_null)
    if source.kind in ("array", "vector"):
        yield _Fault(
            f"empty {source.kind}s", "all rows need the same number of elements", _is_empty
        )
    if source.kind != "binary" and not source.is_text:
        wider = "float64" if source.dtype.startswith("float") else "int64"
        title = f"values that are too large for {source.dtype}"
        advice = f"keep them with dtypes={{{source.name!r}: '{wider}'}}, or scale them"
        yield _Fault(title, advice, _overflows)
        if not allow_nan:
            if source.kind == "scalar":
                repair = "fill them or leave those rows out (df.filter)"
            advice = f"{repair}, or let them pass with allow_nan=True"
            yield _Fault("values that are NaN or infinite", advice, _is_not_finite)
    if source.weight:
        advice = "a sample weight is at least 0; leave those rows out"
        yield _Fault("negative sample weights", advice, _is_negative)


def _is_null(source: Source) -> SparkColumn:
    from pyspark.sql import functions as F

    return F.col(quoted(source.name)).isNull()


def _has_inner_null(source: Source) -> SparkColumn:
    from pyspark.sql import functions as F

    values = elements(source)  # null if an inner array is
    return F.coalesce(F.exists(values, lambda value: value.isNull()), F.lit(True))


def _is_empty(source: Source) -> SparkColumn:
    from pyspark.sql import functions as F

    return F.size(elements(source)) == 0


def _overflows(source: Source) -> SparkColumn:
    from pyspark.sql import functions as F

    return F.exists(elements(source), lambda value: _element_overflows(value, source.dtype))


def _element_overflows(value: SparkColumn, dtype: str) -> SparkColumn:
    from pyspark.sql import functions as F

    if dtype == "float32":
        number = F.abs(value.cast("double"))
        return (number > F.lit(_FLOAT32_MAX)) & (number < F.lit(float("inf")))
    return value.isNotNull() & value.try_cast(SPARK_TYPES[dtype]).isNull()


def _is_not_finite(source: Source) -> SparkColumn:
    from pyspark.sql import functions as F

    infinite = F.lit(float("inf"))
    return F.exists(elements(source), lambda v: F.abs(v.cast("double")) >= infinite)


def _is_negative(source: Source) -> SparkColumn:
    from pyspark.sql import functions as F

    column = F.col(quoted(source.name))
    if source.kind == "array":
        return F.coalesce(F.exists(column, lambda value: value < 0), F.lit(False))
    return column < 0


@dataclass(frozen=True)
class _NotEncoded:
    encoding: str

    def __call__(self, source: Source) -> SparkColumn:
        from pyspark.sql import functions as F

        return ~_begins(F.col(quoted(source.name)), self.encoding)


def _begins(column: SparkColumn, encoding: str) -> SparkColumn:
    from pyspark.sql import functions as F

    head = F.hex(F.substring(column, 1, _HEAD_BYTES))
    return head.rlike(f"^(?:{_SIGNATURES[encoding]})")


def _byte_size(source: Source) -> SparkColumn:
    from pyspark.sql import functions as F

    return F.array(F.length(F.col(quoted(source.name))))


def _ragged(
    number: int,
    source: Source,
    facts: Mapping[str, object],
    frame: DataFrame | None,
    level: int,
    what: str,
) -> DataError:
    """Return the error for rows of differing sizes, with the first that differs from row 0."""
    from pyspark.sql import functions as F

    low, high = facts[f"min{number}_{level}"], facts[f"max{number}_{level}"]
    unit = "bytes" if source.kind == "binary" else "elements"
    where = ""
    if frame is not None:
        lengths = _byte_size(source) if source.kind == "binary" else sizes(source, level)
        first = frame.select(lengths).first()
        head = first[0] if first is not None else [low]
        if min(head) != max(head):
            where = f"; in row 0 alone, of {min(head)} to {max(head)}"
        else:
            other = _locate(frame, F.exists(lengths, lambda size: size != F.lit(head[0])))
            where = f"; row 0 has {head[0]}, {other.describe()} does not"
            if not other.count:
                where = f" when written, and {head[0]} when computed again; {_UNSTEADY}"
    return DataError(
        f"column {source.name!r} holds {what} of {low} to {high} {unit}{where}; all rows need the "
        "same number (pad or cut them)"
    )


def _refuse_fault(frame: DataFrame | None, source: Source, fault: _Fault) -> None:
    if frame is None:
        raise DataError(f"column {source.name!r} has {fault.title}; {fault.advice}")
    faulty = _locate(frame, fault.condition(source))
    if faulty.count:
        raise DataError(
            f"column {source.name!r} has {fault.title} in {faulty.count} of {faulty.rows} rows, "
            f"first in {faulty.describe()}; {fault.advice}"
        )
