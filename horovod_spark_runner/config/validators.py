"""Validators: kinds of settings, and checks of single values."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from ..errors import InvalidInputError, brief

T = TypeVar("T")
# Columns by input or output: one, several that are joined, or (labels only) none.
ColumnNames = Sequence[str | Sequence[str] | None] | Mapping[str, str | Sequence[str] | None]


@dataclass(frozen=True)
class Kind(Generic[T]):
    """Kind of a setting's values.

    Attributes:
        words: its description.
        check: takes the setting's name and a value, and returns the value as a plain one of this
            kind, or raises `InvalidInputError`.
        converter: the function of ``pyspark.ml.param.TypeConverters`` for it.
        parse: makes a value, still to be checked, of a word of a command line; ``None`` if no word
            can express it.
    """

    words: str
    check: Callable[[str, object], T]
    converter: str = "identity"
    parse: Callable[[str], object] | None = None


def check_count(name: str, value: object, minimum: int = 1, advice: str = "") -> int:
    """Return ``value``, which may be NumPy's, as an integer of at least ``minimum``.

    Args:
        name: its name, for the message.
        value: the number.
        minimum: the smallest that is valid.
        advice: end of the message.

    Raises:
        InvalidInputError: ``value`` is not an integer, or below ``minimum``.
    """
    number = as_integer(value)
    if number is None or number < minimum:
        raise InvalidInputError(
            f"{name} must be an integer of at least {minimum}, got {brief(value)}{advice}"
        )
    return number


def as_integer(value: object) -> int | None:
    """Return ``value`` as an integer; ``None`` if it is of another kind."""
    # bool is an int to Python, and NumPy's to older NumPys, but num_workers=True is a mistake.
    if type(value).__name__ in ("bool", "bool_") or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several
        return None


def check_number(name: str, value: object, *, unit: str = "") -> float:
    """Return ``value``, which may be NumPy's, as a finite number of at least 0.

    Args:
        name: its name, for the message.
        value: the number.
        unit: its unit, for the message.

    Raises:
        InvalidInputError: ``value`` is not a number, or negative or infinite.
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else -1.0
    if not math.isfinite(number) or number < 0:
        kind = f"a number of {unit}" if unit else "a number"
        raise InvalidInputError(f"{name} must be {kind}, at least 0, got {brief(value)}")
    return number


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``choices``, else raise ``InvalidInputError``."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidInputError(f"{name} must be one of {', '.join(choices)}, got {brief(value)}")
    return value


def check_flag(name: str, value: object) -> bool:
    """Return ``value``, which may be NumPy's, as a boolean.

    Raises:
        InvalidInputError: it is not, such as ``"no"``, which is true in Python.
    """
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        raise InvalidInputError(f"{name} must be True or False, got {brief(value)}")
    return bool(value)


def check_place(name: str, value: object) -> str | os.PathLike[str]:
    """Return ``value`` if its type is that of a folder's path or URL.

    Raises:
        InvalidInputError: ``value`` is not a path.
    """
    if value == "":
        raise InvalidInputError(f"{name} is empty; give a folder or URL, or leave it out")
    if not isinstance(value, (str, os.PathLike)):
        raise InvalidInputError(f"{name} must be the path or URL of a folder, got {brief(value)}")
    return value


def check_options(name: str, value: object, cls: type[T]) -> T:
    """Return ``value`` if it is of class ``cls`` itself; its defaults for ``None``.

    Raises:
        InvalidInputError: it is not, such as a subclass, whose further fields would be ignored.
    """
    if value is None:
        return cls()
    if type(value) is not cls:
        raise InvalidInputError(
            f"{name} must be {cls.__name__}(…), got an object of type {type(value).__name__}"
        )
    return value


def check_columns(name: str, value: object, *, may_lack: bool = False) -> ColumnNames:
    """Return columns by input or output as a plain list or dictionary of names.

    Args:
        name: their name, for the message.
        value: the columns; a single one may be its name.
        may_lack: whether an entry may be ``None``.

    Raises:
        InvalidInputError: they are neither a list nor a dictionary of columns.
    """
    if isinstance(value, str) and value:
        return [value]
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, Mapping)):
        raise InvalidInputError(
            f"{name} must be a column's name, a list of them or a dictionary from the model's "
            f"names to columns, got {brief(value)}"
        )
    if not isinstance(value, Mapping):
        return [_check_slot(name, one, may_lack) for one in value]
    if not all(isinstance(key, str) for key in value):
        raise InvalidInputError(
            f"{name} must name the model's inputs or outputs, got {brief(tuple(value))}"
        )
    return {key: _check_slot(name, one, may_lack) for key, one in value.items()}


def _check_slot(name: str, value: object, may_lack: bool) -> str | list[str] | None:
    """Return the columns of one input or output."""
    if isinstance(value, str) or (value is None and may_lack):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(n, str) for n in value):
        return list(value)
    raise InvalidInputError(
        f"{name} must hold column names, or lists of those that are joined into one, got "
        f"{brief(value)}"
    )


def _check_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInputError(f"{name} must be a name, got {brief(value)}")
    return value


def _check_above_zero(name: str, value: object, *, unit: str) -> float:
    number = check_number(name, value, unit=unit)
    if not number:
        raise InvalidInputError(f"{name} must be above 0, got {brief(value)}")
    return number


def _check_text_map(name: str, value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise InvalidInputError(
            f"{name} must map text to text, got an object of type {type(value).__name__}"
        )
    wrong = [k for k, v in value.items() if not isinstance(k, str) or not isinstance(v, str)]
    if wrong:  # the values may be secrets: only names and types are shown
        kinds = ", ".join(f"{key!r}: {type(value[key]).__name__}" for key in wrong)
        raise InvalidInputError(f"{name} must map text to text, got {{{kinds}}}")
    return MappingProxyType(dict(value))


def _check_environment(name: str, value: object) -> Mapping[str, str]:
    checked = _check_text_map(name, value)
    for key, each in checked.items():
        if not key or "=" in key or "\0" in key + each:
            raise InvalidInputError(
                f"{name}: {key!r} cannot be set: a name has no '=', and neither it nor its value "
                "has a NUL character"
            )
    return checked


def count(minimum: int = 1, advice: str = "") -> Kind[int]:
    """Return the kind of integers of at least ``minimum``; errors end with ``advice``."""
    words = f"integer, at least {minimum}"
    return Kind(words, lambda name, value: check_count(name, value, minimum, advice), "toInt", int)


def number(unit: str = "") -> Kind[float]:
    """Return the kind of numbers of at least 0 that count ``unit``."""
    words = f"number of {unit}, at least 0" if unit else "number, at least 0"
    return Kind(words, lambda name, value: check_number(name, value, unit=unit), "toFloat", float)


def number_above_zero(unit: str = "") -> Kind[float]:
    """Return the kind of numbers above 0 that count ``unit``."""
    words = f"number of {unit}, above 0" if unit else "number above 0"

    def check(name: str, value: object) -> float:
        return _check_above_zero(name, value, unit=unit)

    return Kind(words, check, "toFloat", float)


def choice(*choices: str) -> Kind[Any]:
    """Return the kind of one of several words."""
    words = "one of " + ", ".join(f'`"{one}"`' for one in choices)
    return Kind(words, lambda name, value: check_choice(name, value, choices), "toString", str)


def optional(kind: Kind[T]) -> Kind[T | None]:
    """Return the kind that may also be ``None``."""

    def check(name: str, value: object) -> T | None:
        return None if value is None else kind.check(name, value)

    # pyspark leaves a Param that is None unset, and converts no such value.
    return Kind(f"{kind.words}; or `None`", check, kind.converter, kind.parse)


def options_of(cls: type[T]) -> Kind[T]:
    """Return the kind of objects of a class of options."""
    return Kind(f"`{cls.__name__}`", lambda name, value: check_options(name, value, cls))


def _parse_flag(word: str) -> object:
    return {"true": True, "false": False}.get(word.lower(), word)


FLAG: Kind[bool] = Kind("`True` or `False`", check_flag, "toBoolean", _parse_flag)
SECONDS = number("seconds")
TEXT: Kind[str] = Kind("text", _check_text, "toString", str)
PLACE: Kind[str | os.PathLike[str]] = Kind("path or URL", check_place, "toString", str)
TEXT_MAP: Kind[Mapping[str, str]] = Kind("dictionary of text by name", _check_text_map)
ENVIRONMENT: Kind[Mapping[str, str]] = Kind("dictionary of text by name", _check_environment)
COLUMNS: Kind[ColumnNames] = Kind("list of columns, or dictionary of them by name", check_columns)
