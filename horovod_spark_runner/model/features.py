"""The feature columns of a DataFrame that is to be predicted on, as the model takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..config.prediction import PredictionSettings
from ..data.manifest import Column
from ..data.prepare.columns import Source, expression, sizes
from ..errors import DataError, InvalidInputError, brief
from ..formatting import quote_all
from ..training.spec import Binding

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn


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
        DataError: it is not.
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
