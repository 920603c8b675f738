"""Pickle Keras objects that functions capture: an equal copy, or a refusal.

Keras saves an object as its archive, of configuration and weights. A copy is built of it at once,
and compared with the original attribute by attribute: settings, functions, values of all variables,
frozen layers, optimizers. Attributes that Keras did not save are set on the copy, here and at the
destination. A copy that still differs is refused.

The comparison does not run the model. It covers attributes, but neither state elsewhere (in slots,
C++ or the globals of installed packages) nor attributes in `_PER_PROCESS`, which Keras creates
anew.
"""

from __future__ import annotations

import contextlib
import copyreg
import gc
import inspect
import random
import re
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .errors import InvalidInputError

Path = tuple[Any, ...]

# Attributes of Keras' objects for tracking and tracing.
_PER_PROCESS = re.compile(
    r"_self_.*|_tracke[dr]|_call(ed|_signature)|_(in|out)bound_nodes|_losses(_override)?|_loss_ids"
    r"|_(parent_)?path|_input_spec|_saved_model_(inputs|arg)_spec|_auto_config|_build_shapes_dict"
    r"|_exclude_from_weight_decay_cache|_trainable_variables_indices"
)
# Further ones of its models. A graph is compared as part of the configuration.
_OF_MODELS = re.compile(
    r"_nodes|_(nodes|operations)_by_depth|_operations|_(in|out)puts(_struct)?|_functional"
    r"|_compiled_trainable_state|_distribut(e|ion)_strategy|_eval_epoch_iterator|stop_training"
    r"|_compile_(loss|metrics)|(train|test|predict)_function|_loss_tracker"
)
# Set by compile().
_COMPILED = ("_compile_config", "_compile_loss", "_compile_metrics", "_loss_tracker", "loss")
# Names of variables in this process, useless in another one.
_EXCLUDED = "_exclude_from_weight_decay"
# Objects of these packages are compared by value. The workers have their code.
_LEAVES = sys.stdlib_module_names | {"numpy", "tensorflow"}
_NUMBER = re.compile("[0-9]{1,5}")
_ADVICE = "build it inside model_fn, or inside the function that runs on the ranks"


class _Absent:
    """Placeholder for an attribute that the original lacks."""


class Holders:
    """Captured objects by the layers, optimizers and variables that they hold.

    Each object is pickled separately, so a shared part would be duplicated.
    """

    def __init__(self) -> None:
        self._of: dict[int, Any] = {}

    def note(self, value: Any) -> None:
        """Note the parts of a Keras object.

        Raises:
            InvalidInputError: another object holds one of them.
        """
        layers = [one for one in _layers_of(value)[1:] if one.variables]
        optimizer = getattr(value, "optimizer", None)
        optimizers = [optimizer, getattr(optimizer, "inner_optimizer", None)]
        for part in [value, *layers, *optimizers, *getattr(value, "variables", ())]:
            holder = self._of.setdefault(id(part), value)
            if holder is not value and part is not None:
                raise InvalidInputError(
                    f"{_called(part)} is captured twice, in {_called(holder)} and in "
                    f"{_called(value)}, and would be duplicated; capture one object that holds "
                    f"all, and take the others from it, or {_ADVICE}"
                )


@dataclass(frozen=True)
class _State:
    """State to set on a copy after it is built from Keras' archive.

    Attributes:
        custom_objects: classes and functions by the names that Keras looks up.
        compiled: arguments of ``compile`` but the optimizer; ``None`` if Keras compiles.
        optimizer: its configuration.
        built_for: indices of the variables it was built for; ``None`` if it was not.
        patches: values that differ, by their paths from the copy.
    """

    custom_objects: Mapping[str, Any]
    compiled: Mapping[str, Any] | None = None
    optimizer: Mapping[str, Any] | None = None
    built_for: Sequence[int] | None = None
    patches: Sequence[tuple[Path, Any]] = ()


def reduce_keras_object(value: Any, holders: Holders) -> Any:
    """Return the reduction of a Keras object, or ``NotImplemented`` if its own suffices.

    Args:
        value: any object.
        holders: holders of the objects that are pickled with it.

    Raises:
        InvalidInputError: no equal copy can be made, or it shares a part with another object.
    """
    keras: Any = sys.modules.get("keras")
    # Layer is missing while Keras is being imported.
    bases = getattr(getattr(keras, "Layer", None), "__mro__", ())
    saveable: Any = next((base for base in bases if base.__name__ == "KerasSaveable"), None)
    if saveable is None:
        return NotImplemented
    cls: Any = type(value)
    new = copyreg.__newobj__  # type: ignore[attr-defined]
    if isinstance(value, keras.callbacks.Callback) and vars(value).get("_model") is not None:
        reduced = new, (cls,), {**vars(value), "_model": None}  # of an earlier fit
        return reduced if cls.__reduce_ex__ is object.__reduce_ex__ else NotImplemented
    if cls.__module__ == "keras.src.utils.tracking" and issubclass(cls, (list, dict, set)):
        plain = cls.__mro__[1]  # it would bring its layer along
        return plain, (plain(value),)
    if isinstance(value, keras.Variable):
        holders.note(value)
    has_reduce = any(
        getattr(cls, name) is not getattr(saveable, name, None)
        for name in ("__reduce__", "__reduce_ex__")
    )
    if has_reduce or not isinstance(value, saveable):
        return NotImplemented
    if isinstance(value, (keras.Layer, keras.optimizers.Optimizer)):
        holders.note(value)
    if isinstance(value, keras.losses.Loss):
        has_state = hasattr(value, "__getstate__")  # every object has it from Python 3.11 on
        return new, (cls,), value.__getstate__() if has_state else vars(value)
    return _reduce_saveable(value, keras)


def _reduce_saveable(value: Any, keras: Any) -> Any:
    refusal = f"no equal copy of {_called(value)} can be made"
    compiled = _compile_arguments(value, keras)
    plain = value if compiled is None else _uncompiled(value)
    optimizer = None if compiled is None else value.optimizer
    try:
        with _undisturbed(keras), _named_lambdas((plain, optimizer)):
            make, arguments = plain.__reduce__()
            # Functions that it is compiled with may hold the model: they follow once it is built.
            state = _state(plain, optimizer, compiled, keras)
            copy = _make(state.custom_objects, make, arguments)
            _complete(copy, state)
            patches = _differing(value, copy, compiled)
            left = [path for path, part in patches if _is_fixed(path, part)]
            if not left:
                for path, part in patches:
                    _set(copy, path, part)
                left = [path for path, _ in _differing(value, copy, compiled)] if patches else []
                left += _config_differences(plain, copy if compiled is None else _uncompiled(copy))
    except Exception as error:  # of user classes
        text = f"{refusal} from what Keras saves ({type(error).__name__}: {error}); {_ADVICE}"
        raise InvalidInputError(text) from error
    if left:
        # Public attributes are more informative.
        path = min(left, key=lambda path: str(path[-1]).startswith("_"))
        name = ".".join(map(str, path))
        raise InvalidInputError(f"{refusal}: its {name} would differ; {_ADVICE}")
    del copy
    if isinstance(value, keras.Model):
        gc.collect()  # models have cycles, and may be large
    whole = replace(state, patches=patches)
    return _make, (state.custom_objects, make, arguments), whole, None, None, _complete


@contextlib.contextmanager
def _undisturbed(keras: Any) -> Iterator[None]:
    """Build a copy without side effects on random numbers, names and GPU memory."""
    from keras.src.backend.common import global_state

    names = global_state.get_global_attribute("object_name_uids", defaultdict(int))
    before, names = random.getstate(), names.copy()
    try:
        with warnings.catch_warnings(), keras.device("cpu:0"):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(before)
        global_state.set_global_attribute("object_name_uids", names)


@contextlib.contextmanager
def _named_lambdas(value: Any) -> Iterator[None]:
    """Name lambdas, since Keras loses the globals of unnamed ones."""
    lambdas = [one for one in _walk(value) if getattr(one, "__name__", "") == "<lambda>"]
    for number, function in enumerate(lambdas):
        function.__name__ = f"lambda_{number}"
    try:
        yield
    finally:
        for function in lambdas:
            function.__name__ = "<lambda>"


def _compile_arguments(value: Any, keras: Any) -> Mapping[str, Any] | None:
    """Return a model's arguments of ``compile``; ``None`` if it overrides Keras' compilation."""
    if not isinstance(value, keras.Model) or not value.compiled:
        return None
    methods = ("compile", "compile_from_config", "get_compile_config")
    if any(getattr(type(value), name) is not getattr(keras.Model, name) for name in methods):
        return None
    config = dict(value._compile_config.config)
    del config["optimizer"]
    return config


def _uncompiled(model: Any) -> Any:
    """Return an object with a model's attributes, but for those set by ``compile``."""
    shadow = object.__new__(type(model))
    unset = {name: None for name in (*_COMPILED, "optimizer") if name in vars(model)}
    vars(shadow).update({**vars(model), **unset, "compiled": False})
    return shadow


def _state(plain: Any, optimizer: Any, compiled: Mapping[str, Any] | None, keras: Any) -> _State:
    state = _State(_custom_objects((plain, optimizer), keras), compiled)
    if optimizer is None:
        return state
    state = replace(state, optimizer=keras.optimizers.serialize(optimizer))
    if not optimizer.built:
        return state
    places = {id(one): place for place, one in enumerate(plain.weights)}
    variables = optimizer._trainable_variables
    # A variable of another model is missing here, and detected as a difference.
    built_for = [places.get(id(one), 0) for one in variables]
    return replace(state, built_for=tuple(built_for) if isinstance(variables, tuple) else built_for)


def _make(objects: Mapping[str, Any], make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Build a copy; let Keras name later layers as if it had named the copy's here."""
    import keras
    from keras.src.backend.common.global_state import get_global_attribute

    with keras.saving.custom_object_scope(dict(objects)):
        copy = make(*arguments)
    counts = get_global_attribute("object_name_uids", defaultdict(int), set_to_default=True)
    for layer in _layers_of(copy):
        name, _, number = layer.name.rpartition("_")
        name, number = (name, int(number)) if _NUMBER.fullmatch(number) else (layer.name, 0)
        counts[name] = max(counts[name], number + 1)
    return copy


def _complete(copy: Any, state: _State) -> None:
    import keras

    with keras.saving.custom_object_scope(dict(state.custom_objects)):
        if state.compiled is not None:
            optimizer = None
            if state.optimizer is not None:
                optimizer = keras.optimizers.deserialize(deepcopy(state.optimizer))
            if optimizer is not None and state.built_for is not None:
                weights = copy.weights
                variables = [weights[place] for place in state.built_for]
                keep = tuple if isinstance(state.built_for, tuple) else list
                optimizer.build(keep(variables))
            # An optimizer that scales the loss was created already.
            copy.compile(optimizer, **state.compiled, auto_scale_loss=False)
    for path, value in state.patches:
        _set(copy, path, value)
    for layer in _layers_of(copy):
        for part in _walk(getattr(layer, "_compile_config", None)):
            # Keras resets a model's metrics only after their first call.
            if isinstance(part, keras.metrics.Metric):
                part.reset_state()


def _differing(value: Any, copy: Any, compiled: Any) -> list[tuple[Path, Any]]:
    """Return `_differences`, without the arguments of ``compile``, which are sent unchanged."""
    sent = () if compiled is None else ("_compile_config",)
    return [(path, part) for path, part in _differences(value, copy, {}) if path[0] not in sent]


def _differences(one: Any, two: Any, seen: dict[int, list[Any]], path: Path = ()) -> Iterator[Any]:
    """Yield paths at which a copy differs, and what its original has there.

    Args:
        one: the original, or a part of it.
        two: that of the copy.
        seen: the copies of the original's parts, by their ids.
        path: path to the part.
    """
    if one is two or _is_left_over(one):
        return
    parts = _parts(one)
    if _kind(one) is not _kind(two) or (parts is None and not _is_same(one, two)):
        yield path, one
    if _kind(one) is not _kind(two) or parts is None:
        return
    if not isinstance(one, (list, tuple, dict)):
        copies = seen.setdefault(id(one), [])
        if any(copy is two for copy in copies):
            return
        copies.append(two)
        # Other Keras objects, such as dtype policies, have no state to share.
        if len(copies) > 1 and (_has_variables(one) or not _is_keras_code(type(one))):
            yield path, one
    others = _parts(two) or {}
    if isinstance(one, (list, tuple)) and len(parts) != len(others):
        yield path, one
        return
    for name, part in parts.items():
        inner = _differences(part, others.get(name, _Absent), seen, (*path, name))
        if isinstance(one, tuple) and any(True for _ in inner):
            yield path, one
        yield from inner
    for name in others.keys() - parts.keys():
        yield (*path, name), _Absent


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the parts of an object, variable or container by name; ``None`` for other values."""
    keras = sys.modules["keras"]
    if isinstance(value, keras.Variable):
        names = ("trainable", "regularizer", "constraint")
        return {"value": np.asarray(value), **{name: getattr(value, name) for name in names}}
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, types.MethodType):
        return {name: getattr(value, name) for name in ("__func__", "__self__")}
    if type(value).__module__ == "tensorflow.python.ops.lookup_ops" and hasattr(value, "export"):
        with contextlib.suppress(sys.modules["tensorflow"].errors.OpError):  # it is empty yet
            columns = [one.numpy().tolist() for one in value.export()]
            return {"entries": sorted(zip(*columns, strict=True))}
        return {}
    is_leaf = type(value).__module__.partition(".")[0] in _LEAVES
    if is_leaf or isinstance(value, (set, type)) or not hasattr(value, "__dict__"):
        return None
    if inspect.isroutine(value) or isinstance(value, types.ModuleType) or _is_left_over(value):
        return None
    is_of_keras = any(cls.__module__.partition(".")[0] == "keras" for cls in type(value).__mro__)
    left_out = [_PER_PROCESS] * is_of_keras + [_OF_MODELS] * isinstance(value, keras.Model)
    return {
        name: inner
        for name, inner in vars(value).items()
        if not any(names.fullmatch(name) for names in left_out)
        and not _is_wrapped_method(value, name, inner)
    }


def _is_wrapped_method(value: Any, name: str, attribute: Any) -> bool:
    """Return whether an attribute is one of the methods that Keras wraps."""
    wrapped = getattr(attribute, "__wrapped__", None)
    return name in ("build", "quantize") and getattr(wrapped, "__self__", None) is value


def _is_left_over(value: Any) -> bool:
    """Return whether a value is a remnant of a graph or a ``fit``."""
    keras = sys.modules["keras"]
    if isinstance(value, (keras.KerasTensor, keras.callbacks.History)):
        return True
    return bool(keras.ops.is_tensor(value)) and not hasattr(value, "numpy")


def _kind(value: Any) -> Any:
    return next((kind for kind in (list, dict, set) if isinstance(value, kind)), type(value))


def _is_same(one: Any, two: Any) -> bool:
    try:
        if not hasattr(one, "__array__"):
            return bool(one == two or (one != one and two != two))
        one, two = np.asarray(one), np.asarray(two)
        if one.dtype != two.dtype or one.shape != two.shape:
            return False
        if one.dtype.hasobject:
            return bool(one.tolist() == two.tolist())
        return np.array_equal(one.ravel().view(np.uint8), two.ravel().view(np.uint8))
    except Exception:  # of user classes
        return False


def _is_fixed(path: Path, value: Any) -> bool:
    """Return whether a value cannot be set on a copy: variables, or names in this process."""
    if path[-1:] in (("compiled",), (_EXCLUDED,)):
        return bool(value)
    return any(map(_has_variables, _walk(value)))


def _has_variables(value: Any) -> bool:
    keras = sys.modules["keras"]
    kinds = (keras.Layer, keras.Variable, keras.metrics.Metric, keras.optimizers.Optimizer)
    return isinstance(value, (*kinds, keras.random.SeedGenerator))


def _set(copy: Any, path: Path, value: Any) -> None:
    *outer, name = path
    for step in outer:
        copy = copy[step] if isinstance(copy, (dict, list, tuple)) else getattr(copy, step)
    if value is _Absent:
        copy.pop(name) if isinstance(copy, dict) else delattr(copy, name)
    elif isinstance(copy, (dict, list)):
        copy[name] = value
    elif name == "value" and isinstance(copy, sys.modules["keras"].Variable):
        copy.assign(value)
    else:
        setattr(copy, name, value)


def _called(value: Any) -> str:
    return f"{type(value).__name__} {getattr(value, 'name', '')!r}"


def _config_differences(one: Any, two: Any) -> list[Path]:
    serialize = sys.modules["keras"].saving.serialize_keras_object
    differing = _differences(serialize(one), serialize(two), {})
    # Layers record the shapes of their first rows.
    return [path for path, _ in differing if "build_config" not in path]


def _layers_of(value: Any) -> list[Any]:
    """Return a layer and all layers inside it, outer ones first; another object itself."""
    flatten = getattr(value, "_flatten_layers", None)
    return [value] if flatten is None else list(flatten(include_self=True, recursive=True))


def code_of(value: Any) -> dict[str, list[Any]]:
    """Return the functions and classes in an object, without Keras' own, by name."""
    code: dict[str, list[Any]] = {}
    for part in _walk(value):
        thing = part if inspect.isfunction(part) or isinstance(part, type) else type(part)
        if thing is part or hasattr(part, "get_config"):
            named = code.setdefault(thing.__name__, [])
            excluded = isinstance(thing, type) and _is_keras_code(thing)
            if not excluded and all(other is not thing for other in named):
                named.append(thing)
    return {name: things for name, things in code.items() if things}


def _is_keras_code(thing: Any) -> bool:
    return str(thing.__module__).partition(".")[0] in {"keras", "tensorflow", "numpy", "builtins"}


def _custom_objects(value: Any, keras: Any) -> dict[str, Any]:
    """Return the classes and functions that a copy looks up, by Keras' keys."""
    objects: dict[str, Any] = {}
    for name, things in code_of(value).items():
        for thing in things:
            objects.setdefault(name, thing)
            objects.setdefault(keras.saving.get_registered_name(thing), thing)
    return objects


def _walk(value: Any) -> Iterator[Any]:
    """Yield a value and all its parts, each once."""
    stack, seen = [value], {}
    while stack:
        part = stack.pop()
        if id(part) not in seen:
            seen[id(part)] = part
            yield part
            if not isinstance(part, sys.modules["keras"].Variable):
                stack += (_parts(part) or {}).values()
