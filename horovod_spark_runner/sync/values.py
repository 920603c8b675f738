"""Values of a model and its optimizers as ranks exchange them outside a step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .synchroniser import Variables

MODEL = "model/"
Arrays = dict[str, np.ndarray]


def read_values(
    variables: Variables, groups: tuple[str, ...], names: Iterable[str] | None = None
) -> Arrays:
    """Return copies of values by name: real numbers of at least single precision, whole numbers.

    Args:
        variables: of this rank.
        groups: how the names begin; learning rates are left out.
        names: which of them; by default all.
    """
    named = variables.named
    values: Arrays = {}
    for name in named if names is None else names:
        variable = named[name]
        if not name.startswith(groups) or variables.is_rate(variable):
            continue
        value = np.asarray(variables.view(variable))
        if _is_floating(value.dtype):
            values[name] = value.astype(np.result_type(np.float32, _numeric(value.dtype)))
        elif value.dtype.kind in "iub":
            values[name] = value.copy()
    return values


def base_of(before: np.ndarray) -> np.ndarray:
    """Return the base of changes: infinity less infinity would be no number."""
    return np.where(np.isfinite(before), before, before.dtype.type(0))


def change_of(now: np.ndarray, before: np.ndarray, rows: int) -> np.ndarray:
    """Return this rank's term of the mean change by rows: its change times its ``rows``."""
    if not rows:
        return np.zeros_like(now)
    return np.asarray(rows * (now - base_of(before)), now.dtype)


def _is_floating(dtype: np.dtype) -> bool:
    # bfloat16 and the like are no types of NumPy's own.
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name)


def _numeric(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.kind == "f" else np.dtype(np.float32)
