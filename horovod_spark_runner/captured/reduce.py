"""How Keras objects with code or settings of the user's are pickled."""

from __future__ import annotations

import copyreg
import inspect
import json
import pickle
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .compiled import COMPILED, Compiled, compiled_of, uncompiled
from .holders import Holders
from .kept import Kept, kept_of
from .parts import by_name, is_custom, layers_of, parts_of
from .told import check_custom, check_parts

# Keras looks here first for functions, by their bare names.
_BUILT_IN = ("activations", "constraints", "initializers", "losses", "metrics", "regularizers")
# Names that Keras gives to layers: the class, and a number from the second one on.
_COUNTED = re.compile(r"(?P<class>.*?)(_(?P<number>[0-9]{1,5}))?")


@dataclass(frozen=True)
class _State:
    """What a copy is given once it is made.

    Attributes:
        known: the classes and functions it may look up, by the keys that Keras uses.
        kept: what its configuration may not tell.
        compiled: what it is compiled with; ``None`` where Keras does that.
    """

    known: Mapping[str, Any]
    kept: Kept
    compiled: Compiled | None


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
        return copyreg.__newobj__, (cls,), _loss_state(value)  # type: ignore[attr-defined]
    if isinstance(value, keras.optimizers.Optimizer) and value.built:
        raise pickle.PicklingError(
            f"{cls.__name__} was built for the weights of a model already, so that a copy would "
            "begin anew; capture that model, and use its optimizer, or make a new one"
        )
    return _reduce_saveable(value, keras)


def _reduce_saveable(value: Any, keras: Any) -> Any:
    compiled = compiled_of(value, keras)
    parts = list(parts_of(value, () if compiled is None else COMPILED))
    optimizer = None if compiled is None else value.optimizer
    optimizers = [] if optimizer is None else list(parts_of(optimizer))
    # The functions that it is compiled with may hold the model: these follow, once it is made.
    make, arguments = (value if compiled is None else uncompiled(value)).__reduce__()
    names = [] if compiled is None else list(compiled.names())
    known = _known([*parts, *optimizers], _configuration(arguments[0]) + json.dumps(names), keras)
    with keras.saving.custom_object_scope(known):
        check_parts(value, parts, keras)
        # Of Keras' own, what configurations lack goes along.
        check_custom(optimizers, keras)
    if isinstance(value, (keras.Layer, keras.metrics.Metric)):
        state = _State(known, kept_of(value, keras), compiled)
        return _make_knowing, (known, make, arguments), state, None, None, _restore
    return (_make_knowing, (known, make, arguments)) if known else NotImplemented


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


def _known(parts: Sequence[Any], text: str, keras: Any) -> dict[str, Any]:
    """Return the classes and functions that a copy looks up, by the keys that Keras uses.

    Args:
        parts: what the object is made of.
        text: its configuration, and what else is looked up, as JSON.
        keras: the module.
    """
    known = {key: _only(key, found, keras) for key, found in _custom_objects(parts, keras).items()}
    # A configuration may also name what is registered and not yet made.
    for key, found in keras.saving.get_custom_objects().items():
        if f'"{key}"' in text:
            known.setdefault(key, found)
    return known


def _custom_objects(parts: Sequence[Any], keras: Any) -> dict[str, list[Any]]:
    """Return what Keras may look up, of the user's or a third party's, by the keys it uses."""
    # Of these alone, Keras pickles the code.
    called = [one.function for one in parts if isinstance(one, keras.layers.Lambda)]
    coded = [one for one in called if getattr(one, "__name__", "") == "<lambda>"]
    custom: dict[str, list[Any]] = {}
    for name, found in by_name(parts).items():
        for thing in found:
            if not is_custom(thing) or any(thing is one for one in coded):
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


def _loss_state(loss: Any) -> Any:
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


def _make_knowing(
    known: Mapping[str, Any], make: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    import keras

    with keras.saving.custom_object_scope(dict(known)):
        copy = make(*arguments)
    _count_names(copy)
    return copy


def _restore(copy: Any, state: _State) -> None:
    import keras

    with keras.saving.custom_object_scope(dict(state.known)):
        state.kept.restore(copy)
        if state.compiled is not None:
            state.compiled.compile(copy, keras)


def _count_names(copy: Any) -> None:
    """Let Keras name new layers as if it had named those of a copy here."""
    # There is no public way to look at them without counting on.
    from keras.src.backend.common.global_state import get_global_attribute

    counts = get_global_attribute("object_name_uids", defaultdict(int), set_to_default=True)
    for layer in layers_of(copy):
        told = _COUNTED.fullmatch(layer.name)
        if told and told["class"].replace("_", "") == type(layer).__name__.lower():
            counts[told["class"]] = max(counts[told["class"]], int(told["number"] or 0) + 1)
