"""Variables that a step changes, though Keras does not know them as part of the model.

A ``tf.Variable``, a ``tf.random.Generator`` or a metric that no model holds is neither handed out
by rank 0 nor averaged, compared or kept in checkpoints. What a step only reads is a constant to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

# TensorFlow has no public name for it.
from tensorflow.python.framework.auto_control_deps_utils import (
    get_read_only_resource_input_indices_graph,
)

from ...errors import ModelError
from .exchange import is_runner_variable
from .generators import generators
from .metrics import metric_variables, variables_of
from .optimizers import leaf_optimizers


def check_tracked(
    model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer], graph: tf.Graph
) -> None:
    """Check that Keras, or this package, tracks every variable that a training step changes.

    Args:
        model: the built model.
        optimizers: all optimizers that its step uses.
        graph: of its step.

    Raises:
        ModelError: it changes another variable, or draws from another generator.
    """
    tracked = {_handle(variable) for variable in tracked_variables(model, optimizers)}
    others = [
        variable
        for variable in _changed_in(graph)
        if id(variable.handle) not in tracked and not is_runner_variable(variable)
    ]
    if not others:
        return
    names = sorted(_name(model, variable) for variable in others)
    raise ModelError(
        f"the training step of model {model.name!r} changes {', '.join(names)}, which Keras does "
        "not know as a part of the model: ranks would part in it unseen, and a resumed run would "
        "begin it anew. Make variables by self.add_weight(…, trainable=False), draw random numbers "
        "by keras.random with a keras.random.SeedGenerator that is an attribute of the model or a "
        "layer, and keep metrics in such attributes, too"
    )


def _changed_in(graph: tf.Graph) -> list[tf.Variable]:
    """Return the variables that a traced function changes, also in functions that it calls."""
    read = {id(graph.inputs[n]) for n in get_read_only_resource_input_indices_graph(graph)}
    changed = {id(outer) for outer, inner in graph.captures if id(inner) not in read}
    return [variable for variable in graph.variables if id(variable.handle) in changed]


def tracked_variables(
    model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer]
) -> Iterator[keras.Variable | tf.Variable]:
    """Yield the variables of a model, its optimizers, metrics and generators; some repeatedly."""
    yield from model.variables
    for optimizer in [*optimizers, *leaf_optimizers(optimizers)]:
        yield from optimizer.variables
    yield from metric_variables(model)
    yield from generators().values()
    # A model whose `metrics` are others, and one within it, may have these as well, which nothing
    # is computed from. What `compile` makes is no attribute that Keras tracks.
    for layer in model._flatten_layers(include_self=True, recursive=True):
        yield from variables_of(layer._metrics)
        made = [getattr(layer, name, None) for name in ("_loss_tracker", "_compile_metrics")]
        made += getattr(getattr(layer, "_compile_loss", None), "metrics", ())
        yield from variables_of(metric for metric in made if metric is not None)


def _handle(variable: keras.Variable | tf.Variable) -> int:
    """Return an identity shared by all objects that represent one variable."""
    return id(variable.value.handle if isinstance(variable, keras.Variable) else variable.handle)


def _name(model: keras.Model, variable: tf.Variable) -> str:
    """Return how the user knows a variable."""
    for layer in model._flatten_layers(include_self=True, recursive=True):
        for key, value in vars(layer).items():
            held = value.state if isinstance(value, tf.random.Generator) else value
            is_variable = isinstance(held, (tf.Variable, keras.Variable))
            if is_variable and _handle(held) == id(variable.handle):
                return f"attribute {key!r} of {layer.name!r}"
    return f"variable {variable.name.partition(':')[0]!r}"
