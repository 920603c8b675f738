"""Source of a Keras model, as the driver knows it. Loads no framework."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidInputError, ModelError, brief
from ...storage.contents import Contents, read_entry
from ...storage.filesystem import Location
from ...training.engine import GRAPH_FILE
from ...training.spec import ModelSource, check_model_fn, check_objects
from ...typed_json import load_json
from .saved import CONFIG_FILE, KIND

# Keras' settings in a new process.
_AT_FIRST = {
    "floatx": "float32",
    "dtype_policy": "float32",
    "image_data_format": "channels_last",
    "epsilon": 1e-7,
}
_NO_ARCHIVE = "model file %s is not a Keras archive (model.save('….keras'))"


def model_source(model: Any, custom_objects: Mapping[str, Any] | None = None) -> ModelSource:
    """Return the source for ``run_training``'s ``model_fn`` argument.

    Its `file` holds the bytes of a ``.keras`` file, or the text of ``model.to_json()``.

    Args:
        model: a function without required arguments, or the path or URL of a ``.keras`` or
            ``.json`` file.
        custom_objects: see `ModelSource`.

    Raises:
        ModelError: it is neither, or the file cannot be a Keras model.
        InvalidInputError: ``custom_objects`` is no dictionary by name.
    """
    custom_objects = check_objects(custom_objects)
    if isinstance(model, (str, os.PathLike)):
        return _file_source(Location(model), custom_objects)
    if _is_of_keras(model, "Model"):
        raise ModelError(
            f"model_fn is a {type(model).__name__} object; give the function that builds and "
            "compiles it, so that the model is made on the workers"
        )
    if not callable(model):
        raise ModelError(
            "model_fn must be a function that returns a compiled keras.Model, or the path of a "
            f".keras or .json file, got {brief(model)}"
        )
    check_model_fn(model)
    if (settings := _settings_of_this_process()) != _AT_FIRST:
        model = _UnderSettings(model, settings)
    return ModelSource(function=model, custom_objects=custom_objects)


@dataclass(frozen=True)
class _UnderSettings:
    """A ``model_fn`` that is called under the settings of Keras that hold on the driver.

    Attributes:
        function: what is called.
        settings: of `keras_state`.
    """

    function: Callable[[], Any]
    settings: Mapping[str, Any]

    def __call__(self) -> Any:
        from .keras_state import set_keras_state

        set_keras_state(self.settings)
        return self.function()

    def __reduce__(self) -> tuple[Any, ...]:
        # In this order: what the function has captured is made under the settings, too.
        return _under_settings, (_RestoredSettings(self.settings), self.function, self.settings)


@dataclass(frozen=True)
class _RestoredSettings:
    """Settings that hold once this is unpickled, which gives those from before.

    Attributes:
        settings: of `keras_state`.
    """

    settings: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin, (self.settings,)


def _begin(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    from .keras_state import keras_state, set_keras_state

    before = keras_state()
    set_keras_state(settings)
    return before


def _under_settings(
    before: Mapping[str, Any], function: Callable[[], Any], settings: Mapping[str, Any]
) -> _UnderSettings:
    from .keras_state import set_keras_state

    set_keras_state(before)
    return _UnderSettings(function, settings)


def _settings_of_this_process() -> Mapping[str, Any]:
    """Return the settings of Keras' that hold here, as they do where ``model_fn`` is written."""
    keras = sys.modules.get("keras")
    if keras is None or not hasattr(keras, "config"):  # while it is being imported
        return _AT_FIRST
    from .keras_state import keras_state

    settings = keras_state()
    try:
        keras.dtype_policies.get(settings["dtype_policy"])
    except ValueError as error:
        raise ModelError(
            f"the dtype policy {settings['dtype_policy']!r} of this process has no name by which "
            "it could be set on the ranks; call keras.config.set_dtype_policy in model_fn, and not "
            "here"
        ) from error
    return settings


def check_callback_argument(callbacks: Any) -> None:
    """Check ``callbacks`` without importing Keras; the ranks check a function's result.

    Raises:
        InvalidInputError: it holds something else than Keras callbacks.
    """
    if _is_of_keras(callbacks, "Callback") or not callable(callbacks):
        list_callbacks(callbacks)


def list_callbacks(callbacks: Any) -> list[Any]:
    """Return one callback, or several, as a list.

    Raises:
        InvalidInputError: they are something else.
    """
    if _is_of_keras(callbacks, "Callback") and not _is_of_keras(callbacks, "CallbackList"):
        return [callbacks]
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise InvalidInputError(
            "callbacks must be a list of keras.callbacks.Callback, or a function that returns one, "
            f"got {brief(callbacks)}"
        )
    for callback in callbacks:
        if not _is_of_keras(callback, "Callback"):
            raise InvalidInputError(
                f"callbacks holds {brief(callback)}, which is no keras.callbacks.Callback"
            )
    return list(callbacks)


def _is_of_keras(value: Any, name: str) -> bool:
    """Return whether ``value`` is an instance of Keras' class of that name."""
    # Without importing Keras: if it is an instance, Keras is loaded already.
    return any(
        cls.__module__.startswith("keras.") and cls.__name__ == name for cls in type(value).__mro__
    )


def _check_file(place: Location) -> None:
    """Check that there is a file to read a model from.

    Raises:
        ModelError: there is none.
    """
    if place.is_folder:
        kind = "a folder"
        if place.join(GRAPH_FILE).exists():
            kind = "a SavedModel, whose graph cannot be trained on"
        raise ModelError(
            f"model_fn={str(place)!r} is {kind}; give a function that builds the model, with "
            "initial_weights for the weights of a SavedModel or run, or a .keras or .json file"
        )
    if not place.exists():
        raise ModelError(f"model file {place} does not exist")


def _file_source(place: Location, custom_objects: dict[str, Any]) -> ModelSource:
    _check_file(place)
    if place.name.endswith(".keras"):
        return ModelSource(file=read_archive(place), custom_objects=custom_objects)
    if place.name.endswith(".json"):
        return ModelSource(file=_model_json(place), custom_objects=custom_objects)
    raise ModelError(f"model file {place} must end in .keras or .json")


def read_archive(place: str | os.PathLike[str] | Location) -> Contents:
    """Return the contents of a ``.keras`` file.

    Raises:
        ModelError: it is none.
    """
    location = place if isinstance(place, Location) else Location(place)
    if not location.name.endswith(".keras"):
        raise ModelError(f"model file {location} must end in .keras")
    _check_file(location)
    archive = location.spool(lambda part: None)
    try:
        read_entry(archive.open(), CONFIG_FILE, KIND)
    except ValueError as error:
        raise ModelError(f"{_NO_ARCHIVE % location}: {error}") from error
    return archive


def _model_json(place: Location) -> str:
    try:
        text = place.read_text()
        config = load_json(text)
    except ValueError as error:
        raise ModelError(f"model file {place} is not JSON: {error}") from error
    if not isinstance(config, dict) or "class_name" not in config:
        raise ModelError(f"model file {place} was not made by model.to_json()")
    if not config.get("compile_config"):
        raise ModelError(
            f"model file {place} holds a model that was not compiled; call model.compile(…) "
            "before model.to_json(), or give a model_fn"
        )
    return text
