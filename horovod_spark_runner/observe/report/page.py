"""The page, and its elements around charts."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TypeAlias

Child: TypeAlias = "str | Iterable[Child]"
_Attribute: TypeAlias = "str | int | float | None"
# Elements without an end tag.
_EMPTY = frozenset({"br", "meta"})
# More rows of a table are left out, and their number shown.
_MOST_ROWS = 500


class Markup(str):
    """Text that is HTML or SVG already, and not to be escaped."""

    __slots__ = ()


def element(tag: str, *children: Child, **attributes: _Attribute) -> Markup:
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
    return Markup(f"<{tag}{written}>{_join(*children)}</{tag}>")


def _join(*children: Child) -> Markup:
    """Return ``children`` one after the other; text is escaped."""
    return Markup("".join(_escaped(child) for child in children))


def _escaped(child: Child) -> str:
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        # Text from files may hold characters that are invalid in a page.
        return html.escape(child.encode("utf-8", "replace").decode(), quote=False)
    return "".join(map(_escaped, child))


def _text(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value).encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: its heading.
        contents: from above to below.
        about: a sentence on what is shown.
    """

    title: str
    contents: Sequence[Child]
    about: str = ""

    def draw(self) -> Child:
        """Return the section; nothing if it is empty."""
        if not any(self.contents):
            return ""
        about = element("p", self.about, class_="about") if self.about else ""
        return element("section", element("h2", self.title), about, self.contents)


def page(
    title: str,
    subtitle: str,
    sections: Iterable[Section],
    top: Child = "",
    tables: Iterable[Section] = (),
) -> str:
    """Return a whole HTML page, which loads nothing and runs no other script than its own.

    Args:
        title: of the page, and its heading.
        subtitle: a line below it, and the rest of the page's title.
        sections: those without contents are left out.
        top: what stands before the first section.
        tables: narrow sections, which follow in two columns if there is room.
    """
    style, script = _part("page.css"), _part("page.js")
    policy = f"default-src 'none'; style-src '{_sum(style)}'; script-src '{_sum(script)}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{title} – {subtitle}"),
        element("style", Markup(style)),
    )
    body = element(
        "body",
        element("h1", title),
        element("p", subtitle, class_="sub"),
        top,
        [section.draw() for section in sections],
        element("div", [section.draw() for section in tables], class_="columns"),
        element("script", Markup(script)),
    )
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


def figure(title: str, *contents: Child, about: str = "") -> Markup:
    """Return a chart, or several, under a title.

    Args:
        title: what is shown.
        contents: the charts.
        about: a line on it, such as the last value.
    """
    caption = element("figcaption", title, element("span", about) if about else "")
    return element("figure", caption, contents)


def grid(*figures: Child) -> Markup:
    """Return figures side by side, as many as there is room for."""
    return element("div", figures, class_="grid")


def facts(pairs: Mapping[str, Child]) -> Markup:
    """Return the main facts, by name."""
    return element(
        "dl",
        [
            element("div", element("dt", name), element("dd", value))
            for name, value in pairs.items()
        ],
        class_="facts",
    )


def paragraph(*words: Child) -> Markup:
    """Return a paragraph."""
    return element("p", words)


def preformatted(words: str) -> Markup:
    """Return text whose lines and spaces stay as they are."""
    return element("pre", words)


def folded(title: str, *contents: Child) -> Markup:
    """Return content that is shown only once its title is chosen."""
    return element("details", element("summary", title), contents)


def table(
    header: Sequence[Child],
    rows: Sequence[Sequence[Child]],
    *,
    numeric: Iterable[int] = (),
    strong: Iterable[int] = (),
) -> Markup:
    """Return a table of at most `_MOST_ROWS` rows, with the number of rows left out.

    Args:
        header: names of the columns.
        rows: each as long as the header.
        numeric: numbers, from 0, of the columns that are aligned to the right.
        strong: numbers of the rows that are pointed out.
    """
    right, bold = set(numeric), set(strong)

    def cells(kind: str, row: Sequence[Child]) -> list[Markup]:
        if len(row) != len(header):
            raise ValueError(f"a row of {len(row)} cells in a table of {len(header)} columns")
        return [element(kind, c, class_="n" if i in right else None) for i, c in enumerate(row)]

    body = [
        element("tr", cells("td", row), class_="strong" if i in bold else None)
        for i, row in enumerate(rows[:_MOST_ROWS])
    ]
    written = element(
        "table",
        element("thead", element("tr", cells("th", header))),
        element("tbody", body),
    )
    left_out = len(rows) - _MOST_ROWS
    note = element("p", f"and {left_out:,} more", class_="about") if left_out > 0 else ""
    return element("div", written, note, class_="scroll")


@functools.cache
def _part(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _sum(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
