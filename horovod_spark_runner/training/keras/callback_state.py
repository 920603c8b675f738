"""What Keras callbacks remember, as JSON and arrays: early stopping, plateaus, best values.

Keras callbacks have no common way to be saved. What a callback has changed in its own attributes
since training began is its state; what is a number, text, array, or list, dictionary, set or deque
of those, can be saved and given back. Anything else (open files, functions) is made again by the
callback; a container that has changed and cannot be saved is warned of.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ..logs import Json

logger = logging.getLogger(__name__)

# Set by Keras itself for every training.
_FRAMEWORK = {"model", "_model", "params"}
# Under this name, the size of a CSVLogger's file stands among its attributes.
_LOG = "csv_file"

# A value as JSON, and the arrays that it refers to by their number.
Packed = tuple[Json, list[np.ndarray]]


class CallbackStates:
    """The state of some callbacks.

    Args:
        callbacks: the callbacks by a name that is the same in every run, just after their
            ``on_train_begin``.
    """

    def __init__(self, callbacks: dict[str, keras.callbacks.Callback]) -> None:
        self._callbacks = callbacks
        self._initial = {
            name: {key: _pack(value) for key, value in _attributes(callback).items()}
            for name, callback in callbacks.items()
        }
        self._outlines = {
            name: {key: _outline(value) for key, value in _attributes(callback).items()}
            for name, callback in callbacks.items()
        }
        self._warned: set[str] = set()

    def capture(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return what has changed: JSON by callback, and the arrays it refers to by name."""
        state: dict[str, Json] = {}
        arrays: dict[str, np.ndarray] = {}
        for name, callback in self._callbacks.items():
            changed: dict[str, Json] = {}
            for key, value in _attributes(callback).items():
                packed = _pack(value)
                if packed is None:
                    self._warn(name, key, value)
                elif not _same(packed, self._initial[name].get(key)):
                    changed[key] = packed[0]
                    for number, array in enumerate(packed[1]):
                        arrays[f"{name}/{key}/{number:05d}"] = array
            if isinstance(callback, keras.callbacks.CSVLogger):
                changed[_LOG] = _size(callback)
            if changed:
                state[name] = changed
        return state, arrays

    def restore(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Give the callbacks what `capture` returned; unknown ones are left as they are."""
        for name, changed in state.items():
            if name not in self._callbacks:
                logger.warning("the checkpoint has the state of callback %s, not given now", name)
                continue
            if changed.get(_LOG) is not None:
                _cut(self._callbacks[name], changed[_LOG])
            for key, value in changed.items():
                if key == _LOG:
                    continue
                prefix = f"{name}/{key}/"
                own = {int(n[len(prefix) :]): arrays[n] for n in arrays if n.startswith(prefix)}
                try:
                    setattr(self._callbacks[name], key, _unpack(value, own))
                except KeyError:  # a large array, and rank 0 had none
                    logger.warning("callback %s: attribute %s begins anew", name, key)

    def _warn(self, name: str, key: str, value: object) -> None:
        # What was there when the training began, and is no container, is no state; neither are
        # callables and files.
        initial = self._initial[name]
        same = key in initial and initial[key] is None
        same = same and _outline(value) == self._outlines[name][key]
        if same or callable(value) or hasattr(value, "write") or f"{name}.{key}" in self._warned:
            return
        self._warned.add(f"{name}.{key}")
        logger.warning(
            "callback %s: attribute %s (%s) cannot be kept in checkpoints; a resumed run begins "
            "without it",
            name,
            key,
            type(value).__name__,
        )


def _size(callback: keras.callbacks.Callback) -> int | None:
    """Return the size of a callback's log in bytes; ``None`` if it is no local file."""
    path = Path(callback.filename)
    return path.stat().st_size if path.is_file() else None


def _cut(callback: keras.callbacks.Callback, size: int) -> None:
    """Take the rows out of a log that will be written again."""
    if (_size(callback) or 0) > size:
        os.truncate(callback.filename, size)
        callback.append_header = size == 0


def _attributes(callback: keras.callbacks.Callback) -> dict[str, object]:
    left_out = set(_FRAMEWORK)
    if hasattr(callback, "monitor_op"):
        # Keras turns its sign round, once, when it finds out which way the metric is better.
        left_out.add("min_delta")
    return {key: value for key, value in vars(callback).items() if key not in left_out}


def _outline(value: object) -> dict[int, int] | list[int] | None:
    """Return what changes with a container's items; of anything else, nothing does."""
    if isinstance(value, dict):
        return {id(key): id(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [id(item) for item in value]
    return None


def _pack(value: object) -> Packed | None:
    """Return ``value`` as JSON that refers to the arrays beside it, or ``None``."""
    arrays: list[np.ndarray] = []
    try:
        return _pack_into(value, arrays), arrays
    except TypeError:
        return None


def _pack_into(value: object, arrays: list[np.ndarray]) -> Json:
    if value is None or (
        isinstance(value, (bool, int, float, str)) and not isinstance(value, np.generic)
    ):
        return value
    if isinstance(value, (list, tuple)):
        items = [_pack_into(item, arrays) for item in value]
        return {"list" if isinstance(value, list) else "tuple": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _pack_into(item, arrays) for key, item in value.items()}}
    if isinstance(value, dict):
        pairs = value.items()
        return {"pairs": [[_pack_into(part, arrays) for part in pair] for pair in pairs]}
    if isinstance(value, (set, frozenset)):
        # In one order, whatever the hashes are.
        items = [_pack_into(item, arrays) for item in sorted(value, key=repr)]
        return {"set" if isinstance(value, set) else "frozenset": items}
    if isinstance(value, deque):
        return {"deque": [value.maxlen, *(_pack_into(item, arrays) for item in value)]}
    if isinstance(value, np.generic) or keras.ops.is_tensor(value):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcV" and value.dtype.names is None:
        arrays.append(np.array(value))
        return {"array": len(arrays) - 1}
    raise TypeError(type(value).__name__)


def _unpack(value: Any, arrays: Mapping[int, np.ndarray]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "array":
        return arrays[inner] if arrays[inner].shape else arrays[inner][()]
    if kind == "dict":
        return {key: _unpack(item, arrays) for key, item in inner.items()}
    if kind == "pairs":
        return {_unpack(key, arrays): _unpack(item, arrays) for key, item in inner}
    if kind == "deque":
        return deque((_unpack(item, arrays) for item in inner[1:]), inner[0])
    items = [_unpack(item, arrays) for item in inner]
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)


def _same(one: Packed, other: Packed | None) -> bool:
    if other is None or one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(one[1], other[1], strict=True)
    )
