"""What `serialize` pickles otherwise than cloudpickle: code, cached functions, Keras objects."""

from __future__ import annotations

import functools
import io
import linecache
import zlib
from collections.abc import Callable, Sequence
from types import CodeType
from typing import IO, Any

import cloudpickle

from .captured.holders import Holders
from .captured.parts import is_by_value
from .captured.reduce import reduce_keras_object

_CACHED = type(functools.lru_cache(lambda: None))


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle's, but what is pickled by value also works where it comes to.

    Code keeps the name of its file and brings the source along: tracebacks show lines, and what
    reads source, such as AutoGraph and TorchScript, finds that of the code, also of a notebook's
    cell, and of a file that was edited since or that another host does not have.

    Functions cached by `functools` have a cache of their own; Python pickles them as names in a
    module. Of Keras objects, see `captured`.

    Args:
        file: where to write.
        sources: let code bring its source along.
        holders: of the Keras objects in what is pickled by itself and belongs together.
    """

    def __init__(
        self, file: IO[bytes], *, sources: bool = False, holders: Holders | None = None
    ) -> None:
        super().__init__(file, protocol=5)
        self._holders = holders or Holders()
        # One object for each file, so that it is pickled once.
        self._sources: dict[str, _Source] | None = {} if sources else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            return self._reduce_code(value)
        if isinstance(value, _CACHED) and is_by_value(value):
            return _cached, (value.__wrapped__, value.cache_parameters())
        if type(value) is functools.cached_property:  # which may hold a lock
            return functools.cached_property, (value.func,), {"attrname": value.attrname}
        if (reduced := reduce_keras_object(value, self._holders)) is not NotImplemented:
            return reduced
        return super().reducer_override(value)

    def _reduce_code(self, code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
        make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
        file: str | _Source = code.co_filename
        if self._sources is not None:
            file = self._sources.setdefault(code.co_filename, _Source(code.co_filename))
        return _code_in_file, (make, arguments, file)


def pickled(value: Any, *, sources: bool = False, holders: Holders | None = None) -> bytes:
    """Return ``value`` as `Pickler` pickles it."""
    stream = io.BytesIO()
    Pickler(stream, sources=sources, holders=holders).dump(value)
    return stream.getvalue()


class _Source:
    """The name of a file of source, which is a string once unpickled; its text comes along."""

    def __init__(self, file: str) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[..., str], tuple[str, bytes]]:
        linecache.checkcache(self._file)  # it may have been edited, and loaded again
        text = "".join(linecache.getlines(self._file))
        # Frameworks are looked for by their names in what is pickled; this is no use of them.
        return _know_source, (self._file, zlib.compress(text.encode(errors="surrogatepass"), 1))


def _know_source(file: str, source: bytes) -> str:
    text = zlib.decompress(source).decode(errors="surrogatepass")
    known = linecache.cache.get(file)
    # What this process has read itself has a time, by which it knows when to read it again.
    if text and (known is None or (len(known) > 1 and known[1] is None)):
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return file


def _code_in_file(make: Callable[..., CodeType], arguments: Sequence[Any], file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)
