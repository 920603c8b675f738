"""Feature columns of Parquet files, read without Spark, as the model takes them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..data.manifest import TEXT, Column
from ..data.prepare.columns import Source
from ..errors import DataError
from .features import check_fits

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


def check_feature(field: pa.Field, column: Column) -> None:
    """Check that ``field`` can be predicted on by a model that was trained on ``column``.

    Raises:
        DataError: its type is another one.
    """
    check_fits(_source(field), column)


def feature_array(array: pa.Array, column: Column) -> pa.Array:
    """Return the values of a checked column as the model takes them; what does not fit is null."""
    if pa.types.is_struct(array.type):
        array = _vector_values(array)
    if column.encoding:
        return array.cast(pa.binary())
    wanted = pa.string() if column.is_text else pa.from_numpy_dtype(column.numpy_dtype)
    if not column.shape:
        return _cast(array, wanted)
    if not pa.types.is_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
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
    depth = 0
    while pa.types.is_nested(element) and hasattr(element, "value_type"):
        depth, element = depth + 1, element.value_type
    text = pa.types.is_string(element) or pa.types.is_large_string(element)
    given = TEXT if text else _NUMBERS.get(str(element))
    if given is None or depth > 1:
        raise DataError(
            f"column {name!r} holds {field.type}, which files cannot be predicted on by; read them "
            "with Spark and use transform, which takes nested arrays and decimals, or cast it"
        )
    return Source(name, "array" if depth else "scalar", given, given, depth)


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
    if pa.types.is_integer(array.type) and pa.types.is_integer(wanted):
        bounds = np.iinfo(wanted.to_pandas_dtype())
        given = np.iinfo(array.type.to_pandas_dtype())
        low, high = max(bounds.min, given.min), min(bounds.max, given.max)
        fits = pc.and_(pc.greater_equal(array, low), pc.less_equal(array, high))
        array = pc.if_else(fits, array, pa.scalar(None, array.type))
    return array.cast(wanted, safe=False)
