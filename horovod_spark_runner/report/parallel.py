"""Parallel coordinates: how the values of many variables go together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .axes import CHARACTER, HEIGHT, WIDE, Scale, bounds, chart, text
from .markup import Markup, element
from .numbers import short, shortened

# Lines beyond these are not drawn; the chart says how many.
MOST_LINES = 400
_STEPS = 6  # of the colour scale
_TOP, _BOTTOM = 30.0, 24.0


@dataclass(frozen=True)
class Axis:
    """One variable.

    Attributes:
        name: key of its values, and what it is called.
        log: whether it is shown on a logarithmic scale; its values are positive then.
        choices: its values where they are no numbers, from below.
    """

    name: str
    log: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """One set of values.

    Attributes:
        values: by the axes' names; one that is not there is drawn at the foot of its axis.
        shade: from 0 to 1, the strongest colour.
        told: what is shown under the pointer.
        marked: whether it is pointed out.
    """

    values: Mapping[str, object]
    shade: float = 0.0
    told: str = ""
    marked: bool = False


def parallel_chart(axes: Sequence[Axis], lines: Sequence[Line], *, label: str) -> Markup:
    """Return a chart with an upright axis for each variable and a line for each set of values.

    Args:
        axes: from left to right, at least one.
        lines: the most important first; the first `MOST_LINES` are drawn, the first of them on top.
        label: what the chart shows, for those who cannot see it.

    Raises:
        ValueError: a value does not fit its axis.
    """
    shown = lines[:MOST_LINES]
    gap = (WIDE - 110) / max(len(axes) - 1, 1)
    places = {axis.name: 55 + i * gap for i, axis in enumerate(axes)}
    scales = {axis.name: _scale(axis, shown) for axis in axes}
    drawn = [_draw_line(axes, scales, places, line) for line in reversed(shown)]
    # What is pointed out lies above all others.
    drawn.sort(key=lambda one: 'marked"' in one)
    rows = [*drawn, *(_draw_axis(axis, scales[axis.name], places[axis.name], gap) for axis in axes)]
    if len(lines) > MOST_LINES:
        rows.append(text(f"{len(lines) - MOST_LINES:,} more", WIDE - 4, HEIGHT - 2, "end", "note"))
    return chart(WIDE, HEIGHT, label, *rows)


def _scale(axis: Axis, lines: Sequence[Line]) -> Scale:
    bottom, top = HEIGHT - _BOTTOM - 14, _TOP + 6
    if axis.choices:
        return Scale(-0.5, len(axis.choices) - 0.5, bottom, top)
    given = [line.values[axis.name] for line in lines if axis.name in line.values]
    for value in given:
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{axis.name}: {value!r} is no finite number")
        if axis.log and value <= 0:
            raise ValueError(f"{axis.name}: {value!r} is not positive, as a log scale needs it")
    low, high = bounds(np.asarray(given, np.float64), log=axis.log)
    return Scale(low, high, bottom, top, log=axis.log)


def _height(axis: Axis, scale: Scale, line: Line) -> float:
    if axis.name not in line.values:
        return HEIGHT - _BOTTOM
    value = line.values[axis.name]
    if axis.choices:
        if str(value) not in axis.choices:
            raise ValueError(f"{axis.name}: {value!r} is none of {axis.choices}")
        return scale.at(axis.choices.index(str(value)))
    return scale.at(float(value))  # type: ignore[arg-type]


def _draw_line(
    axes: Sequence[Axis], scales: Mapping[str, Scale], places: Mapping[str, float], line: Line
) -> Markup:
    points = [f"{places[a.name]:.1f} {_height(a, scales[a.name], line):.1f}" for a in axes]
    shade = min(int(max(line.shade, 0.0) * _STEPS), _STEPS - 1)
    return element(
        "path",
        element("title", line.told) if line.told else "",
        class_=f"way q{shade}" + (" marked" if line.marked else ""),
        d="M" + "L".join(points),
    )


def _draw_axis(axis: Axis, scale: Scale, x: float, gap: float) -> Markup:
    room = max(4, int(gap / CHARACTER) - 1)
    rows = [
        element("line", class_="axis", x1=x, x2=x, y1=scale.begin, y2=scale.end),
        text(shortened(axis.name, room), x, 14, "middle", "title"),
    ]
    if axis.choices:
        ticks = [(i, shortened(choice, room)) for i, choice in enumerate(axis.choices)]
    else:
        ticks = [(tick, short(tick)) for tick in scale.ticks(4)]  # type: ignore[misc]
    for tick, words in ticks:
        y = scale.at(tick)
        rows.append(element("line", class_="tick", x1=x - 4, x2=x, y1=y, y2=y))
        rows.append(text(words, x - 6, y + 3.5, "end", "halo"))
    return element("g", rows)
