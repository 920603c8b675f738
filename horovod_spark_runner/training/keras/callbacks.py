"""The user's Keras callbacks on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from ...errors import InvalidInputError

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


def check_callbacks(given: Any) -> list[Any]:
    """Return the callbacks that were given.

    Args:
        given: a sequence of callbacks, or a function that returns one.

    Raises:
        InvalidInputError: something given is not a Keras callback.
    """
    callbacks = given() if callable(given) and not _is_callback(given) else given
    if _is_callback(callbacks) and not isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = [callbacks]
    if not isinstance(callbacks, Sequence):
        raise InvalidInputError(
            f"callbacks must be a list of keras.callbacks.Callback, got {callbacks!r}"
        )
    for callback in callbacks:
        if not _is_callback(callback):
            raise InvalidInputError(
                f"callbacks holds {callback!r}, which is no keras.callbacks.Callback"
            )
    return list(callbacks)


def _is_callback(value: Any) -> bool:
    return isinstance(value, keras.callbacks.Callback)


def overrides(callbacks: Sequence[Any], *names: str) -> bool:
    """Tell whether a callback does something at one of the hooks ``names``."""
    return any(
        not getattr(getattr(callback, name), "_is_default", False)
        for callback in callbacks
        for name in names
    )


class Callbacks:
    """Calls the callbacks of this rank as ``Model.fit`` does.

    Args:
        callbacks: all callbacks that were given, the same on every rank.
        model: the model they watch.
        rank: Keras' own callbacks that write files are kept on rank 0 only.
        params: what Keras tells callbacks of a training.
        resumed: whether files written before are to be gone on with.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        model: Any,
        rank: int,
        params: Mapping[str, Any],
        *,
        resumed: bool,
    ) -> None:
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.CSVLogger) and resumed:
                callback.append = True
        # A callback's name, its place and class, is the same on all ranks and in a resumed run.
        self.named = {
            f"{number:03d}.{type(callback).__name__}": callback
            for number, callback in enumerate(callbacks)
            if rank == 0 or not isinstance(callback, _RANK_ZERO_ONLY)
        }
        self._logs = _EpochLogs()
        self.list = keras.callbacks.CallbackList(
            list(self.named.values()), add_history=True, model=model, **params
        )
        self.list.callbacks.append(self._logs)
        begins = ("on_train_batch_begin", "on_batch_begin")
        ends = ("on_train_batch_end", "on_batch_end")
        self.watch_begin = overrides(callbacks, *begins)
        self.watch_end = overrides(callbacks, *ends)
        self.watch_test = overrides(callbacks, "on_test_batch_begin", "on_test_batch_end")

    def end_epoch(self, epoch: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Call the hooks of an epoch's end; return its logs with what callbacks have added."""
        self.list.on_epoch_end(epoch, dict(logs))
        return self._logs.last

    def restore_history(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Give the model's ``History`` the epochs of earlier attempts."""
        record = self.list.model.history
        record.epoch = list(range(len(history)))
        for logs in history:
            for name, value in logs.items():
                record.history.setdefault(name, []).append(value)


class _EpochLogs(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps an epoch's logs as all callbacks have left them."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.last = dict(logs or {})
