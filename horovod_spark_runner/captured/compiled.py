"""What a captured model was compiled with, sent as the objects themselves.

A configuration names a function, and leaves out arguments of Keras' own losses and metrics; of an
optimizer Keras restores some variables only. Here a copy is compiled with what its original was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Attributes of a model that compile() sets.
COMPILED = (
    "_compile_config",
    "_compile_loss",
    "_compile_metrics",
    "_loss_tracker",
    "loss",
    "optimizer",
)
_CONFIG = "_compile_config"
# Those of exclude_from_weight_decay: variables by identity, and a pattern of their names.
EXCLUDED, EXCLUDED_NAMES = "_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"


@dataclass(frozen=True)
class _Excluded:
    """What weight decay leaves out: variables by their places, and a pattern of names."""

    places: Sequence[int]
    pattern: Any


@dataclass(frozen=True)
class _Optimizer:
    """An optimizer of a model.

    Attributes:
        config: Keras' configuration of it.
        built_for: places of the variables it was built for; ``None`` if it was not.
        values: of its own variables.
        excluded: of it, and of what it wraps.
    """

    config: Mapping[str, Any]
    built_for: Sequence[int] | None
    values: Sequence[np.ndarray]
    excluded: Sequence[_Excluded | None]

    def made(self, variables: Sequence[Any], keras: Any) -> Any:
        """Return a copy.

        Args:
            variables: those of the copy of its model.
            keras: the module.
        """
        copy = keras.optimizers.deserialize(dict(self.config))
        for one, excluded in zip(_chain(copy), self.excluded, strict=True):
            if excluded is not None:
                keys = {one._var_key(variables[place]) for place in excluded.places}
                setattr(one, EXCLUDED, keys)
                setattr(one, EXCLUDED_NAMES, excluded.pattern)
                one._exclude_from_weight_decay_cache = {}
        if self.built_for is not None:
            copy.build([variables[place] for place in self.built_for])
        for variable, value in zip(copy.variables, self.values, strict=True):
            variable.assign(value)
        return copy


@dataclass(frozen=True)
class Compiled:
    """What a model was compiled with.

    Attributes:
        arguments: of ``compile``, but the optimizer.
        optimizer: the model's; ``None`` if it has none.
    """

    arguments: Mapping[str, Any]
    optimizer: _Optimizer | None

    def names(self) -> Iterator[str]:
        """Yield the names by which Keras may look something up."""
        yield from _texts(self.arguments)
        if self.optimizer is not None:
            yield from _texts(self.optimizer.config)

    def compile(self, copy: Any, keras: Any) -> None:
        """Compile a copy of the model.

        Args:
            copy: built as the original is.
            keras: the module.
        """
        optimizer = None
        if self.optimizer is not None:
            optimizer = self.optimizer.made(copy.variables, keras)
        # One that scales the loss was made of it already.
        copy.compile(optimizer, **self.arguments, auto_scale_loss=False)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one)


def uncompiled(model: Any) -> Any:
    """Return an object that is a model, to be saved, but for what it was compiled with.

    Another object with the same attributes: the user's own model is not changed meanwhile.
    """
    shadow = object.__new__(type(model))
    left_out = {name: None for name in COMPILED if name in vars(model)}
    vars(shadow).update({**vars(model), **left_out, "compiled": False})
    return shadow


def compiled_of(model: Any, keras: Any) -> Compiled | None:
    """Return what a model was compiled with.

    Args:
        model: any Keras object.
        keras: the module.

    Returns:
        ``None`` where nothing is to be done, or the model does it in a way of its own.
    """
    if not isinstance(model, keras.Model) or not model.compiled or not hasattr(model, _CONFIG):
        return None
    own = ("compile", "compile_from_config", "get_compile_config")
    if any(getattr(type(model), name) is not getattr(keras.Model, name) for name in own):
        return None
    arguments = dict(getattr(model, _CONFIG).config)
    arguments.pop("optimizer")
    optimizer = None if model.optimizer is None else _optimizer(model, keras)
    if model.optimizer is not None and optimizer is None:
        return None
    return Compiled(arguments, optimizer)


def _optimizer(model: Any, keras: Any) -> _Optimizer | None:
    """Return a model's optimizer; ``None`` if it was built for more than this model."""
    optimizer = model.optimizer
    places = {id(variable): place for place, variable in enumerate(model.variables)}
    built_for = None
    if optimizer.built:
        built = [places.get(id(one)) for one in optimizer._trainable_variables]
        built_for = [place for place in built if place is not None]
        if len(built_for) < len(built):
            return None
    excluded = []
    for one in _chain(optimizer):
        keys = {one._var_key(variable): place for place, variable in enumerate(model.variables)}
        named = getattr(one, EXCLUDED, None) or ()
        if any(key not in keys for key in named):
            return None
        pattern = getattr(one, EXCLUDED_NAMES, None)
        found = _Excluded([keys[key] for key in named], pattern)
        excluded.append(found if named or pattern else None)
    values = [np.array(one) for one in optimizer.variables]
    return _Optimizer(keras.optimizers.serialize(optimizer), built_for, values, excluded)


def _chain(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, and what it wraps, as one that scales the loss does."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)
