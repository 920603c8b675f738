"""What configurations do not tell of Keras objects, and no copy would have: it is refused."""

from __future__ import annotations

import inspect
import pickle
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from .attributes import is_same, plain_attributes
from .compiled import EXCLUDED, EXCLUDED_NAMES
from .kept import FN_ARGUMENTS
from .parts import is_by_value, is_custom

# Arguments of its layers that Keras restores otherwise, or that no longer matter once it is made.
_RESTORED = ("autocast", "batch_input_shape", "batch_size", "input_dim", "input_shape", "weights")


def check_parts(value: Any, parts: Sequence[Any], keras: Any) -> None:
    """Check that copies of what an object is made of would be the same.

    Args:
        value: the object.
        parts: itself, layers and other objects, and functions.
        keras: the module.

    Raises:
        pickle.PicklingError: one would not be.
    """
    check_custom(parts, keras)
    for part in parts:
        if not inspect.isfunction(part) and not is_by_value(type(part)):
            restored = part is value and isinstance(value, keras.metrics.Metric)
            _check_kept(part, keras, getattr(part, FN_ARGUMENTS, ()) if restored else ())


def check_custom(parts: Iterable[Any], keras: Any) -> None:
    """Check that the configurations of the user's own objects among ``parts`` tell all of them.

    Raises:
        pickle.PicklingError: one does not.
    """
    for part in parts:
        if not inspect.isfunction(part) and is_by_value(type(part)):
            _check_told(part)
            _check_set(part, keras)


def _check_told(value: Any) -> None:
    """Check that the configuration of an object of a user's class is that of its ``__init__``."""
    cls = type(value)
    if is_custom(cls.from_config):  # which knows better
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


def _check_set(value: Any, keras: Any) -> None:
    """Check that nothing was set after an object of a user's class was made that is not restored.

    Of layers and metrics it is, and losses are pickled as they are.
    """
    cls = type(value)
    if isinstance(value, (keras.Layer, keras.metrics.Metric, keras.losses.Loss)):
        return
    before = random.getstate()
    # Two of them, as some draw a seed.
    one, two = (plain_attributes(cls.from_config(value.get_config()), keras) for _ in range(2))
    random.setstate(before)
    changed = sorted(
        name
        for name, found in plain_attributes(value, keras).items()
        if name in one and is_same(one[name], two.get(name)) and not is_same(found, one[name])
    )
    if changed:
        raise pickle.PicklingError(
            f"{', '.join(changed)} of {cls.__name__} was set after it was made, and get_config() "
            "does not tell so, so a copy would be another one"
        )


def _check_kept(value: Any, keras: Any, restored: Collection[str]) -> None:
    """Check that a copy of one of Keras' own objects would be the same.

    Its configurations leave out arguments, such as the ``delta`` of a ``Huber`` (3.15), and what
    was set afterwards.

    Args:
        value: the object.
        keras: the module.
        restored: names of arguments that do not matter, as `Kept` holds them.
    """
    cls, lost = type(value), ""
    if isinstance(value, keras.optimizers.Optimizer):
        if any(getattr(value, name, None) for name in (EXCLUDED, EXCLUDED_NAMES)):
            lost = "what exclude_from_weight_decay was told"
        elif value.built and isinstance(value, keras.optimizers.LossScaleOptimizer):
            lost = "the values of its variables"  # of which Keras restores some
    elif hasattr(value, FN_ARGUMENTS):  # a loss or metric around a function
        left_out = [name for name in _left_out(value) if name not in restored]
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
    given = getattr(value, FN_ARGUMENTS, {})
    return [
        one.name
        for one in inspect.signature(type(value).__init__).parameters.values()
        if one.name not in config
        and one.default is not one.empty
        and not is_same(given.get(one.name, getattr(value, one.name, one.default)), one.default)
    ]


def _has_default(value: Any, one: inspect.Parameter) -> bool:
    """Tell whether an argument is known to be the one that is taken where none is given."""
    return is_same(getattr(value, one.name, getattr(value, f"_{one.name}", one.empty)), one.default)
