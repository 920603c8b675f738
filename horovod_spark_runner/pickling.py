"""Cloudpickle for source code, cached functions, Keras objects and Spark's broadcasts."""

from __future__ import annotations

import copyreg
import functools
import io
import linecache
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from types import CodeType
from typing import IO, Any

import cloudpickle

from .captured import Holders, reduce_keras_object
from .errors import InvalidInputError

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
        holders: holders of the Keras objects in other pickles of the same call.
    """

    def __init__(
        self, file: IO[bytes], *, sources: bool = False, holders: Holders | None = None
    ) -> None:
        super().__init__(file, protocol=5)
        self._holders = holders or Holders()
        # One object per file, so that it is pickled once.
        self._sources: dict[str, _Source] | None = {} if sources else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            return self._reduce_code(value)
        if isinstance(value, _CACHED) and _is_by_value(value):
            return _cached, (value.__wrapped__, value.cache_parameters())
        if type(value) is functools.cached_property:  # which may hold a lock
            return functools.cached_property, (value.func,), {"attrname": value.attrname}
        for reduced in (_reduce_shared(value), reduce_keras_object(value, self._holders)):
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(value)

    def _reduce_code(self, code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
        make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
        file: str | _Source = code.co_filename
        if self._sources is not None:
            file = self._sources.setdefault(code.co_filename, _Source(code.co_filename))
        return _code_in_file, (make, arguments, file)


def pickle_value(value: Any, *, sources: bool = False, holders: Holders | None = None) -> bytes:
    """Return ``value`` as `Pickler` pickles it."""
    stream = io.BytesIO()
    Pickler(stream, sources=sources, holders=holders).dump(value)
    return stream.getvalue()


def _reduce_shared(value: Any) -> Any:
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


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
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
