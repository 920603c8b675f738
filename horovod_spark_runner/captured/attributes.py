"""Attributes of the user's objects, found in an original and set on its copy.

A copy that Keras makes of a configuration has what ``__init__``, ``build`` and ``call`` give it,
and not what else was set on the original.
"""

from __future__ import annotations

import enum
import functools
import inspect
import io
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import cloudpickle
import numpy as np

_SIMPLE = (type(None), bool, int, float, complex, str, bytes, np.generic, enum.Enum)


@dataclass(frozen=True)
class Attributes:
    """What was found on an object.

    Attributes:
        plain: plain values by name, which can be compared.
        others: what can be sent besides; what holds something of Keras' is not among it.
        unsent: names of what cannot be pickled.
    """

    plain: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    unsent: frozenset[str] = frozenset()

    def set_on(self, copy: Any) -> None:
        """Let a copy have them as well, where it does not."""
        has = vars(copy)
        # It makes these when it is called, and takes note that it has.
        lazy = any(has.get(name) is None for name in self.unsent)
        for name, value in self.plain.items():
            known = name in has and is_same(value, has[name])
            if not known and not (lazy and isinstance(value, bool)):
                setattr(copy, name, value)
        for name, value in self.others.items():
            comparable = any("__eq__" in vars(cls) for cls in type(value).__mro__[:-1])
            if has.get(name) is None or (comparable and not is_same(value, has[name])):
                setattr(copy, name, value)


def attributes_of(value: Any, keras: Any) -> Attributes:
    """Return the attributes of an object that are not Keras'.

    Args:
        value: an object of a class that is not Keras'.
        keras: the module.
    """
    plain, others, unsent = {}, {}, set()
    for name, found in _own(value, keras):
        if is_plain(found):
            plain[name] = bare(found)
        elif (sendable := _is_sendable(found, keras)) is not None:
            if sendable:
                others[name] = found
            else:
                unsent.add(name)
    return Attributes(plain, others, frozenset(unsent))


def plain_attributes(value: Any, keras: Any) -> dict[str, Any]:
    """Return those of `attributes_of` that are plain values."""
    return {name: bare(found) for name, found in _own(value, keras) if is_plain(found)}


def _own(value: Any, keras: Any) -> Iterable[tuple[str, Any]]:
    left_out = _of_keras(keras)
    for name, found in getattr(value, "__dict__", {}).items():
        # Keras wraps methods, such as build, and puts them on the object.
        wrapped = inspect.isroutine(found) and hasattr(type(value), name)
        if name not in left_out and not wrapped:
            yield name, found


@functools.lru_cache(1)
def _of_keras(keras: Any) -> frozenset[str]:
    """Return the names of attributes that Keras gives to all objects of some kind.

    Objects are made for that, as no class tells.
    """
    tensor = keras.Input((1,), name="bare")
    models = [
        keras.Model(name="bare"),
        keras.Sequential(name="bare"),
        keras.Model(tensor, tensor, name="bare"),
    ]
    for model in models:
        model.compile("sgd", "mse")
    others = (
        keras.Layer(name="bare"),
        keras.metrics.Metric(name="bare"),
        keras.optimizers.SGD(name="bare"),
        keras.losses.Loss(name="bare"),
    )
    return frozenset({"history"}.union(*(vars(one) for one in (*models, *others))))


class _HoldsKeras(Exception):
    """What is pickled holds something that belongs to a model, and comes with that."""


def _is_sendable(value: Any, keras: Any) -> bool | None:
    """Tell whether a value can be pickled by itself; ``None`` if it holds something of Keras'."""
    kinds = (
        *(keras.Layer, keras.Variable, keras.KerasTensor, keras.random.SeedGenerator),
        *(keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer),
    )

    class Probe(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, part: Any) -> Any:
            if isinstance(part, kinds):
                raise _HoldsKeras
            return super().reducer_override(part)

    try:
        Probe(io.BytesIO(), protocol=5).dump(value)
    except _HoldsKeras:
        return None
    except Exception:  # whatever the classes of users raise
        return False
    return True


def is_plain(value: Any) -> bool:
    """Tell whether a value is made of numbers, text and arrays only."""
    if isinstance(value, _SIMPLE):
        return True
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if is_dataclass(value) and not isinstance(value, type):
        return all(is_plain(getattr(value, one.name, None)) for one in fields(value))
    return type(value).__name__ == "EagerTensor"


def bare(value: Any) -> Any:
    """Return a plain value without what Keras has wrapped collections in."""
    if isinstance(value, OrderedDict):
        return OrderedDict((name, bare(inner)) for name, inner in value.items())
    if isinstance(value, dict):
        return {name: bare(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [bare(inner) for inner in value]
    if isinstance(value, tuple):
        inner = [bare(one) for one in value]
        return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
    return set(value) if isinstance(value, set) else value


def is_same(found: Any, other: Any) -> bool:
    """Tell whether two values are known to be the same."""
    try:
        if found is other:
            return True
        arrays = [hasattr(one, "shape") and np.shape(one) != () for one in (found, other)]
        if any(arrays):
            one, two = np.asarray(found), np.asarray(other)
            return all(arrays) and one.dtype == two.dtype and np.array_equal(one, two)
        return bool(found == other)
    except Exception:  # what cannot be compared
        return False
