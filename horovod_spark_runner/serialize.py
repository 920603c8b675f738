"""Pickle calls for the workers, and name the part that cannot be pickled.

Code of installed packages is pickled by name, as the workers have it too. Code of the caller's
modules, beside a script or notebook, is pickled by value: the workers need no copy. For modules
that functions import in their bodies, see `imported_modules`.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
import io
import linecache
import os
import pickle
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import IO, Any, TypeVar

import cloudpickle

from .captured import reduce_keras_object
from .errors import InvalidInputError
from .frameworks import modules_to_preload
from .imported_modules import (
    SentModule,
    collect_imports,
    is_callers_module,
    make_after_receiving,
)

T = TypeVar("T")

# The list of modules that are pickled by value is global to the process.
_lock = threading.Lock()


def dumps(value: Any) -> bytes:
    """Return ``value`` pickled for the workers."""
    with _lock, _caller_modules_by_value():
        return pickle_value(value, sources=True)


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


def loads_with(data: bytes, left_out: Sequence[object]) -> Any:
    """Return the value that `dumps_without` pickled, with the objects it left out."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> Any:
            return left_out[number]

    return Unpickler(io.BytesIO(data)).load()


@contextlib.contextmanager
def _caller_modules_by_value() -> Iterator[None]:
    already = cloudpickle.list_registry_pickle_by_value()
    modules = {  # by their own names: one may be imported by two
        module.__name__: module
        for name, module in list(sys.modules.items())
        if is_callers_module(name, getattr(module, "__file__", None))
    }
    own = [module for name, module in modules.items() if name not in already]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def dump_call(
    function: Callable[..., Any], args: Sequence[object], kwargs: dict[str, object]
) -> tuple[bytes, tuple[str, ...]]:
    """Return the pickled call and the modules that its code mentions.

    Raises:
        InvalidInputError: ``function`` is not callable, or something in the call cannot be
            pickled; the message names it.
    """
    if not callable(function):
        raise InvalidInputError(
            f"a function is needed, got {function!r}; one that calls runpy.run_path(path, "
            "run_name='__main__') runs a script"
        )
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
    for name, value in named.items():
        try:
            dumps(value)
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


def _parts(value: Any) -> list[tuple[str, object]]:
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


_CACHED = type(functools.lru_cache(lambda: None))


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle's pickler, with complete objects by value.

    Code keeps the name of its file and is sent with its source. So tracebacks show lines, and
    readers of source, such as AutoGraph and TorchScript, get the code's own source, also of a
    notebook's cell, and of a file that was edited since or is missing on another host.

    Functions cached by `functools` get new caches; Python pickles them as names in a module. For
    Keras objects, see `captured`.

    A broadcast variable is sent with its value: ranks are no Spark tasks, and a trained model
    outlives the session. An accumulator is refused.

    Args:
        file: the file to write.
        sources: send code with its source.
    """

    def __init__(self, file: IO[bytes], *, sources: bool = False) -> None:
        super().__init__(file, protocol=5)
        # One object per file, so that it is pickled once.
        self._sources: dict[str, _Source] | None = {} if sources else None
        self._modules: dict[str, SentModule] = {}

    def reducer_override(self, value: Any) -> object:
        if isinstance(value, CodeType):
            return self._reduce_code(value)
        if isinstance(value, _CACHED) and _is_by_value(value):
            return _cached, (value.__wrapped__, value.cache_parameters())
        if type(value) is functools.cached_property:  # which may hold a lock
            return functools.cached_property, (value.func,), {"attrname": value.attrname}
        for reduced in (_reduce_shared(value), reduce_keras_object(value)):
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(value)

    def _dynamic_function_reduce(self, function: FunctionType) -> tuple[object, ...]:
        make, arguments, *state = super()._dynamic_function_reduce(function)
        if modules := collect_imports(function, self._modules):
            make, arguments = make_after_receiving, (modules, make, arguments)
        return make, arguments, *state

    def _reduce_code(self, code: CodeType) -> tuple[Callable[..., CodeType], tuple[object, ...]]:
        make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
        file: str | _Source = code.co_filename
        if self._sources is not None:
            file = self._sources.setdefault(code.co_filename, _Source(code.co_filename))
        return _code_in_file, (make, arguments, file)


def pickle_value(value: Any, *, sources: bool = False) -> bytes:
    """Return ``value`` as `Pickler` pickles it."""
    stream = io.BytesIO()
    Pickler(stream, sources=sources).dump(value)
    return stream.getvalue()


def _reduce_shared(value: Any) -> object:
    """Return the reduction of one of Spark's shared variables, else ``NotImplemented``.

    Raises:
        InvalidInputError: it is an accumulator, or a broadcast variable without its value.
    """
    if _is_of_spark(value, "pyspark.accumulators", "Accumulator"):
        raise InvalidInputError(
            f"{value!r} is an accumulator, and Spark counts only what its own tasks add: what "
            "ranks add would be lost. Return the number from the function that HorovodRunner "
            "runs, or log it as a metric of the training"
        )
    if not _is_of_spark(value, "pyspark.core.broadcast", "Broadcast"):
        return NotImplemented
    if value._jbroadcast is not None and not os.path.exists(value._path):
        raise InvalidInputError(
            f"broadcast variable {value._jbroadcast.id()} no longer has a value: destroy() was "
            "called, or its Spark session has ended. Broadcast the value again"
        )
    unset = dict.fromkeys(("_jbroadcast", "_sc", "_python_broadcast", "_path"))
    return copyreg.__newobj__, (type(value),), {**unset, "_value": value.value}  # type: ignore[attr-defined]


def _is_of_spark(value: Any, module: str, name: str) -> bool:
    """Return whether ``value`` is of a class of PySpark, without importing it."""
    return issubclass(type(value), getattr(sys.modules.get(module), name, ()))


class _Source:
    """The name of a source file, pickled with its text; a string once unpickled."""

    def __init__(self, file: str) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[..., str], tuple[str, bytes]]:
        linecache.checkcache(self._file)  # it may have been edited and reloaded
        text = "".join(linecache.getlines(self._file))
        # Compressed: frameworks are detected by names in the pickle, but not by those in source.
        return _know_source, (self._file, zlib.compress(text.encode(errors="surrogatepass"), 1))


def _know_source(file: str, source: bytes) -> str:
    text = zlib.decompress(source).decode(errors="surrogatepass")
    entry = linecache.cache.get(file)
    # A file that this process has read itself has a time stamp, and is kept.
    if text and (entry is None or (len(entry) > 1 and entry[1] is None)):
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return file


def _code_in_file(make: Callable[..., CodeType], arguments: Sequence[Any], file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> object:
    return functools.lru_cache(**parameters)(function)


def _is_by_value(function: Any) -> bool:
    """Return whether a function is pickled by value, as one that others cannot import."""
    name = str(function.__module__)
    if name == "__main__" or name not in sys.modules:
        return True
    for module in cloudpickle.list_registry_pickle_by_value():
        if name == module or name.startswith(f"{module}."):
            return True
    target: Any = sys.modules[name]
    for part in function.__qualname__.split("."):
        target = getattr(target, part, None)
    return target is not function
