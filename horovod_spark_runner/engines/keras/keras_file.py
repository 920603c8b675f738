"""A trained model as one ``.keras`` file."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import cloudpickle

from ...errors import ModelError
from ...storage.filesystem import Location
from ...training.trained_model import Recipe
from .artifact import probe_loading, save_unpacked
from .binding import InputBinding
from .loading import Graph, make_model
from .model import fresh_keras_state, keras_state, sample_inputs, using_keras_state
from .saved import KerasParts, pack_archive


def export_keras(recipe: Recipe, target: Location) -> None:
    """Write the model of a recipe; see `Engine.export`.

    A file that has been checked when the model was trained is written as it is.
    """
    parts: KerasParts = recipe.parts
    if parts.packed is not None:
        raise ModelError(
            "a .keras file cannot hold this model: it is a SavedModel, a graph without layers; "
            "format='saved_model' can"
        )
    if parts.archive is not None and parts.weights is None:
        target.write_bytes(parts.archive)
        return
    with using_keras_state(keras_state()), fresh_keras_state():
        model, bind = make_model(recipe)
        assert not isinstance(model, Graph)
        with using_keras_state(parts.state), tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "model")
            _write(recipe, model, bind, place)
            target.write_stream(functools.partial(pack_archive, place))


def _write(recipe: Recipe, model: object, bind: InputBinding, folder: Path) -> None:
    """Write the contents of the file, from which the same model is loaded, into a new folder.

    Raises:
        ModelError: Keras cannot write it, or another model is loaded from it.
    """
    parts: KerasParts = recipe.parts
    objects = {} if parts.objects is None else cloudpickle.loads(parts.objects)
    if parts.source is not None:
        objects = {**(parts.source.custom_objects or {}), **objects}
    inputs = sample_inputs(model, bind, recipe.sample_rows().inputs)
    try:
        save_unpacked(model, folder)
    except Exception as error:  # a custom layer's get_config may fail in any way
        raise ModelError(f"a .keras file cannot hold this model: {error!s:.500}") from error
    saved, problem = probe_loading(folder, model, objects, inputs)
    if saved.loads == "source":
        raise ModelError(
            f"a .keras file cannot hold this model: what Keras loads from it differs ({problem})"
        )
