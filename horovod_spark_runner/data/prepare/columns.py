"""Columns of a dataset: from a DataFrame's (`Source`) to those that the ranks read (`Column`).

In the JVM, each column becomes one Parquet column of numbers, of strings, of lists of either, or of
bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ...cluster.spark.session import is_case_sensitive
from ...errors import DataError
from ...formatting import quote_all
from ..manifest import FORMAT, TEXT, Column
from ..read.decode import decode_array, decode_value, fit_value
from ..read.images import image_dtype, image_mode
from .schema import (
    Roles,
    check_named,
    check_roles,
    check_shape,
    check_unambiguous,
    field_hint,
    quoted,
)

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

# Spark type of the numbers -> NumPy dtype that they are trained in by default.
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


# Small row groups shuffle well, and were measured to read faster than large ones.
ROW_GROUP_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class Source:
    """A column of a DataFrame, before it is materialized.

    Attributes:
        name: its name.
        kind: ``"scalar"``, ``"array"``, ``"vector"`` or ``"binary"``.
        given: Spark's name for the type of its elements.
        dtype: NumPy dtype they are trained in; ``"string"`` for strings, ``""`` for bytes, until
            their encoding is known.
        depth: nesting depth of arrays; 0 for other columns.
        weight: whether it holds sample weights, which are not negative.
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


@dataclass(frozen=True)
class DataRequest:
    """Request for a dataset: columns, types and shapes.

    Attributes:
        roles: the columns and their parts.
        shapes: shapes of columns; by default those of the data.
        materializer: ``"petastorm"``, or ``"spark"``, which is what Spark Connect gets anyway.
        dtypes: NumPy dtypes of columns, in place of the defaults.
        allow_nan: allow NaN and infinite values.
        reuse: reuse an existing dataset, and allow others to reuse this one.
    """

    roles: Roles
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    materializer: str = "petastorm"
    dtypes: Mapping[str, str] = field(default_factory=dict)
    allow_nan: bool = False
    reuse: bool = True

    def key(self, sources: Sequence[Source]) -> str:
        """Return the identity of the request: which columns, in which types and shapes."""
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        wanted = [FORMAT, [asdict(s) for s in sources], shapes, self.allow_nan, ROW_GROUP_BYTES]
        return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]


def sources_of(
    frame: DataFrame, roles: Roles, dtypes: Mapping[str, str] | None = None
) -> tuple[Source, ...]:
    """Return the columns to materialize.

    Args:
        frame: the data.
        roles: the columns and their parts.
        dtypes: NumPy dtypes to train them in, in place of the defaults.

    Raises:
        DataError: a column's type cannot be trained on, or not in its role or the requested dtype.
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
            f"dtypes gives column {name!r} the type {requested}, but it holds floats: round and "
            "cast them first if that is intended"
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
    """Return the Spark expression of ``source`` in its stored form, under its name.

    Values that do not fit become null or infinite, which the checks detect.

    Raises:
        DataError: it would turn strings into numbers or back, or floats into integers.
    """
    column = _spark_column(source)
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
        column = _vector_elements(source, source.dtype)
    else:
        column = column.try_cast(stored)
    return column.alias(source.name)


def elements(source: Source) -> SparkColumn:
    """Return all elements of a row, before they are stored, as one array."""
    from pyspark.sql import functions as F

    if source.kind == "vector":
        return _vector_elements(source, "float64")
    column = _spark_column(source)
    if source.kind == "scalar":
        return F.array(column)
    for _ in range(source.depth - 1):
        column = _flatten(column)
    return column


def sizes(source: Source, level: int) -> SparkColumn:
    """Return the lengths of all arrays of a row at nesting ``level``, from 1."""
    from pyspark.sql import functions as F

    column = (
        _vector_elements(source, "float32") if source.kind == "vector" else _spark_column(source)
    )
    for _ in range(level - 2):
        column = _flatten(column)
    return F.array(F.size(column)) if level == 1 else F.transform(column, F.size)


def _vector_elements(source: Source, dtype: str) -> SparkColumn:
    """Return a vector column as arrays; null stays null."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    column = _spark_column(source)
    # Spark's function fails on null, without saying where.
    return F.when(column.isNotNull(), vector_to_array(column, dtype))


def _spark_column(source: Source) -> SparkColumn:
    from pyspark.sql import functions as F

    return F.col(quoted(source.name))


def _flatten(column: SparkColumn) -> SparkColumn:
    from pyspark.sql import functions as F

    return F.flatten(column)


@dataclass(frozen=True)
class Layout:
    """Layout of a column's values in the Parquet files.

    Attributes:
        sizes: sizes of a row's value, nested arrays from the outside in; ``()`` for a scalar.
        encoding: encoding of bytes: ``"image"``, ``"npy"``, ``"npz"``, ``"raw"``; ``""`` for
            numbers and strings.
    """

    sizes: tuple[int, ...] = ()
    encoding: str = ""


def columns_of(
    sources: Sequence[Source],
    layouts: Mapping[str, Layout],
    shapes: Mapping[str, tuple[int, ...]],
    first_value: Callable[[str], bytes],
) -> tuple[Column, ...]:
    """Return the columns of a dataset.

    Args:
        sources: the columns as they were written.
        layouts: the layouts of their values.
        shapes: requested shapes, by column.
        first_value: returns the first row's bytes of a column.

    Raises:
        DataError: a shape does not fit, or the first value cannot be decoded.
    """
    return tuple(
        _read_column(source, layouts[source.name], shapes.get(source.name), first_value)
        for source in sources
    )


def _read_column(
    source: Source,
    layout: Layout,
    shape: tuple[int, ...] | None,
    first_value: Callable[[str], bytes],
) -> Column:
    name = source.name
    if layout.encoding == "image":
        return _image_column(source, shape, first_value(name))
    if layout.encoding in ("npy", "npz"):
        array = decode_array(name, layout.encoding, first_value(name))
        fitted = _fit(name, shape, array.shape)
        if fitted != array.shape:
            raise DataError(
                f"shapes gives column {name!r} the shape {fitted}, but its arrays have the shape "
                f"{array.shape}"
            )
        column = Column(name, source.dtype or _number(name, array.dtype), fitted, layout.encoding)
        fit_value(column, array, "the first row holds")
        return column
    if layout.encoding == "raw":
        dtype = source.dtype or "uint8"
        (size,) = layout.sizes
        if not size or size % np.dtype(dtype).itemsize:
            raise DataError(
                f"column {name!r} holds {size} bytes per row, which are not a multiple of "
                f"{dtype}'s size; give its type with dtypes={{{name!r}: …}}, and its shape in "
                "shapes"
            )
        sizes = (size // np.dtype(dtype).itemsize,)
        return Column(name, dtype, _fit(name, shape, sizes), "raw")
    return Column(name, source.dtype, _fit(name, shape, layout.sizes))


def _fit(name: str, shape: tuple[int, ...] | None, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a column whose rows have ``sizes``."""
    if 0 in sizes:
        raise DataError(f"column {name!r} holds empty arrays only")
    if shape is None:
        return sizes
    check_shape(name, shape, math.prod(sizes) if sizes else 0)
    return shape


def missing_image_shape(name: str) -> DataError:
    """Return the error for a column of encoded images without a shape."""
    return DataError(
        f"column {name!r} holds encoded images; give the size to read them in: "
        f"data=DataOptions(shapes={{{name!r}: (height, width, channels)}}) for run_training, "
        f"shapes={{{name!r}: (height, width, channels)}} elsewhere"
    )


def _image_column(source: Source, shape: tuple[int, ...] | None, data: bytes) -> Column:
    if shape is None:
        raise missing_image_shape(source.name)
    image_mode(source.name, shape)
    dtype = source.dtype or image_dtype(source.name, data)
    column = Column(source.name, dtype, shape, "image")
    decode_value(column, data, None, None)  # checks Pillow and the first image
    return column


def _number(name: str, dtype: np.dtype) -> str:
    """Return the dtype to train an array in: float32 for floats."""
    if dtype.kind == "b":
        return "int8"
    if dtype.kind == "f":
        return "float32"
    if dtype.kind in "iu":
        return str(dtype.name)
    raise DataError(f"column {name!r} holds arrays of {dtype}, which cannot be trained on")
