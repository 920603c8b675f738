"""Detect the engine of a model function by its annotation or its code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType, ModuleType

from ..frameworks import TORCH

_PACKAGE = __name__.partition(".")[0]
_TORCH_MODULE = "torch.nn.modules.module.Module"
# Lightning's modules say themselves how they are trained.
LIGHTNING_MODULES = (
    "lightning.pytorch.core.module.LightningModule",
    "pytorch_lightning.core.module.LightningModule",
)


def detect_engine(model: object) -> str | None:
    """Return the ``horovod_engine`` of the class that ``model`` returns, if that shows.

    A function's return annotation counts first, then the names in its code: classes, and functions
    by their annotation. A module of PyTorch's own is for that engine, which tells how it is to be
    given.
    """
    model = _unwrapped(model)
    if any(_name(cls) == _TORCH_MODULE for cls in _classes(model)):
        return TORCH
    function = _function(model)
    if function is None:
        return None
    code = function.__code__
    called = list(_named(function, [*code.co_names, *code.co_freevars]))
    annotations = [_annotated(each) for each in called if isinstance(each, FunctionType)]
    for thing in (_annotated(function), *called, *annotations):
        engine = getattr(thing, "horovod_engine", None) if isinstance(thing, type) else None
        if isinstance(engine, str):
            return engine
        if isinstance(thing, type) and any(
            _name(cls) in LIGHTNING_MODULES for cls in thing.__mro__
        ):
            return TORCH
    return None


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"


def _annotated(function: FunctionType) -> object:
    """Return the class of a function's return annotation."""
    annotation = function.__annotations__.get("return")
    if not isinstance(annotation, str):
        return annotation
    text = annotation.strip("'\"").rpartition(".")[2]
    return next((each for each in _named(function, [text]) if isinstance(each, type)), None)


def _unwrapped(model: object) -> object:
    """Return the function behind a ``functools.partial``."""
    while isinstance(model, functools.partial):
        model = model.func
    return model


def _classes(model: object) -> Sequence[type]:
    return (model if isinstance(model, type) else type(model)).__mro__


def _function(model: object) -> FunctionType | None:
    """Return the function of Python's that runs where ``model`` is called."""
    if isinstance(model, type) or not callable(model):
        return None
    function = model if isinstance(model, (FunctionType, MethodType)) else type(model).__call__
    function = inspect.unwrap(getattr(function, "__func__", function))
    return function if isinstance(function, FunctionType) else None


def _named(function: FunctionType, names: Sequence[str]) -> Iterator[object]:
    """Yield the objects behind ``names`` in ``function``, also as names of this package."""
    namespace: dict[str, object] = {**function.__globals__, **_closure(function)}
    modules = {thing.__name__ for n in names if isinstance(thing := namespace.get(n), ModuleType)}
    # `package.Name`, or imported within the function; nobody else's module is looked into.
    package = sys.modules[_PACKAGE] if _PACKAGE in {*names, *modules} else None
    for name in names:
        yield namespace.get(name)
        if package is not None and name in package.__all__:
            yield getattr(package, name)


def _closure(function: FunctionType) -> dict[str, object]:
    variables: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not set yet
            variables[name] = cell.cell_contents
    return variables
