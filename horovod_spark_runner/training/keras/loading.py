"""A trained Keras model made again, to predict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import cloudpickle
import numpy as np
import tensorflow as tf

from ...data.manifest import Manifest
from ...errors import ModelError
from ...storage.arrays import load_arrays
from ..trained_model import Model, Recipe
from .artifact import load_archive
from .binding import InputBinding
from .keras_state import fresh_keras_state, using_keras_state
from .model import build_model, finalize_layers
from .outputs import build_by_call, call_model, output_specs, pick
from .sample import check_sample
from .saved import KerasParts


def load_model(recipe: Recipe) -> Model:
    """Return the function from feature columns to outputs; see `Engine.load`."""
    parts: KerasParts = recipe.own
    with fresh_keras_state():
        model = _from_archive(parts) if parts.archive is not None else _from_source(parts)
        bind = _binding(model, recipe)
        if parts.weights is not None:
            _give_weights(model, recipe, bind)

    def call(inputs: Any) -> Any:
        return call_model(model, inputs)

    forward = call if parts.eager else _compiled(call, recipe.batch_size)

    def prepare(values: dict[str, np.ndarray]) -> Any:
        return tf.nest.map_structure(tf.convert_to_tensor, bind(values))

    def compute(inputs: Any) -> list[np.ndarray]:
        with using_keras_state(parts.state):
            given = forward(inputs)
        return [_to_numpy(pick(given, output.path)) for output in recipe.outputs]

    return Model(prepare, compute)


def _compiled(call: Callable[[Any], Any], rows: int | None) -> Callable[[Any], Any]:
    """Return ``call`` as one graph, traced once, for so many rows, or for any number of them."""
    # Without AutoGraph, as Keras itself predicts; it would leave a file behind, too.
    function = tf.function(call, autograph=False)
    traced: list[Any] = []

    def shape_of(tensor: Any) -> Any:
        return tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype)

    def forward(inputs: Any) -> Any:
        if not traced:
            specs = tf.nest.map_structure(shape_of, inputs)
            traced.append(function.get_concrete_function(specs))
        return traced[0](inputs)

    return forward


def describe_outputs(recipe: Recipe) -> tuple[list[dict[str, Any]], str]:
    """Return what the model gives, or nothing and why; see `Engine.describe_outputs`."""
    parts: KerasParts = recipe.own
    with fresh_keras_state():
        model = _from_source(parts)
        bind = _binding(model, recipe)
        try:
            if parts.weights is not None:
                _give_weights(model, recipe, bind)
            example = bind({column.name: column.blank() for column in recipe.columns})
            return [asdict(output) for output in output_specs(model, example)], ""
        except ModelError:
            raise
        except Exception as error:  # the user's own call may fail in any way
            return [], f"{type(error).__name__}: {error}"


def _binding(model: Any, recipe: Recipe) -> InputBinding:
    return InputBinding(model, recipe.inputs, Manifest("", (), recipe.columns, (), ""))


def _from_archive(parts: KerasParts) -> Any:
    assert parts.archive is not None
    objects = None if parts.objects is None else cloudpickle.loads(parts.objects)
    with using_keras_state(parts.state):
        return load_archive(parts.archive, objects)


def _from_source(parts: KerasParts) -> Any:
    assert parts.source is not None
    return build_model(parts.source)


def _give_weights(model: Any, recipe: Recipe, bind: InputBinding) -> None:
    parts: KerasParts = recipe.own
    arrays = load_arrays(parts.weights or b"")
    values = [arrays[name] for name in sorted(arrays)]
    if not model.built or len(model.weights) != len(values):
        blank = {c.name: c.blank().repeat(recipe.batch_size or 1, 0) for c in recipe.columns}
        with using_keras_state(parts.state):
            build_by_call(model, bind(blank))
    trained, built = ([tuple(array.shape) for array in w] for w in (values, model.weights))
    if trained != built:
        place = next((n for n, (a, b) in enumerate(zip(trained, built)) if a != b), None)  # noqa: B905
        found = (
            f"{len(built)} weights, the trained one has {len(trained)}"
            if place is None
            else f"weight {place} of shape {built[place]}, the trained one has {trained[place]}"
        )
        raise ModelError(f"model_fn builds another model than was trained: {found}")
    model.set_weights(values)
    finalize_layers(model)
    if parts.sample is not None:
        example = bind({column.name: column.blank() for column in recipe.columns})
        with using_keras_state(parts.state):
            check_sample(model, example, parts.sample)


def _to_numpy(value: Any) -> np.ndarray:
    if hasattr(value, "dense_shape"):  # a sparse tensor
        value = tf.sparse.to_dense(value)
    array: np.ndarray = value.numpy()
    return array
