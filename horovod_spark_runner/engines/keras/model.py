"""A Keras model in a process: settings of Keras, building, calls, outputs by name.

Keras' settings are process-wide; they are kept separate between the models in one process.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from ...checkpoint.attachments import AttachedFile, contents_of
from ...checkpoint.model_state import Variable
from ...errors import HorovodSparkError, ModelError, on_one_line
from ...storage.arrays import Arrays
from ...storage.contents import Contents
from ...training.sample_rows import Call, repeat_rows
from ...training.spec import ModelSource, OutputSpec
from .private import global_state

# Tensors or arrays, alone or in tuples, lists and dictionaries within each other: what a model
# takes and gives. Only `keras.tree` and `tf.nest` look inside.
Nest: TypeAlias = object
# What leads to a value in such a nest, or in JSON.
Keys: TypeAlias = tuple[str | int, ...]
# A method as its class holds it, and one that takes its place for a while.
_Method = TypeVar("_Method", bound=Callable[..., object])
# What Keras keeps for each thread: names it has given, seeds, the dtype policy.
_TRACKERS = [name for name in vars(global_state) if name.endswith("_TRACKER")]
Bind = Callable[[Mapping[str, np.ndarray]], Nest]


def build_model(source: ModelSource) -> keras.Model:
    """Return the compiled Keras model of ``source``.

    Raises:
        ModelError: it gives something else.
    """
    model, origin = _build(source)
    if not isinstance(model, keras.Model):
        kind = type(model).__name__
        advice = "it must return a compiled keras.Model, or a TorchModel for PyTorch"
        if hasattr(model, "horovod_engine"):
            advice = f"say so in its annotation, def model_fn() -> {kind}, to train one"
        raise ModelError(f"{origin} returned {_describe(model)}; {advice}")
    return model


def _build(source: ModelSource) -> tuple[object, str]:
    if source.function is not None:
        return source.call_function(), "model_fn"
    if isinstance(source.file, (Contents, AttachedFile)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.keras")
            contents_of(source.file).write_to(path)
            objects = dict(source.custom_objects)
            with explaining_files():
                return keras.saving.load_model(path, custom_objects=objects), "the model file"
    with explaining_files():
        model = keras.models.model_from_json(source.file, custom_objects=source.custom_objects)
    return model, "the model file"


@contextlib.contextmanager
def explaining_files() -> Iterator[None]:
    """Raise a `ModelError` where Keras cannot load a model's file."""
    try:
        yield
    except HorovodSparkError:
        raise
    except Exception as error:  # whatever Keras raises for what it does not know
        raise ModelError(
            f"Keras cannot load the model file: {first_line(error)}. Give classes and functions of "
            "your own that it names as custom_objects"
        ) from error


def first_line(error: BaseException) -> str:
    """Return an error's class and message, shortened."""
    return f"{type(error).__name__}: {on_one_line(error, 300)}"


def _describe(value: object) -> str:
    if value is None:
        return "None (is its return statement missing?)"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def check_trainable(
    model: keras.Model, batch_size: int, rows: Sequence[int] = (), ranks: int = 1
) -> None:
    """Check that ``model`` can be trained here, before its variables exist.

    Args:
        model: the model.
        batch_size: rows per rank and step.
        rows: rows of the training data and, where there are some, of the validation data.
        ranks: number of ranks that share a global batch.

    Raises:
        ModelError: it is not compiled, has a training procedure of its own that would not be
            called, or keeps state from batch to batch.
    """
    if not model.compiled:
        raise ModelError(
            f"model {model.name!r} is not compiled; call model.compile(optimizer=…, loss=…) in "
            "model_fn"
        )
    if model._distribute_strategy is not None:
        raise ModelError(
            f"model {model.name!r} was built under a tf.distribute strategy; build it without: "
            "run_training spreads the training over ranks itself"
        )
    for name in ("fit", "make_train_function", "make_test_function", "evaluate"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ModelError(
                f"{type(model).__name__} overrides {name}(), which run_training does not call; put "
                "what differs into train_step, test_step, compute_loss or callbacks"
            )
    _check_batch_size(model, batch_size, rows, ranks)


def check_stateless(model: keras.Model, why: str) -> None:
    """Check that no layer carries its state from one batch to the next.

    Args:
        model: the model.
        why: why none may, for the message.

    Raises:
        ModelError: a layer is stateful.
    """
    for layer in all_layers(model)[1:]:
        if getattr(layer, "stateful", False) is True:
            raise ModelError(
                f"layer {layer.name!r} is stateful: it carries its state from one batch to the "
                f"next, but {why}; build it with stateful=False"
            )


def _check_batch_size(model: keras.Model, batch_size: int, rows: Sequence[int], ranks: int) -> None:
    check_stateless(model, "batches are shuffled and spread over ranks")
    for tensor in getattr(model, "inputs", None) or ():
        size = tensor.shape[0]
        if size is not None and (size != batch_size or any(r % (size * ranks) for r in rows)):
            raise ModelError(
                f"model input {tensor.name!r} takes batches of exactly {size} rows, but batch_size "
                f"is {batch_size} and the last batch of {' and '.join(map(str, rows))} rows is a "
                "partial one; build it with keras.Input(shape=…) instead of batch_shape"
            )


def check_losses(model: keras.Model) -> None:
    """Check that the losses a model is compiled with can be shared out over ranks.

    Raises:
        ModelError: one is not reduced to a number.
    """
    for loss in getattr(getattr(model, "_compile_loss", None), "_flat_losses", None) or ():
        if loss.loss.reduction in (None, "none"):
            raise ModelError(
                f"loss {loss.loss.name!r} of model {model.name!r} has reduction="
                f"{loss.loss.reduction!r}, so that the gradients of all rows are added up, however "
                "many ranks share them; use 'sum_over_batch_size' (the default), 'mean' or 'sum'"
            )


def has_custom_steps(model: keras.Model) -> bool:
    """Return whether the user overrides the model's steps, not only its call."""
    return any(
        getattr(type(model), name) is not getattr(keras.Model, name)
        for name in ("train_step", "test_step", "compute_loss", "compute_metrics")
    )


def all_layers(model: keras.Model) -> list[keras.Layer]:
    """Return a model and all its layers, those inside of layers, too."""
    # Keras has no public way to reach them.
    return list(model._flatten_layers(include_self=True, recursive=True))


def finalize_layers(model: keras.Model) -> bool:
    """Recompute the constants that layers derive from their weights; call it after setting weights.

    `keras.layers.Normalization` keeps mean and variance as weights, but computes with constants
    made of them. Functions compiled before keep the old constants.

    Args:
        model: a built ``keras.Model``.

    Returns:
        Whether there are such layers.
    """
    finalized = False
    for layer in all_layers(model):
        finalize = getattr(layer, "finalize_state", None)
        # Layers without weights (Discretization) derive their state from what `adapt` saw, which a
        # loaded model has no longer: finalising them again would empty them.
        if finalize is not None and layer.weights:
            finalize()
            finalized = True
    return finalized


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


def call_model(model: keras.Model, inputs: Nest) -> Nest:
    """Return the result of ``model.predict`` for one batch; a custom ``predict_step`` counts."""
    return model.predict_step((inputs,))


def build_by_call(model: keras.Model, inputs: Nest) -> None:
    """Build a model's weights by a call as in training."""
    arguments = {"training": True} if model._call_has_training_arg else {}
    model(inputs, **arguments)


def call_outputs(model: keras.Model, example: Nest) -> Any | None:
    """Return the outputs of a model's call in training mode, or ``None`` if it has no call."""
    outputs = getattr(model, "outputs", None)
    if outputs:
        return outputs[0] if isinstance(model, keras.Sequential) else model.output
    if type(model).call is keras.Model.call:
        return None
    arguments = {"training": True} if model._call_has_training_arg else {}
    if model.run_eagerly:
        return model(example, **arguments)
    kind = tf.nest.map_structure(lambda v: tf.TensorSpec((None, *v.shape[1:]), v.dtype), example)
    traced = tf.function(lambda x: model(x, **arguments), autograph=False)
    return traced.get_concrete_function(kind).structured_outputs


@contextlib.contextmanager
def unchanged(model: keras.Model, others: Sequence[Variable] = ()) -> Iterator[None]:
    """Restore the state of ``model``, and of ``others``, after calls: counters, seeds."""
    variables = [*getattr(model, "non_trainable_variables", ()), *others]
    before = [(variable, np.array(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            if not np.array_equal(np.array(variable), value):
                variable.assign(value)


def output_leaves(value: Nest) -> list[tuple[Keys, tf.Tensor]]:
    """Return every tensor of a model's outputs, with the keys and indices of its path.

    Dictionaries are walked in their own order, which is the one their author wrote.

    Raises:
        ModelError: one is sparse or ragged.
    """
    if isinstance(value, (tf.SparseTensor, tf.RaggedTensor)):
        raise ModelError(
            f"the model gives a {type(value).__name__}; end it with a dense tensor "
            "(keras.ops.convert_to_tensor(x, sparse=False), or x.to_tensor() of a ragged one)"
        )
    if isinstance(value, Mapping):
        below = list(value.items())
    elif isinstance(value, (list, tuple)):
        below = list(enumerate(value))
    else:
        return [] if value is None else [((), value)]
    return [((key, *path), leaf) for key, inner in below for path, leaf in output_leaves(inner)]


def pick(value: Nest, path: Keys) -> tf.Tensor:
    """Return the tensor at ``path``."""
    inside: Any = value
    for key in path:
        inside = inside[key]
    return inside


def fixed_batch(model: keras.Model) -> int | None:
    """Return the number of rows that ``model`` has to be called with; ``None`` for any."""
    try:
        inputs = keras.tree.flatten(model.inputs or [])
    except (AttributeError, ValueError):  # a subclass, or a Sequential before it is built
        return None
    sizes = {tensor.shape[0] for tensor in inputs if tensor.shape and tensor.shape[0] is not None}
    return max(sizes, default=None)


def to_numpy(value: tf.Tensor) -> np.ndarray:
    """Return an output as an array of numbers or strings."""
    array = np.array(value)
    if array.dtype != object:
        return array
    flat = [one.decode(errors="surrogateescape") for one in array.reshape(-1).tolist()]
    return np.array(flat, object).reshape(array.shape)


def output_specs(model: keras.Model, inputs: Nest) -> list[OutputSpec]:
    """Return names, shapes and types of the model's outputs.

    A single output is called "prediction". Those in a list have the names of the layers that give
    them, those in dictionaries their keys; deeper down, keys and indices are joined by "_".

    Args:
        model: the model.
        inputs: at least two rows, or as many as it takes.

    Raises:
        ModelError: an output does not have one entry per row.
    """
    rows = len(keras.tree.flatten(inputs)[0])
    leaves = output_leaves(call_model(model, inputs))
    names = _output_names(model, [path for path, _ in leaves])
    specs = []
    for name, (path, leaf) in zip(names, leaves, strict=True):
        shape = tuple(leaf.shape)
        if not shape or shape[0] not in (rows, None):
            raise ModelError(
                f"output {name!r} has the shape {shape} for {rows} rows; each output must have one "
                "entry per row"
            )
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        specs.append(OutputSpec(name, shape[1:], dtype, path, _last_activation(model, path)))
    if not specs:
        raise ModelError("the model returns no output")
    return specs


def _last_activation(model: keras.Model, path: Keys) -> str:
    """Return the activation that a model applies last to an output; empty without a graph."""
    if type(model).predict_step is not keras.Model.predict_step:
        return ""
    try:
        inner = model._functional if isinstance(model, keras.Sequential) else model
        operation = pick(inner._outputs_struct, path)._keras_history.operation
    except (AttributeError, KeyError, IndexError, TypeError):  # no graph, as of a subclass
        return ""
    if type(operation).__module__.partition(".")[0] != "keras":
        return ""
    # Layers that are activations themselves, and operations on tensors.
    if type(operation).__name__ in ("Softmax", "Sigmoid"):
        return type(operation).__name__.lower()
    return getattr(getattr(operation, "activation", None), "__name__", "")


def _output_names(model: keras.Model, paths: Sequence[Keys]) -> list[str]:
    if len(paths) == 1:
        return ["prediction"]
    layers = getattr(model, "output_names", None) or []
    flat = all(len(path) == 1 and isinstance(path[0], int) for path in paths)
    if flat and len(layers) == len(paths):
        return _distinct(layers)
    # An index alone is no name for a column.
    prefixed = [path if isinstance(path[0], str) else ("output", *path) for path in paths]
    return _distinct(["_".join(map(str, path)) for path in prefixed])


def _distinct(names: Sequence[str]) -> list[str]:
    """Return ``names`` with a number behind those that came before, in any case of letters."""
    taken: set[str] = set()
    result = []
    for name in names:
        number, candidate = 1, name
        while candidate.lower() in taken:
            candidate, number = f"{name}_{number}", number + 1
        taken.add(candidate.lower())
        result.append(candidate)
    return result


def sample_inputs(model: keras.Model, bind: Bind, rows: Arrays) -> Nest:
    """Return the inputs that rows make, by turns as many as the model takes, or at least two.

    Args:
        model: the model.
        bind: makes its inputs of columns.
        rows: the columns.
    """
    count = fixed_batch(model) or max(2, len(next(iter(rows.values()))))
    return bind(repeat_rows(rows, count))


def calling(model: keras.Model, bind: Bind) -> Call:
    """Return the function from columns to a model's outputs, which leaves it as it is."""

    def call(rows: Arrays) -> list[np.ndarray]:
        with unchanged(model):
            outputs = call_model(model, sample_inputs(model, bind, rows))
        return [to_numpy(value) for _, value in output_leaves(outputs)]

    return call


def classes_with(base: type, method: str) -> list[type]:
    """Return ``base``, its bases and subclasses that define ``method``."""
    classes = [cls for cls in base.__mro__ if method in vars(cls)]
    pending: list[type] = [base]
    while pending:
        derived: type
        for derived in pending.pop().__subclasses__():
            pending.append(derived)
            if method in vars(derived) and derived not in classes:
                classes.append(derived)
    return classes


@contextlib.contextmanager
def replaced(
    owner: type | ModuleType, name: str, wrap: Callable[[_Method], _Method]
) -> Iterator[None]:
    """Replace function ``name`` of a module, class or base by ``wrap(function)`` for a while."""
    if isinstance(owner, type):
        owner = next(cls for cls in owner.__mro__ if name in vars(cls))
    original = vars(owner)[name]
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
