"""State of a model: its variables, generators, and its description for checkpoints.

A description is JSON without automatic names ("dense_3"), which differ from one call of a function
to the next; `compare_models` compares two of them.

A ``tf.Variable``, a ``tf.random.Generator`` or a metric that no model holds is neither broadcast by
rank 0 nor averaged, compared or kept in checkpoints; `check_tracked` refuses it where a step
changes it. A variable that a step only reads is a constant to it. TensorFlow's stateful ops
(``tf.random.normal`` inside a compiled step) keep a counter in their kernel that nothing can read:
use ``keras.random`` or ``tf.random.Generator`` in code whose runs are to be resumed exactly.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...checkpoint.config_diff import (
    ModelChanges,
    describe_change,
    diff_optimizer,
    diff_training,
    diff_values,
    join_changes,
)
from ...checkpoint.model_state import TrainingVariables, Variable, separate_seed
from ...checkpoint.rank_state import capture_random, restore_random
from ...errors import ModelError
from ...training.progress import Json
from .exchange import is_runner_variable
from .metrics import metric_variables, variables_of
from .model import all_layers
from .optimizers import find_optimizers, leaf_optimizers
from .private import global_seed_generator, read_only_inputs
from .saved import LAMBDA

# Longer values (a vocabulary, an array) are recorded by their digest.
_LONGEST = 300
_UNNAMED = ("name", "module", "registered_name", "build_config", "shared_object_id")
# What a resumed run takes from the checkpoint whatever the model says: weights and seeds.
_INITIAL = ("seed", "weights")
_NESTED = ("layers", "inbound_nodes", "input_layers", "output_layers", "build_input_shape")


def value_of(variable: keras.Variable) -> np.ndarray:
    """Return a variable's value; it must not change while it is used.

    It is the variable's own memory where that is the processor's: no copy of what may be gigabytes.
    """
    return np.asarray(tf.convert_to_tensor(variable))


class KerasVariables(TrainingVariables):
    """Keras implementation of `TrainingVariables`.

    Args:
        model: the built model.
        optimizers: its optimizers.
    """

    def __init__(
        self, model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer]
    ) -> None:
        self._model = model
        self._optimizers = optimizers

    @property
    def weights(self) -> list[keras.Variable]:
        """The model's weights."""
        return list(self._model.weights)

    @property
    def groups(self) -> dict[str, list[keras.Variable]]:
        groups = {"model": self.weights}
        for number, optimizer in enumerate(self._optimizers):
            groups[f"optimizer{number or ''}"] = list(optimizer.variables)
        return groups

    @property
    def seeds(self) -> list[keras.Variable]:
        # What is a variable but no weight is the state of a random layer (dropout and the like).
        ids = {id(variable) for variable in self._model.weights}
        return [v for v in self._model.non_trainable_variables if id(v) not in ids]

    def view(self, variable: keras.Variable) -> tf.Tensor:
        return tf.convert_to_tensor(variable)

    def trained_by(self) -> list[list[int] | None]:
        indices = {id(variable): index for index, variable in enumerate(self.weights)}
        groups: list[list[int] | None] = []
        for optimizer in self._optimizers:
            # Keras has no public name for what an optimizer was built for.
            positions = [indices.get(id(v)) for v in getattr(optimizer, "_trainable_variables", ())]
            trained = [index for index in positions if index is not None]
            groups.append(
                trained if optimizer.built and trained and len(trained) == len(positions) else None
            )
        return groups

    def build_optimizers(self, trained: Sequence[Sequence[int] | None]) -> None:
        weights = self.weights
        for optimizer, indices in zip(self._optimizers, trained, strict=False):
            if not optimizer.built and indices and max(indices) < len(weights):
                optimizer.build([weights[index] for index in indices])

    def is_rate(self, variable: keras.Variable) -> bool:
        return str(getattr(variable, "name", "")) == "learning_rate"

    def likely_cause(self, differing: Sequence[Variable]) -> str:
        if any(map(self.is_rate, differing)):
            return (
                "The learning rate differs, so a callback set it from what only its own rank knows "
                "(its clock, random numbers, or a loss of its own); use the logs that Keras "
                "passes, which are those of all ranks"
            )
        if not any(getattr(v, "trainable", True) for v in differing):
            return (
                "They are not trained but set by a layer or callback from its own rank's rows; "
                "average them over the ranks (horovod.tensorflow.allreduce), or keep them out of "
                "the weights"
            )
        return (
            "They are changed outside Keras's optimizers (assigned by a train_step or callback on "
            "its own), whose gradients are exchanged; apply gradients with a "
            "keras.optimizers.Optimizer, and let callbacks do the same on every rank"
        )


def generators() -> dict[str, Variable]:
    """Return the states of the generators, as variables by name.

    They come into being at their first use, which leaves no trace here: Keras draws the seed of its
    own from Python's generator.
    """
    before = random.getstate()
    # Keras has no public name for the generator behind layers without a seed of their own.
    keras_seed = global_seed_generator().state
    tensorflow_state = tf.random.get_global_generator().state
    random.setstate(before)
    return {"tensorflow": tensorflow_state, "keras": keras_seed}


@contextlib.contextmanager
def nothing_drawn() -> Iterator[None]:
    """Put all global generators, Python's and NumPy's too, back to where they were before."""
    states = generators()
    values, arrays = capture_random(states)
    try:
        yield
    finally:
        restore_random(values, arrays, states)


def separate_generators(rank: int) -> None:
    """Give Keras' global generator a separate stream on this rank.

    Code that draws from it without a seed would draw the same numbers on every rank.
    """
    generator = global_seed_generator()
    generator.state.assign(separate_seed(generator.state.numpy(), rank))


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
    names = sorted(_user_name(model, variable) for variable in others)
    raise ModelError(
        f"the training step of model {model.name!r} changes {', '.join(names)}, which Keras does "
        "not track: they would diverge, and be lost in a resumed run. Make variables by "
        "self.add_weight(…, trainable=False), and keep metrics and keras.random.SeedGenerator "
        "objects, for random numbers by keras.random, in attributes of the model or a layer"
    )


def _changed_in(graph: tf.Graph) -> list[tf.Variable]:
    """Return the variables that a traced function changes, also in functions that it calls."""
    read = {id(graph.inputs[n]) for n in read_only_inputs(graph)}
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
    for layer in all_layers(model):
        yield from variables_of(layer._metrics)
        made = [getattr(layer, name, None) for name in ("_loss_tracker", "_compile_metrics")]
        made += getattr(getattr(layer, "_compile_loss", None), "metrics", ())
        yield from variables_of(metric for metric in made if metric is not None)


def _handle(variable: keras.Variable | tf.Variable) -> int:
    """Return an identity shared by all objects that represent one variable."""
    return id(variable.value.handle if isinstance(variable, keras.Variable) else variable.handle)


def _user_name(model: keras.Model, variable: tf.Variable) -> str:
    """Return how the user knows a variable."""
    for layer in all_layers(model):
        for key, value in vars(layer).items():
            held = value.state if isinstance(value, tf.random.Generator) else value
            is_variable = isinstance(held, (tf.Variable, keras.Variable))
            if is_variable and _handle(held) == id(variable.handle):
                return f"attribute {key!r} of {layer.name!r}"
    return f"variable {variable.name.partition(':')[0]!r}"


def describe_model(model: keras.Model) -> dict[str, Json]:
    """Return the model's layers, connections and compile configuration as JSON.

    A layer that cannot tell its settings (no ``get_config``) is recorded by its class only.

    Args:
        model: the built model, before any of its training.
    """
    compiled = getattr(getattr(model, "_compile_config", None), "config", {})
    return {
        "layers": {
            f"layer {index} ({type(layer).__name__})" if index else "the model": _describe_layer(
                layer
            )
            # A custom class around the same layers is the same model to its weights.
            for index, layer in enumerate(all_layers(model))
        },
        "optimizers": [_describe_optimizer(optimizer) for optimizer in find_optimizers(model)],
        "loss": _plain(compiled.get("loss", getattr(model, "loss", None))),
        "loss_weights": _plain(compiled.get("loss_weights")),
        "metrics": _plain([compiled.get("metrics"), compiled.get("weighted_metrics")]),
    }


def _describe_layer(layer: keras.layers.Layer) -> dict[str, Json]:
    try:
        config = layer.get_config()
    except Exception:  # a layer's own get_config may fail in any way
        return {}
    graph = _describe_graph(config) if isinstance(layer, keras.Model) else None
    config = {k: v for k, v in config.items() if k not in (*_UNNAMED, *_INITIAL, *_NESTED)}
    config.pop("quantization_config", None)
    if not layer._trainable_variables and not layer._non_trainable_variables:
        config.pop("trainable", None)  # it has nothing to train
    described: Any = _mapping(config)
    return described if graph is None else {**described, "connections": graph}


def _describe_graph(config: Mapping[str, Any]) -> str | None:
    """Return how the operations of a functional model are connected, by their indices."""
    operations = config.get("layers", [])
    if "output_layers" not in config:
        return None
    indices = {operation["name"]: index for index, operation in enumerate(operations)}
    nodes = []
    for operation in operations:
        settings = operation["config"]
        # Settings of layers stand in their own entries; operations (keras.ops) have none.
        arguments = {} if "trainable" in settings else _plain({**settings, "name": None})
        nodes.append([operation["class_name"], arguments, operation["inbound_nodes"]])
    whole = [nodes, config["input_layers"], config["output_layers"]]
    return _digest(_plain(_by_index(whole, indices)))


def _by_index(value: object, indices: Mapping[str, int]) -> object:
    """Return ``value`` with [name, node, tensor] as [index, node, tensor], deep inside too."""
    if isinstance(value, (list, tuple)):
        if len(value) == 3 and isinstance(value[0], str) and value[0] in indices:
            return [indices[value[0]], *value[1:]]
        return [_by_index(item, indices) for item in value]
    if isinstance(value, Mapping):
        return {key: _by_index(item, indices) for key, item in value.items()}
    return value


def _describe_optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, Json]:
    try:
        config = {**optimizer.get_config(), "name": None}
    except Exception:  # an optimizer's own get_config may fail in any way
        return {"class": type(optimizer).__name__, "config": None}
    return {"class": type(optimizer).__name__, "config": _plain(config)}


def _plain(value: object) -> Json:
    """Return ``value`` as JSON without automatic names; long values become their digest."""
    if value is None or isinstance(value, (bool, int, str)):
        return _digest(value) if isinstance(value, str) and len(value) > _LONGEST else value
    if isinstance(value, float):
        return float(value) if value == value else "nan"  # NaN would differ from itself
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, (list, tuple)):
        return _short([_plain(item) for item in value])
    if isinstance(value, np.ndarray) or keras.ops.is_tensor(value):
        return _short(np.asarray(value).tolist())
    if hasattr(value, "get_config"):
        try:
            # Some losses and metrics leave the arguments of their function out of their config.
            config = {**getattr(value, "_fn_kwargs", {}), **value.get_config()}
            return _mapping({"class_name": type(value).__name__, "config": config})
        except Exception:  # an object's own get_config may fail in any way
            return type(value).__name__
    return getattr(value, "__name__", type(value).__name__)


def _mapping(value: Mapping[Any, Any]) -> Json:
    kind, config = value.get("class_name"), value.get("config")
    if kind is None or "config" not in value:
        return {
            str(key): _plain(item)
            for key, item in value.items()
            if not str(key).endswith("initializer")
        }
    if kind == LAMBDA:
        return LAMBDA  # its code holds the file and line it was written at
    if kind == "function" or not isinstance(config, Mapping):
        return _plain(config)
    if kind == "DTypePolicy":
        return config.get("name")
    if kind == "__keras_tensor__":
        return config.get("keras_history")
    left_out = (*_UNNAMED, *_NESTED, "seed", "dtype") if "name" in config else ("seed",)
    inner = {key: item for key, item in config.items() if key not in left_out}
    described: Any = _mapping(inner)
    return {"class": kind, **described}


def _short(value: Json) -> Json:
    if isinstance(value, list) and len(json.dumps(value)) > _LONGEST:
        return _digest(value)
    return value


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def compare_models(
    then: Mapping[str, Any], now: Mapping[str, Any], *, in_epoch: bool
) -> ModelChanges:
    """Compare two results of `describe_model`.

    Args:
        then: that of the checkpoint; empty for one that recorded nothing.
        now: that of this call's model.
        in_epoch: whether the checkpoint was taken within an epoch, whose sums are continued.
    """
    if not then:
        return ModelChanges(None, record=dict(now))
    layers = _layer_changes(then.get("layers", {}), now["layers"])
    if layers:
        return ModelChanges(join_changes(layers))
    before, after = then.get("optimizers", []), now["optimizers"]
    kinds = [[entry["class"] for entry in entries] for entries in (before, after)]
    if kinds[0] != kinds[1]:
        return ModelChanges(describe_change("optimizer", ", ".join(kinds[0]), ", ".join(kinds[1])))
    refusal, warnings = diff_training(
        then,
        now,
        summed=("loss", "loss_weights", "metrics"),
        warned=("loss", "loss_weights"),
        in_epoch=in_epoch,
        prefix="compile's ",
    )
    if refusal is not None:
        return ModelChanges(refusal)
    ignored, changed, optimizers = _optimizer_changes(before, after)
    return ModelChanges(None, (*warnings, *ignored), changed, {**now, "optimizers": optimizers})


def _layer_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    lost, new = ([n for n in a if n not in b] for a, b in ((then, now), (now, then)))
    if lost or new:
        had, has = (
            names[0] if names else f"no more than {len(layers) - 1} layers"
            for names, layers in ((lost, then), (new, now))
        )
        return [f"it had {had}, this one has {has}"]
    return [describe_change(path, *pair) for path, *pair in diff_values(then, now)]


def _optimizer_changes(
    then: Sequence[Any], now: Sequence[Any]
) -> tuple[tuple[str, ...], tuple[str, ...], list[Any]]:
    """Return warnings of overridden settings, all changes, and the new record."""
    ignored: list[str] = []
    changed: list[str] = []
    records = []
    for before, after in zip(then, now, strict=True):
        old, new = before.get("config"), after.get("config")
        records.append(after)
        if old is None or new is None:
            continue
        messages, every, config = diff_optimizer(
            f"optimizer {after['class']}", old, new, _is_initial_value
        )
        ignored += [
            f"{text}. Set another by a callback, or begin a new run with initial_weights"
            for text in messages
        ]
        changed += every
        records[-1] = {**after, "config": config}
    return tuple(ignored), tuple(changed), records


def _is_initial_value(path: str, one: object, other: object) -> bool:
    """Return whether a setting is only what a variable, which a checkpoint holds, begins with."""
    name = path.rpartition(".")[2]
    if "learning_rate." in path or not all(isinstance(v, (int, float)) for v in (one, other)):
        return False  # a schedule recomputes its rates
    return name == "learning_rate" or name.startswith("initial_")
