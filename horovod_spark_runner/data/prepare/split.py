"""Training rows and validation rows."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...errors import DataError, brief
from ...spark.session import is_case_sensitive
from .schema import Roles, check_unambiguous, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

# Hashes are compared on this scale: fractions are exact to about one in a billion.
_SCALE = 1 << 30
# How many calls in threads of this process have frames of a plan kept, which Spark keeps once.
_users: Counter[int] = Counter()
_keeping = threading.Lock()


def check_validation(
    frame: DataFrame, validation: Any, roles: Roles, stratify: str | None = None
) -> None:
    """Check ``run_training``'s ``validation`` as far as the schemas show.

    Args:
        frame: the training DataFrame.
        validation: a fraction, a column name, a DataFrame or ``None``.
        roles: the columns that are trained on.
        stratify: column of which both parts are to hold each value in the same proportion.

    Raises:
        DataError: it is something else, or does not fit the data.
    """
    fraction = isinstance(validation, (int, float)) and not isinstance(validation, bool)
    if stratify is not None:
        if not fraction:
            raise DataError("stratify needs a fraction as validation")
        if stratify not in frame.columns:
            raise DataError(f"stratify={stratify!r}: the DataFrame has no such column")
        _check_name(frame, stratify)
    if validation is None:
        return
    if isinstance(validation, str):
        _check_column(frame, validation, roles)
    elif fraction:
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
            f"rows, or a DataFrame, got {brief(validation)}"
        )


def _check_column(frame: DataFrame, name: str, roles: Roles) -> None:
    types = {field.name: field.dataType.typeName() for field in frame.schema.fields}
    if name not in types:
        raise DataError(f"validation={name!r}: the DataFrame has no such column")
    _check_name(frame, name)
    if name in roles.columns:
        raise DataError(f"validation column {name!r} is a feature, label or weight too")
    if types[name] not in ("boolean", "byte", "short", "integer", "long"):
        raise DataError(
            f"validation column {name!r} is of type {types[name]}; it must be boolean, or 1 for "
            "rows to validate with and 0 for the others"
        )


def _check_name(frame: DataFrame, name: str) -> None:
    case_sensitive = is_case_sensitive(frame.sparkSession)
    check_unambiguous([name], frame.columns, case_sensitive=case_sensitive)


@contextlib.contextmanager
def split_rows(
    frame: DataFrame, validation: Any, roles: Roles, seed: int, stratify: str | None = None
) -> Iterator[tuple[DataFrame, DataFrame | None]]:
    """Yield the training and the validation DataFrame.

    A fraction is taken by a hash of the row's values and ``seed``: the same rows on every run and
    in every partitioning, and equal rows on the same side. With ``stratify``, of each value of
    that column the same fraction is taken, rounded to whole rows. A frame that is split is cached
    meanwhile, so that both parts come from the same rows even if it is not deterministic.
    """
    if validation is None:
        yield frame, None
        return
    if not isinstance(validation, (str, int, float)):
        yield frame, validation
        return
    with computed_once(frame) as cached:
        if stratify is not None:
            yield _stratified(cached, float(validation), roles, seed, stratify)
            return
        chosen = _condition(cached, validation, roles, seed)
        yield cached.filter(~chosen), cached.filter(chosen)


def training_rows(frame: DataFrame, validation: Any, roles: Roles, seed: int) -> DataFrame:
    """Return the rows that `split_rows` leaves to train on, to be counted or sampled.

    Nothing is cached, and no column is looked at to stratify by: of a frame that is computed in
    another way each time they are as many, but others.
    """
    return frame.filter(~_condition(frame, validation, roles, seed))


@contextlib.contextmanager
def computed_once(frame: DataFrame) -> Iterator[DataFrame]:
    """Yield a frame whose rows Spark keeps meanwhile; one that it keeps already stays kept.

    Frames of one plan share what is kept: it stays until the last of several calls at once is over.
    """
    plan = frame.semanticHash()
    with _keeping:
        level = frame.storageLevel
        kept = level.useMemory or level.useDisk
        ours = not kept or _users[plan] > 0
        if not kept:
            frame.persist()
        _users[plan] += ours
    try:
        yield frame
    finally:
        with _keeping:
            _users[plan] -= ours
            if ours and not _users[plan]:
                frame.unpersist()
                del _users[plan]


def _condition(frame: DataFrame, validation: Any, roles: Roles, seed: int) -> SparkColumn:
    from pyspark.sql import functions as F

    if isinstance(validation, str):
        return indicator(frame, validation)
    hashed = _hash(roles, seed)
    return F.pmod(hashed, F.lit(_SCALE)) < F.lit(int(validation * _SCALE))


def indicator(frame: DataFrame, name: str) -> SparkColumn:
    """Return the condition under which a row is for validation by the column ``name``.

    Raises:
        DataError: it has null values, or numbers other than 0 and 1.
    """
    from pyspark.sql import functions as F

    column = F.col(quoted(name)).cast("long")
    found = frame.agg(
        F.count_if(column.isNull()), F.min(F.when(~column.isin(0, 1), column))
    ).first()
    nulls, other = (0, None) if found is None else found
    if nulls:
        raise DataError(
            f"validation column {name!r} has {nulls} null values; every row must be for training "
            "or for validation"
        )
    if other is not None:
        raise DataError(
            f"validation column {name!r} holds {other}; it must be true or 1 for rows to validate "
            "with and false or 0 for the others: make it so, such as by "
            f"df.withColumn({name!r}, df[{name!r}] == {other})"
        )
    return column != F.lit(0)


def _hash(roles: Roles, seed: int) -> SparkColumn:
    from pyspark.sql import functions as F

    return F.xxhash64(F.lit(seed), *(F.col(quoted(name)) for name in roles.columns))


def _stratified(
    frame: DataFrame, fraction: float, roles: Roles, seed: int, stratify: str
) -> tuple[DataFrame, DataFrame]:
    """Return both parts: of each value of ``stratify``, the rows with the smallest hashes."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    column = F.col(quoted(stratify))
    ranked = frame.withColumn("__hash", _hash(roles, seed))
    alike = Window.partitionBy(column)
    # rank() gives equal rows the same rank, so that they stay on one side.
    rank = F.rank().over(alike.orderBy("__hash"))
    ranked = ranked.withColumn("__rank", rank).withColumn(
        "__last", F.round(F.count(F.lit(1)).over(alike) * F.lit(fraction))
    )
    chosen = F.col("__rank") <= F.col("__last")
    helpers = ("__hash", "__rank", "__last")
    return ranked.filter(~chosen).drop(*helpers), ranked.filter(chosen).drop(*helpers)
