"""The user's Keras callbacks on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ..errors import InvalidInputError

# These write files or send messages: one rank is enough, and several would disturb each other.
_RANK_ZERO_ONLY = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def make_callbacks(
    given: Any, model: Any, rank: int, epochs: int, *, resumed: bool
) -> tuple[Any, dict[str, Any]]:
    """Return the ``keras.callbacks.CallbackList`` of this rank, and its callbacks by name.

    The name of a callback, its place and class, is the same on all ranks and in a resumed run.

    Args:
        given: a sequence of callbacks, or a function that returns one.
        model: the model they watch.
        rank: callbacks that write files are kept on rank 0 only.
        epochs: epochs the run is to have.
        resumed: whether files written before are to be gone on with.

    Raises:
        InvalidInputError: something given is not a Keras callback.
    """
    callbacks = given() if callable(given) else given
    if not isinstance(callbacks, Sequence):
        raise InvalidInputError(
            f"callbacks must be a list of keras.callbacks.Callback, got {callbacks!r}"
        )
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise InvalidInputError(
                f"callbacks holds {callback!r}, which is no keras.callbacks.Callback"
            )
        if isinstance(callback, keras.callbacks.CSVLogger) and resumed:
            callback.append = True
    named = {
        f"{number:03d}.{type(callback).__name__}": callback
        for number, callback in enumerate(callbacks)
        if rank == 0 or not isinstance(callback, _RANK_ZERO_ONLY)
    }
    every = keras.callbacks.CallbackList(
        list(named.values()), add_history=False, add_progbar=False, model=model, epochs=epochs
    )
    return every, named
