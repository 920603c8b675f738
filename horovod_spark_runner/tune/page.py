"""The page of a study: what its trials have shown so far. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..report.axes import spans_decades
from ..report.bars import Bar, bar_chart
from ..report.lines import Series, line_chart
from ..report.markup import Child, Markup
from ..report.numbers import duration, number
from ..report.page import Section, facts, figure, folded, grid, page, paragraph, table
from ..report.parallel import Axis, Line, parallel_chart
from ..report.scatter import Point, scatter_chart
from .result import FAILED, FINISHED, PRUNED, RUNNING, STATES, TrialLine

# More are left out of the charts, those of least weight; the table has all parameters.
MOST_AXES, MOST_CHOICES, MOST_PRUNED_CURVES, MOST_FINISHED_CURVES = 8, 12, 4, 8
_COLOURS = {FINISHED: 0, PRUNED: 1, FAILED: 3}


@dataclass(frozen=True)
class StudyFacts:
    """What is known of a study.

    Attributes:
        place: its directory.
        record: what it was begun with.
        searching: whether a search goes on there.
        best: number of the best trial; ``None`` if none has finished.
        trials: by number.
        reported: values of the epochs of every trial, by number from 1.
        importances: parameters by how much the metric depends on them, the first most; none where
            that cannot be told.
        log: parameters that were drawn from by their logarithm.
    """

    place: str
    record: Mapping[str, Any]
    searching: bool
    best: int | None
    trials: Sequence[TrialLine]
    reported: Mapping[int, Mapping[int, float]]
    importances: Mapping[str, float]
    log: frozenset[str]

    @property
    def metric(self) -> str:
        return str(self.record["metric"])

    @property
    def highest(self) -> bool:
        """Whether the greatest value is best."""
        return bool(self.record["direction"] == "max")

    @property
    def names(self) -> list[str]:
        """Parameters, the important ones first."""
        found = dict.fromkeys(name for line in self.trials for name in line.params)
        return sorted(found, key=lambda name: -self.importances.get(name, 0.0))

    @property
    def ranked(self) -> list[TrialLine]:
        """The trials that have finished, the best first."""
        done = [line for line in self.trials if line.state == FINISHED and line.value is not None]
        return sorted(done, key=lambda line: (line.value or 0.0) * (-1 if self.highest else 1))


def study_page(study: StudyFacts) -> str:
    """Return the page as HTML."""
    counts = Counter(line.state for line in study.trials)
    told = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    best = next((line for line in study.trials if line.trial == study.best), None)
    seconds = [line.seconds for line in study.trials if line.seconds is not None]
    top = {
        "best trial": "" if best is None else str(best.trial),
        f"its {study.metric}": "" if best is None else _told(best.value),
        "trials": told or "none yet",
        "a trial takes, on average": duration(sum(seconds) / len(seconds)) if seconds else "",
    }
    way = "the greatest" if study.highest else "the least"
    now = "the search goes on" if study.searching else "nobody is searching"
    return page(
        f"Search for {way} {study.metric}",
        f"{study.place}; {now}",
        [
            Section("Best parameters", [] if best is None else _best(best)),
            Section("History", _history(study)),
            Section("Parameters", _parameters(study)),
            Section("Epoch by epoch", _curves(study)),
            Section("Trials", [_table(study)] if study.trials else []),
            Section("What was searched", [_settings(study.record)]),
        ],
        top=facts({name: value for name, value in top.items() if value}),
    )


def _best(best: TrialLine) -> list[Child]:
    rows = [[name, _told(value)] for name, value in best.params.items()]
    return [table(["parameter", "value"], rows), paragraph(best.run_dir)]


def _history(study: StudyFacts) -> list[Child]:
    ended = [line for line in study.trials if line.value is not None and line.state != RUNNING]
    if not study.ranked:
        return []
    log = spans_decades([line.value or 0.0 for line in ended])
    points = [
        Point(
            line.trial,
            line.value or 0.0,
            told=_describe(line, study.metric),
            colour=_COLOURS.get(line.state, 7),
            marked=line.trial == study.best,
        )
        for line in ended
    ]
    finished = [line for line in ended if line.state == FINISHED]
    so_far: list[float] = []
    better = max if study.highest else min
    for line in finished:
        value = line.value or 0.0
        so_far.append(better(so_far[-1], value) if so_far else value)
    best = Series("best", [line.trial for line in finished], so_far)
    colours = "blue have finished, orange were pruned (at their last epoch); the best has a rim"
    values = scatter_chart(points, x_title="trial", y_title=study.metric, log_y=log)
    curve = line_chart([best], x_title="trial", y_title=study.metric, log_y=log, whole_x=True)
    return [
        grid(figure("Value of each trial", values, about=colours), figure("Best so far", curve))
    ]


def _parameters(study: StudyFacts) -> list[Child]:
    ranked = study.ranked
    if len(ranked) < 2:
        return []
    charts: list[Child] = []
    if study.importances:
        bars = [Bar(name, value, f"{value:.0%}") for name, value in study.importances.items()]
        charts.append(
            figure(
                "Importance",
                bar_chart(bars, title="share of what decides whether a trial is good"),
                about="PED-ANOVA; it says the more, the more trials there are",
            )
        )
    axes = [axis for name in study.names if (axis := _axis(study, name, ranked)) is not None]
    values = [line.value or 0.0 for line in ranked]
    for axis in axes[:MOST_AXES]:
        if not axis.choices:
            charts.append(_slice(study, axis, ranked, spans_decades(values)))
    last = Axis(study.metric, log=spans_decades(values))
    lines = [
        Line(
            {**_axis_values(line, axes), study.metric: line.value},
            shade=1.0 - place / len(ranked),
            told=_describe(line, study.metric),
            marked=line.trial == study.best,
        )
        for place, line in enumerate(ranked)
    ]
    label = f"parameters and {study.metric} of the trials that have finished"
    shown = [*[axis for axis in axes if axis.name != study.metric][:MOST_AXES], last]
    together = figure(
        "Together",
        parallel_chart(shown, lines, label=label),
        about="a line for each trial that has finished, the better the stronger",
        wide=True,
    )
    return [grid(*charts), together]


def _axis(study: StudyFacts, name: str, lines: Sequence[TrialLine]) -> Axis | None:
    """Return the axis of a parameter; ``None`` for text of too many kinds."""
    values = [line.params[name] for line in lines if name in line.params]
    if not values:
        return None
    if all(_is_number(value) for value in values):
        return Axis(name, log=name in study.log and min(values) > 0)
    choices = tuple(dict.fromkeys(sorted(map(_told, values))))
    return Axis(name, choices=choices) if len(choices) <= MOST_CHOICES else None


def _axis_values(line: TrialLine, axes: Sequence[Axis]) -> dict[str, object]:
    given = {axis.name: axis for axis in axes if axis.name in line.params}
    return {
        name: _told(line.params[name]) if axis.choices else line.params[name]
        for name, axis in given.items()
    }


def _slice(study: StudyFacts, axis: Axis, lines: Sequence[TrialLine], log: bool) -> Markup:
    points = [
        Point(
            float(line.params[axis.name]),
            line.value or 0.0,
            told=_describe(line, study.metric),
            marked=line.trial == study.best,
        )
        for line in lines
        if axis.name in line.params
    ]
    chart = scatter_chart(
        points, x_title=axis.name, y_title=study.metric, log_x=axis.log, log_y=log
    )
    return figure(axis.name, chart)


def _curves(study: StudyFacts) -> list[Child]:
    pruned = [line for line in study.trials if line.state == PRUNED][-MOST_PRUNED_CURVES:]
    shown = [*study.ranked[:MOST_FINISHED_CURVES], *pruned]
    series = []
    for place, line in enumerate(shown):
        reported = sorted(study.reported.get(line.trial, {}).items())
        if reported:
            epochs, values = zip(*reported, strict=True)
            ended = line.state == PRUNED
            name = f"{line.trial} pruned" if ended else str(line.trial)
            series.append(Series(name, epochs, values, colour=place, dashed=ended))
    if not series:
        return []
    log = spans_decades([value for one in series for value in one.y])
    chart = line_chart(
        series, x_title="epoch", y_title=study.metric, log_y=log, whole_x=True, wide=True
    )
    about = (
        f"the {MOST_FINISHED_CURVES} best of the trials that have finished, and the last "
        f"{MOST_PRUNED_CURVES} that were pruned, by their numbers"
    )
    return [figure(f"{study.metric} after every epoch", chart, about=about, wide=True)]


def _table(study: StudyFacts) -> Markup:
    names = study.names
    header = ["trial", "state", study.metric, *names, "epochs", "seconds", "error"]
    order = [*study.ranked, *[line for line in study.trials if line.state != FINISHED]]
    rows = [
        [
            str(line.trial),
            line.state,
            "" if line.value is None else _told(line.value),
            *[_told(line.params[name]) if name in line.params else "" for name in names],
            str(line.epochs),
            "" if line.seconds is None else f"{line.seconds:.1f}",
            line.error.partition("\n")[0],
        ]
        for line in order
    ]
    strong = [place for place, line in enumerate(order) if line.trial == study.best]
    numeric = [0, 2, len(header) - 3, len(header) - 2]
    return table(header, rows, numeric=numeric, strong=strong)


def _settings(record: Mapping[str, Any]) -> Markup:
    rows = [
        [name, _told(value)]
        for name, value in _flat("", {n: v for n, v in record.items() if n != "format"})
    ]
    return folded("space, seed, settings of the trainings", table(["setting", "value"], rows))


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        inner = [(f"{prefix}.{name}" if prefix else str(name), one) for name, one in value.items()]
        return [row for name, one in inner for row in _flat(name, one)]
    return [(prefix, value)]


def _describe(line: TrialLine, metric: str) -> str:
    params = ", ".join(f"{name} {_told(value)}" for name, value in line.params.items())
    return f"trial {line.trial}: {metric} {_told(line.value)} with {params}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _told(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return str(value)
