"""Making a trained model again in one of Spark's Python workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import cloudpickle
import numpy as np

from ..data.manifest import Column, Manifest
from ..errors import ModelError
from ..quiet import quiet_imports
from ..settings.data import Transform
from ..storage.arrays import load_arrays
from ..training.spec import Binding, ModelSource, OutputSpec

# Columns to the outputs' values, for any number of rows.
Model = Callable[[dict[str, np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True)
class Recipe:
    """How a trained model is made again, and called.

    Attributes:
        inputs: which column feeds which input.
        columns: the feature columns as they were trained on.
        outputs: what it gives.
        archive: contents of its ``.keras`` file, if that is the way.
        objects: pickled dictionary of the user's classes and functions that the archive names.
        source: builds it, otherwise.
        weights: contents of the weights file for ``source``.
        sample: what the trained model gave, by which what ``source`` builds is checked.
        transforms: what to do with decoded images, by column.
        state: Keras' global settings it was trained under.
        eager: call it without making a graph of it.
        batch_size: rows it has to be called with; ``None`` for any number.
    """

    inputs: Binding
    columns: tuple[Column, ...]
    outputs: tuple[OutputSpec, ...]
    archive: bytes | None = field(default=None, repr=False)
    objects: bytes | None = field(default=None, repr=False)
    source: ModelSource | None = None
    weights: bytes | None = field(default=None, repr=False)
    sample: bytes | None = field(default=None, repr=False)
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    state: Mapping[str, str] | None = None
    eager: bool = False
    batch_size: int | None = None


def load_model(recipe: Recipe) -> Model:
    """Return the function from feature columns to the model's outputs.

    Raises:
        ModelError: what was built is not the model that was trained.
    """
    with quiet_imports():
        import tensorflow as tf

        from ..training.binding import InputBinding
        from ..training.keras_state import fresh_keras_state, using_keras_state
        from ..training.outputs import call_model, pick

    with fresh_keras_state():
        model = _from_archive(recipe) if recipe.archive is not None else _from_source(recipe)
        bind = InputBinding(model, recipe.inputs, Manifest("", (), recipe.columns, (), ""))
        if recipe.weights is not None:
            _give_weights(model, recipe, bind)

    def call(inputs: Any) -> Any:
        return call_model(model, inputs)

    # Without AutoGraph, as Keras itself predicts; it would leave a file behind, too.
    forward = call if recipe.eager else tf.function(call, reduce_retracing=True, autograph=False)

    def predict(values: dict[str, np.ndarray]) -> list[np.ndarray]:
        with using_keras_state(recipe.state):
            given = forward(tf.nest.map_structure(tf.convert_to_tensor, bind(values)))
        return [_to_numpy(pick(given, output.path)) for output in recipe.outputs]

    return predict if recipe.batch_size is None else _in_batches_of(recipe.batch_size, predict)


def describe_outputs(recipe: Recipe) -> tuple[list[dict[str, Any]], str]:
    """Return what the model of ``recipe`` gives, as JSON takes it, or nothing and why.

    Raises:
        ModelError: it is not the model that was trained.
    """
    with quiet_imports():
        from ..training.binding import InputBinding
        from ..training.keras_state import fresh_keras_state
        from ..training.outputs import output_specs

    with fresh_keras_state():
        model = _from_source(recipe)
        bind = InputBinding(model, recipe.inputs, Manifest("", (), recipe.columns, (), ""))
        try:
            if recipe.weights is not None:
                _give_weights(model, recipe, bind)
            example = bind({column.name: column.blank() for column in recipe.columns})
            return [asdict(output) for output in output_specs(model, example)], ""
        except ModelError:
            raise
        except Exception as error:  # the user's own call may fail in any way
            return [], f"{type(error).__name__}: {error}"


def _from_archive(recipe: Recipe) -> Any:
    from ..training.artifact import load_archive
    from ..training.keras_state import using_keras_state

    assert recipe.archive is not None
    objects = None if recipe.objects is None else cloudpickle.loads(recipe.objects)
    with using_keras_state(recipe.state):
        return load_archive(recipe.archive, objects)


def _from_source(recipe: Recipe) -> Any:
    from ..training.model import build_model

    assert recipe.source is not None
    return build_model(recipe.source)


def _give_weights(model: Any, recipe: Recipe, bind: Any) -> None:
    from ..training.keras_state import using_keras_state
    from ..training.model import finalize_layers
    from ..training.outputs import build_by_call
    from ..training.sample import check_sample

    arrays = load_arrays(recipe.weights or b"")
    values = [arrays[name] for name in sorted(arrays)]
    if not model.built or len(model.weights) != len(values):
        blank = {c.name: c.blank().repeat(recipe.batch_size or 1, 0) for c in recipe.columns}
        with using_keras_state(recipe.state):
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
    if recipe.sample is not None:
        example = bind({column.name: column.blank() for column in recipe.columns})
        with using_keras_state(recipe.state):
            check_sample(model, example, recipe.sample)


def _to_numpy(value: Any) -> np.ndarray:
    if hasattr(value, "dense_shape"):  # a sparse tensor
        import tensorflow as tf

        value = tf.sparse.to_dense(value)
    array: np.ndarray = value.numpy()
    return array


def _in_batches_of(size: int, predict: Model) -> Model:
    """Call the model with exactly ``size`` rows: the last ones are repeated, and left out again."""

    def padded(values: dict[str, np.ndarray]) -> list[np.ndarray]:
        rows = len(next(iter(values.values())))
        parts = []
        for begin in range(0, rows, size):
            some = {name: v[begin : begin + size] for name, v in values.items()}
            lacking = size - min(size, rows - begin)
            if lacking:
                some = {n: np.concatenate([v, v[-1:].repeat(lacking, 0)]) for n, v in some.items()}
            parts.append([output[: size - lacking] for output in predict(some)])
        return [np.concatenate(output) for output in zip(*parts, strict=True)]

    return padded
