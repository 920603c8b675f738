"""A trained Keras model made again, to predict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import cloudpickle
import numpy as np
import tensorflow as tf

from ...data.manifest import Manifest
from ...errors import ModelError
from ...storage.arrays import ArraysFile
from ...training.trained_model import Model, Recipe
from .artifact import load_archive
from .binding import InputBinding
from .graph import Graph
from .model import (
    Nest,
    build_by_call,
    build_model,
    call_model,
    calling,
    finalize_layers,
    fresh_keras_state,
    keras_state,
    output_specs,
    pick,
    sample_inputs,
    using_keras_state,
)
from .saved import KerasParts

if TYPE_CHECKING:
    import keras


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
    set_weights(model, [*map(arrays.shape, names)], map(arrays.read, names), recipe, bind)
    if parts.source is not None:
        with using_keras_state(parts.state):
            recipe.sample_rows().check(calling(model, bind))


def set_weights(
    model: keras.Model,
    trained: Sequence[tuple[int, ...]],
    values: Iterable[np.ndarray],
    recipe: Recipe,
    bind: InputBinding,
) -> None:
    """Load the trained model's weights into a newly built model.

    Args:
        model: the model.
        trained: the shapes of the trained one's weights.
        values: their values; each is asked for when the one before is in its place.
        recipe: how the trained one is made again.
        bind: what makes the model's inputs of columns.

    Raises:
        ModelError: they are not those of such a model.
    """
    if not model.built or len(model.weights) != len(trained):
        with using_keras_state(recipe.parts.state):
            build_by_call(model, sample_inputs(model, bind, recipe.sample_rows().inputs))
    built = [tuple(weight.shape) for weight in model.weights]
    if list(trained) != built:
        index = next((n for n, (a, b) in enumerate(zip(trained, built)) if a != b), None)  # noqa: B905
        difference = (
            f"{len(built)} weights, the trained one has {len(trained)}"
            if index is None
            else f"weight {index} of shape {built[index]}, the trained one has {trained[index]}"
        )
        made = "model_fn builds" if recipe.parts.archive is None else "its archive gives"
        raise ModelError(f"{made} another model than was trained: {difference}")
    for weight, value in zip(model.weights, values, strict=True):
        weight.assign(value)
    finalize_layers(model)
