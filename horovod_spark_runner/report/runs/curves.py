"""Curves of a run, or of several: metrics, learning rate, throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...formatting import number
from ..axes import spans_decades
from ..lines import Series, line_chart
from ..page import Markup, figure, grid
from .facts import RunFacts

# Points of all curves together: what keeps the page small.
_POINTS = 24_000
# More metrics are left to the table of the last epoch.
MOST_METRICS = 60


def metric_figures(runs: Sequence[RunFacts]) -> list[Markup]:
    """Return a figure for each metric: training and validation, of all runs.

    Args:
        runs: one, or those to be compared.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.metric_names()))
    shown = names[:MOST_METRICS]
    points = _points(2 * len(shown) * len(runs))
    return [grid([_metric(runs, name, points) for name in shown])] if shown else []


def pace_figures(runs: Sequence[RunFacts]) -> list[Markup]:
    """Return figures of the throughput and of learning rates."""
    points = _points(4 * len(runs))
    figures = []
    rates = list(dict.fromkeys(name for run in runs for name in run.rate_names()))
    for name, title, unit in (
        ("samples_per_second", "Throughput", "samples/s"),
        *((rate, rate.replace("_", " ").capitalize(), "rate") for rate in rates[:4]),
    ):
        alone = len(runs) == 1
        series = [
            Series(unit if alone else run.name, *run.recorded(name), colour=i)
            for i, run in enumerate(runs)
        ]
        values = [y for one in series for y in one.y]
        if values:
            chart = line_chart(
                series,
                x_title="epoch",
                y_title=unit,
                whole_x=True,
                from_zero=name == "samples_per_second",
                log_y=name != "samples_per_second" and spans_decades(values),
                points=points,
            )
            figures.append(figure(title, chart, about=f"last {number(values[-1])}"))
    return [grid(figures)] if figures else []


def _metric(runs: Sequence[RunFacts], name: str, points: int) -> Markup:
    series, descriptions, values = [], [], []
    for i, run in enumerate(runs):
        for validation in (False, True):
            full = f"val_{name}" if validation else name
            if not validation and name.startswith("val_"):  # it is beside the one of the training
                continue
            x, y = run.curve(full)
            if not x:
                continue
            # Alone, colour tells training from validation; beside others, it tells the run.
            label = full if len(runs) == 1 else f"{run.name} {'val' if validation else 'train'}"
            colour = int(validation) if len(runs) == 1 else i
            series.append(Series(label, x, y, colour=colour, dashed=not validation))
            descriptions.append(f"{label}: {_in_words(x, y)}")
            values += y
    chart = line_chart(
        series,
        x_title="epoch",
        y_title=name,
        whole_x=True,
        log_y=spans_decades(values),
        points=points,
    )
    return figure(name, chart, about="; ".join(descriptions))


def _in_words(x: Sequence[float], y: Sequence[float]) -> str:
    """Return the last value, and the first of the lowest and of the highest ones."""
    finite = [(value, epoch) for epoch, value in zip(x, y, strict=True) if math.isfinite(value)]
    words = f"last {number(y[-1])}"
    if not finite or len(x) == 1:
        return words
    ends = ("lowest", min(finite)), ("highest", max(finite, key=lambda point: point[0]))
    extremes = (f"{kind} {number(value)} in epoch {epoch:.0f}" for kind, (value, epoch) in ends)
    return ", ".join([words, *extremes])


def _points(curves: int) -> int:
    return max(20, min(300, _POINTS // (4 * max(curves, 1))))
