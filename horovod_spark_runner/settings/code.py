"""Functions and classes by the name they are imported by, where only text can be kept."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import InvalidInputError

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
# The module of a script or notebook.
_MAIN = "__main__:"
_ON_PATH = "put its module on Python's path"


class CodeName(str):
    """The import name of a function or class, which is at hand: its name may come to mean another.

    Attributes:
        thing: the function or class.
    """

    thing: Any

    def __new__(cls, text: str, thing: Any) -> CodeName:
        """Return the name ``text`` of ``thing``."""
        made = super().__new__(cls, text)
        made.thing = thing
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return CodeName, (str(self), self.thing)


def is_import_name(value: object) -> bool:
    """Tell whether ``value`` is text such as ``"package.module:function"``."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def import_name(thing: Any) -> str | None:
    """Return the name by which another process can import ``thing``; ``None`` if there is none."""
    name = name_here(thing)
    return None if name is None or is_of_script(name) else name


def is_of_script(name: str) -> bool:
    """Tell whether an import name is of a script's or notebook's own code, as a process has it."""
    return name.startswith(_MAIN)


def name_here(thing: Any) -> str | None:
    """Return the name that ``thing`` has in this process; ``None`` if there is none.

    Another process that runs the same script or notebook may have it under this name, too.
    """
    name = f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', '')}"
    if not is_import_name(name):
        return None
    try:
        found = by_import_name("it", name)
    except InvalidInputError:
        return None
    return name if found is thing else None


def by_import_name(name: str, text: str) -> Any:
    """Return what ``text`` names.

    Args:
        name: the setting that holds it, for the message.
        text: module and name, such as ``"package.module:function"``.

    Raises:
        InvalidInputError: there is no such module, or nothing of that name in it.
    """
    if isinstance(text, CodeName):
        return text.thing
    module, _, path = text.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(
            f"{name}={text!r} cannot be imported here ({error}); "
            + ("define it in this script or notebook" if is_of_script(text) else _ON_PATH)
            + ", or give the function itself"
        ) from error
    return found


def named(value: Any) -> Any:
    """Return ``value`` with the functions and classes in it by their names, if they have."""
    if callable(value):
        name = name_here(value)
        return value if name is None else CodeName(name, value)
    if isinstance(value, Mapping):
        return {key: named(one) for key, one in value.items()}
    if isinstance(value, list):
        return [named(one) for one in value]
    return tuple(map(named, value)) if isinstance(value, tuple) else value


def inside(value: Any) -> Iterator[Any]:
    """Yield what is in the dictionaries, lists and tuples of ``value``, or ``value`` itself."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from inside(one)
    else:
        yield value


def misfit(function: Callable[..., Any], *given: Any, **by_name: Any) -> str:
    """Return why ``function`` cannot be called with such arguments; ``""`` if it can.

    Some functions written in C do not tell what they take; these may be called.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*given, **by_name)
    except TypeError as error:
        return f"it takes {signature}: {error}"
    return ""
