"""Outputs of a model by name, however they are nested."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...checkpoint.model_state import Variable
from ...errors import ModelError
from ...training.spec import OutputSpec
from .protocols import Nest, Path


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


def output_leaves(value: Nest) -> list[tuple[Path, tf.Tensor]]:
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


def pick(value: Nest, path: Path) -> tf.Tensor:
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


def to_numpy(value: Any) -> np.ndarray:
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


def _last_activation(model: keras.Model, path: Path) -> str:
    """Return the activation that a model applies last to an output; ``""`` if its graph has "
    "none."""
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


def _output_names(model: keras.Model, paths: Sequence[Path]) -> list[str]:
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
