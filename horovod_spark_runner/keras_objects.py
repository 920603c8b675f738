"""Keras objects with code of the user's, as they are pickled. Keras itself is not imported here.

Keras pickles its objects as configurations and names of classes, which are known where those are
imported. Workers import no module of the user's, so classes and functions go along. A loss is
pickled as it is: the configuration of one that takes arguments of its own need not hold them.
"""

from __future__ import annotations

import copyreg
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle

# Modules whose objects need no pickling: the workers have them.
_KNOWN = ("keras", "tensorflow", "numpy", "builtins")


def living_objects(value: Any) -> dict[str, Any]:
    """Return classes and functions by name: of a model's layers, or an object, and what they hold.

    Args:
        value: a Keras object.
    """
    found: dict[str, Any] = {}
    for part in _parts(value):
        if inspect.isfunction(part):
            found.setdefault(part.__name__, part)
        elif _is_custom(type(part)):
            found.setdefault(type(part).__name__, type(part))
    return found


def _parts(value: Any) -> Iterator[Any]:
    """Yield the layers of a model, or an object, and the objects and functions that they hold."""
    flatten = getattr(value, "_flatten_layers", None)
    for part in [value] if flatten is None else flatten(include_self=True, recursive=True):
        yield part
        for inner in list(vars(part).values()):
            yield from _held(inner, depth=3)


def _held(value: Any, depth: int) -> Iterator[Any]:
    if inspect.isfunction(value):
        yield value
    elif isinstance(value, Mapping):
        yield from _held(list(value.values()), depth)
    elif isinstance(value, (list, tuple)):
        for inner in value if depth else ():
            yield from _held(inner, depth - 1)
    elif hasattr(value, "get_config") and not isinstance(value, type):
        if hasattr(value, "_flatten_layers"):  # a layer, which is looked at by itself
            return
        yield value
        for inner in list(getattr(value, "__dict__", {}).values()) if depth else ():
            yield from _held(inner, depth - 1)


def _is_custom(thing: Any) -> bool:
    return str(thing.__module__).partition(".")[0] not in _KNOWN


def is_by_value(thing: Any) -> bool:
    """Tell whether a class or function is pickled by value, as one that others cannot import."""
    module = thing.__module__
    if module == "__main__" or module not in sys.modules or "<locals>" in thing.__qualname__:
        return True
    return module in cloudpickle.list_registry_pickle_by_value()


def reduce_keras_object(value: Any) -> Any:
    """Return how a Keras object is pickled, or ``NotImplemented`` where Keras' own way will do.

    Raises:
        pickle.PicklingError: a configuration does not tell all that an object was made with.
    """
    keras: Any = sys.modules.get("keras")
    # There is no layer while Keras is being imported.
    bases = getattr(getattr(keras, "Layer", None), "__mro__", ())
    saveable = next((base for base in bases if base.__name__ == "KerasSaveable"), None)
    if saveable is None or not isinstance(value, saveable):
        return NotImplemented
    custom = {name: found for name, found in living_objects(value).items() if _is_custom(found)}
    if not custom:
        return NotImplemented
    if isinstance(value, keras.losses.Loss):
        return copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]
    for part in _parts(value):
        if not inspect.isfunction(part) and is_by_value(type(part)):
            _check_told(part)
    name_of = keras.saving.get_registered_name
    named = {key: found for name, found in custom.items() for key in (name, name_of(found))}
    # A configuration may also name what is registered and not yet made.
    given = {**keras.saving.get_custom_objects(), **named}
    make, arguments = value.__reduce__()
    return _make_knowing, (given, make, arguments)


def _check_told(value: Any) -> None:
    """Check that the configuration of an object of a user's class holds what that takes."""
    cls = type(value)
    if _is_custom(cls.from_config):  # which knows better
        return
    taken = inspect.signature(cls.__init__).parameters
    named = (p.name for p in taken.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    missing = sorted(set(named) - {"self"} - set(value.get_config()))
    if missing:
        raise pickle.PicklingError(
            f"get_config() of {cls.__name__} leaves out {', '.join(missing)}, which its __init__ "
            "takes, so a copy would be another one"
        )


def _make_knowing(
    given: Mapping[str, Any], make: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    import keras

    with keras.saving.custom_object_scope(dict(given)):
        return make(*arguments)
