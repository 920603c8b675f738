"""Curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ..formatting import shortened
from .axes import BOLD, HEIGHT, WIDE, WIDTH, Frame, bounds, chart, frame, text
from .page import Markup, element


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


Values: TypeAlias = "Sequence[float] | np.ndarray"

_LABEL_LENGTH = 15
_LINE = 13.0  # height of a label


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: what it is called at its end.
        x: numbers in any order; points without a finite one are not drawn.
        y: a value for each; where one is not finite, the curve is broken, and a cross at the upper
            edge says so.
        colour: number of its colour, from 0; by default its place in the chart. Those that belong
            together may share one.
        dashed: whether to draw it dashed, as a second way to tell curves apart.
    """

    name: str
    x: Values
    y: Values
    colour: int | None = None
    dashed: bool = False


def line_chart(
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    log_y: bool = False,
    from_zero: bool = False,
    whole_x: bool = False,
    wide: bool = False,
    points: int = 300,
) -> Markup:
    """Return a chart of curves, which shows its values under the pointer.

    Args:
        series: the curves; those without a point are left out.
        x_title: what the horizontal axis shows, with its unit.
        y_title: what the vertical axis shows, with its unit.
        log_y: whether the vertical axis is logarithmic; values that are not positive break the
            curve then.
        from_zero: whether the vertical axis shows zero.
        whole_x: whether the horizontal axis counts, so that only whole numbers are shown.
        wide: whether it takes the whole width of the page.
        points: parts of the horizontal axis of which extremes are kept; see `thin`.
    """
    curves = [_Curve.of(one, i, log_y) for i, one in enumerate(series) if len(one.x)]
    width = WIDE if wide else WIDTH
    if not any(len(curve.x) for curve in curves):
        return chart(width, 40, y_title, text("no values", 8, 24))
    all_x = np.concatenate([curve.x[[0, -1]] for curve in curves if len(curve.x)])
    all_y = np.concatenate([curve.y for curve in curves])
    lowest, highest = float(all_x.min()), float(all_x.max())
    if lowest == highest:
        lowest, highest = lowest - 0.5, highest + 0.5
    longest = max(len(curve.label) for curve in curves)
    plot = frame(
        (lowest, highest),
        bounds(all_y, log=log_y, from_zero=from_zero),
        width=width,
        height=HEIGHT,
        right=14 + BOLD * longest,
        log_y=log_y,
    )
    thinned = [curve.thinned(points) for curve in curves]
    drawn = [plot.draw(x_title, y_title, whole_x=whole_x)]
    drawn += [curve.draw(plot) for curve in thinned]
    drawn += _labels(thinned, plot)
    names = ", ".join(curve.series.name for curve in curves)
    scale = f"{plot.x.low:.17g} {plot.x.high:.17g} {plot.x.begin:.2f} {plot.x.end:.2f}"
    hover = element(
        "g", class_="hover", data_x=scale, data_top=plot.y.end, data_bottom=plot.y.begin
    )
    return chart(width, HEIGHT, f"{y_title} by {x_title}: {names}", *drawn, hover, kind="lines")


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
    def label(self) -> str:
        return shortened(self.series.name, _LABEL_LENGTH)

    @property
    def class_(self) -> str:
        return f"c{self.colour % 8}" + (" dashed" if self.series.dashed else "")

    def thinned(self, points: int) -> _Curve:
        chosen = thin(self.x, self.y, points)
        return _Curve(self.series, self.colour, self.x[chosen], self.y[chosen])

    def draw(self, plot: Frame) -> Markup:
        x, y = plot.x(self.x), plot.y(self.y)
        finite = np.isfinite(y)
        parts, dots = [], []
        edges = np.flatnonzero(np.diff(finite.astype(np.int8), prepend=0, append=0))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            places = [f"{a:.1f} {b:.1f}" for a, b in zip(x[begin:end], y[begin:end], strict=True)]
            if len(places) == 1:  # a line of one point would not be seen
                dots.append(element("circle", cx=x[begin], cy=y[begin], r=2.5))
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


def _labels(curves: Sequence[_Curve], plot: Frame) -> list[Markup]:
    """Return the names at the ends of curves, moved apart where they would overlap."""
    wanted: list[tuple[float, _Curve]] = []
    for curve in curves:
        finite = np.flatnonzero(np.isfinite(curve.y))
        wanted.append((plot.y.at(curve.y[finite[-1]]) if len(finite) else plot.y.end, curve))
    wanted.sort(key=lambda one: one[0])
    places: list[float] = []
    for place, _ in wanted:
        places.append(max(place, places[-1] + _LINE) if places else max(place, plot.y.end + 4))
    # Those that were moved below the plot push the others up again.
    limit = plot.y.begin
    for i in range(len(places) - 1, -1, -1):
        places[i] = min(places[i], limit)
        limit = places[i] - _LINE
    return [
        text(curve.label, plot.x.end + 6, place + 4, "start", f"label t{curve.colour % 8}")
        for place, (_, curve) in zip(places, wanted, strict=True)
    ]
