"""The user's classes and functions that a trained model's archive names, found in the model."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence

import keras

from ...captured import code_of
from .saved import LAMBDA, CustomPart


def find_objects(
    model: keras.Model, parts: Sequence[CustomPart], custom_objects: Mapping[str, object]
) -> dict[str, object]:
    """Return those of ``parts`` that can be found, by their keys.

    Args:
        model: the model that was archived.
        parts: what its archive names.
        custom_objects: objects by name that the model itself was made with.
    """
    registered = keras.saving.get_custom_objects()
    # Of several that have one name, none is known to be the one that is meant.
    living = {name: ones[0] for name, ones in code_of(model).items() if len(ones) == 1}
    objects: dict[str, object] = {}
    for part in parts:
        if part.name == LAMBDA:
            candidate = _argument(model, part)
        else:
            sources = (custom_objects, registered, living)
            names = (part.key, part.name)
            candidate = next((p[n] for p in sources for n in names if n in p), None)
        if candidate is not None:
            objects[part.key] = candidate
    return objects


@contextlib.contextmanager
def only_keras() -> Iterator[None]:
    """Limit Keras' registry to its own classes and functions."""
    registered = keras.saving.get_custom_objects()
    before = dict(registered)
    registered.clear()
    try:
        yield
    finally:
        registered.clear()
        registered.update(before)


def name_lambdas(model: keras.Model) -> bool:
    """Name the lambdas among layers' arguments, for Keras to write; return whether there are any.

    Keras writes a lambda as its code, which fails where it refers to a module or has no source.
    """
    named = False
    for layer in _layers(model):
        for field, value in list(vars(layer).items()):
            if inspect.isfunction(value) and value.__name__ == "<lambda>":
                value.__name__ = f"lambda_{field.strip('_')}_of_{layer.name}"
                named = True
    return named


def _argument(model: keras.Model, part: CustomPart) -> object:
    """Return the lambda that a layer was given; nothing if several layers have that name."""
    layers = [layer for layer in _layers(model) if layer.name == part.layer]
    if len(layers) != 1:
        return None
    attributes = (part.field, f"_{part.field}")
    return next((f for a in attributes if callable(f := getattr(layers[0], a, None))), None)


def _layers(model: keras.Model) -> list[keras.Layer]:
    return list(model._flatten_layers(include_self=True, recursive=True))
