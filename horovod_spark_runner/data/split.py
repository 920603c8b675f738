"""Training rows and validation rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from .schema import Roles, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

# Hashes are compared on this scale: fractions are exact to about one in a billion.
_SCALE = 1 << 30


def check_validation(frame: DataFrame, validation: Any, roles: Roles) -> None:
    """Check ``run_training``'s ``validation`` as far as the schemas show.

    Args:
        frame: the training DataFrame.
        validation: a fraction, a column name, a DataFrame or ``None``.
        roles: the columns that are trained on.

    Raises:
        DataError: it is something else, or does not fit the data.
    """
    if validation is None:
        return
    if isinstance(validation, str):
        _check_column(frame, validation, roles)
    elif isinstance(validation, (int, float)) and not isinstance(validation, bool):
        if not 0.0 < validation < 1.0:
            raise DataError(f"validation={validation!r}: a fraction must be between 0 and 1")
    elif hasattr(validation, "schema") and hasattr(validation, "columns"):
        missing = [name for name in roles.columns if name not in validation.columns]
        if missing:
            raise DataError(
                f"the validation DataFrame has no column {', '.join(map(repr, missing))}; it has "
                + ", ".join(map(repr, validation.columns))
            )
    else:
        raise DataError(
            "validation must be a fraction, the name of a column that is true for validation "
            f"rows, or a DataFrame, got {validation!r}"
        )


def _check_column(frame: DataFrame, name: str, roles: Roles) -> None:
    types = {field.name: field.dataType.typeName() for field in frame.schema.fields}
    if name not in types:
        raise DataError(f"validation={name!r}: the DataFrame has no such column")
    if name in roles.columns:
        raise DataError(f"validation column {name!r} is a feature, label or weight too")
    if types[name] not in ("boolean", "byte", "short", "integer", "long"):
        raise DataError(
            f"validation column {name!r} is of type {types[name]}; it must be boolean, or an "
            "integer that is 0 for training rows"
        )


@contextlib.contextmanager
def split_rows(
    frame: DataFrame, validation: Any, roles: Roles, seed: int
) -> Iterator[tuple[DataFrame, DataFrame | None]]:
    """Yield the training and the validation DataFrame.

    A fraction is taken by a hash of the row's values and ``seed``: the same rows on every run and
    in every partitioning, and equal rows on the same side. A frame that is split is cached
    meanwhile, so that both parts come from the same rows even if it is not deterministic.
    """
    if validation is None:
        yield frame, None
        return
    if not isinstance(validation, (str, int, float)):
        yield frame, validation
        return
    cached = frame.persist()
    try:
        chosen = _condition(cached, validation, roles, seed)
        yield cached.filter(~chosen), cached.filter(chosen)
    finally:
        cached.unpersist()


def _condition(frame: DataFrame, validation: Any, roles: Roles, seed: int) -> SparkColumn:
    from pyspark.sql import functions as F

    if isinstance(validation, str):
        column = F.col(quoted(validation))
        nulls = frame.filter(column.isNull()).count()
        if nulls:
            raise DataError(
                f"validation column {validation!r} has {nulls} null values; every row must be "
                "for training or for validation"
            )
        return column.cast("int") != F.lit(0)
    hashed = F.xxhash64(F.lit(seed), *(F.col(quoted(name)) for name in roles.columns))
    return F.pmod(hashed, F.lit(_SCALE)) < F.lit(int(validation * _SCALE))
