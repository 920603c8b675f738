"""Settings as fields of frozen dataclasses, each declared once, with validator and description."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from ..errors import InvalidInputError, brief
from .keywords import check_keywords, nested_usage
from .validators import Kind

T = TypeVar("T")
S = TypeVar("S", bound="Settings")
_KIND, _TEXT = "kind", "text"


def setting(default: T, kind: Kind[T], text: str, *, shown: bool = True) -> T:
    """Return the field of a setting.

    Args:
        default: its default.
        kind: its kind of values.
        text: its description, for docstrings and ``horovod-spark-runner parameters``.
        shown: ``False`` leaves the value, which may be a secret, out of ``repr``.
    """
    metadata = {_KIND: kind, _TEXT: text}
    if isinstance(default, dict):
        factory: Callable[[], Any] = default.copy
        made: T = field(default_factory=factory, repr=shown, metadata=metadata)
        return made
    return field(default=default, repr=shown, metadata=metadata)


def required(kind: Kind[T], text: str) -> T:
    """Return the field of a required setting; see `setting`."""
    made: T = field(metadata={_KIND: kind, _TEXT: text})  # mypy takes it for a default
    return made


@dataclass(frozen=True)
class Settings:
    """Base of all classes of settings: construction validates each field by its kind."""

    def __post_init__(self) -> None:
        for one in fields(self):
            checked = kind_of(one).check(one.name, getattr(self, one.name))
            object.__setattr__(self, one.name, checked)

    def __reduce__(self) -> tuple[Callable[[], Settings], tuple[()]]:
        # A mapping proxy does not pickle.
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        plain = {
            name: dict(value) if isinstance(value, MappingProxyType) else value
            for name, value in values.items()
        }
        return partial(type(self), **plain), ()


def kind_of(one: Field[object]) -> Kind[object]:
    """Return a setting's kind of values."""
    kind: Kind[Any] = one.metadata[_KIND]
    return kind


def text_of(one: Field[Any]) -> str:
    """Return a setting's description."""
    text: str = one.metadata[_TEXT]
    return text


def default_of(one: Field[Any]) -> object:
    """Return a setting's default."""
    return one.default if one.default_factory is MISSING else one.default_factory()


def from_table(cls: type[S]) -> type[S]:
    """Add a class's settings and exceptions to its docstring, and check its keywords."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    lines = [
        textwrap.fill(
            f"{one.name}: {text_of(one)}",
            width=100,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for one in fields(cls)
    ]
    raises = "Raises:\n    InvalidInputError: a setting is invalid."
    cls.__doc__ = "\n".join([doc, "", "Attributes:", *lines, "", raises])
    checked = check_keywords(cls.__name__, partial(nested_usage, cls))(cls.__init__)
    setattr(cls, "__init__", checked)  # noqa: B010
    return cls


def derive(cls: type[S], settings: Settings, **others: Any) -> S:
    """Return settings of class ``cls``: those it shares with ``settings``, and ``others``."""
    shared = {one.name for one in fields(cls)} & {one.name for one in fields(settings)}
    return cls(**{**{name: getattr(settings, name) for name in shared}, **others})


def check_setting_names(cls: type[Settings], name: str, values: Mapping[str, Any]) -> None:
    """Check that a dictionary names settings of a class only.

    Raises:
        InvalidInputError: it names others.
    """
    names = [one.name for one in fields(cls)]
    unknown = [one for one in values if one not in names]
    if unknown:
        raise InvalidInputError(
            f"{name} has no setting {', '.join(map(repr, unknown))}; there are {', '.join(names)}"
        )


def parse_settings(cls: type[S], name: str, values: Mapping[str, Any]) -> S:
    """Return the settings of a class from a dictionary.

    Args:
        cls: the class.
        name: the dictionary's name, for messages.
        values: the dictionary.

    Raises:
        InvalidInputError: it names others, lacks one, or one is invalid.
    """
    check_setting_names(cls, name, values)
    for one in fields(cls):
        if one.name not in values and default_of(one) is MISSING:
            raise InvalidInputError(f"{name}={brief(values)} lacks {one.name!r}: {text_of(one)}")
    return cls(**values)
