"""Send the caller's modules that functions import in their bodies.

A function that is pickled by value brings the modules that it refers to by global names; those that
its body imports are only named in its code. Their source is sent, followed through their own
imports, with the plain values that their globals have by now.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import linecache
import logging
import os
import pkgutil
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

logger = logging.getLogger(__name__)

# Parts of the paths of installed modules. Distributions' names for site-packages differ.
_INSTALLED = ("/site-packages/", "/dist-packages/", ".zip/")
# Cached: sysconfig computes them anew each time, and there are thousands of modules.
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_THIS_PACKAGE = __name__.partition(".")[0]
# Those of an unpacked Spark are in none of these folders, and are there on all machines.
_EVERYWHERE = (_THIS_PACKAGE, "__main__", "pyspark", "py4j")
_PLAIN = (bool, int, float, str, bytes, type(None))


def is_callers_module(name: str, file: Any) -> bool:
    """Return whether a module is neither installed nor of Python: others need it sent."""
    if not isinstance(file, str) or name.partition(".")[0] in _EVERYWHERE:
        return False
    return not file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)


@dataclass(frozen=True)
class SentModule:
    """A module with its source; its name once unpickled, when imports find it.

    Attributes:
        name: its full name.
        origin: its file on the sender's machine; none for a folder without ``__init__.py``.
        submodule_search_locations: a package's folders there.
        source: compressed; ``None`` if it cannot be sent.
        values: plain values of its globals, where the sender has imported it.
    """

    name: str
    origin: str | None
    submodule_search_locations: list[str] | None
    source: bytes | None
    values: dict[str, Any]

    def __reduce__(self) -> tuple[Callable[..., str], tuple[object, ...]]:
        return _receive, astuple(self)


def collect_imports(
    function: FunctionType, collected: dict[str, SentModule]
) -> tuple[SentModule, ...]:
    """Return the caller's modules that a function's body imports, and those that they import.

    Args:
        function: a function that is pickled by value.
        collected: modules by name; new ones are added.
    """
    found: dict[str, SentModule] = {}
    waiting = [*_imported_names(function.__code__, function.__globals__.get("__package__"))]
    while waiting:
        name = waiting.pop()
        spec = None if name in found else _find_spec(name)
        if spec is None:
            continue
        module = found[name] = collected[name] = collected.get(name) or _read_module(name, spec)
        parent = name.rpartition(".")[0]
        waiting += [parent] if parent else []
        if module.source is not None:
            package = parent if module.submodule_search_locations is None else name
            waiting += _names_in_source(module.source, package)
        elif ".zip/" not in str(module.origin):  # of sc.addPyFile, or Spark's own
            _warn(f"a function imports {_describe_missing(name, module.origin)}")
    return tuple(found.values())


def make_after_receiving(
    names: tuple[str, ...], make: Callable[..., Any], arguments: tuple[object, ...]
) -> object:
    """Return ``make(*arguments)``; unpickling ``names`` has made their modules known."""
    return make(*arguments)


def _imported_names(code: CodeType, package: str | None) -> Iterator[str]:
    """Yield what code and the functions in it may import: modules, or names in modules."""
    if dis.opmap["IMPORT_NAME"] in code.co_code[::2]:
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for level, items, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opname == "IMPORT_NAME":
                with contextlib.suppress(ImportError):  # relative, outside a package
                    name = importlib.util.resolve_name("." * level.argval + step.argval, package)
                    yield from [name, *(f"{name}.{item}" for item in items.argval or ())]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imported_names(constant, package)


@functools.lru_cache(maxsize=1000)
def _names_in_source(source: bytes, package: str) -> tuple[str, ...]:
    try:
        code = compile(zlib.decompress(source), package, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return ()
    return tuple(_imported_names(code, package))


def _find_spec(name: str) -> ModuleSpec | None:
    """Return where a module of the caller's is, without importing it or its package."""
    path, parent = None, name.rpartition(".")[0]
    if parent:
        above = _find_spec(parent)
        path = above.submodule_search_locations if above else None
    if (parent and path is None) or name in sys.stdlib_module_names:
        return None
    spec = getattr(sys.modules.get(name), "__spec__", None)
    spec = spec or _finder.find_spec(name, path) or _search(name, path)
    file = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
    return spec if is_callers_module(name, file and file.replace(".zip/", "/")) else None


def _search(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    if path is None:
        found = (one.find_spec(name, None) for one in sys.meta_path if one is not _finder)
    else:  # finders of sys.meta_path need the package loaded for a folder without __init__.py
        finders: list[Any] = [pkgutil.get_importer(folder) for folder in path]
        found = (one.find_spec(name) for one in finders if one)
    return next(filter(None, found), None)


def _read_module(name: str, spec: ModuleSpec) -> SentModule:
    loader: Any = spec.loader
    folders = spec.submodule_search_locations
    source = b"" if spec.origin is None else None
    if spec.origin and spec.origin.endswith(".py") and ".zip/" not in spec.origin:
        with contextlib.suppress(OSError):
            source = loader.get_data(spec.origin)
    packed = None if source is None else zlib.compress(source, 1)
    values = list(vars(sys.modules[name]).items()) if name in sys.modules else []
    plain = {n: v for n, v in values if n[:2] != "__" and _is_plain(v)}
    return SentModule(name, spec.origin, folders and [*folders], packed, plain)


def _is_plain(value: Any, depth: int = 4) -> bool:
    if type(value) is dict:
        value = [*value, *value.values()]
    if type(value) in (list, tuple, set, frozenset):
        return depth > 0 and all(_is_plain(one, depth - 1) for one in value)
    return type(value) in _PLAIN and value == value  # no NaN: each would look like a change


_warn = functools.cache(logger.warning)


def _describe_missing(name: str, file: str | None) -> str:
    return (
        f"module {name} ({file}), which is not sent to the workers, as Python source files are; "
        "if they do not have it, call sc.addPyFile with that file or zip"
    )


class _Loader(SourceLoader):
    def __init__(self, sent: SentModule, file: str | None) -> None:
        self._sent, self._file = sent, file or sent.name

    def get_filename(self, fullname: str) -> str:
        return self._file

    def get_data(self, path: str | bytes) -> bytes:
        is_own = path == self._file and self._sent.source is not None
        return zlib.decompress(self._sent.source or b"") if is_own else Path(str(path)).read_bytes()

    def exec_module(self, module: ModuleType) -> None:
        name = self._sent.name
        if self._sent.source is None:
            raise ModuleNotFoundError(_describe_missing(name, self._file), name=name)
        linecache.lazycache(self._file, vars(module))  # for tracebacks, and to be sent on
        super().exec_module(module)
        for key, value in self._sent.values.items():
            own = getattr(module, key, None)
            if type(own) is not type(value) or own != value:  # equal ones keep their objects
                setattr(module, key, value)


class _Finder(MetaPathFinder):
    """Finds received modules: in workers before others by their names, else after them."""

    def __init__(self) -> None:
        self.received: dict[str, SentModule] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        sent = self.received.get(name)
        if sent is None:
            return None
        comes_first = (
            "pyspark.worker" in sys.modules
            or "OMPI_COMM_WORLD_RANK" in os.environ
            or _is_received(name.rpartition(".")[0])
        )
        own = _search(name, path)
        if own and (sent.source is None or not comes_first):
            return None  # that one is found
        # With files beside it, if this machine has the same.
        place = own if own and _read_module(name, own).source == sent.source else sent
        spec = ModuleSpec(name, _Loader(sent, place.origin), origin=place.origin)
        spec.submodule_search_locations = place.submodule_search_locations
        spec.has_location = place.origin is not None
        return spec


_finder = _Finder()


def _is_received(name: str) -> bool:
    return isinstance(getattr(sys.modules.get(name), "__loader__", None), _Loader)


def _receive(*fields: Any) -> str:
    """Make imports find a module, as it was sent last."""
    sent = SentModule(*fields)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if _finder.received.get(sent.name, sent) != sent:  # and this worker is used again
        for name in filter(_is_received, _finder.received):
            del sys.modules[name]
    _finder.received[sent.name] = sent
    return sent.name
