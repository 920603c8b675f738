"""JSON of bounded depth and size, and dataclasses as JSON, with every field checked. Pure.

Whoever takes a message takes a dataclass, so what is missing, unknown or of another type is found
here, and named, and nowhere later. Frames, lines and requests all come this way, and so do records
that are read from storage.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, ForwardRef, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import InvalidInputError, printable

# A JSON object of any contents, such as a record of a run.
JsonObject: TypeAlias = dict[str, Any]
_Reader = Callable[[object], object]
_KIND = "kind"
# Limits of JSON: levels of lists and objects, values in one text, and bits of integers, which all
# have a float.
MAX_DEPTH, _MAX_VALUES, _MAX_BITS = 100, 8_000_000, 1000


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
    classes: Mapping[str, type[M]] = _named(kinds)
    return _by_kind(_load(text), classes)


def parse_plain(text: str | bytes, cls: type[T]) -> T:
    """Return the dataclass whose fields ``text`` holds, as programs without this package send it.

    Raises:
        MessageError: they are not as declared.
    """
    return _by_fields(_load(text), cls)


def read_fields(value: object, cls: type[T]) -> T:
    """Return the dataclass whose fields an object of parsed JSON holds, as storage keeps it.

    Other versions may have written it: unknown fields are ignored, missing ones have their default.

    Raises:
        InvalidInputError: a field without a default is missing, or one is of another type.
    """
    try:
        return _by_fields(value, cls, exactly=False)
    except ValueError as error:
        raise InvalidInputError(str(error)) from error


def load_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        InvalidInputError: it is not JSON, or exceeds the limits of this module.
    """
    try:
        return _within_limits(text)
    except ValueError as error:
        raise InvalidInputError(f"it cannot be read as JSON: {error}") from error


def _within_limits(text: str | bytes) -> object:
    marks = (b",", b"[", b"{") if isinstance(text, bytes) else (",", "[", "{")
    if (count := sum(map(text.count, marks))) > _MAX_VALUES:  # type: ignore[arg-type]
        raise ValueError(f"it has about {count:,} values; at most {_MAX_VALUES:,} are read")
    too_deep = f"its lists and objects are nested more than {MAX_DEPTH} deep"
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        nested = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for each in nested for one in each if isinstance(one, (dict, list))]
        if not level:
            break
    else:
        raise ValueError(too_deep)
    return value


def _integer(text: str) -> int:
    if len(text) > _MAX_BITS or (value := int(text)).bit_length() > _MAX_BITS:
        raise ValueError(f"the integer {text:.20} has more than {_MAX_BITS} bits")
    return value


def _load(text: str | bytes) -> object:
    try:
        value: object = load_json(text)
    except ValueError as error:
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
def _readers(cls: type, exactly: bool) -> Mapping[str, _Reader]:
    """Return what reads each field of a dataclass."""
    hints = get_type_hints(cls)
    return {name: _reader(hints[name], exactly) for name in _names(cls)}


@functools.cache
def _named(kinds: tuple[type, ...]) -> Mapping[str, type]:
    return {kind.__name__: kind for kind in kinds}


def _by_kind(value: object, classes: Mapping[str, type[M]]) -> M:
    fields = _object(value)
    kind = fields.pop(_KIND, None)
    cls = classes.get(kind) if isinstance(kind, str) else None
    if cls is None:
        expected = ", ".join(sorted(classes))
        raise MessageError(f"a message of kind {reprlib.repr(kind)}; expected {expected}")
    return _by_fields(fields, cls)


def _by_fields(value: object, cls: type[T], exactly: bool = True) -> T:
    owner: type = cls
    fields, readers = _object(value), _readers(owner, exactly)
    wrong = fields.keys() ^ readers.keys() if exactly else _required(owner) - fields.keys()
    if wrong:
        named = printable(", ".join(sorted(wrong)))
        raise MessageError(f"{cls.__name__} with missing or unknown fields: {named:.200}")
    values: dict[str, object] = {}
    for name, read in readers.items():
        try:
            if name in fields:
                values[name] = read(fields[name])
        except MessageError as error:
            raise MessageError(f"{cls.__name__}.{name}: {error}") from None
    return cls(**values)


@functools.cache
def _required(cls: type) -> frozenset[str]:
    missing = dataclasses.MISSING
    return frozenset(
        one.name
        for one in dataclasses.fields(cls)
        if one.default is missing and one.default_factory is missing
    )


def _reader(hint: object, exactly: bool) -> _Reader:
    """Return what checks, and makes of parsed JSON, a value of an annotation's type."""
    if hint is Any or isinstance(hint, ForwardRef):  # a recursive type
        return lambda value: value
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and origin is None:
        return _class_reader(hint, exactly)
    if origin is tuple and arguments[1:] == (...,):
        return functools.partial(_tuple, _reader(arguments[0], exactly))
    if origin is tuple:
        return functools.partial(_each, [_reader(one, exactly) for one in arguments])
    if origin in (list, Sequence):
        return lambda value: list(_tuple(_reader(arguments[0], exactly), value))
    if origin in (dict, Mapping) and arguments[0] is str:
        return functools.partial(_dict, _reader(arguments[1], exactly))
    if origin in (Union, UnionType):
        kinds = tuple(
            one for one in arguments if isinstance(one, type) and issubclass(one, Message)
        )
        if len(kinds) > 1:  # the others of the union do not travel
            return lambda value: _by_kind(value, _named(kinds))
        others = [_reader(one, exactly) for one in arguments if one is not NoneType]
        by_type = {one: _PLAIN[one] for one in arguments if one in _PLAIN}
        read = others[0] if len(others) == 1 else functools.partial(_one_of, by_type, others)
        return functools.partial(_optional, read) if NoneType in arguments else read
    raise TypeError(f"{hint} cannot be read from JSON")


def _class_reader(cls: type, exactly: bool) -> _Reader:
    if issubclass(cls, Message):
        classes = _named((cls,))
        return lambda value: _by_kind(value, classes)
    if dataclasses.is_dataclass(cls):
        return lambda value: _by_fields(value, cls, exactly)
    if cls in _PLAIN:
        return _PLAIN[cls]
    return functools.partial(_instance, cls)  # not read from JSON


def _instance(cls: type, value: object) -> object:
    if not isinstance(value, cls):
        raise _unexpected(cls.__name__, value)
    return value


def _object(value: object) -> dict[str, object]:
    if type(value) is not dict:
        raise _unexpected("an object", value)
    return value


def _tuple(read: _Reader, value: object) -> tuple[object, ...]:
    if type(value) is not list:
        raise _unexpected("a list", value)
    return tuple(map(read, value))


def _each(reads: list[_Reader], value: object) -> tuple[object, ...]:
    if type(value) is not list or len(value) != len(reads):
        raise _unexpected(f"a list of {len(reads)}", value)
    return tuple(read(one) for read, one in zip(reads, value, strict=True))


def _dict(read: _Reader, value: object) -> dict[str, object]:
    return {name: read(entry) for name, entry in _object(value).items()}


def _one_of(by_type: Mapping[type, _Reader], reads: list[_Reader], value: object) -> object:
    if type(value) in by_type:
        return by_type[type(value)](value)
    for read in reads[:-1]:
        try:
            return read(value)
        except MessageError:
            pass
    return reads[-1](value)


def _optional(read: _Reader, value: object) -> object:
    return None if value is None else read(value)


def _text(value: object) -> object:
    if type(value) is not str:
        raise _unexpected("text", value)
    return value


def _whole(value: object) -> object:
    if type(value) is not int:
        raise _unexpected("an integer", value)
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
