"""What was set on a captured layer or metric after it was made, so that its copy has it, too.

A copy that Keras makes of a configuration and weights has what ``__init__`` and ``build`` give it.
What goes along is what can be told to be the object's own: plain values, of classes that are not
Keras', and whether and how each variable is trained.
"""

from __future__ import annotations

import enum
import functools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np

from .parts import is_custom, layers_of

# Keras' name for what its losses and metrics of a function are given for that.
FN_ARGUMENTS = "_fn_kwargs"
# What compile() sets, as far as it is known by other names than in Keras' base classes.
_COMPILED = frozenset(("optimizer", "loss", "stop_training"))
_SIMPLE = (type(None), bool, int, float, complex, str, bytes, np.generic, enum.Enum)


@dataclass(frozen=True)
class _Part:
    """A layer, or a metric.

    Attributes:
        name: its class's.
        trainable: that of a layer; ``None`` of others.
        attributes: its plain ones.
        opaque: names of the others, of which nothing is known.
    """

    name: str
    trainable: bool | None
    attributes: Mapping[str, Any]
    opaque: frozenset[str]


@dataclass(frozen=True)
class _Variable:
    """How a variable is trained."""

    trainable: bool
    regularizer: Any
    constraint: Any


@dataclass(frozen=True)
class Kept:
    """What a copy is to have that its configuration may not tell.

    Attributes:
        parts: of the object and its layers, outer ones first.
        variables: of all of its variables.
    """

    parts: Sequence[_Part]
    variables: Sequence[_Variable] = field(default=())

    def restore(self, copy: Any) -> None:
        """Give it to a copy.

        Raises:
            pickle.UnpicklingError: the copy is made of other parts.
        """
        found = layers_of(copy)
        names = [type(one).__name__ for one in found]
        if names != [part.name for part in self.parts]:
            raise pickle.UnpicklingError(
                f"a copy of {names[0]} {getattr(copy, 'name', '')!r} is made of other layers than "
                "the original; build it in model_fn instead"
            )
        for one, part in zip(found, self.parts, strict=True):
            if part.trainable is not None and one.trainable != part.trainable:
                one.trainable = part.trainable  # and what it is made of, which comes later
            _set(one, part)
        if self.parts[0].trainable is None:
            return
        variables = copy.variables
        if len(variables) != len(self.variables):
            raise pickle.UnpicklingError(
                f"a copy of {names[0]} {copy.name!r} has {len(variables)} variables, the original "
                f"has {len(self.variables)}; build it in model_fn instead"
            )
        for variable, kept in zip(variables, self.variables, strict=True):
            if variable.trainable != kept.trainable:
                variable.trainable = kept.trainable
            for name in ("regularizer", "constraint"):
                own = getattr(kept, name)
                if own is not getattr(variable, name, None):
                    setattr(variable, name, own)


def kept_of(value: Any, keras: Any) -> Kept:
    """Return what a copy of a layer or metric is to have.

    Args:
        value: the layer, a model, say, or metric.
        keras: the module.
    """
    parts = [_part(one, keras) for one in layers_of(value)]
    if parts[0].trainable is None:
        return Kept(parts)
    ways = ("regularizer", "constraint")
    return Kept(
        parts,
        [
            _Variable(one.trainable, *(getattr(one, name, None) for name in ways))
            for one in value.variables
        ],
    )


def _part(value: Any, keras: Any) -> _Part:
    attributes: dict[str, Any] = {}
    opaque: frozenset[str] = frozenset()
    if is_custom(type(value)):
        attributes = plain_attributes(value, keras)
        opaque = frozenset(vars(value)) - attributes.keys() - _of_keras(keras)
    elif isinstance(value, keras.metrics.Metric) and hasattr(value, FN_ARGUMENTS):
        attributes = {FN_ARGUMENTS: _bare(getattr(value, FN_ARGUMENTS))}
    trainable = value.trainable if isinstance(value, keras.Layer) else None
    return _Part(type(value).__name__, trainable, attributes, opaque)


def _set(copy: Any, part: _Part) -> None:
    has = vars(copy)
    if any(has.get(name) is None for name in part.opaque):
        return  # it makes these when it is called, and whatever goes with them
    for name, value in part.attributes.items():
        if name not in has or not is_same(value, has[name]):
            setattr(copy, name, value)


def plain_attributes(value: Any, keras: Any) -> dict[str, Any]:
    """Return the attributes of an object that are plain values, and not those Keras gives it."""
    left_out = _of_keras(keras)
    return {
        name: _bare(found)
        for name, found in vars(value).items()
        if name not in left_out and _is_plain(found)
    }


@functools.lru_cache(1)
def _of_keras(keras: Any) -> frozenset[str]:
    """Return the names of attributes that Keras gives to all objects of some kind."""
    bare = (
        keras.Layer(name="bare"),
        keras.Model(name="bare"),
        keras.metrics.Metric(name="bare"),
        keras.optimizers.Optimizer(0.1, name="bare"),
    )
    return _COMPILED.union(*(vars(one) for one in bare))


def _is_plain(value: Any) -> bool:
    if isinstance(value, _SIMPLE):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype != object
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_plain(getattr(value, one.name, None)) for one in fields(value))
    return type(value).__name__ == "EagerTensor"


def _bare(value: Any) -> Any:
    """Return a plain value without what Keras has wrapped collections in."""
    if isinstance(value, dict):
        return {name: _bare(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_bare(inner) for inner in value]
    if isinstance(value, set):
        return set(value)
    return value


def is_same(found: Any, other: Any) -> bool:
    """Tell whether two values are known to be the same."""
    try:
        if found is other:
            return True
        if hasattr(found, "shape") and hasattr(other, "shape"):
            one, two = np.asarray(found), np.asarray(other)
            return one.dtype == two.dtype and np.array_equal(one, two)
        return bool(found == other)
    except Exception:  # what cannot be compared
        return False
