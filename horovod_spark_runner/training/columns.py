"""Which columns feed the model: as `run_training` is given them, as it finds them by convention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..data.prepare.schema import quote_all
from ..errors import DataError, InvalidInputError
from .spec import Binding

# By input or output: a column, several that are joined, or (labels only) none.
ColumnNames = Sequence[str | Sequence[str] | None] | Mapping[str, str | Sequence[str] | None]
# What Spark ML calls them.
FEATURES, LABEL = "features", "label"


def by_convention(
    features: ColumnNames | None, labels: ColumnNames | None, available: Sequence[str]
) -> tuple[ColumnNames, ColumnNames | None]:
    """Return the feature and label columns where Spark ML's names stand for those not given.

    Args:
        features: what was given as ``feature_cols``.
        labels: what was given as ``label_cols``; where features were given, none are left out.
        available: the columns there are.

    Raises:
        DataError: no features were given, and there is no column of that name.
    """
    if features is not None:
        return features, labels
    if FEATURES not in available:
        raise DataError(
            f"feature_cols is not given, and the DataFrame has no column {FEATURES!r}; name the "
            "columns that feed the model's inputs, in their order or by their names, and those its "
            f"outputs are compared with in label_cols; there are {quote_all(available)}"
        )
    if labels is None and LABEL in available:
        labels = [LABEL]
    return [FEATURES], labels


def bind_columns(columns: ColumnNames | None, title: str) -> Binding:
    """Return what ``feature_cols`` or ``label_cols`` (``title``) says of inputs or outputs.

    Raises:
        InvalidInputError: it is neither a list nor a dictionary of columns.
        DataError: it names a column twice.
    """
    if columns is None and title == "label_cols":
        return Binding(())
    if isinstance(columns, str) or not isinstance(columns, (Sequence, Mapping)):
        raise InvalidInputError(
            f"{title} must be a list of column names or a dictionary from the model's names to "
            f"columns, got {columns!r}"
        )
    names = tuple(columns) if isinstance(columns, Mapping) else None
    given = columns.values() if isinstance(columns, Mapping) else columns
    slots = [_slot(one, title) for one in given]
    if names is not None and not all(isinstance(name, str) for name in names):
        raise InvalidInputError(f"{title} must name the model's inputs or outputs, got {names!r}")
    if title == "feature_cols" and names is None:
        flat = [name for slot in slots for name in slot]
        twice = sorted({name for name in flat if flat.count(name) > 1})
        if twice:
            raise DataError(f"feature_cols names {', '.join(map(repr, twice))} more than once")
    return Binding(tuple(slots), names)


def _slot(given: Any, title: str) -> tuple[str, ...]:
    """Return the columns of one input or output."""
    if isinstance(given, str):
        return (given,)
    if given is None and title == "label_cols":  # an output without a loss
        return ()
    if isinstance(given, (list, tuple)) and given and all(isinstance(n, str) for n in given):
        return tuple(given)
    raise InvalidInputError(
        f"{title} must hold column names, or lists of those that are joined into one, got {given!r}"
    )


def recorded_columns(binding: Binding) -> list[Any] | dict[str, Any]:
    """Return ``feature_cols`` or ``label_cols`` as JSON."""
    slots = [slot[0] if len(slot) == 1 else list(slot) or None for slot in binding.slots]
    return slots if binding.names is None else dict(zip(binding.names, slots, strict=True))
