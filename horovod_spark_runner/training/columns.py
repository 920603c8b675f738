"""Resolve the model's columns: given, by convention, or by the model's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ..config.validators import ColumnNames
from ..errors import DataError
from ..formatting import quote_all
from .spec import FEATURES, Binding, ModelNames

# What Spark ML calls the labels.
LABEL = "label"


def by_convention(
    labels: ColumnNames | None, available: Sequence[str]
) -> tuple[ColumnNames, ColumnNames | None]:
    """Return the feature and label columns by Spark ML's names, where no features are named.

    Args:
        labels: what was given as ``label_cols``.
        available: the columns there are, `FEATURES` among them.
    """
    if labels is None and LABEL in available:
        labels = [LABEL]
    return [FEATURES], labels


def by_name(
    model: ModelNames, labels: ColumnNames | None, available: Sequence[str]
) -> tuple[ColumnNames, ColumnNames | None]:
    """Return the feature and label columns that are called as the model's inputs and outputs.

    Args:
        model: what the model calls these.
        labels: what was given as ``label_cols``.
        available: the columns there are, `FEATURES` not among them.

    Raises:
        DataError: names and columns do not tell for certain which is which.
    """
    there = f"the DataFrame's columns are {quote_all(available)}"
    unknown = f"feature_cols is not given, and the DataFrame has no column {FEATURES!r}"
    advice = "name the columns that feed the model's inputs, in their order or by their names"
    if not model.inputs:
        raise DataError(
            f"{unknown}; the model has no inputs with names of their own before it is given data: "
            f"{advice}; {there}"
        )
    fitting = [names for names in model.inputs if set(names) <= set(available)]
    if not fitting:
        missing = [name for name in model.inputs[0] if name not in available]
        raise DataError(
            f"{unknown}; of the model's inputs {_alternatives(model.inputs)}, "
            f"{quote_all(missing)} is no column: {advice}; {there}"
        )
    if len(fitting) > 1:
        raise DataError(
            f"{unknown}; the model's inputs are called {_alternatives(fitting)}, all of "
            "which are columns: say in feature_cols which column feeds which, as a dictionary"
        )
    features = dict.fromkeys(fitting[0])
    chosen = _labels_by_name(model, tuple(features), available) if labels is None else labels
    return {name: name for name in features}, chosen


def _labels_by_name(
    model: ModelNames, features: Sequence[str], available: Sequence[str]
) -> ColumnNames | None:
    """Return the label columns, none for a model that needs none."""
    fitting = [names for names in model.outputs if set(names) <= set(available)]
    candidates: list[tuple[str, ...]] = list(fitting)
    if LABEL in available and LABEL not in features and (LABEL,) not in candidates:
        candidates.append((LABEL,))
    partly = sorted({name for names in model.outputs for name in names if name in available})
    reason = ""
    if len(candidates) > 1:
        reason = f"the columns {_alternatives(candidates)} may each be meant"
    elif candidates and set(candidates[0]) & set(features):
        reason = (
            f"output and input {quote_all(sorted({*candidates[0]} & {*features}))} share a name"
        )
    elif not candidates and partly:
        reason = (
            f"of the model's outputs {_alternatives(model.outputs)}, only {quote_all(partly)} is "
            "a column"
        )
    elif not candidates and model.needs_labels:
        named = f" its outputs are {_alternatives(model.outputs)}," if model.outputs else ""
        reason = (
            f"the model is compiled with a loss,{named} and none of the DataFrame's columns "
            f"{quote_all(available)} is called so, or {LABEL!r} and not an input"
        )
    if reason:
        raise DataError(
            f"label_cols is not given, and {reason}; name the columns the model's outputs are "
            "compared with, label_cols=[…] or {output: column}; [] for none"
        )
    if not candidates:
        return None
    # A single output needs no name, and Spark ML's is none of the model's.
    return (
        list(candidates[0]) if len(candidates[0]) == 1 else {name: name for name in candidates[0]}
    )


def _alternatives(alternatives: Sequence[Sequence[str]]) -> str:
    return " or ".join(quote_all(names) for names in alternatives)


# A column, several joined, or none; by the names of inputs or outputs, or in their order.
_Slot: TypeAlias = str | list[str] | None
Recorded: TypeAlias = list[_Slot] | dict[str, _Slot]


def recorded_columns(binding: Binding) -> Recorded:
    """Return ``feature_cols`` or ``label_cols`` as JSON."""
    slots: list[_Slot] = [s[0] if len(s) == 1 else list(s) or None for s in binding.slots]
    return slots if binding.names is None else dict(zip(binding.names, slots, strict=True))
