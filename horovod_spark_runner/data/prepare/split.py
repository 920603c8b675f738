"""Split of a DataFrame into training rows and validation rows."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...cluster.spark.session import check_is_frame, is_case_sensitive
from ...errors import DataError
from .schema import Roles, check_unambiguous, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

# Hashes are compared on this scale: fractions are exact to about one in a billion.
_SCALE = 1 << 30
# Buckets of hashes in which rows are counted, to estimate repetitions.
_BUCKETS = 1024
# Equal rows stay on one side unless the fraction could be off by more than this part of it.
_TOLERANCE = 0.01
# Calls in threads of this process that have frames of a plan cached, which Spark caches once.
_users: Counter[int] = Counter()
_keeping = threading.Lock()


def check_validation(
    frame: DataFrame, validation: Any, roles: Roles, stratify: str | None = None
) -> None:
    """Check ``run_training``'s ``validation`` as far as the schemas allow.

    Args:
        frame: the training DataFrame.
        validation: a fraction, a column name, a DataFrame or ``None``.
        roles: the columns that are trained on.
        stratify: column of which both parts are to hold each value in the same proportion.

    Raises:
        DataError: it is invalid, or does not fit the data.
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
    else:
        check_is_frame(
            validation,
            "validation must be a fraction, the name of a column that is true for validation "
            "rows, or a Spark DataFrame",
        )
        missing = [name for name in roles.columns if name not in validation.columns]
        if missing:
            raise DataError(
                f"the validation DataFrame has no column {', '.join(map(repr, missing))}; it has "
                + ", ".join(map(repr, validation.columns))
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
    frame: DataFrame, validation: object, roles: Roles, seed: int, stratify: str | None = None
) -> Iterator[tuple[DataFrame, DataFrame | None]]:
    """Yield the training and the validation DataFrame.

    A fraction is taken by a hash of the row's values and ``seed``: the same rows on every run and
    in every partitioning. Where rows repeat so often that this could miss the fraction, the same
    fraction is taken of each group of equal rows, within one row. With ``stratify``, the fraction
    is exact for each value of that column, rounded to whole rows. A frame that is split is cached
    meanwhile, so that both parts come from the same rows even if it is not deterministic.
    """
    if validation is None:
        yield frame, None
        return
    if not isinstance(validation, (str, int, float)):
        yield frame, validation
        return
    with cache_rows(frame) as cached:
        if isinstance(validation, str):
            chosen = validation_condition(cached, validation)
            yield cached.filter(~chosen), cached.filter(chosen)
        else:
            yield _fraction(cached, float(validation), roles, seed, stratify)


def training_rows(frame: DataFrame, validation: object, seed: int) -> DataFrame:
    """Return about as many training rows as `split_rows`, to be counted or sampled.

    Nothing is cached: for a fraction, the rows are drawn at random.
    """
    from pyspark.sql import functions as F

    if isinstance(validation, str):
        return frame.filter(~validation_condition(frame, validation))
    return frame.filter(F.rand(seed) >= validation)


@contextlib.contextmanager
def cache_rows(frame: DataFrame) -> Iterator[DataFrame]:
    """Yield the frame, cached by Spark meanwhile; a frame that is cached already stays so.

    Frames of one plan share the cache, which stays until the last of concurrent calls has ended.
    """
    plan = frame.semanticHash()
    with _keeping:
        level = frame.storageLevel
        persisted = level.useMemory or level.useDisk
        ours = not persisted or _users[plan] > 0
        if not persisted:
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


def validation_condition(frame: DataFrame, name: str) -> SparkColumn:
    """Return the condition under which a row is for validation by the column ``name``.

    Raises:
        DataError: it has null values, or numbers other than 0 and 1.
    """
    from pyspark.sql import functions as F

    column = F.col(quoted(name)).cast("long")
    row = frame.agg(F.count_if(column.isNull()), F.min(F.when(~column.isin(0, 1), column))).first()
    nulls, other = (0, None) if row is None else row
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


def _fraction(
    frame: DataFrame, fraction: float, roles: Roles, seed: int, stratify: str | None
) -> tuple[DataFrame, DataFrame]:
    """Return both parts: rows with small tickets, in [0, 1), are for validation.

    The copies of a repeated row get equidistant tickets, independent of their order.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    names = dict.fromkeys([*roles.columns, *([] if stratify is None else [stratify])])
    values = [F.col(quoted(name)) for name in names]
    hashed = frame.withColumn("__hash", F.xxhash64(F.lit(seed), *values))
    key = F.col("__hash")
    ticket = F.pmod(key, F.lit(_SCALE)) / F.lit(float(_SCALE))
    if stratify is not None:
        ticket = key / F.lit(2.0**64) + F.lit(0.5)
    if _repeats(hashed, fraction):
        equal = Window.partitionBy(key)
        # Rows whose hashes collide have the same order in both parts.
        copy = F.row_number().over(equal.orderBy(F.xxhash64(F.lit(~seed), *values)))
        ticket = (copy - F.lit(1) + ticket) / F.count(F.lit(1)).over(equal)
    numbered = hashed.withColumn("__ticket", ticket)
    chosen = F.col("__ticket") < F.lit(int(fraction * _SCALE) / _SCALE)
    if stratify is not None:
        stratum = Window.partitionBy(F.col(quoted(stratify)))
        place = F.row_number().over(stratum.orderBy("__ticket", key))
        wanted = F.round(F.count(F.lit(1)).over(stratum) * F.lit(fraction))
        numbered = numbered.withColumn("__chosen", place <= wanted)
        chosen = F.col("__chosen")
    helpers = ("__hash", "__ticket", "__chosen")
    return numbered.filter(~chosen).drop(*helpers), numbered.filter(chosen).drop(*helpers)


def _repeats(hashed: DataFrame, fraction: float) -> bool:
    """Return whether rows repeat so often that a fraction of hashes may miss the fraction of rows.

    Hashes of distinct rows spread evenly over buckets. The surplus of the sum of squares of the
    buckets' rows estimates that of the groups of equal rows, within a few percent.
    """
    from pyspark.sql import functions as F

    buckets = hashed.groupBy(F.pmod("__hash", F.lit(_BUCKETS))).count().collect()
    counts = [row["count"] for row in buckets]
    rows = sum(counts)
    squares = (sum(n * n for n in counts) - rows * rows / _BUCKETS) / (1 - 1 / _BUCKETS)
    deviation = math.sqrt(max(0.0, fraction * (1 - fraction) * squares))
    # Below, the fraction is about as accurate as for distinct rows.
    return bool(squares > 1.5 * rows and deviation > _TOLERANCE * fraction * rows)
