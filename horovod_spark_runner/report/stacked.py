"""Stacked bars: the parts of several wholes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..formatting import duration, shortened
from .axes import CHARACTER, HEIGHT, WIDE, WIDTH, Scale, chart, frame, text
from .lines import groups
from .page import Markup, element

MOST_COLUMNS = 90
ROW = 20.0
_LABEL_LENGTH = 22
_GAP = 0.18  # between columns, of a column's width


@dataclass(frozen=True)
class Part:
    """One part that every whole may have.

    Attributes:
        name: what it is called.
        colour: number of its colour, from 0.
        about: what it means, in a sentence.
    """

    name: str
    colour: int
    about: str = ""


@dataclass(frozen=True)
class Whole:
    """A whole to divide into parts.

    Attributes:
        label: what it stands for.
        values: its parts by name, none of them negative; parts that it lacks are 0.
    """

    label: str
    values: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.values.values())


def legend(parts: Sequence[Part], wholes: Sequence[Whole]) -> Markup:
    """Return the names of the parts that ``wholes`` have, with their colours."""
    present = {name for whole in wholes for name, value in whole.values.items() if value > 0}
    return element(
        "ul",
        [
            element(
                "li",
                element("i", class_=f"b{part.colour % 8}"),
                part.name,
                title=part.about or None,
            )
            for part in parts
            if part.name in present
        ],
        class_="legend",
    )


def stacked_rows(
    wholes: Sequence[Whole],
    parts: Sequence[Part],
    *,
    title: str,
    format_value: Callable[[float], str] = duration,
    wide: bool = False,
) -> Markup:
    """Return a horizontal bar for each of ``wholes``, with its total at its end.

    Args:
        wholes: in the order to show them; a few dozen can be read.
        parts: in the order to lay them, with their colours; draw them with `legend`.
        title: what lengths show, with the unit.
        format_value: returns a value as it is shown; by default they are seconds.
        wide: whether it takes the whole width of the page.

    Raises:
        ValueError: a whole has a part that is none of ``parts``, or negative.
    """
    _check(wholes, parts)
    width = WIDE if wide else WIDTH
    left = 10 + CHARACTER * max((len(shortened(w.label, _LABEL_LENGTH)) for w in wholes), default=0)
    right = 12 + CHARACTER * max((len(format_value(w.total)) for w in wholes), default=0)
    high = max((whole.total for whole in wholes), default=0.0) or 1.0
    scale = Scale(0.0, high, left, width - right)
    rows = [text(title, 2, 11, "start", "title")]
    for i, whole in enumerate(wholes):
        top, before = 20 + i * ROW, 0.0
        rows.append(text(shortened(whole.label, _LABEL_LENGTH), left - 6, top + 12, "end"))
        for part in parts:
            value = whole.values.get(part.name, 0.0)
            if value > 0:
                begin, end = scale.at(before), scale.at(before + value)
                rows.append(_box(whole, part, format_value, begin, top + 2, end - begin, ROW - 6))
                before += value
        rows.append(
            text(format_value(whole.total), scale.at(before) + 5, top + 12, "start", "value")
        )
    return chart(width, 24 + len(wholes) * ROW, title, *rows)


def stacked_columns(
    wholes: Sequence[Whole],
    parts: Sequence[Part],
    *,
    x_title: str,
    y_title: str,
    first: int = 1,
    format_value: Callable[[float], str] = duration,
    wide: bool = False,
) -> Markup:
    """Return an upright bar for each of ``wholes``, which are in a sequence, such as epochs.

    Above `MOST_COLUMNS` each column is the mean of several that follow each other, and the
    horizontal axis says of how many.

    Args:
        wholes: in their order.
        parts: in the order to lay them, from below, with their colours; draw them with `legend`.
        x_title: what the columns are.
        y_title: what heights show, with the unit.
        first: number of the first whole.
        format_value: returns a value as it is shown; by default they are seconds.
        wide: whether it takes the whole width of the page.

    Raises:
        ValueError: a whole has a part that is none of ``parts``, or negative.
    """
    _check(wholes, parts)
    together = groups(len(wholes), MOST_COLUMNS)
    columns = [_mean([wholes[i] for i in one]) for one in together]
    high = max((column.total for column in columns), default=0.0) or 1.0
    plot = frame(
        (first - 0.5, first + len(wholes) - 0.5) if wholes else (0.5, 1.5),
        (0.0, high * 1.03),
        width=WIDE if wide else WIDTH,
        height=HEIGHT,
        right=14,
    )
    most = max(map(len, together), default=1)
    x_label = x_title if most == 1 else f"{x_title} (each column the mean of up to {most})"
    rows = [plot.draw(x_label, y_title, whole_x=True)]
    for column, one in zip(columns, together, strict=True):
        begin, end = plot.x.at(first + one[0] - 0.5), plot.x.at(first + one[-1] + 0.5)
        gap, before = (end - begin) * _GAP, 0.0
        for part in parts:
            value = column.values.get(part.name, 0.0)
            if value > 0:
                low, top = plot.y.at(before), plot.y.at(before + value)
                rows.append(
                    _box(
                        column,
                        part,
                        format_value,
                        begin + gap / 2,
                        top,
                        end - begin - gap,
                        low - top,
                    )
                )
                before += value
    return chart(plot.width, plot.height, f"{y_title} by {x_title}", *rows)


def _box(
    whole: Whole,
    part: Part,
    format_value: Callable[[float], str],
    x: float,
    y: float,
    width: float,
    height: float,
) -> Markup:
    value, total = whole.values[part.name], whole.total
    fraction = f"{value / total:.0%} of {format_value(total)}"
    label = f"{whole.label}: {part.name} {format_value(value)} ({fraction})"
    return element(
        "rect",
        element("title", label),
        class_=f"f{part.colour % 8}",
        x=x,
        y=y,
        width=width,
        height=height,
    )


def _mean(wholes: Sequence[Whole]) -> Whole:
    if len(wholes) == 1:
        return wholes[0]
    names = dict.fromkeys(name for whole in wholes for name in whole.values)
    values = {n: sum(w.values.get(n, 0.0) for w in wholes) / len(wholes) for n in names}
    return Whole(f"{wholes[0].label} to {wholes[-1].label}, mean", values)


def _check(wholes: Sequence[Whole], parts: Sequence[Part]) -> None:
    names = {part.name for part in parts}
    for whole in wholes:
        for name, value in whole.values.items():
            if name not in names:
                raise ValueError(f"{whole.label} has a part {name!r}, which is none of {names}")
            if not value >= 0:
                raise ValueError(f"{whole.label}: the part {name!r} cannot be {value}")
