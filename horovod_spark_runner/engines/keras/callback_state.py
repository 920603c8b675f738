"""State of Keras callbacks as JSON and arrays: early stopping, plateaus, best values.

Keras callbacks have no common way to be saved. What a callback has changed in its own attributes
since training began is its state; what is a number, text, array, or list, tuple or dictionary of
those, can be saved and given back, and so can a variable's value. Open files and functions are made
again by the callback; of what else a callback of the user's own keeps, a warning tells.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...training.progress import Json

logger = logging.getLogger(__name__)

# Set by Keras itself for every training.
_FRAMEWORK = {"model", "_model", "params"}
# Under this name, the size of a CSVLogger's file stands among its attributes.
_LOG = "csv_file"

_VARIABLES = (keras.Variable, tf.Variable)

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
        self._objects = {name: dict(vars(callback)) for name, callback in callbacks.items()}
        self._warned: set[str] = set()

    def capture(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the changed attributes: JSON by callback, and their arrays by name.

        A callback that has changed nothing is named, too: it was there.
        """
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
            state[name] = changed
        return state, arrays

    def restore(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Restore the state from `capture`; callbacks without state stay as they are.

        What had not changed then is as it was when the training began, whatever the hooks of an
        resumed epoch have made of it.
        """
        for name, changed in state.items():
            if name not in self._callbacks:
                if changed:
                    logger.warning(
                        "the checkpoint has the state of callback %s, not given now", name
                    )
                continue
            self._put_back(name, set(changed))
            if changed.get(_LOG) is not None:
                _cut(self._callbacks[name], changed[_LOG])
            for key, value in changed.items():
                if key == _LOG:
                    continue
                prefix = f"{name}/{key}/"
                value_arrays = {
                    int(n[len(prefix) :]): arrays[n] for n in arrays if n.startswith(prefix)
                }
                try:
                    self._set(name, key, value, value_arrays)
                except KeyError:  # a large array, and rank 0 had none
                    logger.warning("callback %s: attribute %s begins anew", name, key)

    def _put_back(self, name: str, changed: set[str]) -> None:
        """Reset savable attributes that are not in ``changed`` to their initial values."""
        for key, value in _attributes(self._callbacks[name]).items():
            initial = self._initial[name].get(key)
            if key in changed or initial is None:
                continue
            packed = _pack(value)
            if packed is not None and not _same(packed, initial):
                self._set(name, key, initial[0], dict(enumerate(initial[1])))

    def _set(self, name: str, key: str, value: Any, arrays: Mapping[int, np.ndarray]) -> None:
        callback = self._callbacks[name]
        present = vars(callback).get(key)
        if (
            isinstance(present, _VARIABLES) and value is not None
        ):  # which others, such as a loss, may hold as well
            present.assign(_unpack(value, arrays))
        elif isinstance(value, dict) and "variable" in value:
            logger.warning("callback %s: attribute %s is no variable now", name, key)
        else:
            setattr(callback, key, _unpack(value, arrays))

    def _warn(self, name: str, key: str, value: object) -> None:
        # What was there when the training began, and holds no items, is no state; neither are
        # callables and files, nor what Keras' own callbacks work with.
        same = value is self._objects[name].get(key) and not isinstance(value, Collection)
        from_keras = type(self._callbacks[name]).__module__.startswith("keras.")
        if same or from_keras or callable(value) or hasattr(value, "write"):
            return
        if f"{name}.{key}" in self._warned:
            return
        self._warned.add(f"{name}.{key}")
        logger.warning(
            "callback %s: attribute %s (%s) cannot be kept in checkpoints; a resumed run begins "
            "with what the callback itself gives it",
            name,
            key,
            type(value).__name__,
        )


def _size(callback: keras.callbacks.Callback) -> int | None:
    """Return the size of a callback's log in bytes; ``None`` if it is no local file."""
    path = Path(callback.filename)
    return path.stat().st_size if path.is_file() else None


def _cut(callback: keras.callbacks.Callback, size: int) -> None:
    """Remove the rows from a log that will be written again."""
    if (_size(callback) or 0) > size:
        os.truncate(callback.filename, size)
        callback.append_header = size == 0


def _attributes(callback: keras.callbacks.Callback) -> dict[str, object]:
    left_out = set(_FRAMEWORK)
    if hasattr(callback, "monitor_op"):
        # Keras turns its sign round, once, when it finds out which way the metric is better.
        left_out.add("min_delta")
    if isinstance(callback, keras.callbacks.CSVLogger):
        left_out.add("writer")  # which it makes for the file that it opens
    # The model's variables are in the checkpoint anyway.
    model = getattr(callback, "_model", None)
    optimizer = getattr(model, "optimizer", None)
    variables = [*getattr(model, "variables", ()), *getattr(optimizer, "variables", ())]
    of_model = {id(variable) for variable in variables}
    return {
        key: value
        for key, value in vars(callback).items()
        if key not in left_out and id(value) not in of_model
    }


def _pack(value: object) -> Packed | None:
    """Return ``value`` as JSON that refers to the arrays beside it, or ``None``."""
    arrays: list[np.ndarray] = []
    try:
        if isinstance(value, _VARIABLES):
            _pack_into(np.asarray(tf.convert_to_tensor(value)), arrays)
            return {"variable": 0}, arrays
        return _pack_into(value, arrays), arrays
    except TypeError:
        return None


def _pack_into(value: Any, arrays: list[np.ndarray]) -> Json:
    # Of exactly these classes: one derived of them, such as a named tuple, would not come back.
    if value is None or type(value) in (bool, int, float, str):
        plain: Json = value
        return plain
    if type(value) in (list, tuple):
        return {type(value).__name__: [_pack_into(item, arrays) for item in value]}
    if type(value) is dict:
        return {"dict": [[_pack_into(part, arrays) for part in pair] for pair in value.items()]}
    if isinstance(value, np.generic) or _is_constant(value):
        value = np.asarray(value)
    if type(value) is np.ndarray and value.dtype.kind in "biufcV" and value.dtype.names is None:
        arrays.append(np.array(value))
        return {"array": len(arrays) - 1}
    raise TypeError(type(value).__name__)


def _is_constant(value: object) -> bool:
    """Return whether it is a tensor; a variable within a container would come back as none."""
    return bool(keras.ops.is_tensor(value)) and not isinstance(value, _VARIABLES)


def _unpack(value: Any, arrays: Mapping[int, np.ndarray]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind in ("array", "variable"):
        return arrays[inner] if arrays[inner].shape else arrays[inner][()]
    if kind == "dict":
        return {_unpack(key, arrays): _unpack(item, arrays) for key, item in inner}
    items = [_unpack(item, arrays) for item in inner]
    return items if kind == "list" else tuple(items)


def _same(one: Packed, other: Packed | None) -> bool:
    if other is None or one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(one[1], other[1], strict=True)
    )
