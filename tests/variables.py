"""Variables of a model that are NumPy's, for tests of ways to synchronise without a framework."""

from __future__ import annotations

from typing import Any

import numpy as np


class Value:
    """A variable; see `Variable`."""

    def __init__(self, value: Any, *, trained: bool = False) -> None:
        self.value, self.trained = np.array(value), trained

    def assign(self, value: np.ndarray) -> None:
        assert value.dtype == self.value.dtype
        assert value.shape == self.value.shape
        self.value = np.array(value)


class NumPyVariables:
    """Variables by name; see `Variables`."""

    def __init__(self, **named: Value) -> None:
        self.named = named

    def __getitem__(self, name: str) -> Any:
        return self.named[name].value

    def view(self, variable: Value) -> np.ndarray:
        return variable.value

    def is_trained(self, variable: Value) -> bool:
        return variable.trained

    def is_rate(self, variable: Value) -> bool:
        return False
