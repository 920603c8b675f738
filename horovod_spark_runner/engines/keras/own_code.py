"""Functions and classes of a user's own within a Keras model."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import keras

# Objects of these packages are not searched.
_LEAVES = sys.stdlib_module_names | {"numpy", "tensorflow"}
_OF_KERAS = {"keras", "tensorflow", "numpy", "builtins"}


def code_of(model: keras.Model) -> dict[str, list[Any]]:
    """Return the functions and classes in a model, without Keras' own, by name."""
    code: dict[str, list[Any]] = {}
    for part in _walk(model):
        thing = part if inspect.isfunction(part) or isinstance(part, type) else type(part)
        if thing is part or hasattr(part, "get_config"):
            named = code.setdefault(thing.__name__, [])
            excluded = isinstance(thing, type) and _package(thing) in _OF_KERAS
            if not excluded and all(other is not thing for other in named):
                named.append(thing)
    return {name: things for name, things in code.items() if things}


def _walk(value: Any) -> Iterator[Any]:
    """Yield a value and all its parts, each once."""
    stack, seen = [value], {}
    while stack:
        part = stack.pop()
        if id(part) not in seen:
            seen[id(part)] = part
            yield part
            stack += _parts(part)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, (keras.Variable, keras.KerasTensor, set, type, types.ModuleType)):
        return ()
    if inspect.isroutine(value) or _package(type(value)) in _LEAVES:
        return ()
    return getattr(value, "__dict__", {}).values()


def _package(thing: Any) -> str:
    return str(thing.__module__).partition(".")[0]
