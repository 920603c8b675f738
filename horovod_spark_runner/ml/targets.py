"""The columns a model's outputs are compared with when it is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..data.manifest import Column
from ..data.prepare.columns import sources_of_features
from ..data.prepare.schema import quote_all
from ..errors import DataError, InvalidInputError
from ..settings.kinds import ColumnNames
from ..spark.session import is_case_sensitive
from ..training.spec import Binding, bind_columns
from ..training.trained_model import Targets
from .features import check_once, feature_argument

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame


def choose_targets(
    trained: Targets, label_cols: ColumnNames | str | None, weight: str | bool | None
) -> tuple[Targets, tuple[str, ...]]:
    """Return what outputs are compared with, and the DataFrame's column for each of its columns.

    Args:
        trained: what they were compared with in training.
        label_cols: the label columns, if not called as those were.
        weight: the column of sample weights; ``None`` for that of the training, ``False`` for none.

    Raises:
        InvalidInputError: the label columns do not fit those of the training.
    """
    labels = trained.outputs.columns
    names = _renamed(trained.outputs, label_cols)
    columns = [column for column in trained.columns if column.name in labels]
    given = [names[column.name] for column in columns]
    chosen = trained.weight if weight is None else weight or None
    if chosen is True or not isinstance(chosen, (str, type(None))):
        raise InvalidInputError(
            "sample_weight_col must be a column's name, None for that of the training, or False "
            f"for no weights, got {weight!r}"
        )
    if chosen is None:
        return replace(trained, columns=tuple(columns), weight=None), tuple(given)
    key = "weight"  # a name of its own: the column may be a label, too
    while key in labels:
        key += "_"
    dtypes = [column.dtype for column in trained.columns if column.name == trained.weight]
    column = Column(key, dtypes[0] if dtypes else "float32")
    return replace(trained, columns=(*columns, column), weight=key), (*given, chosen)


def _renamed(trained: Binding, label_cols: ColumnNames | str | None) -> dict[str, str]:
    """Return what each label column of the training is called now."""
    names = {name: name for name in trained.columns}
    if label_cols is None:
        return names
    given = bind_columns([label_cols] if isinstance(label_cols, str) else label_cols, "label_cols")
    if given.names is None:
        if len(given.slots) != len(trained.slots):
            raise InvalidInputError(
                f"label_cols gives {given.describe()}, but the model was trained on "
                f"{trained.describe()}; name as many, in this order"
            )
        pairs = list(zip(trained.slots, given.slots, strict=True))
    else:
        known = dict(zip(trained.names or (), trained.slots, strict=False))
        unknown = [name for name in given.names if name not in known]
        if unknown:
            right = quote_all(list(known)) if known else f"not named: give {trained.describe()}"
            raise InvalidInputError(
                f"label_cols names {quote_all(unknown)}, but the outputs it was trained with are "
                + right
            )
        pairs = [(known[n], slot) for n, slot in zip(given.names, given.slots, strict=True)]
    for before, now in pairs:
        if len(before) != len(now):
            raise InvalidInputError(
                f"label_cols gives {' + '.join(now) or 'no column'} where the model was trained on "
                f"{' + '.join(before) or 'none'}"
            )
        names.update(zip(before, now, strict=True))
    return names


def target_arguments(
    frame: DataFrame, columns: Sequence[Column], names: Sequence[str], weight: str | None
) -> list[SparkColumn]:
    """Return the Spark expressions that give labels and weights as the model was trained on them.

    Args:
        frame: the rows.
        columns: what the model was trained on.
        names: the DataFrame's column for each.
        weight: which of ``columns`` is that of sample weights.

    Raises:
        DataError: a column is missing, there twice, or of another type.
    """
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise DataError(
            f"the DataFrame has no column {quote_all(missing)}, which the outputs are compared "
            "with or rows are weighed by; name the right ones, label_cols=… and "
            f"sample_weight_col=…; it has {quote_all(frame.columns)}"
        )
    check_once(names, frame.columns, is_case_sensitive(frame.sparkSession))
    sources = sources_of_features(frame, names)
    for source, column in zip(sources, columns, strict=True):
        if column.name == weight and (source.kind != "scalar" or source.is_text):
            raise DataError(f"sample_weight_col {source.name!r} must hold one number per row")
    return [feature_argument(s, c) for s, c in zip(sources, columns, strict=True)]
