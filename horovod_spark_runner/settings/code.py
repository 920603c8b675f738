"""Functions and classes by the name they are imported by, where only text can be kept."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InvalidInputError

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_import_name(value: object) -> bool:
    """Tell whether ``value`` is text such as ``"package.module:function"``."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def import_name(thing: Any) -> str | None:
    """Return the name by which another process can import ``thing``; ``None`` if there is none."""
    name = f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', '')}"
    if not is_import_name(name) or name.startswith("__main__:"):
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
    module, _, path = text.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(
            f"{name}={text!r} cannot be imported here ({error}); put its module on Python's path, "
            "or give the function itself"
        ) from error
    return found


def named(value: Any) -> Any:
    """Return ``value`` with the functions and classes in it by their import names, if they have."""
    if callable(value):
        return import_name(value) or value
    if isinstance(value, Mapping):
        return {key: named(one) for key, one in value.items()}
    if isinstance(value, list):
        return [named(one) for one in value]
    return tuple(map(named, value)) if isinstance(value, tuple) else value


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
