"""Weights to begin with, as the driver finds them: of another run, a file or a SavedModel.

The files are sent along as they are; the engine's `initial_weights` puts the values into the model.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from ..errors import ModelError
from ..rundir.checkpoint import VARIABLES_FILE, CheckpointInfo, newest_readable, read_file
from ..rundir.directory import RunDirectory
from ..settings.training import InitialWeights
from ..storage.contents import Contents
from ..storage.filesystem import Location
from .spec import WarmStart
from .trained_model import WEIGHTS_FILE, read_model

ARRAYS, KERAS, SAVED_MODEL = "arrays", "keras", "saved_model"
STATE_DICT = "state_dict"
_GRAPH_FILE = "saved_model.pb"


def read_warm_start(weights: InitialWeights) -> WarmStart:
    """Return what the files of ``weights`` hold.

    Raises:
        ModelError: there are no such weights.
    """
    place, skip_mismatch = weights.place, weights.skip_mismatch
    location = Location(place)
    try:
        start = _read(location)
    except OSError as error:
        raise ModelError(f"initial_weights={str(place)!r} cannot be read: {error}") from error
    except ValueError as error:
        raise ModelError(f"initial_weights={str(place)!r} cannot be used: {error}") from error
    if skip_mismatch and start.kind == ARRAYS and not start.paths:
        raise ModelError(
            f"initial_weights={str(place)!r} was written by a version that did not record the "
            "paths of weights, which skip_mismatch=True needs; give its "
            "model/model.keras or one of its checkpoints"
        )
    return replace(start, skip_mismatch=skip_mismatch)


def _read(location: Location) -> WarmStart:
    text = str(location)
    if location.name.endswith((".keras", ".weights.h5")):
        return WarmStart(text, KERAS, {location.name: location.read_bytes()})
    if location.name.endswith((".pt", ".pth")):
        return WarmStart(text, STATE_DICT, {location.name: location.read_bytes()})
    if location.join(_GRAPH_FILE).exists():
        return WarmStart(text, SAVED_MODEL, _read_folder(location, ""))
    read = functools.partial(read_file, name=VARIABLES_FILE)
    if location.join(VARIABLES_FILE).exists():
        return _of_checkpoint(location, *read(location))
    directory = RunDirectory(location)
    if directory.signature.exists():
        model = read_model(directory)
        paths = model.signature.weights
        return WarmStart(text, ARRAYS, {WEIGHTS_FILE: model.read(WEIGHTS_FILE)}, paths)
    newest = newest_readable(directory, read)
    if newest is None:
        raise ModelError(
            f"initial_weights={text!r} is no run directory with a model or checkpoint, .keras or "
            ".weights.h5 file, SavedModel, or .pt or .pth file of a state_dict"
        )
    return _of_checkpoint(*newest)


def _of_checkpoint(folder: Location, info: CheckpointInfo, data: Contents) -> WarmStart:
    paths = tuple(path for name, path, *_ in info.variables if name.startswith("model/"))
    return WarmStart(str(folder), ARRAYS, {VARIABLES_FILE: data.read()}, paths)


def _read_folder(folder: Location, below: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for entry in folder.list():
        name = f"{below}{entry.name}"
        if entry.is_folder:
            files.update(_read_folder(entry, f"{name}/"))
        else:
            files[name] = entry.read_bytes()
    return files
