"""Bars, one for each of some things."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .axes import CHARACTER, WIDE, WIDTH, Scale, chart, text
from .markup import Markup, element
from .numbers import number, shortened

# More of them are no picture any more; the chart says how many are left out.
MOST_BARS = 60
ROW = 20.0
_LABEL_LENGTH = 22


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        label: what it stands for.
        value: its length, not negative.
        told: its value as it is shown; by default as a number.
        colour: number of its colour, from 0.
    """

    label: str
    value: float
    told: str = ""
    colour: int = 0


def bar_chart(bars: Sequence[Bar], *, title: str, wide: bool = False) -> Markup:
    """Return horizontal bars from zero, each with its value at its end.

    Args:
        bars: in the order to show them.
        title: what their lengths show, with its unit.
        wide: whether it takes the whole width of the page.

    Raises:
        ValueError: a bar is negative or no number.
    """
    bad = [bar for bar in bars if not bar.value >= 0]
    if bad:
        raise ValueError(f"a bar's length cannot be {bad[0].value} ({bad[0].label})")
    width = WIDE if wide else WIDTH
    shown = bars[:MOST_BARS]
    told = [bar.told or number(bar.value) for bar in shown]
    left = 10 + CHARACTER * max((len(shortened(b.label, _LABEL_LENGTH)) for b in shown), default=0)
    right = 10 + CHARACTER * max(map(len, told), default=0)
    high = max((bar.value for bar in shown), default=0.0) or 1.0
    scale = Scale(0.0, high, left, width - right)
    rows = [text(title, 2, 11, "start", "title")]
    for i, (bar, words) in enumerate(zip(shown, told, strict=True)):
        top, end = 20 + i * ROW, scale.at(bar.value)
        rows.append(text(shortened(bar.label, _LABEL_LENGTH), left - 6, top + 12, "end"))
        rows.append(
            element(
                "rect",
                element("title", f"{bar.label}: {words}"),
                class_=f"f{bar.colour % 8}",
                x=left,
                y=top + 2,
                width=max(end - left, 0.5),
                height=ROW - 6,
            )
        )
        rows.append(text(words, end + 5, top + 12, "start", "value"))
    height = 24 + len(shown) * ROW
    if len(bars) > MOST_BARS:
        rows.append(text(f"and {len(bars) - MOST_BARS:,} more", left, height + 8))
        height += ROW
    return chart(width, height, title, *rows)
