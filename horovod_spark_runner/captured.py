"""Pickle Keras objects that functions capture: losses, metrics and callbacks, but no layers.

Keras' archive of an object leaves out attributes, arguments of ``compile`` and classes of the
user's own, so a copy of a layer, a model or an optimizer could differ from the original. These are
refused: the function can build them where it runs.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import numpy as np

from .errors import InvalidInputError

_ADVICE = "build it inside model_fn, or inside the function that runs on the ranks"
_PLAIN = (bool, int, float, str, type(None))


def reduce_keras_object(value: Any) -> object:
    """Return the reduction of a Keras object, or ``NotImplemented`` if its own suffices.

    Raises:
        InvalidInputError: the object is a layer, a model, an optimizer, a variable, or a metric
            that its configuration does not describe.
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
    has_reduce = any(
        getattr(cls, name) is not getattr(saveable, name, None)
        for name in ("__reduce__", "__reduce_ex__")
    )
    if isinstance(value, keras.Variable) or (isinstance(value, saveable) and not has_reduce):
        if isinstance(value, keras.losses.Loss):
            has_state = hasattr(value, "__getstate__")  # every object has it from Python 3.11 on
            return new, (cls,), value.__getstate__() if has_state else vars(value)
        if isinstance(value, keras.metrics.Metric):
            return _reduce_metric(value, keras)
        raise InvalidInputError(f"{_called(value)} is a Keras object with weights; {_ADVICE}")
    return NotImplemented


def _reduce_metric(value: Any, keras: Any) -> tuple[Callable[..., object], tuple[object, ...]]:
    cls = type(value)
    if cls is keras.metrics.MeanMetricWrapper:  # whose configuration names its function only
        names = {"fn": value._fn, "name": value.name, "dtype": value._dtype_policy}
        return _make, (cls, {**names, **value._fn_kwargs})
    try:
        config = value.get_config()
        copy = cls.from_config(dict(config))
    except Exception as error:  # of user classes
        raise InvalidInputError(
            f"{_called(value)} cannot be made again of its get_config() "
            f"({type(error).__name__}: {error}); {_ADVICE}"
        ) from error
    theirs = vars(copy)
    differing = [name for name, part in vars(value).items() if _differs(part, theirs.get(name))]
    if differing:
        raise InvalidInputError(
            f"{_called(value)}: its get_config() does not hold {differing[0]!r}; {_ADVICE}"
        )
    return _make_by_config, (cls, config)


def _differs(one: Any, two: Any) -> bool:
    """Return whether two attributes are values that differ; other objects are not compared."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() != two.keys() or any(_differs(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) != len(two) or any(map(_differs, one, two))
    if isinstance(one, FunctionType):
        return not isinstance(two, FunctionType) or one.__code__ is not two.__code__
    if isinstance(one, (np.ndarray, np.generic)):
        return not np.array_equal(one, two)
    return isinstance(one, _PLAIN) and not (type(one) is type(two) and one == two)


def _make(cls: Callable[..., Any], arguments: Mapping[str, object]) -> object:
    return cls(**arguments)


def _make_by_config(cls: Any, config: Mapping[str, object]) -> object:
    return cls.from_config(dict(config))


def _called(value: Any) -> str:
    return f"{type(value).__name__} {getattr(value, 'name', '')!r}"
