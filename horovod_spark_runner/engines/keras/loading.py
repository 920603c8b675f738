"""Make a trained Keras model again; put given weights into a model.

By itself, Keras draws initial values at random (three times the memory of a weight; TensorFlow
keeps what it has once taken), reads a weight as a whole, and copies it twice into its variable.
Under `sparing_memory`, a large weight begins as zeros that take no memory, and is read into what
its variable uses.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import cloudpickle
import h5py
import keras
import numpy as np
import tensorflow as tf

from ...checkpoint.attachments import contents_of
from ...data.manifest import Manifest
from ...errors import ModelError
from ...storage.arrays import ArraysFile
from ...storage.checksums import read_verified_file
from ...storage.contents import PART_BYTES, Contents, spool, unpack
from ...storage.filesystem import Location
from ...training.engine import GRAPH_FILE, KERAS_FILE, SAVED_MODEL
from ...training.named_weights import (
    NamedWeight,
    describe_difference,
    report_taken,
    take_over,
    weights_of_run,
)
from ...training.spec import WarmStart
from ...training.trained_model import (
    Model,
    Recipe,
)
from ...training.warm_start import ARRAYS
from .binding import ALIGNMENT, InputBinding, as_tensor
from .model import (
    Nest,
    build_by_call,
    build_model,
    call_model,
    calling,
    explaining_files,
    finalize_layers,
    fresh_keras_state,
    keras_state,
    output_specs,
    pick,
    replaced,
    sample_inputs,
    using_keras_state,
)
from .optimizers import find_optimizers
from .private import H5IOStore
from .saved import (
    KIND,
    KerasParts,
    name_lambdas_in,
)
from .state import value_of

if TYPE_CHECKING:
    import keras

# Arguments of keras.Layer that Keras adds to the configuration of every subclass.
_BASE_ARGUMENTS = ("name", "trainable", "dtype", "autocast", "activity_regularizer")
# Numbers from which a weight counts as large.
_LARGE = 4 * 1024 * 1024
# Kinds of numbers whose memory NumPy can hand over.
_SHARED_KINDS = "fiu"
# Only for the thread that saves or loads: others may use Keras meanwhile.
_sparing: ContextVar[bool] = ContextVar("sparing", default=False)
# Keras goes through its files so.
_BY_LAYERS = ". Weights go by the kinds of their layers, in their order"
# In a .keras file.
_WEIGHTS = "model.weights.h5"


def load_model(recipe: Recipe) -> Model:
    """Return the function from feature columns to outputs; see `Engine.load`."""
    # What stays holds neither the recipe nor its parts, which have the model's bytes.
    parts: KerasParts = recipe.parts
    state, outputs = parts.state, recipe.outputs
    with fresh_keras_state():
        model, bind = make_model(recipe)

    def call(inputs: Nest) -> Nest:
        return call_model(model, inputs)

    forward = call if parts.eager else _compiled(call, recipe.batch_size)

    def prepare(values: dict[str, np.ndarray]) -> Nest:
        return tf.nest.map_structure(tf.convert_to_tensor, bind(values))

    def compute(inputs: Nest) -> list[np.ndarray]:
        with using_keras_state(state):
            result = forward(inputs)
        return [pick(result, output.path).numpy() for output in outputs]

    return Model(prepare, compute)


def _compiled(call: Callable[[Nest], Nest], rows: int | None) -> Callable[[Nest], Nest]:
    """Return ``call`` as one graph, traced once, for so many rows, or for any number of them."""
    # Without AutoGraph, as Keras itself predicts; it would leave a file behind, too.
    function = tf.function(call, autograph=False)
    traced: list[Callable[[Nest], Nest]] = []

    def shape_of(tensor: tf.Tensor) -> tf.TensorSpec:
        return tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype)

    def forward(inputs: Nest) -> Nest:
        if not traced:
            specs = tf.nest.map_structure(shape_of, inputs)
            traced.append(function.get_concrete_function(specs))
        return traced[0](inputs)

    return forward


def made_model(recipe: Recipe) -> object:
    """Return the Keras model, not compiled, or TensorFlow's loaded object; see `Engine.model`."""
    # Also what the process had set before, which a fresh state takes away.
    with using_keras_state(keras_state()), fresh_keras_state():
        model = make_model(recipe)[0]
        return model.loaded if isinstance(model, Graph) else model


def make_model(recipe: Recipe) -> tuple[keras.Model, InputBinding]:
    """Return the trained model and the binding from columns to its inputs.

    Raises:
        ModelError: what was built is not the model that was trained.
    """
    parts: KerasParts = recipe.parts
    if parts.packed is not None:
        graph = Graph(parts.packed, parts.graph)
        return graph, _binding(graph, recipe)
    model = _from_archive(parts) if parts.archive is not None else _from_source(parts)
    bind = _binding(model, recipe)
    if parts.weights is not None:
        _give_weights(model, recipe, bind)
    return model, bind


def describe_outputs(recipe: Recipe) -> tuple[list[dict[str, object]], str]:
    """Return the model's outputs, or none and the reason; see `Engine.describe_outputs`."""
    parts: KerasParts = recipe.parts
    with fresh_keras_state():
        model = _from_source(parts)
        bind = _binding(model, recipe)
        try:
            if parts.weights is not None:
                _give_weights(model, recipe, bind)
            inputs = sample_inputs(model, bind, recipe.sample_rows().inputs)
            return [asdict(output) for output in output_specs(model, inputs)], ""
        except ModelError:
            raise
        except Exception as error:  # the user's own call may fail in any way
            return [], f"{type(error).__name__}: {error}"


def _binding(model: keras.Model, recipe: Recipe) -> InputBinding:
    return InputBinding(model, recipe.inputs, Manifest("", (), recipe.columns, (), ""))


def _from_archive(parts: KerasParts) -> keras.Model:
    assert parts.archive is not None
    objects = None if parts.objects is None else cloudpickle.loads(parts.objects)
    with using_keras_state(parts.state):
        return load_archive(parts.archive, objects)


def _from_source(parts: KerasParts) -> keras.Model:
    assert parts.source is not None
    return build_model(parts.source)


def _give_weights(model: keras.Model, recipe: Recipe, bind: InputBinding) -> None:
    parts: KerasParts = recipe.parts
    assert parts.weights is not None
    arrays = ArraysFile(parts.weights)
    names = sorted(arrays.names)
    trained = [NamedWeight(n, arrays.shape(n), partial(arrays.read, n)) for n in names]
    set_weights(model, trained, recipe, bind)
    if parts.source is not None:
        with using_keras_state(parts.state):
            recipe.sample_rows().check(calling(model, bind))


def set_weights(
    model: keras.Model,
    trained: Sequence[NamedWeight],
    recipe: Recipe,
    bind: InputBinding,
) -> None:
    """Load the trained model's weights into a newly built model.

    Args:
        model: the model.
        trained: the trained one's weights; each is read when the one before is assigned.
        recipe: how the trained one is made again.
        bind: what makes the model's inputs of columns.

    Raises:
        ModelError: they are not those of such a model.
    """
    if not model.built or len(model.weights) != len(trained):
        with using_keras_state(recipe.parts.state):
            build_by_call(model, sample_inputs(model, bind, recipe.sample_rows().inputs))
    if difference := describe_difference(weights_in(model), trained, by_order=True):
        made = "model_fn builds" if recipe.parts.archive is None else "its archive gives"
        raise ModelError(f"{made} another model than was trained: {difference}")
    for weight, other in zip(model.weights, trained, strict=True):
        weight.assign(other.read())
    finalize_layers(model)


def weights_in(model: keras.Model) -> list[NamedWeight]:
    """Return a model's weights."""
    return [
        NamedWeight(w.path, tuple(w.shape), partial(value_of, w), assign=w.assign)
        for w in model.weights
    ]


def load_archive(archive: Contents, objects: Mapping[str, object] | None) -> keras.Model:
    """Return the model in a ``.keras`` file, not compiled.

    Args:
        archive: contents of the file.
        objects: the user's classes and functions it names; lambdas by the keys of `CustomPart`.

    Raises:
        ModelError: Keras cannot load it.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "model")
        unpack(archive.open(), place, KIND)
        with explaining_files():
            return load_unpacked(place, objects)


def load_unpacked(folder: Path, objects: Mapping[str, object] | None) -> keras.Model:
    """Load a model from the unpacked contents of a ``.keras`` file."""
    if objects is not None:
        name_lambdas_in(folder)
    custom_objects = _revivable(objects or {})
    with sparing_memory():
        return keras.saving.load_model(folder, custom_objects=custom_objects, compile=False)


def _revivable(objects: Mapping[str, object]) -> dict[str, object]:
    """Return ``objects`` with classes that load also if they do not take ``name`` or ``dtype``.

    Keras writes such arguments of its base classes for every subclass, and then cannot load one
    whose ``__init__`` takes its own arguments only, as most subclasses of ``keras.Model`` do.
    """
    return {
        name: _lenient(value)
        if isinstance(value, type) and issubclass(value, keras.Layer)
        else value
        for name, value in objects.items()
    }


def _lenient(cls: type[keras.Layer]) -> type[keras.Layer]:
    taken = inspect.signature(cls.__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return cls

    def from_config(_: type, config: Mapping[str, object], *args: object) -> keras.Layer:
        arguments = {k: v for k, v in config.items() if k in taken or k not in _BASE_ARGUMENTS}
        return cls.from_config(arguments, *args)

    return type(cls.__name__, (cls,), {"from_config": classmethod(from_config)})


def pack_saved_model(folder: Location, sums: Mapping[str, str] | None = None) -> Contents:
    """Return a SavedModel's files as one archive.

    Args:
        folder: where it lies.
        sums: SHA-256 of all its files, where they are known.

    Raises:
        ModelError: there is no SavedModel, or a file is missing or damaged.
    """
    files = folder.files() if folder.is_folder else []
    if not any(file.name == GRAPH_FILE for file in files):
        raise ModelError(f"{folder} holds no SavedModel: {GRAPH_FILE} is missing")
    names = [file.name for file in files] if sums is None else list(sums)

    def write(whole: IO[bytes]) -> None:
        with zipfile.ZipFile(whole, "w") as archive:
            for name in names:
                _add_file(archive, folder, name, sums)

    return spool(write)


def _add_file(
    archive: zipfile.ZipFile, folder: Location, name: str, sums: Mapping[str, str] | None
) -> None:
    try:
        if sums is None:
            contents = folder.join(name).spool(lambda part: None)
        else:
            contents = read_verified_file(folder, name, sums)
    except ValueError as error:
        raise ModelError(f"the SavedModel in {folder}: {error}") from error
    with archive.open(name, "w", force_zip64=True) as entry, contents.open() as file:
        shutil.copyfileobj(file, entry, PART_BYTES)


class Graph:
    """One signature of a SavedModel, called as a Keras model is.

    Args:
        packed: what `pack_saved_model` returned.
        signature: the signature's name.

    Attributes:
        loaded: what TensorFlow loads of it.
        takes: what the signature takes, by name.

    Raises:
        ModelError: there is no such signature, or it takes nothing, or a fixed number of rows.
    """

    def __init__(self, packed: Contents, signature: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            unpack(packed.open(), folder, "a SavedModel's files")
            self.loaded = tf.saved_model.load(folder)
        signatures = sorted(self.loaded.signatures)
        if signature not in signatures:
            has = ", ".join(signatures) or "none"
            raise ModelError(f"the SavedModel has no signature {signature!r}; it has {has}")
        self._call = self.loaded.signatures[signature]
        self.takes: Mapping[str, tf.TensorSpec] = self._call.structured_input_signature[1]
        if not self.takes:
            raise ModelError(f"signature {signature!r} of the SavedModel takes no inputs")
        fixed = [n for n, spec in self.takes.items() if not spec.shape.rank or spec.shape[0]]
        if fixed:
            raise ModelError(
                f"signature {signature!r} of the SavedModel takes {fixed[0]!r} of shape "
                f"{self.takes[fixed[0]].shape}; it must take any number of rows"
            )

    def predict_step(self, data: tuple[Mapping[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
        """Return the outputs by name."""
        (inputs,) = data
        shaped = {
            name: tf.reshape(tf.cast(inputs[name], spec.dtype), [-1, *spec.shape[1:]])
            for name, spec in self.takes.items()
        }
        return dict(sorted(self._call(**shaped).items()))


@contextlib.contextmanager
def sparing_memory() -> Iterator[None]:
    """Save and load models without copies of large weights.

    Whatever a model is built with inside has to be loaded, too: it begins as zeros.
    """
    _watch()
    token = _sparing.set(True)
    try:
        yield
    finally:
        _sparing.reset(token)


@functools.cache
def _watch() -> None:
    make, fill = keras.Layer.add_weight, keras.Variable.assign
    read, write = H5IOStore.__getitem__, H5IOStore.__setitem__

    @functools.wraps(make)
    def add_weight(
        self: keras.Layer, shape: Any = None, initializer: Any = None, *args: Any, **kwargs: Any
    ) -> keras.Variable:
        if _sparing.get() and _is_large(shape):
            initializer = _zeros
        return make(self, shape, initializer, *args, **kwargs)

    @functools.wraps(fill)
    def assign(self: keras.Variable, value: Any) -> Any:
        if not (_sparing.get() and isinstance(value, np.memmap) and _fits_variable(self, value)):
            return fill(self, value)
        copy = _aligned(value.shape, value.dtype)
        copy[...] = value
        tensor = as_tensor(copy)
        self.value.assign(tensor)
        return tensor

    @functools.wraps(read)
    def get(self: H5IOStore, key: str) -> Any:
        mapped = _mapped(self._h5_entry_group.get(key)) if _sparing.get() else None
        return read(self, key) if mapped is None else mapped

    @functools.wraps(write)
    def put(self: H5IOStore, key: str, value: Any) -> None:
        if _sparing.get() and isinstance(value, keras.Variable):
            value = value_of(value)
        write(self, key, value)

    keras.Layer.add_weight, keras.Variable.assign = add_weight, assign
    H5IOStore.__getitem__, H5IOStore.__setitem__ = get, put


def _is_large(shape: Any) -> bool:
    sizes = shape if isinstance(shape, (tuple, list)) else ()
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) >= _LARGE


def _zeros(shape: Sequence[int], dtype: str | None = None) -> tf.Tensor:
    kind = tf.as_dtype(dtype or keras.config.floatx()).as_numpy_dtype
    if np.dtype(kind).kind not in _SHARED_KINDS:
        return tf.zeros(shape, kind)
    return as_tensor(_aligned(tuple(shape), np.dtype(kind)))


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return zeros where TensorFlow wants numbers to begin; memory is taken as it is written."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + size].view(dtype).reshape(shape)


def _fits_variable(variable: keras.Variable, value: np.ndarray) -> bool:
    return (
        isinstance(variable.value, tf.Variable)
        and tuple(variable.value.shape) == value.shape
        and variable.value.dtype.as_numpy_dtype == value.dtype
    )


def _mapped(data: Any) -> np.memmap | None:
    """Return a memory map of a contiguous array in an HDF5 file; ``None`` for any other."""
    if (
        not isinstance(data, h5py.Dataset)
        or data.size < _LARGE
        or data.dtype.kind not in _SHARED_KINDS
    ):
        return None
    begin = data.id.get_offset()
    if "dtype" in data.attrs or not data.dtype.isnative or begin is None:
        return None
    if data.external or data.is_virtual or data.file.driver != "sec2":
        return None
    return np.memmap(data.file.filename, data.dtype, "r", begin, data.shape)


def load_initial_weights(model: keras.Model, start: WarmStart) -> None:
    """Load the weights of ``start`` into the built ``model``; report weights that were left out.

    Raises:
        ModelError: they do not fit; the first difference is shown. With ``skip_mismatch``: none
            of them does.
    """
    theirs: list[NamedWeight] = []
    with tempfile.TemporaryDirectory() as folder:
        if start.kind == ARRAYS:
            theirs = weights_of_run(start)
        else:
            for name, data in start.files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                contents_of(data).write_to(path)
        if start.kind == SAVED_MODEL:
            theirs = _weights_of_saved_model(folder, start.origin)
        if start.kind == KERAS_FILE:
            taken = _load_keras_file(model, path, start)
            if start.skip_mismatch:
                theirs = [] if taken else _weights_of_keras_file(path)
                report_taken(weights_in(model), taken, theirs, start, _BY_LAYERS)
        else:
            take_over(weights_in(model), theirs, start, by_order=not start.skip_mismatch)
    finalize_layers(model)


def _weights_of_saved_model(folder: str, origin: str) -> list[NamedWeight]:
    variables = getattr(tf.saved_model.load(folder), "variables", ())
    # The states of random layers stand among the weights; they are no weights.
    weights = [v for v in variables if "seed_generator_state" not in v.name]
    if not weights:
        raise ModelError(
            f"initial_weights={origin!r}: the SavedModel lists no variables; write it with Keras "
            "(model.export), or load it in model_fn"
        )
    return [NamedWeight(v.name.partition(":")[0], tuple(v.shape), v.numpy) for v in weights]


def _weights_of_keras_file(path: Path) -> list[NamedWeight]:
    """Return the weights in a file of Keras', by their places in it, without the optimizer's."""
    import h5py

    weights: list[NamedWeight] = []

    def note(place: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset) and not place.startswith("optimizer/"):
            name = place.removeprefix("_layer_checkpoint_dependencies/").removeprefix("layers/")
            weights.append(NamedWeight(name, item.shape, item.__array__))

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
    indices = {id(weight): index for index, weight in enumerate(model.weights)}
    # Such files may hold an optimizer, with its learning rate, and states of random layers.
    optimizers = find_optimizers(model) if model.compiled else []
    others = [v for optimizer in optimizers for v in optimizer.variables]
    others += [v for v in model.variables if id(v) not in indices]
    saved_values = [np.array(variable) for variable in others]
    taken: set[int] = set()

    def noting(original: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(original)
        def assign(variable: keras.Variable, value: object) -> object:
            result = original(variable, value)
            if id(variable) in indices:
                taken.add(indices[id(variable)])
            return result

        return assign

    try:
        # Keras does not tell what it takes where some may be missing.
        with warnings.catch_warnings(), replaced(keras.Variable, "assign", noting):
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            if start.skip_mismatch:
                warnings.simplefilter("ignore")  # what was left out is reported in one line
            model.load_weights(path, skip_mismatch=start.skip_mismatch)
    except Exception as error:  # Keras raises many types for files that do not fit
        raise ModelError(
            f"initial_weights={start.origin!r} do not fit the model: {error}"
        ) from error
    for variable, value in zip(others, saved_values, strict=True):
        variable.assign(value)
    return taken
