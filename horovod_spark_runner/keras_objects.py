"""Keras objects with code of the user's, as they are pickled. Keras itself is not imported here.

Keras pickles its objects as configurations and names of classes, which are known where those are
imported. Workers import no module of the user's, so classes and functions go along. A loss is
pickled as it is: the configuration of one that takes arguments of its own need not hold them, and
those of some of Keras' own do not. What a copy would lack otherwise is refused.
"""

from __future__ import annotations

import copyreg
import inspect
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

# Modules whose objects need no pickling: the workers have them.
_KNOWN = ("keras", "tensorflow", "numpy", "builtins")
# Keras looks here first for functions, by their bare names.
_BUILT_IN = ("activations", "constraints", "initializers", "losses", "metrics", "regularizers")
# Arguments of its layers that Keras restores otherwise, or that no longer matter once it is made.
_RESTORED = ("autocast", "batch_input_shape", "batch_size", "input_dim", "input_shape", "weights")


def living_objects(value: Any) -> dict[str, list[Any]]:
    """Return classes and functions by name: of a model's layers, or an object, and what they hold.

    Args:
        value: a Keras object.

    Returns:
        Those of each name; several where a name says too little.
    """
    return _by_name(_parts(value))


def _by_name(parts: Iterable[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for part in parts:
        thing = part if inspect.isfunction(part) else type(part)
        if not inspect.isfunction(part) and not _is_custom(thing):
            continue
        named = found.setdefault(thing.__name__, [])
        if all(other is not thing for other in named):
            named.append(thing)
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


def reduce_keras_object(value: Any, holders: Holders) -> Any:
    """Return how a Keras object is pickled, or ``NotImplemented`` where its own way will do.

    Args:
        value: any object.
        holders: of what was pickled before, and will be beside it.

    Raises:
        pickle.PicklingError: a configuration does not tell all that an object was made with, or
            which of several functions or classes of one name; or it is an optimizer that was built
            already, or shares a part with what was pickled before.
    """
    keras: Any = sys.modules.get("keras")
    # There is no layer while Keras is being imported.
    bases = getattr(getattr(keras, "Layer", None), "__mro__", ())
    if bases and isinstance(value, keras.callbacks.Callback):
        return _reduce_callback(value)
    saveable: Any = next((base for base in bases if base.__name__ == "KerasSaveable"), None)
    if saveable is None or not isinstance(value, saveable):
        return NotImplemented
    cls: Any = type(value)
    if cls.__reduce__ is not saveable.__reduce__ or cls.__reduce_ex__ is not saveable.__reduce_ex__:
        return NotImplemented  # the user's own way
    if isinstance(value, (keras.Layer, keras.optimizers.Optimizer)):
        holders.note(value)
    if isinstance(value, keras.losses.Loss):
        return copyreg.__newobj__, (cls,), _state(value)  # type: ignore[attr-defined]
    if isinstance(value, keras.optimizers.Optimizer) and value.built:
        raise pickle.PicklingError(
            f"{cls.__name__} was built for the weights of a model already, so that a copy would "
            "begin anew; capture that model, and use its optimizer, or make a new one"
        )
    parts = list(_parts(value))
    for part in parts:
        if inspect.isfunction(part):
            continue
        if is_by_value(type(part)):
            _check_told(part)
        else:
            _check_kept(part, keras)
    custom = _custom_objects(parts, keras)
    if not custom:
        return NotImplemented
    given = {key: _only(key, found, keras) for key, found in custom.items()}
    make, arguments = value.__reduce__()
    # A configuration may also name what is registered and not yet made.
    text = _configuration(arguments[0])
    for key, found in keras.saving.get_custom_objects().items():
        if f'"{key}"' in text:
            given.setdefault(key, found)
    return _make_knowing, (given, make, arguments)


def _reduce_callback(callback: Any) -> Any:
    """Return how a callback is pickled: without the model of an earlier ``fit``, which it keeps."""
    cls: Any = type(callback)
    if cls.__reduce_ex__ is not object.__reduce_ex__ or vars(callback).get("_model") is None:
        return NotImplemented
    reduced = callback.__reduce_ex__(4)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return NotImplemented
    make, arguments, state = reduced[:3]
    return make, arguments, {**state, "_model": None}, *reduced[3:]


def _custom_objects(parts: Sequence[Any], keras: Any) -> dict[str, list[Any]]:
    """Return what Keras may look up, of the user's or a third party's, by the keys it uses."""
    # Of these alone, Keras pickles the code.
    called = [one.function for one in parts if isinstance(one, keras.layers.Lambda)]
    coded = [one for one in called if getattr(one, "__name__", "") == "<lambda>"]
    custom: dict[str, list[Any]] = {}
    for name, found in _by_name(parts).items():
        for thing in found:
            if not _is_custom(thing) or any(thing is one for one in coded):
                continue
            for key in {name, keras.saving.get_registered_name(thing)}:
                custom.setdefault(key, []).append(thing)
    return custom


def _only(key: str, found: list[Any], keras: Any) -> Any:
    what = "classes" if isinstance(found[0], type) else "functions"
    if len(found) > 1:
        raise pickle.PicklingError(
            f"it holds several {what} called {key!r}, and Keras tells them apart by their names "
            "only, so that one would come out as the other"
        )
    others = (getattr(getattr(keras, one, None), key, found[0]) for one in _BUILT_IN)
    if inspect.isfunction(found[0]) and any(other is not found[0] for other in others):
        raise pickle.PicklingError(
            f"it holds a function called {key!r}, as is one of Keras', which would come out in its "
            "place; call it otherwise"
        )
    return found[0]


def _state(loss: Any) -> Any:
    own = getattr(type(loss), "__getstate__", None)
    if own is None or own is getattr(object, "__getstate__", None):
        return vars(loss)
    return loss.__getstate__()


def _configuration(archive: Any) -> str:
    try:
        with zipfile.ZipFile(archive) as stored:
            return stored.read("config.json").decode()
    finally:
        archive.seek(0)


def _check_told(value: Any) -> None:
    """Check that the configuration of an object of a user's class is that of its ``__init__``."""
    cls = type(value)
    if _is_custom(cls.from_config):  # which knows better
        return
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    kinds = [one.kind for one in parameters]
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    config = value.get_config()
    missing = sorted(
        one.name
        for one in named
        if one.name not in (*config, *_RESTORED) and not _has_default(value, one)
    )
    if missing:
        raise pickle.PicklingError(
            f"get_config() of {cls.__name__} leaves out {', '.join(missing)}, which its __init__ "
            "takes, so a copy would be another one"
        )
    unknown = sorted(set(config) - {one.name for one in named})
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise pickle.PicklingError(
            f"get_config() of {cls.__name__} holds {', '.join(unknown)}, which its __init__ does "
            "not take, so that no copy can be made; let it take **kwargs and pass them on"
        )


def _check_kept(value: Any, keras: Any) -> None:
    """Check that a copy of one of Keras' own objects would be the same.

    Its configurations leave out arguments, such as the ``delta`` of a ``Huber`` (3.15), and what
    was set afterwards.
    """
    cls, lost = type(value), ""
    if isinstance(value, keras.optimizers.Optimizer):
        if getattr(value, "_exclude_from_weight_decay", None) or getattr(
            value, "_exclude_from_weight_decay_pattern", None
        ):
            lost = "what exclude_from_weight_decay was told"
        elif value.built and isinstance(value, keras.optimizers.LossScaleOptimizer):
            lost = "the values of its variables"  # of which Keras restores some
    elif hasattr(value, "_fn_kwargs"):  # a loss or metric around a function
        left_out = _left_out(value)
        if getattr(value, "dtype", None) == keras.config.floatx():  # what is taken for none
            left_out = [name for name in left_out if name != "dtype"]
        lost = ", ".join(left_out)
    if lost:
        raise pickle.PicklingError(
            f"a copy of {cls.__name__} would lack {lost}, as Keras does not store that; a model "
            "that holds it has to be compiled in model_fn, and not before"
        )


def _left_out(value: Any) -> list[str]:
    """Return the arguments of an object of Keras' that a copy would have at their defaults."""
    try:
        config = value.get_config()
    except NotImplementedError:  # of what Keras makes for itself, and does not store
        return []
    given = getattr(value, "_fn_kwargs", {})
    return [
        one.name
        for one in inspect.signature(type(value).__init__).parameters.values()
        if one.name not in config
        and one.default is not one.empty
        and not _same(given.get(one.name, getattr(value, one.name, one.default)), one.default)
    ]


def _has_default(value: Any, one: inspect.Parameter) -> bool:
    """Tell whether an argument is known to be the one that is taken where none is given."""
    return _same(getattr(value, one.name, getattr(value, f"_{one.name}", one.empty)), one.default)


def _same(found: Any, default: Any) -> bool:
    try:
        return found is default or bool(found == default)
    except Exception:  # an array of several, say
        return False


def _make_knowing(
    given: dict[str, Any], make: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    import keras

    with keras.saving.custom_object_scope(given):
        return make(*arguments)


class Holders:
    """Which object holds each layer and optimizer of those that are pickled.

    Each model, layer or optimizer is pickled by itself, so what two of them hold, or one holds that
    is pickled beside it, would come out as two.
    """

    def __init__(self) -> None:
        self._of: dict[int, Any] = {}

    def note(self, value: Any) -> None:
        """Take note of a Keras object.

        Raises:
            pickle.PicklingError: what it holds is, or is held by, another one.
        """
        for part in _kept_by(value):
            holder = self._of.setdefault(id(part), value)
            if holder is not value:
                ways = " and ".join(_way(part, one) for one in (holder, value))
                raise pickle.PicklingError(
                    f"{_called(part)} is captured twice, {ways}, and would come out as two; "
                    "capture one model that holds all, and take the others from it where they are "
                    "used"
                )


def _kept_by(value: Any) -> Iterator[Any]:
    """Yield an object, and the layers with variables and the optimizer that it holds."""
    yield value
    flatten = getattr(value, "_flatten_layers", None)
    for part in [] if flatten is None else flatten(include_self=False, recursive=True):
        if part.variables:
            yield part
    # Of mixed precision, one in another.
    for name in ("optimizer", "inner_optimizer"):
        value = getattr(value, name, None)
        if not hasattr(value, "apply_gradients"):
            return
        yield value


def _way(part: Any, holder: Any) -> str:
    return "by itself" if part is holder else f"in {_called(holder)}"


def _called(value: Any) -> str:
    return f"{type(value).__name__} {getattr(value, 'name', '')!r}"
