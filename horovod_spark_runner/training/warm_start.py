"""Weights to begin with: of another run, of a ``.keras`` file, of a SavedModel.

The driver reads the files (`read_warm_start`) and sends them along; rank 0 puts the values into
the model that model_fn built (`load_initial_weights`) and the others get them from it. Nothing of
the other model but its weights is used, and nothing of it is run.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from ..storage.arrays import load_arrays
from ..storage.checkpoint import VARIABLES_FILE, newest_checkpoint, read_info
from ..storage.filesystem import Location
from ..storage.run_directory import RunDirectory
from .spec import WarmStart

ARRAYS, KERAS, SAVED_MODEL = "arrays", "keras", "saved_model"
_GRAPH_FILE = "saved_model.pb"


def read_warm_start(place: str | Path) -> WarmStart:
    """Return the weights found at ``place``.

    Args:
        place: a run directory, a checkpoint folder of one, a ``.keras`` or ``.weights.h5`` file,
            or the folder of a SavedModel; a path or URL.

    Raises:
        ModelError: there are no such weights.
    """
    location = Location(place)
    try:
        return _read(location)
    except OSError as error:
        raise ModelError(f"initial_weights={str(place)!r} cannot be read: {error}") from error
    except ValueError as error:
        raise ModelError(f"initial_weights={str(place)!r} cannot be used: {error}") from error


def _read(location: Location) -> WarmStart:
    text = str(location)
    if location.name.endswith((".keras", ".weights.h5")):
        return WarmStart(text, KERAS, {location.name: location.read_bytes()})
    if location.join(_GRAPH_FILE).exists():
        return WarmStart(text, SAVED_MODEL, _read_folder(location, ""))
    if location.join(VARIABLES_FILE).exists():
        read_info(location)
        return WarmStart(text, ARRAYS, {VARIABLES_FILE: location.join(VARIABLES_FILE).read_bytes()})
    directory = RunDirectory(location)
    weights = directory.model.join("weights.npz")
    if directory.signature.exists():
        return WarmStart(text, ARRAYS, {weights.name: weights.read_bytes()})
    newest = newest_checkpoint(directory)
    if newest is None:
        raise ModelError(
            f"initial_weights={text!r} is no run directory with a model or checkpoint, .keras or "
            ".weights.h5 file, or SavedModel"
        )
    data = newest[0].join(VARIABLES_FILE).read_bytes()
    return WarmStart(str(newest[0]), ARRAYS, {VARIABLES_FILE: data})


def _read_folder(folder: Location, below: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for entry in folder.list():
        name = f"{below}{entry.name}"
        if entry.is_folder:
            files.update(_read_folder(entry, f"{name}/"))
        else:
            files[name] = entry.read_bytes()
    return files


def load_initial_weights(model: Any, start: WarmStart) -> None:
    """Give the built ``model`` the weights of ``start``.

    Raises:
        ModelError: they do not fit; the first difference is shown.
    """
    if start.kind == ARRAYS:
        _assign(model, _weights_of_run(start.files), start.origin)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, data in start.files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if start.kind == SAVED_MODEL:
            _assign(model, _weights_of_saved_model(folder, start.origin), start.origin)
            return
        try:
            model.load_weights(path)
        except Exception as error:  # Keras raises many types for files that do not fit
            raise ModelError(
                f"initial_weights={start.origin!r} do not fit the model: {error}"
            ) from error


def _weights_of_run(files: dict[str, bytes]) -> list[np.ndarray]:
    ((name, data),) = files.items()
    arrays = load_arrays(data)
    prefix = "model/" if name == VARIABLES_FILE else ""
    return [arrays[key] for key in sorted(arrays) if key.startswith(prefix)]


def _weights_of_saved_model(folder: str, origin: str) -> list[np.ndarray]:
    import tensorflow as tf

    variables = getattr(tf.saved_model.load(folder), "variables", ())
    # The states of random layers stand among the weights; they are no weights.
    weights = [v for v in variables if "seed_generator_state" not in v.name]
    if not weights:
        raise ModelError(
            f"initial_weights={origin!r}: the SavedModel lists no variables; write it with Keras "
            "(model.export), or load it in model_fn"
        )
    return [np.array(v.numpy()) for v in weights]


def _assign(model: Any, arrays: list[np.ndarray], origin: str) -> None:
    weights = list(model.weights)
    for place, (variable, array) in enumerate(zip(weights, arrays, strict=False)):
        if tuple(variable.shape) != array.shape:
            raise ModelError(
                f"initial_weights={origin!r} do not fit the model: weight {place} is "
                f"{variable.path!r} of shape {tuple(variable.shape)}, there it has shape "
                f"{array.shape}"
            )
    if len(weights) != len(arrays):
        raise ModelError(
            f"initial_weights={origin!r} do not fit the model: they are {len(arrays)} arrays, the "
            f"model has {len(weights)} weights"
        )
    for variable, array in zip(weights, arrays, strict=True):
        variable.assign(array)
