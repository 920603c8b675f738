"""The user's Keras callbacks on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from ...checkpoint.files import PlainLogs
from ...storage.arrays import Arrays
from ...training.progress import Logs
from ...training.trainee import Hooks
from .callback_state import CallbackStates
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

    def remember(self) -> None:
        self._states = CallbackStates(self._named)

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
