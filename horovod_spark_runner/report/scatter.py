"""Points: how two values go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .axes import HEIGHT, WIDE, WIDTH, bounds, chart, frame, text
from .markup import Markup, element

# So many points are drawn one by one; of more, one for each place that has any.
MOST_POINTS = 2000
_CELL = 3.0


@dataclass(frozen=True)
class Point:
    """One point.

    Attributes:
        x: where it lies.
        y: likewise.
        told: what is shown under the pointer.
        colour: number of its colour, from 0.
        marked: whether it is pointed out.
    """

    x: float
    y: float
    told: str = ""
    colour: int = 0
    marked: bool = False


def scatter_chart(
    points: Sequence[Point],
    *,
    x_title: str,
    y_title: str,
    log_x: bool = False,
    log_y: bool = False,
    wide: bool = False,
) -> Markup:
    """Return a chart of points.

    Points that are not finite, or not positive on a log axis, have no place; the chart says how
    many those are.

    Args:
        points: in the order to draw them.
        x_title: what the horizontal axis shows, with its unit.
        y_title: what the vertical axis shows, with its unit.
        log_x: whether the horizontal axis is logarithmic.
        log_y: whether the vertical one is.
        wide: whether it takes the whole width of the page.
    """
    x = np.asarray([point.x for point in points], np.float64)
    y = np.asarray([point.y for point in points], np.float64)
    fits = np.isfinite(x) & np.isfinite(y)
    fits &= (x > 0 if log_x else True) & (y > 0 if log_y else True)
    placed = [point for point, fit in zip(points, fits, strict=True) if fit]
    width = WIDE if wide else WIDTH
    if not placed:
        return chart(width, 40, y_title, text("no values", 8, 24))
    x, y = x[fits], y[fits]
    low, high = bounds(x, log=log_x)
    plot = frame(
        (low, high),
        bounds(y, log=log_y),
        width=width,
        height=HEIGHT,
        right=14,
        log_x=log_x,
        log_y=log_y,
    )
    across, up = plot.x(x), plot.y(y)
    drawn = [
        element(
            "circle",
            element("title", point.told) if point.told else "",
            class_=f"point c{point.colour % 8}" + (" marked" if point.marked else ""),
            cx=float(across[i]),
            cy=float(up[i]),
            r=5 if point.marked else 3,
        )
        for i, point in _seen(placed, across, up)
    ]
    title = x_title + (" (log scale)" if log_x else "")
    rows = [plot.draw(title, y_title), *drawn]
    left_out = len(points) - len(placed)
    if left_out:
        rows.append(text(f"{left_out:,} without a place here", width - 8, 10, "end", "note"))
    return chart(width, HEIGHT, f"{y_title} by {x_title}", *rows)


def _seen(points: Sequence[Point], x: np.ndarray, y: np.ndarray) -> list[tuple[int, Point]]:
    """Return the points to draw, those that are marked above all others."""
    chosen = range(len(points))
    if len(points) > MOST_POINTS:
        cells = (x // _CELL).astype(np.int64) * 10_000 + (y // _CELL).astype(np.int64)
        _, first = np.unique(cells, return_index=True)
        marked = [i for i, point in enumerate(points) if point.marked]
        chosen = sorted({*first.tolist(), *marked})  # type: ignore[assignment]
    return sorted(((i, points[i]) for i in chosen), key=lambda one: one[1].marked)
