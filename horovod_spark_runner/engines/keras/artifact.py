"""The trained model in the run directory, for inference and for other programs."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np

from ...checkpoint.run_directory import RunDirectory
from ...errors import CheckpointError, on_one_line
from ...frameworks import KERAS
from ...serialize import dumps
from ...storage.arrays import Arrays, write_arrays
from ...storage.contents import Sink
from ...training.sample_rows import SAMPLE_FILE, check_close
from ...training.spec import OutputSpec
from ...training.trained_model import WEIGHTS_FILE, ModelInputs, ModelWriter, Signature
from .custom_objects import find_objects, name_lambdas, only_keras
from .loading import load_unpacked, sparing_memory
from .model import (
    Bind,
    Nest,
    call_model,
    calling,
    finalize_layers,
    fixed_batch,
    fresh_keras_state,
    keras_state,
    output_leaves,
    output_specs,
    sample_inputs,
    to_numpy,
    unchanged,
    using_keras_state,
)
from .saved import (
    ARCHIVE_FILE,
    FILES,
    KerasFacts,
    SavedModel,
    custom_parts,
    pack_archive,
    read_unpacked_config,
)
from .state import value_of

# How many numbers of two models' weights are compared at once.
_PART = 1 << 22
logger = logging.getLogger(__name__)


def save_model(
    directory: RunDirectory, model: keras.Model, inputs: ModelInputs, bind: Bind
) -> SavedModel:
    """Write the trained model: ``model.keras``, its bare weights, and its signature.

    A model that Keras cannot write (a custom layer without ``get_config``) is kept as weights
    only; they suffice with the function that built it. A model that cannot be called (one with a
    ``train_step`` of its own and no ``call``) is kept likewise, without outputs.

    Args:
        directory: the run directory.
        model: the trained model.
        inputs: what it takes.
        bind: makes its inputs of columns.

    Returns:
        How the model can be made again.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        return _save(directory, model, inputs, bind)
    except OSError as error:
        raise CheckpointError(
            f"the training is done, but its model could not be written to {directory.model}: "
            f"{error}. Once the storage takes files again, the same call goes on from the newest "
            "checkpoint, and writes it"
        ) from error


def _save(
    directory: RunDirectory, model: keras.Model, inputs: ModelInputs, bind: Bind
) -> SavedModel:
    state = keras_state()
    files = ModelWriter(directory)
    files.write_stream(WEIGHTS_FILE, functools.partial(_write_weights, model))
    outputs, rows, problem = outputs_of(model, inputs, bind)
    if outputs is None:
        logger.warning("the model is saved, but it cannot predict: %s", problem)
    elif sample := inputs.saved_rows(calling(model, bind), rows):
        files.write(SAMPLE_FILE, sample.dump())
    saved = SavedModel("source")
    with _archive(model) as archive:
        if archive is not None:
            files.write_stream(ARCHIVE_FILE, functools.partial(pack_archive, archive))
        if archive is not None and outputs is not None:
            tried = sample_inputs(model, bind, rows)
            saved, problem = probe_loading(archive, model, inputs.custom_objects, tried)
    facts = KerasFacts(
        archive=archive is not None,
        self_contained=saved.loads == "archive",
        needs_source=archive is not None and saved.loads == "source",
        run_eagerly=bool(model.run_eagerly),
        state=state,
        keras=keras.__version__,
    )
    signature = Signature(
        inputs=inputs.inputs,
        columns=inputs.columns,
        outputs=outputs,
        engine=KERAS,
        weights=tuple(weight.path for weight in model.weights),
        transforms=inputs.transforms,
        problem=problem,
        batch_size=fixed_batch(model),
        own=facts.to_fields(),
        targets=inputs.targets,
    )
    files.finish(signature, FILES)
    return saved


def _write_weights(model: keras.Model, sink: Sink) -> None:
    weights = enumerate(model.weights)
    write_arrays(sink, ((f"{number:05d}", value_of(weight)) for number, weight in weights))


def save_unpacked(model: keras.Model, folder: Path) -> None:
    """Write the files of a model's archive into a new folder, from which `pack` makes it."""
    with sparing_memory():
        model.save(folder, zipped=False)


@contextlib.contextmanager
def _archive(model: keras.Model) -> Iterator[Path | None]:
    """Yield the folder in which Keras has written the model, or ``None`` if it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "model")
        try:
            try:
                save_unpacked(model, place)
            except Exception:
                if not name_lambdas(model):
                    raise
                save_unpacked(model, place)
        except Exception as error:  # a custom layer's get_config may fail in any way
            reason = _first_line(error)
            logger.warning("the model is kept as weights only; Keras cannot write it: %s", reason)
            yield None
            return
        yield place


def outputs_of(
    model: keras.Model, inputs: ModelInputs, bind: Bind
) -> tuple[tuple[OutputSpec, ...] | None, Arrays, str]:
    """Return the model's outputs and the rows it was tried with, or the reason why it has none.

    Args:
        model: the model, which stays as it is.
        inputs: what it takes.
        bind: makes its inputs of columns.
    """
    try:
        rows = inputs.choose_rows(calling(model, bind))
        with unchanged(model):
            return tuple(output_specs(model, sample_inputs(model, bind, rows))), rows, ""
    except Exception as error:  # the user's own call may fail in any way
        return None, {}, _first_line(error)


def probe_loading(
    archive: Path, model: keras.Model, custom_objects: Mapping[str, Any], inputs: Nest
) -> tuple[SavedModel, str]:
    """Load an archive and find the least that reproduces the model from it.

    Args:
        archive: folder with the files of the archive.
        model: the model it was made of.
        custom_objects: classes and functions by name that the model was made with.
        inputs: rows that it takes.

    Returns:
        How it loads, and what was in the way of loading it by itself.
    """
    finalize_layers(model)
    with unchanged(model):
        expected = call_model(model, inputs)
    try:
        with only_keras():
            _check_same(_load_in_new_state(archive, None), model, inputs, expected)
        return SavedModel("archive"), ""
    except Exception as error:  # whatever Keras raises for what it does not know
        problem = _first_line(error)
    try:
        parts = custom_parts(read_unpacked_config(archive))
        objects = dumps(find_objects(model, parts, custom_objects))
        with only_keras():
            loaded = _load_in_new_state(archive, cloudpickle.loads(objects))
            _check_same(loaded, model, inputs, expected)
        return SavedModel("objects", objects), problem
    except Exception as error:  # also whatever the user's own classes raise
        problem = _first_line(error)
        logger.info("predictions will build the model anew: %s", problem)
        return SavedModel("source"), problem


def _load_in_new_state(archive: Path, objects: Mapping[str, Any] | None) -> keras.Model:
    """Return the archive's model as another process would load it, on the CPU."""
    state = keras_state()
    with (
        using_keras_state(state),
        fresh_keras_state(),
        using_keras_state(state),
        keras.device("cpu:0"),
    ):
        return load_unpacked(archive, objects)


def _check_same(loaded: keras.Model, model: keras.Model, inputs: Any, expected: Any) -> None:
    # A layer that only training calls has no weights in a model that is loaded to predict.
    left = iter(model.weights)
    for theirs in loaded.weights:
        if not any(_equal(value_of(ours), value_of(theirs)) for ours in left):
            raise ValueError(f"its weights differ: {theirs.path}")
    loaded_outputs = output_leaves(call_model(loaded, inputs))
    for (path, value), (place, other) in zip(output_leaves(expected), loaded_outputs, strict=True):
        if path != place:
            raise ValueError(f"its outputs differ: {path}, {place}")
        check_close(to_numpy(value), to_numpy(other))


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    parts = zip(_parts(one), _parts(other), strict=True)
    return all(ours.tobytes() == theirs.tobytes() for ours, theirs in parts)


def _parts(array: np.ndarray) -> list[np.ndarray]:
    """Return an array in parts, of which a copy is small."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return [flat[start : start + _PART] for start in range(0, flat.size, _PART)]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {on_one_line(error, 300)}"
