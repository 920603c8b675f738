"""Keras' settings that hold for a whole process, kept apart between the models that live in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import keras


def keras_state() -> dict[str, str]:
    """Return the settings under which models are made and called now."""
    return {
        "floatx": keras.config.floatx(),
        "image_data_format": keras.config.image_data_format(),
        "dtype_policy": keras.config.dtype_policy().name,
    }


@contextlib.contextmanager
def using_keras_state(state: Mapping[str, str] | None) -> Iterator[None]:
    """Let the settings ``state`` hold inside, and those from before afterwards.

    Args:
        state: settings of `keras_state`; ``None`` leaves them.
    """
    if state is None:
        yield
        return
    before = keras_state()
    _set(state)
    try:
        yield
    finally:
        _set(before)


@contextlib.contextmanager
def fresh_keras_state() -> Iterator[None]:
    """Let the settings be inside as in a new process, whatever is set there; as before afterwards.

    Names that Keras gives to layers count from the beginning, too.
    """
    keras.utils.clear_session(free_memory=False)  # the only way to unset the dtype policy
    floatx, image_data_format = keras.config.floatx(), keras.config.image_data_format()
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_image_data_format(image_data_format)
        keras.utils.clear_session(free_memory=False)


def _set(state: Mapping[str, str]) -> None:
    keras.config.set_floatx(state["floatx"])
    keras.config.set_image_data_format(state["image_data_format"])
    keras.config.set_dtype_policy(state["dtype_policy"])
