"""Which columns feed the model: as `run_training` is given them, as it finds them by convention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.prepare.schema import quote_all
from ..errors import DataError
from ..settings.kinds import ColumnNames
from ..training.spec import FEATURES, Binding

# What Spark ML calls the labels.
LABEL = "label"


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


def recorded_columns(binding: Binding) -> list[Any] | dict[str, Any]:
    """Return ``feature_cols`` or ``label_cols`` as JSON."""
    slots = [slot[0] if len(slot) == 1 else list(slot) or None for slot in binding.slots]
    return slots if binding.names is None else dict(zip(binding.names, slots, strict=True))
