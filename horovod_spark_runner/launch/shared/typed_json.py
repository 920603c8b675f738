"""Dataclasses as JSON, and back with every field checked. Pure.

Whoever takes a message takes a dataclass, so what is missing, unknown or of another type is found
here, and named, and nowhere later. Frames, lines and requests all come this way.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import reprlib
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import TypeVar, Union, get_args, get_origin, get_type_hints

_Reader = Callable[[object], object]
_KIND = "kind"


class MessageError(ValueError):
    """A text is no message, or none that is expected where it came."""


class Message:
    """Base of dataclasses that travel by themselves: their JSON names their class."""

    __slots__ = ()


M = TypeVar("M", bound=Message)
T = TypeVar("T")


def to_json(message: object) -> str:
    """Return a dataclass as JSON.

    Raises:
        TypeError: it holds what JSON does not have.
    """
    return json.dumps(message, default=_to_fields, separators=(",", ":"))


def parse(text: str | bytes, *kinds: type[M]) -> M:
    """Return the message in ``text``.

    Args:
        text: one JSON object.
        kinds: the classes it may be of.

    Raises:
        MessageError: it is of none of them, or not as that one is declared.
    """
    known: Mapping[str, type[M]] = _named(kinds)
    return _by_kind(_load(text), known)


def parse_plain(text: str | bytes, cls: type[T]) -> T:
    """Return the dataclass whose fields ``text`` holds, as programs without this package send it.

    Raises:
        MessageError: they are not as declared.
    """
    return _by_fields(_load(text), cls)


def _load(text: str | bytes) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"no JSON: {error}") from error
    return value


def _to_fields(value: object) -> dict[str, object]:
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} has no JSON")
    cls: type = type(value)
    fields = {name: getattr(value, name) for name in _names(cls)}
    return {_KIND: cls.__name__, **fields} if isinstance(value, Message) else fields


@functools.cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


@functools.cache
def _readers(cls: type) -> Mapping[str, _Reader]:
    """Return what reads each field of a dataclass."""
    hints = get_type_hints(cls)
    return {name: _reader(hints[name]) for name in _names(cls)}


@functools.cache
def _named(kinds: tuple[type, ...]) -> Mapping[str, type]:
    return {kind.__name__: kind for kind in kinds}


def _by_kind(value: object, known: Mapping[str, type[M]]) -> M:
    fields = _object(value)
    kind = fields.pop(_KIND, None)
    cls = known.get(kind) if isinstance(kind, str) else None
    if cls is None:
        expected = ", ".join(sorted(known))
        raise MessageError(f"a message of kind {reprlib.repr(kind)}; expected {expected}")
    return _by_fields(fields, cls)


def _by_fields(value: object, cls: type[T]) -> T:
    owner: type = cls
    fields, readers = _object(value), _readers(owner)
    if fields.keys() != readers.keys():
        wrong = ", ".join(sorted(fields.keys() ^ readers.keys()))
        raise MessageError(f"{cls.__name__} with missing or unknown fields: {wrong:.200}")
    values: dict[str, object] = {}
    for name, read in readers.items():
        try:
            values[name] = read(fields[name])
        except MessageError as error:
            raise MessageError(f"{cls.__name__}.{name}: {error}") from None
    return cls(**values)


def _reader(hint: object) -> _Reader:
    """Return what checks, and makes of parsed JSON, a value of an annotation's type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and origin is None:
        return _class_reader(hint)
    if origin is tuple and arguments[1:] == (...,):
        return functools.partial(_tuple, _reader(arguments[0]))
    if origin is dict and arguments[0] is str:
        return functools.partial(_dict, _reader(arguments[1]))
    if origin in (Union, UnionType):
        others = [argument for argument in arguments if argument is not NoneType]
        if len(others) < len(arguments):
            if len(others) > 1:
                raise TypeError(f"{hint} cannot be read from JSON: more than one kind beside None")
            return functools.partial(_optional, _reader(others[0]))
        # The others of the union do not travel.
        known = _named(tuple(kind for kind in arguments if issubclass(kind, Message)))
        return lambda value: _by_kind(value, known)
    raise TypeError(f"{hint} cannot be read from JSON")


def _class_reader(cls: type) -> _Reader:
    if issubclass(cls, Message):
        known = _named((cls,))
        return lambda value: _by_kind(value, known)
    if dataclasses.is_dataclass(cls):
        return lambda value: _by_fields(value, cls)
    if cls in _PLAIN:
        return _PLAIN[cls]
    raise TypeError(f"{cls} cannot be read from JSON")


def _object(value: object) -> dict[str, object]:
    if type(value) is not dict:
        raise _unexpected("an object", value)
    return value


def _tuple(read: _Reader, value: object) -> tuple[object, ...]:
    if type(value) is not list:
        raise _unexpected("a list", value)
    return tuple(map(read, value))


def _dict(read: _Reader, value: object) -> dict[str, object]:
    return {name: read(entry) for name, entry in _object(value).items()}


def _optional(read: _Reader, value: object) -> object:
    return None if value is None else read(value)


def _text(value: object) -> object:
    if type(value) is not str:
        raise _unexpected("text", value)
    return value


def _whole(value: object) -> object:
    if type(value) is not int:
        raise _unexpected("a whole number", value)
    return value


def _number(value: object) -> object:
    if type(value) is float:
        return value
    try:
        return float(_whole(value))  # type: ignore[arg-type]
    except (MessageError, OverflowError):
        raise _unexpected("a number", value) from None


def _truth(value: object) -> object:
    if type(value) is not bool:
        raise _unexpected("true or false", value)
    return value


_PLAIN: Mapping[type, _Reader] = {str: _text, int: _whole, float: _number, bool: _truth}


def _unexpected(wanted: str, value: object) -> MessageError:
    return MessageError(f"expected {wanted}, got {reprlib.repr(value)}")
