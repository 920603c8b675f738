"""State of objects beside the module, as ``state_dict`` returns it: JSON and arrays."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from ...errors import ModelError
from ...storage.arrays import Arrays
from .state import as_array, as_tensor

# The keys of what JSON has no form of.
_TENSOR, _ARRAY, _DICT, _TUPLE, _FLOAT = "tensor", "array", "dict", "tuple", "float"
_COUNTER = "counter"


def pack_state(value: object, name: str, arrays: Arrays, owner: str) -> Any:
    """Return a state as JSON.

    Args:
        value: dictionaries, counters, lists and tuples of tensors, arrays, numbers, strings and
            ``None``. Optimizers in it are left out.
        name: begins the names of its arrays.
        arrays: receives its tensors and arrays.
        owner: what the state is of, for messages.

    Raises:
        ModelError: it holds anything else.
    """
    if isinstance(value, Tensor | np.ndarray):
        arrays[name] = np.array(as_array(value) if isinstance(value, Tensor) else value)
        return {_TENSOR if isinstance(value, Tensor) else _ARRAY: name}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        items = [
            [
                pack_state(key, f"{name}/key", arrays, owner),
                pack_state(item, f"{name}/{number}", arrays, owner),
            ]
            for number, (key, item) in enumerate(value.items())
            if not isinstance(item, Optimizer)  # of a scheduler that keeps its own
        ]
        return {_COUNTER if isinstance(value, collections.Counter) else _DICT: items}
    if isinstance(value, list | tuple):
        items = [
            pack_state(item, f"{name}/{number}", arrays, owner) for number, item in enumerate(value)
        ]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ModelError(
        f"state_dict() of {owner} holds a {type(value).__module__}.{type(value).__qualname__}, "
        "which a checkpoint cannot hold: return tensors, arrays, numbers and strings, also in "
        "dictionaries and lists"
    )


def unpack_state(packed: Any, arrays: Arrays) -> Any:
    """Return the state that `pack_state` has packed."""
    if isinstance(packed, list):
        return [unpack_state(item, arrays) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, held),) = packed.items()
    if kind == _TENSOR:
        return as_tensor(arrays[held])
    if kind == _ARRAY:
        return np.array(arrays[held])
    if kind in (_DICT, _COUNTER):
        items = {unpack_state(key, arrays): unpack_state(item, arrays) for key, item in held}
        return items if kind == _DICT else collections.Counter(items)
    if kind == _TUPLE:
        return tuple(unpack_state(held, arrays))
    return float(held)
