"""What a Keras object is made of, and the code among it that is not Keras' own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import cloudpickle

# Modules whose objects need no pickling: the workers have them.
_KNOWN = ("keras", "tensorflow", "numpy", "builtins")


def living_objects(value: Any) -> dict[str, list[Any]]:
    """Return classes and functions by name: of a model's layers, or an object, and what they hold.

    Args:
        value: a Keras object.

    Returns:
        Those of each name; several where a name says too little.
    """
    return by_name(parts_of(value))


def by_name(parts: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the functions among ``parts`` and the classes of the others, as `living_objects`."""
    found: dict[str, list[Any]] = {}
    for part in parts:
        thing = part if inspect.isfunction(part) else type(part)
        if not inspect.isfunction(part) and not is_custom(thing):
            continue
        named = found.setdefault(thing.__name__, [])
        if all(other is not thing for other in named):
            named.append(thing)
    return found


def layers_of(value: Any) -> list[Any]:
    """Return a layer and all that it is made of, outer ones first; of another object, itself."""
    flatten = getattr(value, "_flatten_layers", None)
    return [value] if flatten is None else list(flatten(include_self=True, recursive=True))


def parts_of(value: Any, without: Collection[str] = ()) -> Iterator[Any]:
    """Yield the layers of a model, or an object, and the objects and functions that they hold.

    Args:
        value: a Keras object.
        without: names of its attributes that do not count, nor the same objects among others.
    """
    for part in layers_of(value):
        yield part
        own = vars(part)
        names = without if part is value else ()
        # By name only what is no function, which a layer may hold as well.
        left_out = [own[name] for name in names if hasattr(own.get(name), "get_config")]
        for name, inner in list(own.items()):
            # Keras wraps methods, such as build, and puts them on the object.
            wrapped = inspect.isfunction(inner) and hasattr(type(part), name)
            if name not in names and not wrapped:
                yield from _held(inner, 3, left_out)


def _held(value: Any, depth: int, left_out: Collection[Any] = ()) -> Iterator[Any]:
    if any(value is one for one in left_out):
        return
    if inspect.isfunction(value):
        yield value
    elif isinstance(value, Mapping):
        yield from _held(list(value.values()), depth, left_out)
    elif isinstance(value, (list, tuple)):
        for inner in value if depth else ():
            yield from _held(inner, depth - 1, left_out)
    elif hasattr(value, "get_config") and not isinstance(value, type):
        if hasattr(value, "_flatten_layers"):  # a layer, which is looked at by itself
            return
        yield value
        for inner in list(getattr(value, "__dict__", {}).values()) if depth else ():
            yield from _held(inner, depth - 1)


def is_custom(thing: Any) -> bool:
    """Tell whether a class or function is not Keras' own."""
    return str(thing.__module__).partition(".")[0] not in _KNOWN


def is_by_value(thing: Any) -> bool:
    """Tell whether a class or function is pickled by value, as one that others cannot import."""
    name = str(thing.__module__)
    if name == "__main__" or name not in sys.modules:
        return True
    for module in cloudpickle.list_registry_pickle_by_value():
        if name == module or name.startswith(f"{module}."):
            return True
    found: Any = sys.modules[name]
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is not thing
