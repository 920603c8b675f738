"""Import names of functions and classes, where only text can be stored."""

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


class _CodeName(str):
    """The import name of a function or class that the user's own code gave, not storage.

    Attributes:
        thing: the function or class, if available: its name may change its meaning.
    """

    thing: Any

    def __new__(cls, text: str, thing: Any = None) -> _CodeName:
        """Return the name ``text`` of ``thing``."""
        made = super().__new__(cls, text)
        made.thing = thing
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _CodeName, (str(self), self.thing)


class UserSettings(dict[str, object]):
    """Settings that the user's own code gave, not storage; their text leaves out secrets."""

    def __repr__(self) -> str:
        hidden = {
            key: dict.fromkeys(value, "…") if key == "env" and isinstance(value, Mapping) else value
            for key, value in self.items()
        }
        return repr(hidden)


def is_import_name(value: object) -> bool:
    """Return whether ``value`` is text such as ``"package.module:function"``."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def import_name(thing: object) -> str | None:
    """Return the name by which another process can import ``thing``; ``None`` if it has none."""
    name = name_here(thing)
    return None if name is None or is_of_script(name) else name


def is_of_script(name: str) -> bool:
    """Return whether an import name refers to a script's or notebook's own code."""
    return name.startswith(_MAIN)


def name_here(thing: object) -> str | None:
    """Return the name of ``thing`` in this process; ``None`` if it has none.

    Another process that runs the same script or notebook may have it under the same name.
    """
    name = f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', '')}"
    if not is_import_name(name):
        return None
    try:
        imported = by_import_name("it", _CodeName(name))
    except InvalidInputError:
        return None
    return name if imported is thing else None


def by_import_name(name: str, text: str) -> Any:
    """Return the function or class that ``text`` names.

    Args:
        name: the setting that holds it, for the message.
        text: module and name, such as ``"package.module:function"``.

    Raises:
        InvalidInputError: there is no such module, or nothing of that name in it; or the name comes
            from storage, which must not decide what code runs.
    """
    refuse_stored_names({name: text})
    if (thing := getattr(text, "thing", None)) is not None:
        return thing
    module, _, path = text.partition(":")
    try:
        target: object = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(
            f"{name}={text!r} cannot be imported here ({error}); "
            + ("define it in this script or notebook" if is_of_script(text) else _ON_PATH)
            + ", or give the function itself"
        ) from error
    return target


def refuse_stored_names(settings: Mapping[str, Any]) -> None:
    """Check that no import name in settings comes from storage.

    Args:
        settings: values that may name code, by setting.

    Raises:
        InvalidInputError: some do; the message names all.
    """
    stored = {
        name: [
            one
            for one in iterate_items(value)
            if is_import_name(one) and not isinstance(one, _CodeName)
        ]
        for name, value in settings.items()
    }
    refused = {name: names for name, names in stored.items() if names}
    if refused:
        setters = (name.partition("[")[0] for name in refused)
        again = ", ".join(f"set{one[:1].upper()}{one[1:]}(…)" for one in dict.fromkeys(setters))
        raise InvalidInputError(
            ", ".join(f"{name}={', '.join(map(repr, names))}" for name, names in refused.items())
            + " comes from storage, or a plain map as storage may hold, which must not decide what "
            f"code runs: give each function itself, or its name once more, by {again} or a "
            "ParamGridBuilder"
        )


def replace_by_names(value: Any) -> object:
    """Return ``value`` with its functions and classes replaced by their names, if they have one."""

    def name(one: Any) -> Any:
        text = name_here(one) if callable(one) else None
        return one if text is None else _CodeName(text, one)

    return _map_items(value, name)


def mark_user_settings(value: Any) -> object:
    """Return a copy of ``value`` marked, with its import names, as set by the user's code."""

    def mark(one: Any) -> Any:
        return _CodeName(one, getattr(one, "thing", None)) if is_import_name(one) else one

    copied = _map_items(value, mark)
    return UserSettings(copied) if isinstance(copied, dict) else copied


def copy_user_mark(value: Any, checked: object) -> Any:
    """Return a copy of ``checked``, which was made of ``value``, with the mark of ``value``."""
    copied = _map_items(checked, lambda one: one)
    return UserSettings(copied) if isinstance(value, UserSettings) else copied


def from_storage(value: Any) -> Any:
    """Return a copy of ``value`` without the mark, as if read from storage."""
    copied = _map_items(value, lambda one: str(one) if isinstance(one, _CodeName) else one)
    return {**copied} if isinstance(copied, dict) else copied


def _map_items(value: Any, change: Callable[[object], object]) -> Any:
    """Return ``value`` with the items of its dictionaries, lists and tuples changed."""
    if isinstance(value, Mapping):
        changed = {key: _map_items(one, change) for key, one in value.items()}
        return UserSettings(changed) if isinstance(value, UserSettings) else changed
    if type(value) in (list, tuple):
        return type(value)(_map_items(one, change) for one in value)
    return change(value)


def iterate_items(value: Any) -> Iterator[Any]:
    """Yield the items of the dictionaries, lists and tuples of ``value``, or ``value`` itself."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from iterate_items(one)
    else:
        yield value


def explain_misfit(function: Callable[..., object], /, *positional: object, **by_name: Any) -> str:
    """Return why ``function`` cannot be called with such arguments; ``""`` if it can.

    Some functions written in C have no signature; these may be called. That of a wrapper counts,
    and not that of the function within, to which it may pass other arguments.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*positional, **by_name)
    except TypeError as error:
        return f"it takes {signature}: {error}"
    return ""
