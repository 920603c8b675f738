"""Scales, ticks and the frame that charts with two axes share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..formatting import short
from .page import Child, Markup, element

WIDTH, WIDE = 380, 780
HEIGHT = 230
# Width of a character of the charts' text, on average, also of labels in bold type, and room above
# and below the plot.
CHARACTER = 6.0
BOLD = 6.9
TOP, BOTTOM = 24.0, 36.0


@dataclass(frozen=True)
class Scale:
    """From values to places on an axis.

    Attributes:
        low: the value at ``begin``.
        high: the value at ``end``.
        begin: a place, in units of the chart.
        end: the other one; smaller than ``begin`` on an axis that goes up.
        log: whether decades are equally long.
    """

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, values: float | np.ndarray) -> np.ndarray:
        """Return the places of values; not finite where they are not, or not on a log axis."""
        with np.errstate(divide="ignore", invalid="ignore"):
            data = np.asarray(values, np.float64)
            low, high = self.low, self.high
            if self.log:
                data, low, high = np.log10(data), math.log10(low), math.log10(high)
            places: np.ndarray = self.begin + (data - low) / (high - low) * (self.end - self.begin)
        return places

    def at(self, value: float) -> float:
        """Return the place of one value."""
        return float(self(value))

    def ticks(self, count: int) -> list[float]:
        """Return about ``count`` round values, on the scale."""
        if self.log:
            return log_ticks(self.low, self.high, count)
        return linear_ticks(self.low, self.high, count)


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` multiples of 1, 2 or 5 times a power of ten from low to high."""
    raw = (high - low) / max(count, 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    steps = [unit * factor for factor in (0.5, 1, 2, 5, 10)]
    chosen = next(number for number, step in enumerate(steps) if step >= raw * 0.999)
    ticks = _multiples(steps[chosen], low, high)
    # Both ends may lie just beside a multiple.
    return ticks if len(ticks) >= count / 3 else _multiples(steps[chosen - 1], low, high)


def _multiples(step: float, low: float, high: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round values from low to high, equally far apart on a log axis."""
    decades = math.log10(high / low)
    factors = [1.0, 2.0, 5.0] if decades < count / 2 else [1.0]
    every = max(1, math.ceil(decades / count)) if factors == [1.0] else 1
    ticks = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        if power % every == 0
        for factor in factors
    ]
    inside = [value for value in ticks if low * 0.999 <= value <= high * 1.001]
    return inside if len(inside) > 1 else linear_ticks(low, high, count)


def bounds(values: np.ndarray, *, log: bool, from_zero: bool = False) -> tuple[float, float]:
    """Return the lowest and the highest value to show, never equal."""
    shown = values[np.isfinite(values) & (values > 0 if log else True)]
    if not len(shown):
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = float(shown.min()), float(shown.max())
    if from_zero and not log:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        if log:
            return low / 2, high * 2
        around = abs(low) * 0.1 or 1.0
        return (low - around, high + around) if not from_zero else (0.0, high or 1.0)
    if log:
        room = (high / low) ** 0.03
        return low / room, high * room
    # Room for the line's width at the edge; a scale that begins at zero stays there.
    room = 0.03 * (high - low)
    return (low if from_zero else low - room), high + room


def spans_decades(values: Sequence[float] | np.ndarray) -> bool:
    """Return whether a log axis suits these values, all of them positive."""
    array = np.asarray(values, np.float64)
    array = array[np.isfinite(array)]
    return bool(len(array) and array.min() > 0 and array.max() / array.min() >= 50)


@dataclass(frozen=True)
class Frame:
    """The plot of a chart with two axes.

    Attributes:
        x: the horizontal scale.
        y: the vertical one.
        width: of the whole chart.
        height: likewise.
    """

    x: Scale
    y: Scale
    width: int
    height: int

    def draw(self, x_title: str, y_title: str, *, whole_x: bool = False) -> Markup:
        """Return grid, ticks and titles.

        Args:
            x_title: what the horizontal axis shows, with its unit.
            y_title: the same of the vertical one, which is written above it.
            whole_x: ticks at whole numbers only.
        """
        left, right = self.x.begin, self.x.end
        bottom, top = self.y.begin, self.y.end
        rows = []
        for tick in self.y.ticks(4):
            y = self.y.at(tick)
            rows.append(element("line", class_="grid", x1=left, x2=right, y1=y, y2=y))
            # One at the upper edge keeps clear of the title above it.
            rows.append(text(short(tick), left - 5, max(y + 3.5, top + 6), "end"))
        ticks = self.x.ticks(max(2, int((right - left) / 60)))
        for tick in [t for t in ticks if not whole_x or float(t).is_integer()]:
            x = self.x.at(tick)
            rows.append(element("line", class_="tick", x1=x, x2=x, y1=bottom, y2=bottom + 4))
            rows.append(text(short(tick), x, bottom + 15, "middle"))
        rows.append(element("line", class_="axis", x1=left, x2=right, y1=bottom, y2=bottom))
        rows.append(text(x_title, (left + right) / 2, self.height - 4, "middle", "title"))
        scale = " (log scale)" if self.y.log else ""
        rows.append(text(y_title + scale, 2, 10, "start", "title"))
        return element("g", rows)


def frame(
    x: tuple[float, float],
    y: tuple[float, float],
    *,
    width: int,
    height: int,
    right: float,
    log_y: bool = False,
) -> Frame:
    """Return the plot for such bounds, with room for ticks on its left.

    Args:
        x: lowest and highest value of the horizontal axis.
        y: those of the vertical one.
        width: of the chart.
        height: likewise.
        right: room on the right.
        log_y: whether the vertical one is.
    """
    bottom = height - BOTTOM
    upward = Scale(*y, begin=bottom, end=TOP, log=log_y)
    longest = max((len(short(tick)) for tick in upward.ticks(4)), default=1)
    left = 12 + CHARACTER * longest
    return Frame(Scale(*x, begin=left, end=width - right), upward, width, height)


def text(
    words: str, x: float, y: float, anchor: str = "start", class_: str | None = None
) -> Markup:
    """Return text in a chart; ``anchor`` is the end that is at ``x``."""
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=class_)


def chart(width: int, height: float, label: str, *children: Child, kind: str = "") -> Markup:
    """Return a chart of this size; ``label`` describes it to screen readers."""
    return element(
        "svg",
        *children,
        class_=f"chart {kind}".strip(),
        viewBox=f"0 0 {width} {height:g}",
        role="img",
        aria_label=label,
        data_wide="1" if width > WIDTH else None,
    )
