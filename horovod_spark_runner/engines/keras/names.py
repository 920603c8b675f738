"""Names of a Keras model's inputs and outputs, before it is bound to columns."""

from __future__ import annotations

import keras

from ...training.spec import ModelNames, ModelSource
from .binding import (
    holds_dictionary,
    input_structure,
    needs_labels,
    output_layers,
    path_names,
)
from .model import Nest, build_model, fresh_keras_state


def names_of(source: ModelSource) -> ModelNames:
    """Return the names of the model that ``source`` builds; see `Engine.names`."""
    with fresh_keras_state():
        model = build_model(source)
        structure = input_structure(model)
        if structure is None:
            return ModelNames(needs_labels=needs_labels(model))
        layers = [tensor.name for tensor in keras.tree.flatten(structure)]
        outputs = model.outputs[0] if isinstance(model, keras.Sequential) else model.output
        output_names = _name_choices(output_layers(model), outputs)
        return ModelNames(_name_choices(layers, structure), output_names, needs_labels(model))


def _name_choices(layers: list[str], structure: Nest) -> tuple[tuple[str, ...], ...]:
    """Return the names that call each tensor one thing only; a position in a list is no name."""
    choices = [layers, path_names(structure)] if holds_dictionary(structure) else [layers]
    count = len(keras.tree.flatten(structure))
    whole = [tuple(names) for names in choices if len(names) == count == len(set(names))]
    return tuple(dict.fromkeys(whole))
