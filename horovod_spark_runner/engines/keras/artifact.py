"""Write a trained model to the run directory, also one that was trained elsewhere."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

from ...checkpoint.run_directory import RunDirectory
from ...data.manifest import TEXT, Column, Manifest
from ...errors import CheckpointError, ModelError
from ...frameworks import KERAS
from ...serialize import dumps
from ...storage.arrays import Arrays, write_arrays
from ...storage.contents import Sink
from ...storage.filesystem import Location
from ...training.sample_rows import SAMPLE_FILE, SampleRows, check_close
from ...training.spec import FEATURES, Binding, OutputSpec
from ...training.trained_model import (
    WEIGHTS_FILE,
    Layer,
    ModelInputs,
    ModelSummary,
    ModelWriter,
    Signature,
)
from .binding import InputBinding, input_structure, match_inputs
from .engine import read_archive
from .loading import Graph, load_archive, load_unpacked, pack_saved_model, sparing_memory
from .model import (
    Bind,
    Nest,
    all_layers,
    call_model,
    calling,
    check_stateless,
    finalize_layers,
    first_line,
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
from .own_code import code_of
from .saved import (
    ARCHIVE_FILE,
    FILES,
    LAMBDA,
    PACKED_FILE,
    CustomPart,
    KerasFacts,
    SavedModel,
    custom_parts,
    pack_archive,
    read_exported,
    read_unpacked_config,
)
from .state import value_of

# How many numbers of two models' weights are compared at once.
_PART = 1 << 22
logger = logging.getLogger(__name__)
# dtype of an input -> dtype of its column, where Spark has it not.
_COLUMN_DTYPES = {
    "bool": "int8",
    "uint8": "int16",
    "uint16": "int32",
    "uint32": "int64",
    "float16": "float32",
    "bfloat16": "float32",
}
_PLAIN = ("int8", "int16", "int32", "int64", "float32", "float64", TEXT)


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
            f"{error}. Once the storage takes files again, the same call resumes from the newest "
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
        summary=_summarize(model),
    )
    files.finish(signature, FILES)
    return saved


def _summarize(model: keras.Model) -> ModelSummary:
    """Return the layers and parameters that ``model.summary()`` shows."""
    layers = [
        Layer(layer.name, type(layer).__name__, _output_shape(layer), _count(layer.weights))
        for layer in model.layers
    ]
    return ModelSummary.of(layers, _count(model.weights), _count(model.trainable_weights))


def _count(weights: Sequence[keras.Variable]) -> int:
    return sum(math.prod(weight.shape) for weight in weights)


def _output_shape(layer: keras.Layer) -> str:
    """Return the shape of a layer's output; empty if it is unknown."""
    try:
        return str(keras.tree.map_structure(lambda one: tuple(one.shape), layer.output))
    except Exception:  # not called symbolically, as in a subclassed model
        with contextlib.suppress(Exception):  # the user's own layer may fail in any way
            built = layer.get_build_config()
            shapes = built.get("shapes_dict") or {"input_shape": built["input_shape"]}
            of_any_batch = keras.tree.map_shape_structure(lambda one: (None, *one[1:]), shapes)
            return str(layer.compute_output_shape(**of_any_batch))
    return ""


def _write_weights(model: keras.Model, sink: Sink) -> None:
    weights = enumerate(model.weights)
    write_arrays(sink, ((f"{number:05d}", value_of(weight)) for number, weight in weights))


def save_unpacked(model: keras.Model, folder: Path) -> None:
    """Write the files of a model's archive into a new folder, for `pack_archive`."""
    with sparing_memory():
        model.save(folder, zipped=False)


@contextlib.contextmanager
def _archive(model: keras.Model) -> Iterator[Path | None]:
    """Yield the folder in which Keras has written the model, or ``None`` if it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "model")
        try:
            _write_archive(model, place)
        except Exception as error:  # a custom layer's get_config may fail in any way
            reason = first_line(error)
            logger.warning("the model is kept as weights only; Keras cannot write it: %s", reason)
            yield None
            return
        yield place


def _write_archive(model: keras.Model, place: Path) -> None:
    """Let Keras write a model, at least without what it was compiled with.

    Predicting needs no learning rate schedule, loss or metric.
    """
    try:
        save_unpacked(model, place)
        return
    except Exception as error:
        reason = first_line(error)
    if _name_lambdas(model):
        with contextlib.suppress(Exception):
            save_unpacked(model, place)
            return
    with _uncompiled(model):
        save_unpacked(model, place)
    logger.warning(
        "the model is kept without what it was compiled with (optimizer, loss, metrics), which "
        "Keras cannot write: %s",
        reason,
    )


@contextlib.contextmanager
def _uncompiled(model: keras.Model) -> Iterator[None]:
    """Let Keras write a model as one that was not compiled."""
    vars(model)["get_compile_config"] = lambda: None
    try:
        yield
    finally:
        del vars(model)["get_compile_config"]


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
        return None, {}, first_line(error)


def probe_loading(
    archive: Path, model: keras.Model, custom_objects: Mapping[str, object], inputs: Nest
) -> tuple[SavedModel, str]:
    """Load an archive and find the least that reproduces the model from it.

    Args:
        archive: folder with the files of the archive.
        model: the model it was made of.
        custom_objects: classes and functions by name that the model was made with.
        inputs: rows that it takes.

    Returns:
        The way it loads, and the reason why it does not load by itself.
    """
    finalize_layers(model)
    with unchanged(model):
        expected = call_model(model, inputs)
    try:
        with _only_keras():
            _check_same(_load_in_new_state(archive, None), model, inputs, expected)
        return SavedModel("archive"), ""
    except Exception as error:  # whatever Keras raises for what it does not know
        problem = first_line(error)
    try:
        parts = custom_parts(read_unpacked_config(archive))
        objects = dumps(_find_objects(model, parts, custom_objects))
        with _only_keras():
            loaded = _load_in_new_state(archive, cloudpickle.loads(objects))
            _check_same(loaded, model, inputs, expected)
        return SavedModel("objects", objects), problem
    except Exception as error:  # also whatever the user's own classes raise
        problem = first_line(error)
        logger.info("predictions will build the model anew: %s", problem)
        return SavedModel("source"), problem


def _load_in_new_state(archive: Path, objects: Mapping[str, object] | None) -> keras.Model:
    """Return the archive's model as another process would load it, on the CPU."""
    state = keras_state()
    with (
        using_keras_state(state),
        fresh_keras_state(),
        using_keras_state(state),
        keras.device("cpu:0"),
    ):
        return load_unpacked(archive, objects)


def _check_same(loaded: keras.Model, model: keras.Model, inputs: Nest, expected: Nest) -> None:
    # A layer that only training calls has no weights in a model that is loaded to predict.
    left = iter(model.weights)
    for theirs in loaded.weights:
        if not any(_is_equal(value_of(ours), value_of(theirs)) for ours in left):
            raise ValueError(f"its weights differ: {theirs.path}")
    loaded_outputs = output_leaves(call_model(loaded, inputs))
    for (path, value), (place, other) in zip(output_leaves(expected), loaded_outputs, strict=True):
        if path != place:
            raise ValueError(f"its outputs differ: {path}, {place}")
        check_close(to_numpy(value), to_numpy(other))


def _is_equal(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    parts = zip(_parts(one), _parts(other), strict=True)
    return all(ours.tobytes() == theirs.tobytes() for ours, theirs in parts)


def _parts(array: np.ndarray) -> list[np.ndarray]:
    """Return an array in parts, of which a copy is small."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return [flat[start : start + _PART] for start in range(0, flat.size, _PART)]


def _find_objects(
    model: keras.Model, parts: Sequence[CustomPart], custom_objects: Mapping[str, object]
) -> dict[str, object]:
    """Return those of ``parts`` that can be found, by their keys.

    Args:
        model: the model that was archived.
        parts: what its archive names.
        custom_objects: objects by name that the model itself was made with.
    """
    registered = keras.saving.get_custom_objects()
    # Several of one name are ambiguous.
    living = {name: ones[0] for name, ones in code_of(model).items() if len(ones) == 1}
    objects: dict[str, object] = {}
    for part in parts:
        if part.name == LAMBDA:
            candidate = _find_lambda(model, part)
        else:
            sources = (custom_objects, registered, living)
            names = (part.key, part.name)
            candidate = next((p[n] for p in sources for n in names if n in p), None)
        if candidate is not None:
            objects[part.key] = candidate
    return objects


@contextlib.contextmanager
def _only_keras() -> Iterator[None]:
    """Limit Keras' registry to its own classes and functions."""
    registered = keras.saving.get_custom_objects()
    before = dict(registered)
    registered.clear()
    try:
        yield
    finally:
        registered.clear()
        registered.update(before)


def _name_lambdas(model: keras.Model) -> bool:
    """Name the lambdas among layers' arguments, for Keras to write; return whether there are any.

    Keras writes a lambda as its code, which fails where it refers to a module or has no source.
    """
    named = False
    for layer in all_layers(model):
        for field, value in list(vars(layer).items()):
            if inspect.isfunction(value) and value.__name__ == "<lambda>":
                value.__name__ = f"lambda_{field.strip('_')}_of_{layer.name}"
                named = True
    return named


def _find_lambda(model: keras.Model, part: CustomPart) -> object:
    """Return the lambda that a layer was given; nothing if several layers have that name."""
    layers = [layer for layer in all_layers(model) if layer.name == part.layer]
    if len(layers) != 1:
        return None
    attributes = (part.field, f"_{part.field}")
    return next((f for a in attributes if callable(f := getattr(layers[0], a, None))), None)


def adopt_model(
    directory: RunDirectory,
    model: object,
    inputs: Binding | None,
    custom_objects: Mapping[str, object],
) -> SavedModel:
    """Write ``model`` to ``directory``; see `Engine.adopt`.

    Raises:
        ModelError: it is no Keras model, its inputs are not known or are none that columns fit, it
            cannot be called, or cannot be written so that it is the same when it is read.
    """
    if isinstance(model, (str, os.PathLike)):
        model = load_archive(read_archive(model), custom_objects)
    if not isinstance(model, keras.Model):
        raise ModelError(
            "from_keras takes a keras.Model, or the path or URL of a .keras file, got "
            f"{type(model).__name__}"
        )
    check_stateless(model, "Spark's rows have no order, and are spread over tasks")
    structure = input_structure(model)
    if structure is None:
        raise ModelError(
            f"the model {model.name!r} does not record its inputs, as a subclass: give a "
            "functional model, or a Sequential that begins with keras.Input(shape)"
        )
    tensors = keras.tree.flatten(structure)
    if inputs is None:
        names = [tensor.name for tensor in tensors]
        inputs = Binding(names, tuple(names)) if len(names) > 1 else Binding([FEATURES])
    columns = _columns_of(model, inputs)
    bind = InputBinding(model, inputs, Manifest("", (), columns, (), ""))
    takes = ModelInputs(inputs, columns, (), custom_objects)
    outputs, _, problem = outputs_of(model, takes, bind)
    if outputs is None:
        raise ModelError(f"the model {model.name!r} cannot be called: {problem}")
    saved = save_model(directory, model, takes, bind)
    if saved.loads == "source":
        raise ModelError(
            f"the model {model.name!r} cannot be sent to Spark's workers: what Keras writes of it "
            "does not give the same model again. Its layers need get_config()"
        )
    return saved


def adopt_graph(
    directory: RunDirectory, folder: Location, inputs: Binding | None, signature: str
) -> SavedModel:
    """Write the SavedModel in ``folder`` to ``directory``; see `Engine.adopt`.

    Raises:
        ModelError: there is none, or no such signature; or the columns do not fit its inputs.
    """
    exported = read_exported(folder)
    exported_columns = (
        {} if exported is None else {column.name: column for column in exported.columns}
    )
    packed = pack_saved_model(folder, None if exported is None else exported.sums)
    graph = Graph(packed, signature)
    names = sorted(graph.takes)
    if inputs is None and sorted(exported_columns) == names:
        inputs = Binding(tuple(exported_columns), tuple(exported_columns))
    elif inputs is None:
        inputs = Binding(names if len(names) > 1 else [FEATURES], tuple(names))
    elif inputs.names is None and len(names) == len(inputs.slots) == 1:
        inputs = Binding(inputs.slots, tuple(names))
    if sorted(inputs.names or ()) != names or any(len(slot) > 1 for slot in inputs.slots):
        raise ModelError(
            f"signature {signature!r} of the SavedModel takes {', '.join(map(repr, names))}; say "
            f"which column feeds each, feature_cols={{{names[0]!r}: …}}"
        )
    tensors = [graph.takes[name] for name in inputs.names or ()]
    columns = _fitting_columns(inputs, list(zip(tensors, inputs.slots, strict=True)))
    fed = dict(zip(inputs.columns, inputs.names or (), strict=False))
    columns = tuple(replace(exported_columns.get(fed[c.name], c), name=c.name) for c in columns)
    bind = InputBinding(graph, inputs, Manifest("", (), columns, (), ""))
    outputs, rows, problem = outputs_of(graph, ModelInputs(inputs, columns, ()), bind)
    if outputs is None:
        raise ModelError(f"signature {signature!r} of the SavedModel cannot be called: {problem}")
    writer = ModelWriter(directory)
    writer.write(PACKED_FILE, packed)
    writer.write(SAMPLE_FILE, SampleRows(rows).dump())
    facts = KerasFacts(graph=signature, self_contained=True, keras=keras.__version__)
    writer.finish(Signature(inputs, columns, outputs, own=facts.to_fields()))
    return SavedModel("graph")


def _columns_of(model: keras.Model, inputs: Binding) -> tuple[Column, ...]:
    """Return the columns that fit a Keras model's inputs."""
    return _fitting_columns(inputs, match_inputs(model, inputs))


def _fitting_columns(
    inputs: Binding, matched: Sequence[tuple[keras.KerasTensor | tf.TensorSpec, Sequence[str]]]
) -> tuple[Column, ...]:
    """Return the columns that fit tensors, each of which some columns feed."""
    columns: dict[str, Column] = {}
    for tensor, names in matched:
        dtype = tensor.dtype if isinstance(tensor.dtype, str) else tensor.dtype.name
        dtype = _COLUMN_DTYPES.get(dtype, dtype)
        shape = tuple(tensor.shape[1:])
        if dtype not in _PLAIN or None in shape:
            raise ModelError(
                f"model input {tensor.name!r} takes {tensor.dtype} of shape {shape}, which no "
                "column can hold: its shape must be known, and its type one that Spark has"
            )
        if len(names) > 1 and shape != (len(names),):
            raise ModelError(
                f"model input {tensor.name!r} takes rows of shape {shape}, which are not "
                f"{len(names)} columns of a number each: {', '.join(names)}"
            )
        column_shape = () if len(names) > 1 or shape == (1,) else shape
        for name in names:
            column = Column(name, dtype, column_shape)
            if columns.setdefault(name, column) != column:
                raise ModelError(
                    f"column {name!r} feeds several inputs that take different values: "
                    f"{columns[name].describe()} and {column.describe()}"
                )
    return tuple(columns[name] for name in inputs.columns)
