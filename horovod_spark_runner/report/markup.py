"""HTML and SVG from Python: what is no `Markup` is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias


class Markup(str):
    """Text that is HTML or SVG already, and not to be escaped."""

    __slots__ = ()


Child: TypeAlias = "str | Iterable[Child]"
Attribute: TypeAlias = "str | int | float | None"

# Elements that have no end.
_EMPTY = frozenset({"br", "meta"})


def element(tag: str, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element.

    Args:
        tag: its name.
        children: its contents: text, which is escaped, `Markup`, or sequences of them.
        attributes: by name; ``_`` stands for ``-``, ``class_`` for ``class``. ``None`` leaves one
            out; numbers are rounded to hundredths.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(_text(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _EMPTY:
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{join(*children)}</{tag}>")


def join(*children: Child) -> Markup:
    """Return ``children`` one after the other; text is escaped."""
    return Markup("".join(_escaped(child) for child in children))


def _escaped(child: Child) -> str:
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        # Text that was read from files may hold what no page can.
        return html.escape(child.encode("utf-8", "replace").decode(), quote=False)
    return "".join(map(_escaped, child))


def _text(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value).encode("utf-8", "replace").decode()
