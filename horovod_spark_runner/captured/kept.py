"""What a copy of a captured layer or metric is given that Keras does not store.

That is what was set on it and its layers, which of them and of their variables are trained and how,
and values of variables such as the states of random layers.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .attributes import Attributes, attributes_of, bare
from .parts import is_custom, layers_of

# Keras' name for what its losses and metrics of a function are given for that.
FN_ARGUMENTS = "_fn_kwargs"


@dataclass(frozen=True)
class _Part:
    """A layer, or a metric.

    Attributes:
        name: its class's.
        trainable: that of a layer; ``None`` of others.
        attributes: of an object of the user's.
    """

    name: str
    trainable: bool | None
    attributes: Attributes


@dataclass(frozen=True)
class _Variable:
    """How a variable is trained, and its value where Keras does not store that."""

    trainable: bool
    regularizer: Any
    constraint: Any
    value: np.ndarray | None


@dataclass(frozen=True)
class Kept:
    """What a copy is given.

    Attributes:
        parts: of the object and its layers, outer ones first.
        variables: of all of its variables.
    """

    parts: Sequence[_Part]
    variables: Sequence[_Variable]

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
            part.attributes.set_on(one)
        if self.parts[0].trainable is not None:
            self._restore_variables(copy)

    def _restore_variables(self, copy: Any) -> None:
        variables = copy.variables
        if len(variables) != len(self.variables):
            raise pickle.UnpicklingError(
                f"a copy of {type(copy).__name__} {copy.name!r} has {len(variables)} variables, "
                f"the original has {len(self.variables)}; build it in model_fn instead"
            )
        for variable, kept in zip(variables, self.variables, strict=True):
            if variable.trainable != kept.trainable:
                variable.trainable = kept.trainable
            for name in ("regularizer", "constraint"):
                own = getattr(kept, name)
                if own is not getattr(variable, name, None):
                    setattr(variable, name, own)
            if kept.value is not None:
                variable.assign(kept.value)


def kept_of(value: Any, keras: Any) -> Kept:
    """Return what a copy of a layer or metric is to be given.

    Args:
        value: the layer, a model, say, or metric.
        keras: the module.
    """
    layers = isinstance(value, keras.Layer)
    parts = [_part(one, keras) for one in layers_of(value)]
    return Kept(parts, list(_variables(value)) if layers else [])


def _part(value: Any, keras: Any) -> _Part:
    attributes = Attributes()
    if is_custom(type(value)):
        attributes = attributes_of(value, keras)
    elif isinstance(value, keras.metrics.Metric) and hasattr(value, FN_ARGUMENTS):
        attributes = Attributes({FN_ARGUMENTS: bare(getattr(value, FN_ARGUMENTS))})
    trainable = value.trainable if isinstance(value, keras.Layer) else None
    return _Part(type(value).__name__, trainable, attributes)


def _variables(value: Any) -> Iterable[_Variable]:
    # Keras adds the two matrices of LoRA up with the kernel, and begins with new ones.
    adapted = [one for one in layers_of(value) if getattr(one, "lora_enabled", False)]
    anew = {id(variable) for one in adapted for variable in one.variables}
    stored = {id(variable) for variable in value.weights} - anew
    for one in value.variables:
        yield _Variable(
            one.trainable,
            getattr(one, "regularizer", None),
            getattr(one, "constraint", None),
            None if id(one) in stored else np.array(one),
        )
