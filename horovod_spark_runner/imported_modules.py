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
import logging
import os
import pickle
import pkgutil
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import ExecutionLoader, MetaPathFinder
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
_PLAIN = (bool, int, float, str, bytes, type(None))


def is_callers_module(name: str, file: Any) -> bool:
    """Return whether a module is neither installed nor of Python: others need it sent."""
    if not isinstance(file, str) or name.partition(".")[0] in (_THIS_PACKAGE, "__main__"):
        return False
    return not file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)


class SentModule:
    """A module with its source; its name once unpickled, when imports find it.

    Args:
        name: its full name.
        spec: where this process finds it.
    """

    def __init__(self, name: str, spec: ModuleSpec) -> None:
        self.name, self.file = name, spec.origin
        self.is_package = spec.submodule_search_locations is not None
        self.source = _read_source(name, spec)
        values = list(vars(sys.modules[name]).items()) if name in sys.modules else []
        self.values = {n: v for n, v in values if n[:2] != "__" and _is_plain(v)}

    def __reduce__(self) -> tuple[Callable[..., str], tuple[dict[str, Any], bytes]]:
        # Compressed: frameworks are detected by names in the pickle, but not by those in source.
        packed = zlib.compress(pickle.dumps(self.source), 1)
        return _receive, ({**vars(self), "source": None}, packed)


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
        module = found[name] = collected.get(name) or SentModule(name, spec)
        collected[name] = module
        parent = name.rpartition(".")[0]
        waiting += [parent] if parent else []
        if module.source is None:
            _warn_not_sent(name, module.file)
        else:
            package = name if module.is_package else parent
            waiting += _names_in_source(module.source, module.file or name, package)
    return tuple(found.values())


def make_after_receiving(
    names: tuple[str, ...], make: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Return ``make(*arguments)``; unpickling ``names`` has made their modules known."""
    return make(*arguments)


def _imported_names(code: CodeType, package: str | None) -> Iterator[str]:
    """Yield what code and the functions in it may import: modules, or names in modules."""
    if dis.opmap["IMPORT_NAME"] in code.co_code[::2]:
        before: list[Any] = []
        for step in dis.get_instructions(code):
            if step.opname == "IMPORT_NAME":
                (level, items), name = before[-2:], step.argval
                with contextlib.suppress(ImportError):  # relative, outside a package
                    name = importlib.util.resolve_name("." * level + name, package)
                    yield from [name, *(f"{name}.{item}" for item in items or ())]
            elif step.opname != "EXTENDED_ARG":
                before.append(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imported_names(constant, package)


@functools.lru_cache(maxsize=1000)
def _names_in_source(source: str, file: str, package: str) -> tuple[str, ...]:
    try:
        return tuple(_imported_names(compile(source, file, "exec", dont_inherit=True), package))
    except (SyntaxError, ValueError):
        return ()


def _find_spec(name: str) -> ModuleSpec | None:
    """Return where a module of the caller's is, without importing it or its package."""
    path, parent = None, name.rpartition(".")[0]
    if name in sys.stdlib_module_names:
        return None
    if parent:
        above = _find_spec(parent)
        path = above and above.submodule_search_locations
        if path is None:
            return None
    spec = getattr(sys.modules.get(name), "__spec__", None)
    spec = spec or _finder.find_spec(name, path) or _search(name, path)
    if spec is None:
        return None
    file = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    return spec if is_callers_module(name, file.replace(".zip/", "/")) else None


def _search(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    if path is None:
        found = (one.find_spec(name, None) for one in sys.meta_path if one is not _finder)
    else:  # finders of sys.meta_path need the package loaded for a folder without __init__.py
        finders: list[Any] = [pkgutil.get_importer(folder) for folder in path]
        found = (one.find_spec(name) for one in finders if one)
    return next(filter(None, found), None)


def _read_source(name: str, spec: ModuleSpec) -> str | None:
    """Return a module's source, or ``None`` if it is none of Python's or in a zip file."""
    if isinstance(spec.loader, _Loader):
        return spec.loader.get_source(name)
    if spec.origin is None:  # a folder
        return ""
    if not spec.origin.endswith(".py") or ".zip/" in spec.origin:
        return None
    try:
        return importlib.util.decode_source(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, UnicodeError):
        return None


@functools.cache
def _warn_not_sent(name: str, file: str | None) -> None:
    if ".zip/" not in str(file):  # of sc.addPyFile, or Spark's own
        logger.warning("a function imports %s", _not_sent(name, file))


def _not_sent(name: str, file: str | None) -> str:
    place = str(file).partition(".zip/")
    path = f"{place[0]}.zip" if place[1] else file
    return (
        f"module {name} ({path}), which is not sent to the workers, as Python source files are; "
        f"if they do not have it, call sc.addPyFile({path!r})"
    )


def _is_plain(value: Any, depth: int = 4) -> bool:
    if type(value) is dict:
        value = [*value, *value.values()]
    if type(value) in (list, tuple, set, frozenset):
        return depth > 0 and all(_is_plain(one, depth - 1) for one in value)
    return type(value) in _PLAIN


class _Loader(ExecutionLoader):
    def __init__(self, sent: dict[str, Any], file: str | None) -> None:
        self.sent, self._file = sent, file

    def get_filename(self, fullname: str) -> str:
        return self._file or fullname

    def get_source(self, fullname: str) -> str | None:
        source: str | None = self.sent["source"]
        return source

    def is_package(self, fullname: str) -> bool:
        return bool(self.sent["is_package"])

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if self.get_source(name) is None:
            raise ModuleNotFoundError(_not_sent(name, self._file), name=name)
        super().exec_module(module)
        _set_values(module, self.sent["values"])


def _set_values(module: ModuleType, values: dict[str, Any]) -> None:
    """Set globals that the sender had changed; equal ones keep their objects."""
    for name, value in values.items():
        own = getattr(module, name, None)
        if type(own) is not type(value) or own != value:
            setattr(module, name, value)


class _Finder(MetaPathFinder):
    """Finds received modules: in workers before others by their names, else after them."""

    def __init__(self) -> None:
        self.received: dict[str, dict[str, Any]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        sent = self.received.get(name)
        if sent is None:
            return None
        own = _search(name, path)
        package = sys.modules.get(name.rpartition(".")[0])
        comes_first = (
            "pyspark.worker" in sys.modules
            or "OMPI_COMM_WORLD_RANK" in os.environ
            or isinstance(getattr(package, "__loader__", None), _Loader)
        )
        if own and (sent["source"] is None or not comes_first):
            return None  # that one is found
        has_same = own is not None and _read_source(name, own) == sent["source"]
        file = own.origin if own and has_same else sent["file"]
        spec = ModuleSpec(name, _Loader(sent, file), origin=file, is_package=sent["is_package"])
        spec.has_location = file is not None
        if sent["is_package"]:
            folders = own.submodule_search_locations if own and has_same else None
            spec.submodule_search_locations = [*(folders or [os.path.dirname(file or "")])]
        return spec


_finder = _Finder()


def _receive(sent: dict[str, Any], packed: bytes) -> str:
    """Make imports find a module, as it was sent last."""
    sent["source"] = pickle.loads(zlib.decompress(packed))
    name: str = sent["name"]
    before = _finder.received.get(name, sent)
    _finder.received[name] = sent
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    changed = {n: v for n, v in sent["values"].items() if before["values"].get(n) != v}
    for loaded in _finder.received:
        module = sys.modules.get(loaded)
        if module and isinstance(module.__loader__, _Loader):
            if before["source"] != sent["source"]:
                del sys.modules[loaded]  # others may hold objects of it
            elif loaded == name:
                _set_values(module, changed)
    return name
