"""Feature columns as the model takes them: of DataFrames, and of Parquet files without Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..config.prediction import PredictionSettings
from ..data.manifest import TEXT, Column
from ..data.prepare.columns import Source, expression, sizes
from ..errors import DataError, InvalidInputError, brief
from ..formatting import quote_all
from ..training.spec import Binding

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn

# Arrow's names of numbers -> Spark's.
_NUMBERS = {
    "bool": "boolean",
    "int8": "byte",
    "uint8": "short",
    "int16": "short",
    "uint16": "integer",
    "int32": "integer",
    "uint32": "long",
    "int64": "long",
    "float": "float",
    "double": "double",
}
# What Spark's vectors are in Parquet, and the value of ``type`` in a dense one.
_VECTOR_FIELDS = ("type", "size", "indices", "values")
_DENSE = 1


def feature_names(
    settings: PredictionSettings, inputs: Binding, columns: Sequence[Column]
) -> tuple[str, ...]:
    """Return the DataFrame's column for each of ``columns``, in their order.

    Args:
        settings: may name the DataFrame's columns.
        inputs: which column of the training feeds which input.
        columns: those columns.

    Raises:
        InvalidInputError: other columns are named than the model takes.
    """
    trained = tuple(column.name for column in columns)
    setting, user_columns = "feature_cols", settings.feature_cols
    if settings.features_col is not None:
        setting, user_columns = "features_col", [settings.features_col]
    if user_columns is None:
        return trained
    takes = f"the model takes {quote_all(trained)}, in this order"
    slots = inputs.slots
    if isinstance(user_columns, Mapping):
        # A model trained on a list of columns knows its inputs by these.
        names = inputs.names or tuple(" + ".join(slot) for slot in slots)
        if set(names) != set(user_columns):
            raise InvalidInputError(
                f"{setting}={brief(user_columns)} does not fit: {takes}, for its inputs "
                f"{quote_all(names)}"
            )
        requested = [user_columns[name] for name in names]
    else:
        requested = list(user_columns)
    each = [[one] if isinstance(one, str) else list(one or ()) for one in requested]
    flat, wanted = [n for s in each for n in s], [n for s in slots for n in s]
    renamed = dict(zip(wanted, flat, strict=False))
    nested = any(len(slot) > 1 for slot in each)
    same = len(flat) == len(wanted) and [renamed[name] for name in wanted] == flat
    if not same or (nested and list(map(len, each)) != list(map(len, slots))):
        raise InvalidInputError(f"{setting}={brief(user_columns)} does not fit: {takes}")
    return tuple(renamed[name] for name in trained)


def feature_argument(source: Source, column: Column) -> SparkColumn:
    """Return the Spark expression that gives ``source`` as the model was trained on ``column``.

    What does not fit becomes null.

    Raises:
        DataError: its type is another one.
    """
    check_fits(source, column)
    return _of_same_shape(expression(replace(source, dtype=column.dtype)), source, column)


def check_fits(source: Source, column: Column) -> None:
    """Check that a column is of the kind the model was trained on, and nothing would be cut.

    Raises:
        DataError: the column is of another kind, or its values would be cut.
    """
    bytes_wanted, text = column.encoding != "", column.dtype == "string"
    if (
        (source.kind == "binary") != bytes_wanted
        or (not bytes_wanted and (source.kind == "scalar") != (column.shape == ()))
        or (source.given == "string") != text
    ):
        kind = "string" if source.given == "string" else source.kind
        raise DataError(
            f"column {source.name!r} is a {kind}, but the model was trained on {column.describe()}"
        )
    real = source.kind == "vector" or source.given in ("float", "double", "decimal")
    if real and not bytes_wanted and not column.dtype.startswith("float"):
        raise DataError(
            f"column {source.name!r} holds real numbers ({source.given}), but the model was "
            f"trained on {column.describe()}: round and cast them first"
        )


def _of_same_shape(value: SparkColumn, source: Source, column: Column) -> SparkColumn:
    """Return null in place of nested arrays whose sizes only add up to those of ``column``."""
    from pyspark.sql import functions as F

    for level in range(2, source.depth + 1):
        level_sizes = sizes(source, level)
        size = F.array_min(level_sizes)
        same = size == F.array_max(level_sizes)
        if len(column.shape) == source.depth:
            same &= size == column.shape[level - 1]
        value = F.when(same, value)
    return value


def check_feature(field: pa.Field, column: Column) -> None:
    """Check that ``field`` can be predicted on by a model that was trained on ``column``.

    Raises:
        DataError: its type is another one.
    """
    check_fits(_source(field), column)


def feature_array(array: pa.Array, column: Column) -> pa.Array:
    """Return a checked column's values as the model's type; values that do not fit are null."""
    if pa.types.is_struct(array.type):
        array = _vector_values(array)
    if column.encoding:
        return array.cast(pa.binary())
    wanted = pa.string() if column.is_text else pa.from_numpy_dtype(column.numpy_dtype)
    if not column.shape:
        return _cast(array, wanted)
    array = _in_lists(array)
    if pa.types.is_list(array.type.value_type):
        array = _flat(array, column.shape)
    if array.type.value_type == wanted:
        return array
    if not array.null_count:
        return pa.ListArray.from_arrays(array.offsets, _cast(array.values, wanted))
    if array.offset:  # pyarrow takes no mask beside offsets of a slice
        array = array.take(pa.array(np.arange(len(array))))
    elements = _cast(array.values, wanted)
    return pa.ListArray.from_arrays(array.offsets, elements, mask=array.is_null())


def _source(field: pa.Field) -> Source:
    name, element = field.name, field.type
    if pa.types.is_struct(element) and _is_vector(element):
        return Source(name, "vector", "double", "float32")
    if pa.types.is_binary(element) or pa.types.is_large_binary(element):
        return Source(name, "binary", "binary", "")
    depth = _levels(element)
    for _ in range(depth):
        element = element.value_type
    type_name = _NUMBERS.get(str(element))
    if pa.types.is_string(element) or pa.types.is_large_string(element):
        type_name = TEXT
    elif pa.types.is_decimal(element):
        type_name = "decimal"
    if type_name is None:
        raise DataError(
            f"column {name!r} holds {field.type}, which no model takes; turn it into numbers, or "
            "arrays of numbers"
        )
    return Source(name, "array" if depth else "scalar", type_name, type_name, depth)


def _depth(kind: pa.DataType) -> int:
    """Return the nesting depth of Arrow lists of the first kind."""
    return 1 + _depth(kind.value_type) if pa.types.is_list(kind) else 0


def _levels(kind: pa.DataType) -> int:
    """Return the nesting depth of lists of any kind."""
    lists = pa.types.is_nested(kind) and hasattr(kind, "value_type")
    return 1 + _levels(kind.value_type) if lists else 0


def _in_lists(array: pa.Array) -> pa.Array:
    """Return arrays of all of Arrow's kinds, within each other, as those of its first."""

    def kind_of(kind: pa.DataType) -> pa.DataType:
        nested = pa.types.is_nested(kind)
        return pa.list_(kind_of(kind.value_type)) if nested else kind

    if _depth(array.type) == _levels(array.type):
        return array
    # A copy: where arrays of a fixed size are null, there are values nevertheless.
    return array.cast(kind_of(array.type)).take(pa.array(np.arange(len(array))))


def _flat(array: pa.Array, shape: tuple[int, ...]) -> pa.Array:
    """Return nested arrays as flat ones, as Spark lays them flat.

    Null becomes what holds a null in place of an array, arrays of several sizes at one level, or of
    other sizes than ``shape`` has there.

    Args:
        array: arrays of arrays.
        shape: of rows as the model takes them, which may be flat.
    """
    rows, whole = len(array), _depth(array.type) == len(shape)
    wrong = array.is_null().to_numpy(zero_copy_only=False).copy()
    # Of what lies at a level, the row it is of.
    of_row = pc.list_parent_indices(array).to_numpy(zero_copy_only=False)
    inner = array.flatten()
    depth = 1
    while pa.types.is_list(inner.type):
        depth += 1
        sizes = pc.list_value_length(inner).fill_null(-1).to_numpy(zero_copy_only=False)
        least, most = np.full(rows, np.iinfo(np.int64).max), np.full(rows, -1)
        np.minimum.at(least, of_row, sizes)
        np.maximum.at(most, of_row, sizes)
        wrong |= least != most  # so is a row without arrays
        wrong |= least < 0
        if whole:
            wrong |= least != shape[depth - 1]
        of_row = of_row[pc.list_parent_indices(inner).to_numpy(zero_copy_only=False)]
        inner = inner.flatten()
    valid = ~wrong[of_row]  # nothing may lie behind a null
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(np.bincount(of_row[valid], minlength=rows), out=offsets[1:])
    elements = inner if valid.all() else inner.filter(pa.array(valid))
    return pa.ListArray.from_arrays(pa.array(offsets), elements, mask=pa.array(wrong))


def _is_vector(kind: pa.StructType) -> bool:
    return tuple(kind.field(i).name for i in range(kind.num_fields)) == _VECTOR_FIELDS


def _vector_values(array: pa.Array) -> pa.Array:
    """Return the elements of a column of vectors as lists; null stays null."""
    kinds, _, _, values = array.flatten()
    if not pc.any(pc.not_equal(kinds, _DENSE)).as_py():  # nulls do not count
        return values
    rows = []
    for vector in array.to_pylist():
        if vector is None or vector["type"] == _DENSE:
            rows.append(None if vector is None else vector["values"])
            continue
        dense = np.zeros(vector["size"])
        dense[vector["indices"]] = vector["values"]
        rows.append(dense)
    return pa.array(rows, pa.list_(pa.float64()))


def _cast(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return numbers in another type; whole numbers that it cannot hold become null."""
    if array.type == wanted:
        return array
    if pa.types.is_decimal(array.type):
        # Read from text, they are rounded once, as Java does; Arrow's own cast rounds by steps.
        return array.cast(pa.string()).cast(wanted)
    if pa.types.is_integer(array.type) and pa.types.is_integer(wanted):
        bounds = np.iinfo(wanted.to_pandas_dtype())
        source_bounds = np.iinfo(array.type.to_pandas_dtype())
        low, high = max(bounds.min, source_bounds.min), min(bounds.max, source_bounds.max)
        fits = pc.and_(pc.greater_equal(array, low), pc.less_equal(array, high))
        array = pc.if_else(fits, array, pa.scalar(None, array.type))
    return array.cast(wanted, safe=False)
