"""Input columns of an exported pipeline, and their values as the ONNX file takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.prepare.schema import quoted
from ..errors import DataError, ModelError
from .onnx_builder import TEXT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField

# Spark's types of numbers -> NumPy's.
_DTYPES = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
}
VECTOR, _ARRAY = "vector", "array"
# Arrays of numbers that float64 holds exactly.
_ARRAY_TYPES = tuple(
    f"array<{kind}>" for kind in ("tinyint", "smallint", "int", "float", "double", "boolean")
)
# Name of the boolean input that marks a column's nulls.
NULL = ".null"


@dataclass(frozen=True)
class Input:
    """A column that a pipeline takes.

    Attributes:
        name: its name.
        kind: Spark's type of it, ``"vector"``, or ``"array"`` for one of numbers.
        size: elements of a vector or array; 0 for other kinds.
        needed: whether the pipeline needs it; Spark passes over a StringIndexer's missing column.
    """

    name: str
    kind: str
    size: int = 0
    needed: bool = True

    @property
    def dtype(self) -> str:
        """NumPy's type of it in the ONNX file, or ``"string"``."""
        return TEXT if self.kind == TEXT else _DTYPES.get(self.kind, "float64")

    @property
    def holds_vectors(self) -> bool:
        """Whether a value is a vector or an array."""
        return self.kind in (VECTOR, _ARRAY)


def kind_of(field: StructField) -> str | None:
    """Return the kind of a column; ``None`` for one that an ONNX file cannot take."""
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import CharType, StringType, VarcharType

    if isinstance(field.dataType, VectorUDT):
        return VECTOR
    if isinstance(field.dataType, StringType | CharType | VarcharType):
        return TEXT
    type_name = str(field.dataType.simpleString())
    if type_name in _DTYPES:
        return type_name
    return _ARRAY if type_name in _ARRAY_TYPES else None


def vector_size(frame: DataFrame, field: StructField) -> int:
    """Return the elements of a column's vectors or arrays, from its metadata or its first row.

    Raises:
        ModelError: neither tells.
    """
    from pyspark.sql import functions as F

    metadata = field.metadata.get("ml_attr", {})
    if "num_attrs" in metadata:
        return int(metadata["num_attrs"])
    if "attrs" in metadata:
        return sum(len(group) for group in metadata["attrs"].values())
    column = F.col(quoted(field.name))
    row = frame.select(column).where(column.isNotNull()).first()
    if row is None:
        raise ModelError(
            f"column {field.name!r} holds nothing but null, so the size of its vectors is not "
            "known; give a DataFrame with a value"
        )
    return len(row[0])


def onnx_inputs(
    inputs: Iterable[Input], values: Mapping[str, Sequence[Any]]
) -> dict[str, np.ndarray]:
    """Return the inputs of a pipeline's ONNX file from columns of Spark's values.

    Args:
        inputs: the columns that it takes.
        values: their values; ``None`` for null.

    Raises:
        DataError: a vector has another size than the file takes.
    """
    fed: dict[str, np.ndarray] = {}
    for one in inputs:
        column = [_to_plain(one, value) for value in values[one.name]]
        blank: Any = "" if one.kind == TEXT else [0.0] * one.size if one.holds_vectors else 0
        filled = [blank if value is None else value for value in column]
        array = np.array(filled, object if one.kind == TEXT else one.dtype)
        fed[one.name] = array.reshape(len(column), one.size) if one.holds_vectors else array
        fed[one.name + NULL] = np.array([value is None for value in column], bool)
    return fed


def _to_plain(one: Input, value: Any) -> Any:
    """Return a value as numbers or text; ``None`` for null, and for an array that does not fit."""
    if one.kind == _ARRAY and value is not None and (len(value) != one.size or None in value):
        return None
    if one.kind == VECTOR and value is not None and len(value) != one.size:
        raise DataError(
            f"column {one.name!r} holds a vector of {len(value)} elements, and the ONNX file takes "
            f"vectors of {one.size}"
        )
    return value.toArray() if hasattr(value, "toArray") else value
