"""The random generators of a rank, as JSON and arrays.

Python's and NumPy's legacy one, and those of the framework that trains.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..storage.arrays import Arrays
from .state import Variable

# Python's and NumPy's, which begin alike on all ranks.
ALIKE = ("python", "numpy")


def capture_random(own: Mapping[str, Variable]) -> tuple[dict[str, Any], Arrays]:
    """Return the state of all global generators of this process.

    Args:
        own: the states of the framework's own, by name.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, gauss],
        "numpy": [kind, int(position), int(has_gauss), float(cached)],
    }
    arrays = {"python": np.array(words, np.uint32), "numpy": np.array(keys)}
    arrays.update({name: np.array(variable.numpy()) for name, variable in own.items()})
    return state, arrays


def restore_random(state: dict[str, Any], arrays: Arrays, own: Mapping[str, Variable]) -> None:
    """Put all global generators into a state that `capture_random` returned.

    Those of the framework that are not in it stay as they are.
    """
    version, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in arrays["python"]), gauss))
    kind, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, arrays["numpy"], position, has_gauss, cached))
    for name, variable in own.items():
        if name in arrays:
            variable.assign(arrays[name])
