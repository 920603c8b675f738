"""Pickle calls for the workers, and name the part that cannot be pickled.

Code of installed packages is pickled by name, as the workers have it too. Code of the caller's
modules, beside a script or notebook, is pickled by value: the workers need no copy.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import pickle
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any, TypeVar

import cloudpickle

from .captured import Holders
from .errors import InvalidInputError
from .frameworks import modules_to_preload
from .pickling import Pickler, pickle_value

T = TypeVar("T")

# Parts of the paths of installed modules. Distributions' names for site-packages differ.
_INSTALLED = ("/site-packages/", "/dist-packages/", ".zip/")
# Cached: sysconfig computes them anew each time, and there are thousands of modules.
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_THIS_PACKAGE = __name__.partition(".")[0]
# The list of modules that are pickled by value is global to the process.
_lock = threading.Lock()


def dumps(value: Any, holders: Holders | None = None) -> bytes:
    """Return ``value`` pickled for the workers.

    Args:
        value: what to pickle.
        holders: holders of the Keras objects in other pickles of the same call.
    """
    with _lock, _caller_modules_by_value():
        return pickle_value(value, sources=True, holders=holders)


def dumps_without(value: Any, left_out: type[T]) -> tuple[bytes, list[T]]:
    """Return ``value`` pickled for the workers, and the objects left out.

    Args:
        value: what to pickle.
        left_out: class of the objects that do not become part of the pickle.
    """
    apart: list[T] = []

    class Leaving(Pickler):
        def persistent_id(self, part: Any) -> int | None:
            if not isinstance(part, left_out):
                return None
            apart.append(part)
            return len(apart) - 1

    buffer = io.BytesIO()
    with _lock, _caller_modules_by_value():
        Leaving(buffer, sources=True).dump(value)
    return buffer.getvalue(), apart


def loads_with(data: bytes, left_out: Sequence[Any]) -> Any:
    """Return the value that `dumps_without` pickled, with the objects it left out."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> Any:
            return left_out[number]

    return Unpickler(io.BytesIO(data)).load()


@contextlib.contextmanager
def _caller_modules_by_value() -> Iterator[None]:
    already = cloudpickle.list_registry_pickle_by_value()
    modules = [
        module
        for name, module in list(sys.modules.items())
        if _is_callers_module(name, module) and name not in already
    ]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _is_callers_module(name: str, module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or name.partition(".")[0] in (_THIS_PACKAGE, "__main__"):
        return False
    return not file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)


def dump_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[bytes, tuple[str, ...]]:
    """Return the pickled call and the modules that its code mentions.

    Raises:
        InvalidInputError: ``function`` is not callable, or something in the call cannot be
            pickled; the message names it.
    """
    if not callable(function):
        raise InvalidInputError(f"a function is needed, got {function!r}")
    try:
        payload = dumps((function, tuple(args), kwargs))
    except Exception as error:
        named = {"the function": function, **{f"argument {i}": a for i, a in enumerate(args)}}
        named.update((f"argument {name}", value) for name, value in kwargs.items())
        raise InvalidInputError(_unpicklable_message(named, error)) from error
    return payload, _mentioned_modules(payload)


def check_picklable(named: dict[str, Any]) -> None:
    """Check that the values can be sent to the workers together.

    Raises:
        InvalidInputError: one cannot; the message names it and the part to blame.
    """
    holders = Holders()
    for name, value in named.items():
        try:
            dumps(value, holders)
        except Exception as error:
            raise InvalidInputError(_unpicklable_message({name: value}, error)) from error


def _unpicklable_message(named: dict[str, Any], error: BaseException) -> str:
    """Return a message on which of ``named`` cannot be pickled, and the part to blame."""
    for name, value in named.items():
        if not _pickles(value):
            path = _find_culprit(value) or repr(value)
            if isinstance(error, InvalidInputError):  # its message has the advice
                return f"{name} cannot be sent to the workers, because of {path}: {error}"
            return (
                f"{name} cannot be sent to the workers: {path} cannot be pickled "
                f"({type(error).__name__}: {error}). Create it inside the function instead: the "
                "function runs on the workers"
            )
    return f"the call cannot be sent to the workers: {type(error).__name__}: {error}"


def _find_culprit(value: Any, depth: int = 4) -> str | None:
    """Return a description of the innermost part of ``value`` that cannot be pickled."""
    for name, part in _parts(value):
        if _pickles(part):
            continue
        inner = _find_culprit(part, depth - 1) if depth else None
        return inner or f"{name} (a {type(part).__module__}.{type(part).__qualname__})"
    return None


def _parts(value: Any) -> list[tuple[str, Any]]:
    if inspect.isfunction(value):
        label = f"function {value.__qualname__}"
        captured, module_globals = inspect.getclosurevars(value).nonlocals, value.__globals__
        named = [
            name for name in dict.fromkeys(_names_in(value.__code__)) if name in module_globals
        ]
        return [
            *((f"variable {n!r} captured by {label}", v) for n, v in captured.items()),
            *((f"global {n!r} used by {label}", module_globals[n]) for n in named),
            *((f"a default of {label}", v) for v in value.__defaults__ or ()),
        ]
    if inspect.ismethod(value):
        return [(f"the object that {value.__qualname__} is bound to", value.__self__)]
    if isinstance(value, dict):
        return [(f"entry {key!r}", v) for key, v in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"element {i}", v) for i, v in enumerate(value)]
    # Objects with their own reduction are not pickled by their attributes.
    has_reduce = any("__reduce__" in vars(cls) for cls in type(value).__mro__[:-1])
    if has_reduce or type(value).__module__.startswith("pyspark."):
        return []
    if inspect.isclass(value):
        members = [(n, v) for n, v in vars(value).items() if inspect.isfunction(v) or n[0] != "_"]
        return [(f"{n!r} of class {value.__qualname__}", v) for n, v in members]
    if isinstance(getattr(value, "__dict__", None), dict):
        owner = type(value).__qualname__
        attributes = [(f"attribute {name!r} of {owner}", v) for name, v in vars(value).items()]
        return [*attributes, (f"class {owner}", type(value))]
    return []


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code uses, and those of the functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _pickles(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True


def _mentioned_modules(payload: bytes) -> tuple[str, ...]:
    modules: dict[str, None] = {}
    for name, imports in modules_to_preload().items():
        if name.encode() in payload:
            modules.update(dict.fromkeys(imports))
    return tuple(modules)
