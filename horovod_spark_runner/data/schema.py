"""From a DataFrame's columns to the columns that are trained on.

Checks what the schema alone shows, and makes the Spark expressions that turn each column into
numbers or arrays of numbers, in the JVM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

# Spark type -> (type in the Parquet files, NumPy dtype). Real numbers are trained in float32.
_SCALARS = {
    "boolean": ("tinyint", "int8"),
    "byte": ("tinyint", "int8"),
    "short": ("smallint", "int16"),
    "integer": ("int", "int32"),
    "long": ("bigint", "int64"),
    "float": ("float", "float32"),
    "double": ("float", "float32"),
    "decimal": ("float", "float32"),
}
_ADVICE = {
    "string": "index it first with pyspark.ml.feature.StringIndexer (and OneHotEncoder)",
    "map": "take its values out into columns of numbers",
    "struct": "select its fields as columns of their own",
    "binary": "decode it into an array of numbers",
    "date": "turn it into numbers, such as datediff or dayofweek",
    "timestamp": "turn it into numbers, such as unix_timestamp or hour",
    "timestamp_ntz": "turn it into numbers, such as unix_timestamp or hour",
}


@dataclass(frozen=True)
class Roles:
    """Which columns play which part; every tuple holds column names.

    Attributes:
        features: the model's inputs.
        labels: what it is to predict.
        weight: weight of each row in the loss, if any.
    """

    features: tuple[str, ...]
    labels: tuple[str, ...]
    weight: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.features, *self.labels, *((self.weight,) if self.weight else ()))


@dataclass(frozen=True)
class Source:
    """One column before it is materialized.

    Attributes:
        name: its name.
        kind: ``"scalar"``, ``"array"`` or ``"vector"``.
        stored: Spark type of its numbers in the Parquet files.
        dtype: NumPy dtype of them.
    """

    name: str
    kind: str
    stored: str
    dtype: str


def check_roles(roles: Roles, available: Sequence[str]) -> None:
    """Check that every column exists and has one part to play. Pure.

    Raises:
        DataError: a column is missing, named twice, ambiguous, or label and feature at once.
    """
    if not roles.features:
        raise DataError("feature_cols names no column")
    if not roles.labels:
        raise DataError("label_cols names no column")
    for title, names in (("feature_cols", roles.features), ("label_cols", roles.labels)):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"{title} names {_quote(twice)} more than once")
    both = [name for name in roles.labels if name in roles.features]
    if both:
        raise DataError(
            f"{_quote(both)} is in label_cols and in feature_cols: the model would be shown what "
            "it is to predict"
        )
    if roles.weight is not None and roles.weight in (*roles.features, *roles.labels):
        raise DataError(f"sample_weight_col {roles.weight!r} is a feature or label too")
    missing = [name for name in roles.columns if name not in available]
    if missing:
        raise DataError(
            f"the DataFrame has no column {_quote(missing)}; it has {_quote(available)}"
        )
    ambiguous = [name for name in roles.columns if list(available).count(name) > 1]
    if ambiguous:
        raise DataError(
            f"the DataFrame has several columns named {_quote(ambiguous)}; rename them so that "
            "each name is there once"
        )


def sources_of(frame: DataFrame, roles: Roles) -> tuple[Source, ...]:
    """Return the columns to materialize.

    Raises:
        DataError: a column's type cannot be trained on.
    """
    check_roles(roles, frame.columns)
    types = {field.name: field.dataType for field in frame.schema.fields}
    sources = tuple(_source(name, types[name]) for name in roles.columns)
    for source in sources:
        if source.name == roles.weight and source.kind != "scalar":
            raise DataError(f"sample_weight_col {roles.weight!r} must hold one number per row")
    return sources


def sources_of_features(frame: DataFrame, names: Sequence[str]) -> tuple[Source, ...]:
    """Return the named columns of a DataFrame that is to be predicted on.

    Raises:
        DataError: a column is missing, or its type is none a model takes.
    """
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise DataError(
            f"the DataFrame has no column {_quote(missing)}, which the model takes; it has "
            + _quote(frame.columns)
        )
    types = {field.name: field.dataType for field in frame.schema.fields}
    return tuple(_source(name, types[name]) for name in names)


def _source(name: str, data_type: DataType) -> Source:
    from pyspark.ml.linalg import VectorUDT
    from pyspark.mllib.linalg import VectorUDT as OldVectorUDT
    from pyspark.sql.types import ArrayType

    if isinstance(data_type, (VectorUDT, OldVectorUDT)):
        return Source(name, "vector", "float", "float32")
    kind, element = "scalar", data_type
    if isinstance(data_type, ArrayType):
        kind, element = "array", data_type.elementType
    type_name = element.typeName()
    if type_name not in _SCALARS:
        advice = _ADVICE.get(type_name, "turn it into numbers or arrays of numbers")
        if kind == "array" and isinstance(element, ArrayType):
            advice = "flatten it (pyspark.sql.functions.flatten) and give its shape in shapes={…}"
        raise DataError(
            f"column {name!r} is of type {data_type.simpleString()}, which cannot be trained on; "
            + advice
        )
    stored, dtype = _SCALARS[type_name]
    return Source(name, kind, stored, dtype)


def expression(source: Source) -> SparkColumn:
    """Return the Spark expression that gives ``source`` in its stored form, under its name."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    column = F.col(quoted(source.name))
    if source.kind == "vector":
        # Spark's function fails on null, and says neither where nor how often.
        column = F.when(column.isNotNull(), vector_to_array(column, "float32"))
    elif source.kind == "array":
        column = column.cast(f"array<{source.stored}>")
    else:
        column = column.cast(source.stored)
    return column.alias(source.name)


def quoted(name: str) -> str:
    """Return a column name that Spark does not read dots or spaces into."""
    return "`" + name.replace("`", "``") + "`"


def check_shape_names(shapes: Mapping[str, object], names: Sequence[str]) -> None:
    """Check that ``shapes`` speaks of columns that are trained on. Pure.

    Raises:
        DataError: it does not.
    """
    unknown = [name for name in shapes if name not in names]
    if unknown:
        raise DataError(f"shapes names {_quote(unknown)}, which is neither feature nor label")


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], widths: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every column, as asked or flat. Pure.

    Args:
        shapes: shapes asked for, by column.
        widths: elements per row, by column; 0 for a scalar.

    Raises:
        DataError: a shape names no column, or does not hold its column's elements.
    """
    check_shape_names(shapes, tuple(widths))
    result: dict[str, tuple[int, ...]] = {}
    for name, width in widths.items():
        shape = tuple(int(size) for size in shapes.get(name, (width,) if width else ()))
        elements = 1
        for size in shape:
            elements *= size
        if elements != max(width, 1) or (shape and not width):
            found = f"{width} elements" if width else "a single number"
            raise DataError(
                f"shapes gives column {name!r} the shape {shape} of {elements} elements, but its "
                f"rows hold {found}"
            )
        result[name] = shape
    return result


def _quote(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
