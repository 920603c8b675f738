"""The user's Keras callbacks on every rank, and their state as JSON and arrays.

Keras callbacks have no common way to be saved. What a callback has changed in its own attributes
since training began is its state; what is a number, text, array, or list, tuple or dictionary of
those, can be saved and given back, and so can a variable's value. Open files and functions are made
again by the callback; of what else a callback of the user's own keeps, a warning tells.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...checkpoint.files import PlainLogs
from ...storage.arrays import Arrays
from ...training.progress import Json, Logs
from ...training.trainee import Hooks
from .engine import list_callbacks

# These write files or send messages: one rank is enough, and several would disturb each other.
_RANK_ZERO_ONLY = tuple(
    getattr(keras.callbacks, name)
    for name in (
        "BackupAndRestore",
        "CSVLogger",
        "ModelCheckpoint",
        "OrbaxCheckpoint",
        "ProgbarLogger",
        "RemoteMonitor",
        "TensorBoard",
    )
    if hasattr(keras.callbacks, name)
)
logger = logging.getLogger(__name__)
# Set by Keras itself for every training.
_FRAMEWORK = {"model", "_model", "params"}
# Under this name, the size of a CSVLogger's file stands among its attributes.
_LOG = "csv_file"
_VARIABLES = (keras.Variable, tf.Variable)
# A value as JSON, and the arrays that it refers to by their number.
_Packed = tuple[Json, list[np.ndarray]]


def check_callbacks(callbacks: object) -> list[keras.callbacks.Callback]:
    """Return the callbacks that were given.

    Args:
        callbacks: a sequence of callbacks, or a function that returns one.

    Raises:
        InvalidInputError: something given is not a Keras callback.
    """
    if callable(callbacks) and not isinstance(callbacks, keras.callbacks.Callback):
        return list_callbacks(callbacks())
    return list_callbacks(callbacks)


def overrides(callbacks: Sequence[keras.callbacks.Callback], *names: str) -> bool:
    """Return whether a callback does something at one of the hooks ``names``."""
    return any(
        not getattr(getattr(callback, name), "_is_default", False)
        for callback in callbacks
        for name in names
    )


class Callbacks(Hooks):
    """Calls the callbacks of this rank as ``Model.fit`` does.

    Args:
        callbacks: all callbacks that were given, the same on every rank.
        model: the model they watch.
        rank: Keras' own callbacks that write files are kept on rank 0 only.
        params: what Keras tells callbacks of a training.
        resumed: whether files written before are to be continued.
        retrace: compiles the steps again, where a callback has opened what their summaries go to.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        rank: int,
        params: Mapping[str, object],
        *,
        resumed: bool,
        retrace: Callable[[], None],
    ) -> None:
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.CSVLogger) and resumed:
                callback.append = True
        # A callback's name, its number and class, is the same on all ranks and in a resumed run.
        named = {
            f"{n:03d}.{type(callback).__name__}": callback for n, callback in enumerate(callbacks)
        }
        self._named = {
            name: callback
            for name, callback in named.items()
            if rank == 0 or not isinstance(callback, _RANK_ZERO_ONLY)
        }
        self._of_rank_zero = named.keys() - self._named.keys()
        self._model = model
        self._logs = _EpochLogs()
        self._list = keras.callbacks.CallbackList(
            list(self._named.values()), add_history=True, model=model, **params
        )
        self._list.callbacks.append(self._logs)
        self._retrace = retrace
        self._summaries = any(isinstance(c, keras.callbacks.TensorBoard) for c in callbacks)
        begins = ("on_train_batch_begin", "on_batch_begin")
        ends = ("on_train_batch_end", "on_batch_end")
        self.watch_begin = overrides(callbacks, *begins)
        self.watch_end = overrides(callbacks, *ends)
        self.watch_test = overrides(callbacks, "on_test_batch_begin", "on_test_batch_end")

    @property
    def stop_training(self) -> bool:
        return bool(self._model.stop_training)

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        self._model.stop_training = value

    @property
    def stop_evaluating(self) -> bool:
        return bool(self._model.stop_evaluating)

    @stop_evaluating.setter
    def stop_evaluating(self, value: bool) -> None:
        self._model.stop_evaluating = value

    @property
    def initial_epoch(self) -> int:  # type: ignore[override]
        # Keras's BackupAndRestore, on rank 0, may have loaded weights, and says the epoch.
        return int(self._model._initial_epoch or 0)

    @property
    def restored(self) -> str:  # type: ignore[override]
        weights = self._model.get_weights()
        for callback in self._named.values():
            if not isinstance(callback, keras.callbacks.EarlyStopping):
                continue
            best = callback.best_weights if callback.restore_best_weights else None
            # Another callback may have changed them since.
            if best and all(map(np.array_equal, best, weights)):
                name, epoch = type(callback).__name__, callback.best_epoch + 1
                return f"epoch {epoch:,}, restored by {name} (monitors {callback.monitor})"
        return ""

    def train_begin(self) -> None:
        self._list.on_train_begin()
        if self._summaries:
            self._retrace()

    def train_end(self, logs: Logs | None) -> None:
        self._list.on_train_end(logs)

    def epoch_begin(self, epoch: int) -> None:
        self._list.on_epoch_begin(epoch)

    def epoch_end(self, epoch: int, logs: Logs) -> dict[str, object]:
        self._list.on_epoch_end(epoch, dict(logs))
        return self._logs.last

    def train_step_begin(self, number: int) -> None:
        self._list.on_train_batch_begin(number)

    def train_step_end(self, number: int, logs: Logs | None) -> None:
        self._list.on_train_batch_end(number, logs)

    def test_begin(self) -> None:
        self._list.on_test_begin()

    def test_end(self, logs: Logs) -> None:
        self._list.on_test_end(logs)

    def test_step_begin(self, number: int) -> None:
        self._list.on_test_batch_begin(number)

    def test_step_end(self, number: int, logs: Logs | None) -> None:
        self._list.on_test_batch_end(number, logs)

    def snapshot(self) -> None:
        self._states = _CallbackStates(self._named)

    def restore_history(self, history: Sequence[PlainLogs]) -> None:
        record = self._model.history
        record.epoch = list(range(len(history)))
        for logs in history:
            for name, value in logs.items():
                record.history.setdefault(name, []).append(value)

    def capture(self) -> tuple[dict[str, Any], Arrays]:
        return self._states.capture()

    def restore(self, state: dict[str, Any], arrays: Arrays) -> None:
        # A rank that was not there before is given the state of rank 0.
        states = {
            name: callback_state
            for name, callback_state in state.items()
            if name not in self._of_rank_zero
        }
        self._states.restore(states, arrays)


class _EpochLogs(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps an epoch's logs as all callbacks have left them."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, object] = {}

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.last = dict(logs or {})


class _CallbackStates:
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
                    logger.warning(
                        "callback %s: attribute %s starts with its initial value", name, key
                    )

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
            logger.warning("callback %s: attribute %s is not a variable any more", name, key)
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


def _pack(value: object) -> _Packed | None:
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


def _same(one: _Packed, other: _Packed | None) -> bool:
    if other is None or one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(one[1], other[1], strict=True)
    )
