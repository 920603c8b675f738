"""Logs of steps and epochs, as callbacks, checkpoints and the driver see them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from ..checkpoint.files import LogValue

# What JSON gives back.
Json: TypeAlias = "str | float | bool | list[Json] | dict[str, Json] | None"
# What a step, an epoch or an evaluation tells, by name: tensors, numbers, lists, or logs again.
Logs: TypeAlias = Mapping[str, object]


def flat(logs: Logs) -> dict[str, object]:
    """Return ``logs`` without nesting, as Keras's callbacks see them."""
    result: dict[str, object] = {}
    for name, value in sorted(logs.items()):
        result.update(flat(value) if isinstance(value, Mapping) else {name: value})
    return result


def plain(logs: Logs | None) -> dict[str, LogValue]:
    """Return ``logs`` as JSON: numbers, and lists where a metric gives several."""
    return {name: _plain_value(value) for name, value in flat(logs or {}).items()}


def _plain_value(value: object) -> LogValue:
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return str(value)
    return array.item() if array.size == 1 and array.ndim <= 1 else array.tolist()


def beside(logs: Logs, facts: Mapping[str, float]) -> dict[str, float]:
    """Return what a run tells of an epoch, under names that none of its ``logs`` has.

    ``run/`` goes before the name of a fact that a log is called like.
    """
    found = {}
    for name, value in facts.items():
        while name in logs:
            name = f"run/{name}"
        found[name] = value
    return found


def numbers(logs: Logs) -> dict[str, float]:
    """Return the entries of plain ``logs`` that are one number."""
    return {name: value for name, value in logs.items() if isinstance(value, float)}
