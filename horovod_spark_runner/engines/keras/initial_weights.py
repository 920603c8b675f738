"""Weights to begin with, put into the model that model_fn built.

Rank 0 does so and the others get them from it. Nothing of the other model but its weights is used.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...checkpoint.attachments import contents_of
from ...checkpoint.files import VARIABLES_FILE
from ...cluster.worker.reporting import notify
from ...errors import ModelError
from ...storage.arrays import ArraysFile
from ...training.engine import KERAS_FILE
from ...training.spec import WarmStart
from ...training.warm_start import ARRAYS
from .model import finalize_layers
from .optimizers import find_optimizers

if TYPE_CHECKING:
    import keras

_SHOWN = 5
# In a .keras file.
_WEIGHTS = "model.weights.h5"


@dataclass(frozen=True)
class _Weight:
    """A weight to begin with.

    Attributes:
        path: such as ``dense/kernel``.
        shape: of its value.
        read: returns its value.
    """

    path: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray] = field(repr=False)


def load_initial_weights(model: keras.Model, start: WarmStart) -> None:
    """Load the weights of ``start`` into the built ``model``; report weights that were left out.

    Raises:
        ModelError: they do not fit; the first difference is shown. With ``skip_mismatch``: none
            of them does.
    """
    with tempfile.TemporaryDirectory() as folder:
        if start.kind == ARRAYS:
            weights = _weights_of_run(start)
        else:
            for name, data in start.files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                contents_of(data).write_to(path)
            weights = (
                [] if start.kind == KERAS_FILE else _weights_of_saved_model(folder, start.origin)
            )
        if start.kind == KERAS_FILE:
            taken = _load_keras_file(model, path, start)
            if not taken:
                weights = _weights_of_keras_file(path)
        elif start.skip_mismatch:
            taken = _assign_by_path(model, weights)
        else:
            taken = _assign(model, weights, start.origin)
    if start.skip_mismatch:
        _report_taken_weights(model, taken, weights, start.origin, start.kind)
    finalize_layers(model)


def _weights_of_run(start: WarmStart) -> list[_Weight]:
    ((name, data),) = start.files.items()
    file = ArraysFile(contents_of(data))
    prefix = "model/" if name == VARIABLES_FILE else ""
    keys = [key for key in sorted(file.names) if key.startswith(prefix)]
    paths = start.paths if len(start.paths) == len(keys) else [""] * len(keys)
    return [
        _Weight(path, file.shape(key), partial(file.read, key))
        for path, key in zip(paths, keys, strict=True)
    ]


def _weights_of_saved_model(folder: str, origin: str) -> list[_Weight]:
    import tensorflow as tf

    variables = getattr(tf.saved_model.load(folder), "variables", ())
    # The states of random layers stand among the weights; they are no weights.
    weights = [v for v in variables if "seed_generator_state" not in v.name]
    if not weights:
        raise ModelError(
            f"initial_weights={origin!r}: the SavedModel lists no variables; write it with Keras "
            "(model.export), or load it in model_fn"
        )
    return [_Weight(v.name.partition(":")[0], tuple(v.shape), v.numpy) for v in weights]


def _weights_of_keras_file(path: Path) -> list[_Weight]:
    """Return the weights in a file of Keras', by their places in it, without the optimizer's."""
    import h5py

    weights: list[_Weight] = []

    def note(place: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset) and not place.startswith("optimizer/"):
            name = place.removeprefix("_layer_checkpoint_dependencies/").removeprefix("layers/")
            weights.append(_Weight(name, item.shape, item.__array__))

    with contextlib.ExitStack() as stack:
        source: Any = path
        if zipfile.is_zipfile(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            if _WEIGHTS not in archive.namelist():  # in several files, as of very large models
                return []
            source = stack.enter_context(archive.open(_WEIGHTS))
        stack.enter_context(h5py.File(source, "r")).visititems(note)
    return weights


def _load_keras_file(model: keras.Model, path: Path, start: WarmStart) -> set[int]:
    """Load a file as Keras does and return the indices of the weights that were in it."""
    weights = list(model.weights)
    # Such files may hold an optimizer, with its learning rate, and states of random layers.
    optimizers = find_optimizers(model) if model.compiled else []
    others = [v for optimizer in optimizers for v in optimizer.variables]
    weight_ids = {id(weight) for weight in weights}
    others += [v for v in model.variables if id(v) not in weight_ids]
    saved_values = [np.array(variable) for variable in others]
    before: list[np.ndarray] = []
    if start.skip_mismatch:
        # Keras does not tell what it took: what still holds its mark afterwards was not.
        before = [np.array(weight) for weight in weights]
        for weight, value in zip(weights, before, strict=True):
            weight.assign(_mark(value))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            if start.skip_mismatch:
                warnings.simplefilter("ignore")  # a line of our own tells what was left out
            model.load_weights(path, skip_mismatch=start.skip_mismatch)
    except Exception as error:  # Keras raises many types for files that do not fit
        raise ModelError(
            f"initial_weights={start.origin!r} do not fit the model: {error}"
        ) from error
    for variable, value in zip(others, saved_values, strict=True):
        variable.assign(value)
    taken = set(range(len(weights)))
    if start.skip_mismatch:
        for index, (weight, value) in enumerate(zip(weights, before, strict=True)):
            if np.array(weight).tobytes() == _mark(value).tobytes():
                taken.remove(index)
                weight.assign(value)
    return taken


def _mark(value: np.ndarray) -> np.ndarray:
    """Return an array that no file of weights holds; of booleans, the value itself."""
    if value.dtype.kind in "iu":
        return np.full_like(value, np.iinfo(value.dtype).max)
    return value if value.dtype.kind == "b" else np.full_like(value, np.nan)


def _assign(model: keras.Model, sources: Sequence[_Weight], origin: str) -> set[int]:
    weights = list(model.weights)
    for index, (variable, weight) in enumerate(zip(weights, sources, strict=False)):
        if tuple(variable.shape) != weight.shape:
            raise ModelError(
                f"initial_weights={origin!r} do not fit the model: weight {index} is "
                f"{variable.path!r} of shape {tuple(variable.shape)}, there it has shape "
                f"{weight.shape}; InitialWeights(…, skip_mismatch=True) takes over those that fit"
            )
    if len(weights) != len(sources):
        raise ModelError(
            f"initial_weights={origin!r} do not fit the model: they are {len(sources)} arrays, the "
            f"model has {len(weights)} weights; InitialWeights(…, skip_mismatch=True) "
            "takes over those that fit"
        )
    for variable, weight in zip(weights, sources, strict=True):
        variable.assign(weight.read())
    return set(range(len(weights)))


def _assign_by_path(model: keras.Model, weights: Sequence[_Weight]) -> set[int]:
    variables = list(model.weights)
    taken = set()
    for index, source in match_paths(
        [v.path for v in variables], [w.path for w in weights]
    ).items():
        if tuple(variables[index].shape) == weights[source].shape:
            variables[index].assign(weights[source].read())
            taken.add(index)
    return taken


def match_paths(model_paths: Sequence[str], file_paths: Sequence[str]) -> dict[int, int]:
    """Map the index of each model path to the index of the same path of the file. Pure.

    If no path is equal, the name of the whole model, which leads all paths of a ``Sequential``,
    does not count. A path that occurs several times is matched only if it does so equally often.
    """
    return _equal(model_paths, file_paths) or _equal(
        _below_root(model_paths), _below_root(file_paths)
    )


def _equal(model_paths: Sequence[str], file_paths: Sequence[str]) -> dict[int, int]:
    ours, theirs = _indices(model_paths), _indices(file_paths)
    return {
        index: other
        for path, indices in ours.items()
        if len(indices) == len(theirs.get(path, ()))
        for index, other in zip(indices, theirs[path], strict=True)
    }


def _below_root(paths: Sequence[str]) -> list[str]:
    roots = {path.partition("/")[0] for path in paths}
    if len(roots) == 1 and all(path.count("/") >= 2 for path in paths):
        return [path.partition("/")[2] for path in paths]
    return list(paths)


def _indices(paths: Sequence[str]) -> dict[str, list[int]]:
    indices: dict[str, list[int]] = {}
    for index, path in enumerate(paths):
        indices.setdefault(path, []).append(index)
    return indices


def _report_taken_weights(
    model: keras.Model, taken: set[int], weights: Sequence[_Weight], origin: str, kind: str
) -> None:
    """Report to the driver which weights were loaded.

    Raises:
        ModelError: none was.
    """
    variables = list(model.weights)
    shown = {
        True: _listed([w for n, w in enumerate(variables) if n in taken]),
        False: _listed([w for n, w in enumerate(variables) if n not in taken]),
    }
    if not taken:
        kinds = "the kinds of their layers, in their order, as Keras goes through its files"
        order = kinds if kind == KERAS_FILE else "the names of their layers"
        raise ModelError(
            f"initial_weights={origin!r}: no weight has the path and shape of one of the model's, "
            f"which are {shown[False]}; there are {_listed(weights) or 'none'}. Weights go by "
            f"{order}"
        )
    left = len(variables) - len(taken)
    text = f"initial_weights={origin!r}: {len(taken)} of {len(variables)} weights taken over"
    if left:
        text += f" ({shown[True]}); {left} keep their initial values ({shown[False]})"
    notify(text, warn=left > 0)


def _listed(weights: Sequence[Any]) -> str:
    names = [f"{w.path} {tuple(w.shape)}" for w in weights[:_SHOWN]]
    more = len(weights) - _SHOWN
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
