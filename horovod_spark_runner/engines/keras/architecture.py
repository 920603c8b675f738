"""Describe a model for checkpoints: layers, connections, `compile`.

All of it is JSON without automatic names ("dense_3"), which differ from one call of a function to
the next. `horovod_spark_runner.checkpoint.config_diff` compares two of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from ...training.progress import Json
from .optimizers import find_optimizers
from .saved import LAMBDA

# Longer values (a vocabulary, an array) are recorded by their digest.
_LONGEST = 300
_UNNAMED = ("name", "module", "registered_name", "build_config", "shared_object_id")
# What a resumed run takes from the checkpoint whatever the model says: weights and seeds.
_INITIAL = ("seed", "weights")
_NESTED = ("layers", "inbound_nodes", "input_layers", "output_layers", "build_input_shape")


def describe_model(model: keras.Model) -> dict[str, Json]:
    """Return the model's layers, connections and compile configuration as JSON.

    A layer that cannot tell its settings (no ``get_config``) is recorded by its class only.

    Args:
        model: the built model, before any of its training.
    """
    compiled = getattr(getattr(model, "_compile_config", None), "config", {})
    return {
        "layers": {
            f"layer {index} ({type(layer).__name__})" if index else "the model": _layer(layer)
            # Keras has no public way to reach layers inside layers. A class of one's own around
            # the same layers is the same model to its weights.
            for index, layer in enumerate(model._flatten_layers(include_self=True, recursive=True))
        },
        "optimizers": [_optimizer(optimizer) for optimizer in find_optimizers(model)],
        "loss": _plain(compiled.get("loss", getattr(model, "loss", None))),
        "loss_weights": _plain(compiled.get("loss_weights")),
        "metrics": _plain([compiled.get("metrics"), compiled.get("weighted_metrics")]),
    }


def _layer(layer: keras.layers.Layer) -> dict[str, Json]:
    try:
        config = layer.get_config()
    except Exception:  # a layer's own get_config may fail in any way
        return {}
    graph = _graph(config) if isinstance(layer, keras.Model) else None
    config = {k: v for k, v in config.items() if k not in (*_UNNAMED, *_INITIAL, *_NESTED)}
    config.pop("quantization_config", None)
    if not layer._trainable_variables and not layer._non_trainable_variables:
        config.pop("trainable", None)  # it has nothing to train
    described: Any = _mapping(config)
    return described if graph is None else {**described, "connections": graph}


def _graph(config: Mapping[str, Any]) -> str | None:
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


def _optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, Json]:
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
