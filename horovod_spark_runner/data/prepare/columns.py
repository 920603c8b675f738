"""The columns of a DataFrame as they are materialized, and the Spark expressions that do it.

Each column becomes one Parquet column of numbers, of strings, of lists of either, or of bytes, in
the JVM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...cluster.spark.session import is_case_sensitive
from ...errors import DataError
from ...formatting import quote_all
from ..manifest import TEXT
from .schema import Roles, check_named, check_roles, check_unambiguous, field_hint, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

# Spark type of the numbers -> NumPy dtype they are trained in, unless another is asked for.
_DEFAULT_DTYPES = {
    "boolean": "int8",
    "byte": "int8",
    "short": "int16",
    "integer": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float32",
    "decimal": "float32",
}
# NumPy dtype -> Spark type of the same values.
SPARK_TYPES = {
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "float32": "float",
    "float64": "double",
}
_REAL_TYPES = ("float", "double", "decimal")
_TEXT_TYPES = ("string", "char", "varchar")
_INDEX = "index it first with pyspark.ml.feature.StringIndexer (and OneHotEncoder)"
_ADVICE = {
    "map": "take its values out into columns of numbers",
    "struct": "select its fields as columns of their own",
    "binary": "only a column of its own can hold bytes, not an array",
    "date": "turn it into numbers, such as datediff or dayofweek",
    "timestamp": "turn it into numbers, such as unix_timestamp or hour",
    "timestamp_ntz": "turn it into numbers, such as unix_timestamp or hour",
}
_BYTES_DTYPES = ("uint8", "uint16", "uint32", "uint64", "float16", *SPARK_TYPES)


@dataclass(frozen=True)
class Source:
    """One column before it is materialized.

    Attributes:
        name: its name.
        kind: ``"scalar"``, ``"array"``, ``"vector"`` or ``"binary"``.
        given: Spark's name for the type of its elements.
        dtype: NumPy dtype they are trained in; ``"string"`` for strings, ``""`` for bytes, until
            their encoding is known.
        depth: how deep arrays are nested; 0 for what is no array.
        weight: whether they are sample weights, which are not negative.
    """

    name: str
    kind: str
    given: str
    dtype: str
    depth: int = 0
    weight: bool = False

    @property
    def is_text(self) -> bool:
        """Whether it holds strings."""
        return self.dtype == TEXT


def sources_of(
    frame: DataFrame, roles: Roles, dtypes: Mapping[str, str] | None = None
) -> tuple[Source, ...]:
    """Return the columns to materialize.

    Args:
        frame: the data.
        roles: the columns and their parts.
        dtypes: NumPy dtypes to train them in, where the defaults are not wanted.

    Raises:
        DataError: a column's type cannot be trained on, or not in its part or the dtype asked for.
    """
    check_roles(roles, frame.columns, case_sensitive=is_case_sensitive(frame.sparkSession))
    requested = dict(dtypes or {})
    check_named("dtypes", requested, roles)
    types = {field.name: field.dataType for field in frame.schema.fields}
    sources = tuple(_source(name, types[name], requested.get(name)) for name in roles.columns)
    for source in sources:
        steps = source.kind == "array" and source.depth == 1
        numbers = not source.is_text and (source.kind == "scalar" or steps)
        if source.name == roles.weight and not numbers:
            raise DataError(
                f"sample_weight_col {roles.weight!r} must hold one number per row, or an array of "
                "one for each step of a sequence"
            )
        if source.name in roles.labels and source.is_text:
            raise DataError(
                f"column {source.name!r} is of type string, which cannot be a label; {_INDEX}"
            )
    return tuple(replace(source, weight=source.name == roles.weight) for source in sources)


def sources_of_features(frame: DataFrame, names: Sequence[str]) -> tuple[Source, ...]:
    """Return the named columns of a DataFrame that is to be predicted on.

    Raises:
        DataError: a column is missing or ambiguous, or its type is none a model takes.
    """
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise DataError(
            f"the DataFrame has no column {quote_all(missing)}, which the model takes; it has "
            + quote_all(frame.columns)
            + field_hint(missing, frame.columns)
        )
    case_sensitive = is_case_sensitive(frame.sparkSession)
    check_unambiguous(names, frame.columns, case_sensitive=case_sensitive)
    types = {field.name: field.dataType for field in frame.schema.fields}
    return tuple(_source(name, types[name], None) for name in names)


def _source(name: str, data_type: DataType, requested: str | None) -> Source:
    from pyspark.ml.linalg import VectorUDT
    from pyspark.mllib.linalg import VectorUDT as OldVectorUDT
    from pyspark.sql.types import ArrayType, BinaryType

    if isinstance(data_type, BinaryType):
        return Source(name, "binary", "binary", _choose_dtype(name, requested, "", _BYTES_DTYPES))
    if isinstance(data_type, (VectorUDT, OldVectorUDT)):
        return Source(name, "vector", "double", _real(name, requested))
    depth, element = 0, data_type
    while isinstance(element, ArrayType):
        depth, element = depth + 1, element.elementType
    element_type = element.typeName()
    kind = "array" if depth else "scalar"
    if element_type in _TEXT_TYPES:
        if requested not in (None, TEXT):
            raise DataError(
                f"dtypes gives column {name!r} the type {requested!r}, but it holds strings, which "
                f"can only stay strings; {_INDEX}"
            )
        return Source(name, kind, TEXT, TEXT, depth)
    if element_type not in _DEFAULT_DTYPES:
        advice = _ADVICE.get(element_type, "turn it into numbers or arrays of numbers")
        raise DataError(
            f"column {name!r} is of type {data_type.simpleString()}, which cannot be trained on; "
            + advice
        )
    if element_type in _REAL_TYPES:
        dtype = _real(name, requested)
    else:
        dtype = _choose_dtype(name, requested, _DEFAULT_DTYPES[element_type], tuple(SPARK_TYPES))
    return Source(name, kind, element_type, dtype, depth)


def _real(name: str, requested: str | None) -> str:
    if requested in SPARK_TYPES and not requested.startswith("float"):
        raise DataError(
            f"dtypes gives column {name!r} the type {requested}, but it holds real numbers: round "
            "and cast them first if that is what is meant"
        )
    return _choose_dtype(name, requested, "float32", ("float32", "float64"))


def _choose_dtype(name: str, requested: str | None, default: str, choices: Sequence[str]) -> str:
    if requested is None:
        return default
    if requested not in choices:
        raise DataError(
            f"dtypes gives column {name!r} the type {requested!r}; it must be one of "
            + ", ".join(choices)
        )
    return requested


def expression(source: Source) -> SparkColumn:
    """Return the Spark expression that gives ``source`` in its stored form, under its name.

    What cannot be represented becomes null or infinite, which the checks find.

    Raises:
        DataError: strings were to become numbers, or numbers strings, or real numbers integers.
    """
    column = _column(source)
    if source.kind == "binary":
        return column.alias(source.name)
    integers = not source.dtype.startswith("float")
    if (source.given == TEXT) != source.is_text or (source.given in _REAL_TYPES and integers):
        raise DataError(
            f"column {source.name!r} holds values of type {source.given}, but {source.dtype} is "
            "what the model was trained on; cast it to that first"
        )
    stored = "string" if source.is_text else SPARK_TYPES[source.dtype]
    if source.kind == "array":
        for _ in range(source.depth - 1):
            column = _flatten(column)
        column = column.try_cast(f"array<{stored}>")
    elif source.kind == "vector":
        column = vector_elements(source, source.dtype)
    else:
        column = column.try_cast(stored)
    return column.alias(source.name)


def elements(source: Source) -> SparkColumn:
    """Return all elements of a row, as they are given, as one array."""
    from pyspark.sql import functions as F

    if source.kind == "vector":
        return vector_elements(source, "float64")
    column = _column(source)
    if source.kind == "scalar":
        return F.array(column)
    for _ in range(source.depth - 1):
        column = _flatten(column)
    return column


def sizes(source: Source, level: int) -> SparkColumn:
    """Return the lengths of all arrays of a row that lie ``level`` levels deep, from 1."""
    from pyspark.sql import functions as F

    column = vector_elements(source, "float32") if source.kind == "vector" else _column(source)
    for _ in range(level - 2):
        column = _flatten(column)
    return F.array(F.size(column)) if level == 1 else F.transform(column, F.size)


def vector_elements(source: Source, dtype: str) -> SparkColumn:
    """Return a vector column as arrays; null stays null."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    column = _column(source)
    # Spark's function fails on null, and says neither where nor how often.
    return F.when(column.isNotNull(), vector_to_array(column, dtype))


def _column(source: Source) -> SparkColumn:
    from pyspark.sql import functions as F

    return F.col(quoted(source.name))


def _flatten(column: SparkColumn) -> SparkColumn:
    from pyspark.sql import functions as F

    return F.flatten(column)
