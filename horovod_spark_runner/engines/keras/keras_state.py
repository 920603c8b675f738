"""Keras' process-wide settings, kept separate between the models in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
from keras.src.backend.common import global_state

# What Keras keeps for each thread: names it has given, seeds, the dtype policy.
_TRACKERS = [name for name in vars(global_state) if name.endswith("_TRACKER")]


def keras_state() -> dict[str, Any]:
    """Return the settings under which models are made and called now."""
    return {
        "floatx": keras.config.floatx(),
        "image_data_format": keras.config.image_data_format(),
        "dtype_policy": keras.config.dtype_policy().name,
        "epsilon": keras.config.epsilon(),
    }


@contextlib.contextmanager
def using_keras_state(state: Mapping[str, Any] | None) -> Iterator[None]:
    """Apply the settings ``state`` inside, and restore the previous ones afterwards.

    Args:
        state: settings of `keras_state`; ``None`` leaves them.
    """
    if state is None:
        yield
        return
    before = keras_state()
    set_keras_state(state)
    try:
        yield
    finally:
        set_keras_state(before)


@contextlib.contextmanager
def fresh_keras_state() -> Iterator[None]:
    """Run with Keras' state of a new process, except for settings shared by all threads.

    Names that it gives to layers count from the beginning, and no seed is set. All is as before
    afterwards.
    """
    trackers = {name: getattr(global_state, name) for name in _TRACKERS}
    before = keras_state()
    keras.utils.clear_session(free_memory=False)  # the only way to unset the dtype policy
    try:
        yield
    finally:
        keras.utils.clear_session(free_memory=False)
        for name, tracker in trackers.items():
            setattr(global_state, name, tracker)
        _set_for_all(before)


def set_keras_state(state: Mapping[str, Any]) -> None:
    """Apply the settings ``state`` from now on.

    Args:
        state: settings of `keras_state`.
    """
    _set_for_all(state)
    keras.config.set_dtype_policy(state["dtype_policy"])


def _set_for_all(state: Mapping[str, Any]) -> None:
    keras.config.set_floatx(state["floatx"])
    keras.config.set_image_data_format(state["image_data_format"])
    if "epsilon" in state:  # models of earlier versions have none
        keras.config.set_epsilon(state["epsilon"])
