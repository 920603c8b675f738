"""Charts as SVG: curves, and stacked bars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ...formatting import duration, short, shortened
from .page import Child, Markup, element

_WIDTH, _HEIGHT = 380, 230
# Width of a character of the charts' text, on average, and room above, below and beside the plot.
_CHARACTER = 6.0
_TOP, _BOTTOM, _RIGHT = 24.0, 36.0, 14.0
# Characters of a bar's name, and its height.
_ROW_LABEL_LENGTH, _ROW = 22, 20.0
# Values that differ by less than this part of them, as by rounding, are shown as constant.
_CONSTANT = 1e-4
MOST_COLUMNS = 90
_GAP = 0.18  # between columns, of a column's width

_Values: TypeAlias = "Sequence[float] | np.ndarray"


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
            return _log_ticks(self.low, self.high, count)
        return _linear_ticks(self.low, self.high, count)


def _linear_ticks(low: float, high: float, count: int) -> list[float]:
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


def _log_ticks(low: float, high: float, count: int) -> list[float]:
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
    return inside if len(inside) > 1 else _linear_ticks(low, high, count)


def bounds(values: np.ndarray, *, log: bool, from_zero: bool = False) -> tuple[float, float]:
    """Return the lowest and the highest value to show, never equal."""
    shown = values[np.isfinite(values) & (values > 0 if log else True)]
    if not len(shown):
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = float(shown.min()), float(shown.max())
    if from_zero and not log:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= _CONSTANT * max(abs(low), abs(high)):
        if log:
            return low / 2, high * 2
        return (min(0.0, 1.25 * low), max(0.0, 1.25 * high)) if low or high else (0.0, 1.0)
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
class _Frame:
    """The plot of a chart with two axes.

    Attributes:
        x: the horizontal scale.
        y: the vertical one.
    """

    x: Scale
    y: Scale

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
            rows.append(_text(short(tick), left - 5, max(y + 3.5, top + 6), "end"))
        ticks = self.x.ticks(max(2, int((right - left) / 60)))
        for tick in [t for t in ticks if not whole_x or float(t).is_integer()]:
            x = self.x.at(tick)
            rows.append(element("line", class_="tick", x1=x, x2=x, y1=bottom, y2=bottom + 4))
            rows.append(_text(short(tick), x, bottom + 15, "middle"))
        rows.append(element("line", class_="axis", x1=left, x2=right, y1=bottom, y2=bottom))
        rows.append(_text(x_title, (left + right) / 2, _HEIGHT - 4, "middle", "title"))
        scale = " (log scale)" if self.y.log else ""
        rows.append(_text(y_title + scale, 2, 10, "start", "title"))
        return element("g", rows)


def _frame(x: tuple[float, float], y: tuple[float, float], *, log_y: bool = False) -> _Frame:
    """Return the plot for such bounds, with room for ticks on its left.

    Args:
        x: lowest and highest value of the horizontal axis.
        y: those of the vertical one.
        log_y: whether the vertical one is logarithmic.
    """
    upward = Scale(*y, begin=_HEIGHT - _BOTTOM, end=_TOP, log=log_y)
    longest = max((len(short(tick)) for tick in upward.ticks(4)), default=1)
    return _Frame(Scale(*x, begin=12 + _CHARACTER * longest, end=_WIDTH - _RIGHT), upward)


def _text(
    words: str, x: float, y: float, anchor: str = "start", class_: str | None = None
) -> Markup:
    """Return text in a chart; ``anchor`` is the end that is at ``x``."""
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=class_)


def _chart(height: float, label: str, *children: Child, kind: str = "") -> Markup:
    """Return a chart of this height; ``label`` describes it to screen readers."""
    return element(
        "svg",
        *children,
        class_=f"chart {kind}".strip(),
        viewBox=f"0 0 {_WIDTH} {height:g}",
        role="img",
        aria_label=label,
    )


def thin(x: np.ndarray, y: np.ndarray, columns: int) -> np.ndarray:
    """Return the indices, ascending, of the points to draw.

    Of each of so many equal parts of the range of ``x``, the first and the last point stay, the
    lowest and the highest, and the first that is no number: drawn in as many columns of pixels, the
    curve looks as if all points were there.

    Args:
        x: ascending and finite.
        y: one value for each.
        columns: parts of the range.
    """
    count = len(x)
    if count <= 4 * columns:
        return np.arange(count)
    width = float(x[-1] - x[0]) or 1.0
    column = np.minimum(((x - x[0]) * (columns / width)).astype(np.int64), columns - 1)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    finite = np.isfinite(y)
    chosen = [starts, np.append(starts[1:], count) - 1, _first_in_each(column, ~finite)]
    owner = np.cumsum(np.diff(column, prepend=-1) != 0) - 1
    for reduce, nothing in ((np.minimum, np.inf), (np.maximum, -np.inf)):
        extreme = reduce.reduceat(np.where(finite, y, nothing), starts)
        chosen.append(_first_in_each(column, finite & (y == extreme[owner])))
    return np.unique(np.concatenate(chosen))


def _first_in_each(column: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the first of the ``chosen`` points of each column that has some."""
    places = np.flatnonzero(chosen)
    first: np.ndarray = places[np.flatnonzero(np.diff(column[places], prepend=-1))]
    return first


def groups(count: int, limit: int) -> list[range]:
    """Return at most ``limit`` ranges of nearly equal length that make up ``range(count)``."""
    number = min(count, limit)
    edges = [count * i // number for i in range(number + 1)] if number else [0]
    return [range(begin, end) for begin, end in pairwise(edges)]


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: what it is called in the legend.
        x: numbers in any order; points without a finite one are not drawn.
        y: a value for each; where one is not finite, the curve is broken, and a cross at the upper
            edge says so.
        colour: number of its colour, from 0; by default its place in the chart. Those that belong
            together may share one.
        dashed: whether to draw it dashed, as a second way to tell curves apart.
        about: what the legend says of it, such as its last value.
    """

    name: str
    x: _Values
    y: _Values
    colour: int | None = None
    dashed: bool = False
    about: str = ""


def line_chart(
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    log_y: bool = False,
    from_zero: bool = False,
    whole_x: bool = False,
    points: int = 300,
) -> Markup:
    """Return a chart of curves with its legend, which shows its values under the pointer.

    Args:
        series: the curves; those without a point are left out.
        x_title: what the horizontal axis shows, with its unit.
        y_title: what the vertical axis shows, with its unit.
        log_y: whether the vertical axis is logarithmic; values that are not positive break the
            curve then.
        from_zero: whether the vertical axis shows zero.
        whole_x: whether the horizontal axis counts, so that only whole numbers are shown.
        points: parts of the horizontal axis of which extremes are kept; see `thin`.
    """
    curves = [_Curve.of(one, i, log_y) for i, one in enumerate(series) if len(one.x)]
    if not any(len(curve.x) for curve in curves):
        return _chart(40, y_title, _text("no values", 8, 24))
    all_x = np.concatenate([curve.x[[0, -1]] for curve in curves if len(curve.x)])
    all_y = np.concatenate([curve.y for curve in curves])
    lowest, highest = float(all_x.min()), float(all_x.max())
    if lowest == highest:
        lowest, highest = lowest - 0.5, highest + 0.5
    plot = _frame((lowest, highest), bounds(all_y, log=log_y, from_zero=from_zero), log_y=log_y)
    drawn = [plot.draw(x_title, y_title, whole_x=whole_x)]
    drawn += [curve.thinned(points).draw(plot) for curve in curves]
    names = ", ".join(curve.series.name for curve in curves)
    scale = f"{plot.x.low:.17g} {plot.x.high:.17g} {plot.x.begin:.2f} {plot.x.end:.2f}"
    hover = element(
        "g", class_="hover", data_x=scale, data_top=plot.y.end, data_bottom=plot.y.begin
    )
    chart = _chart(_HEIGHT, f"{y_title} by {x_title}: {names}", *drawn, hover, kind="lines")
    shown = [curve.legend() for curve in curves if len(curves) > 1 or curve.series.about]
    return Markup(_legend(shown) + chart)


@dataclass(frozen=True)
class _Curve:
    """A curve in order, as it is drawn.

    Attributes:
        series: what it is of.
        colour: number of its colour.
        x: ascending.
        y: not a number where it is broken.
    """

    series: Series
    colour: int
    x: np.ndarray
    y: np.ndarray

    @classmethod
    def of(cls, series: Series, place: int, log: bool) -> _Curve:
        x, y = np.asarray(series.x, np.float64), np.asarray(series.y, np.float64)
        finite = np.isfinite(x)
        x, y = x[finite], y[finite]
        if np.any(np.diff(x) < 0):
            order = np.argsort(x, kind="stable")
            x, y = x[order], y[order]
        if log:
            y = np.where(y > 0, y, np.nan)
        return cls(series, place if series.colour is None else series.colour, x, y)

    @property
    def class_(self) -> str:
        return _colour(self.colour) + (" dashed" if self.series.dashed else "")

    def legend(self) -> Markup:
        """Return the legend's line for it."""
        sample = element("i", class_=f"line {self.class_}")
        return element("li", sample, self.series.name, " ", element("span", self.series.about))

    def thinned(self, points: int) -> _Curve:
        chosen = thin(self.x, self.y, points)
        return _Curve(self.series, self.colour, self.x[chosen], self.y[chosen])

    def draw(self, plot: _Frame) -> Markup:
        x, y = plot.x(self.x), plot.y(self.y)
        finite = np.isfinite(y)
        parts, dots = [], []
        edges = np.flatnonzero(np.diff(finite.astype(np.int8), prepend=0, append=0))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            places = [f"{a:.1f} {b:.1f}" for a, b in zip(x[begin:end], y[begin:end], strict=True)]
            if len(places) == 1:  # a line of one point would not be seen
                dots.append(element("circle", cx=x[begin], cy=y[begin], r=3))
            else:
                parts.append("M" + "L".join(places))
        broken = "".join(f"M{a - 3:.1f} {plot.y.end:.1f}l6 6m0-6l-6 6" for a in x[~finite])
        return element(
            "g",
            element("title", self.series.name),
            element("path", d="".join(parts)) if parts else "",
            dots,
            element("path", class_="broken", d=broken) if broken else "",
            class_=f"series {self.class_}",
            data_name=self.series.name,
            data_x=" ".join(f"{value:.7g}" for value in self.x),
            data_y=" ".join(f"{value:.5g}" for value in self.y),
        )


def _colour(number: int) -> str:
    """Return the class of a colour."""
    return f"k{number % 8}"


def _legend(items: Sequence[Markup]) -> Markup:
    return element("ul", items, class_="legend") if items else Markup("")


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
        values: seconds of its parts by name, none of them negative; parts that it lacks are 0.
    """

    label: str
    values: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.values.values())

    def boxes(self, parts: Sequence[Part]) -> Iterator[tuple[float, float, Markup, str]]:
        """Yield begin and end of each part that it has, with its title and the class of its colour.

        Raises:
            ValueError: a part is none of ``parts``, or negative.
        """
        names = {part.name for part in parts}
        for name, value in self.values.items():
            if name not in names:
                raise ValueError(f"{self.label}: part {name!r} is not among {names}")
            if not value >= 0:
                raise ValueError(f"{self.label}: the part {name!r} cannot be {value}")
        before = 0.0
        for part in parts:
            value = self.values.get(part.name, 0.0)
            if value > 0:
                fraction = f"{value / self.total:.0%} of {duration(self.total)}"
                label = f"{self.label}: {part.name} {duration(value)} ({fraction})"
                yield before, before + value, element("title", label), _colour(part.colour)
                before += value


def legend(parts: Sequence[Part], wholes: Sequence[Whole]) -> Markup:
    """Return the names of the parts that ``wholes`` have, with their colours."""
    present = {name for whole in wholes for name, value in whole.values.items() if value > 0}
    items = [
        element("li", element("i", class_=_colour(one.colour)), one.name, title=one.about or None)
        for one in parts
        if one.name in present
    ]
    return _legend(items)


def stacked_rows(wholes: Sequence[Whole], parts: Sequence[Part], *, title: str) -> Markup:
    """Return a horizontal bar for each of ``wholes``, with its total at its end.

    Args:
        wholes: in the order to show them; a few dozen can be read.
        parts: in the order to lay them, with their colours; draw them with `legend`.
        title: what lengths show.

    Raises:
        ValueError: a whole has a part that is none of ``parts``, or negative.
    """
    labels = [shortened(whole.label, _ROW_LABEL_LENGTH) for whole in wholes]
    left = 10 + _CHARACTER * max(map(len, labels), default=0)
    right = 12 + _CHARACTER * max((len(duration(w.total)) for w in wholes), default=0)
    high = max((whole.total for whole in wholes), default=0.0) or 1.0
    scale = Scale(0.0, high, left, _WIDTH - right)
    rows = [_text(title, 2, 11, "start", "title")]
    for i, (whole, label) in enumerate(zip(wholes, labels, strict=True)):
        y = 20 + i * _ROW
        rows.append(_text(label, left - 6, y + 12, "end"))
        for low, top, inside, colour in whole.boxes(parts):
            x, width = scale.at(low), scale.at(top) - scale.at(low)
            rows.append(
                element("rect", inside, class_=colour, x=x, y=y + 2, width=width, height=_ROW - 6)
            )
        rows.append(
            _text(duration(whole.total), scale.at(whole.total) + 5, y + 12, "start", "value")
        )
    return _chart(24 + len(wholes) * _ROW, title, *rows)


def stacked_columns(
    wholes: Sequence[Whole], parts: Sequence[Part], *, x_title: str, y_title: str
) -> Markup:
    """Return an upright bar for each of ``wholes``, which are in a sequence, such as epochs.

    Above `MOST_COLUMNS` each column is the mean of several that follow each other, and the
    horizontal axis says of how many.

    Args:
        wholes: in their order.
        parts: in the order to lay them, from below, with their colours; draw them with `legend`.
        x_title: what the columns are.
        y_title: what heights show, with the unit.

    Raises:
        ValueError: a whole has a part that is none of ``parts``, or negative.
    """
    together = groups(len(wholes), MOST_COLUMNS)
    columns = [_mean([wholes[i] for i in one]) for one in together]
    high = max((column.total for column in columns), default=0.0) or 1.0
    plot = _frame((0.5, max(len(wholes), 1) + 0.5), (0.0, high * 1.03))
    most = max(map(len, together), default=1)
    x_label = x_title if most == 1 else f"{x_title} (each column the mean of up to {most})"
    rows = [plot.draw(x_label, y_title, whole_x=True)]
    for column, one in zip(columns, together, strict=True):
        begin, end = plot.x.at(one[0] + 0.5), plot.x.at(one[-1] + 1.5)
        x, width = begin + (end - begin) * _GAP / 2, (end - begin) * (1 - _GAP)
        for low, top, inside, colour in column.boxes(parts):
            y, height = plot.y.at(top), plot.y.at(low) - plot.y.at(top)
            rows.append(
                element("rect", inside, class_=colour, x=x, y=y, width=width, height=height)
            )
    return _chart(_HEIGHT, f"{y_title} by {x_title}", *rows)


def _mean(wholes: Sequence[Whole]) -> Whole:
    if len(wholes) == 1:
        return wholes[0]
    names = dict.fromkeys(name for whole in wholes for name in whole.values)
    values = {n: sum(w.values.get(n, 0.0) for w in wholes) / len(wholes) for n in names}
    return Whole(f"{wholes[0].label} to {wholes[-1].label}, mean", values)
