"""Read fitted stages of Spark ML and the metadata of their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ModelError
from ..scoring.columns import ARRAY, DTYPES, TEXT, VECTOR, WORDS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField

_WORDS_TYPES = ("array<string>",)
# Arrays of numbers that float64 holds exactly.
_ARRAY_TYPES = tuple(
    f"array<{kind}>" for kind in ("tinyint", "smallint", "int", "float", "double", "boolean")
)


@dataclass(frozen=True)
class Fitted:
    """A fitted stage, and the rows before and after it.

    Attributes:
        stage: the stage.
        before: the DataFrame it was given.
        after: the one it gives.
    """

    stage: Any
    before: DataFrame
    after: DataFrame

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"stage {type(self.stage).__name__} ({self.stage.uid})"

    def get(self, param: str) -> Any:
        """Return a Param's value; ``None`` if it has none."""
        stage = self.stage
        if not stage.hasParam(param) or not stage.isDefined(param):
            return None
        return stage.getOrDefault(param)

    @property
    def input(self) -> str:
        return str(self.get("inputCol"))

    @property
    def output(self) -> str:
        return str(self.get("outputCol"))

    @property
    def pairs(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The input columns and the output columns of a stage that may have one or several."""
        if self.stage.isSet("inputCols"):
            return tuple(self.get("inputCols")), tuple(self.get("outputCols"))
        return (self.input,), (self.output,)

    def refused(self, reason: str) -> ModelError:
        """Return the error of a stage that cannot be exported, with the reason."""
        return ModelError(f"{self.name} cannot be exported: {reason}")

    def field(self, name: str) -> StructField:
        """Return the schema field of a column before the stage.

        Raises:
            ModelError: it is not there under exactly this name.
        """
        for field in self.before.schema.fields:
            if field.name == name:
                return field
        raise self.refused(
            f"it takes column {name!r}, and there is {sorted(self.before.columns)} (upper and "
            "lower case count)"
        )

    def kind(self, name: str) -> str:
        """Return the kind of a column before the stage; see `Input`.

        Raises:
            ModelError: it is of a type that cannot be scored.
        """
        kind = kind_of(self.field(name))
        if kind is None:
            type_name = self.field(name).dataType.simpleString()
            raise self.refused(
                f"column {name!r} is of type {type_name}, which the scorer does not know"
            )
        return kind

    def finite(self, values: Any) -> np.ndarray:
        """Return fitted numbers as an array.

        Raises:
            ModelError: some are not finite: what Spark does with them depends on how it holds a
                row's zeros.
        """
        array = np.asarray(values.toArray() if hasattr(values, "toArray") else values, np.float64)
        if not np.isfinite(array).all():
            raise self.refused(
                "it was fitted on values that are NaN or infinite, and what Spark makes of zeros "
                "then depends on how it stores the row; impute such values, and fit it again"
            )
        return array

    def attributes(self, name: str) -> list[dict[str, Any]] | None:
        """Return the attributes of a vector's elements, in their order; ``None`` if unknown."""
        groups = self.field(name).metadata.get("ml_attr", {}).get("attrs")
        if groups is None:
            return None
        return sorted(
            ({**one, "type": kind} for kind, group in groups.items() for one in group),
            key=lambda one: int(one["idx"]),
        )


def kind_of(field: StructField) -> str | None:
    """Return the kind of a column; ``None`` for one that a scorer does not know."""
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import CharType, StringType, VarcharType

    if isinstance(field.dataType, VectorUDT):
        return VECTOR
    if isinstance(field.dataType, StringType | CharType | VarcharType):
        return TEXT
    type_name = str(field.dataType.simpleString())
    if type_name in DTYPES:
        return type_name
    if type_name in _WORDS_TYPES:
        return WORDS
    return ARRAY if type_name in _ARRAY_TYPES else None


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
    column = F.col("`" + field.name.replace("`", "``") + "`")
    row = frame.select(column).where(column.isNotNull()).first()
    if row is None:
        raise ModelError(
            f"column {field.name!r} holds nothing but null, so the size of its vectors is not "
            "known; give a DataFrame with a value"
        )
    return len(row[0])


def as_text(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)
