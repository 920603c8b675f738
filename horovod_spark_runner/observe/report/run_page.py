"""The report of a run, and of two side by side."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...checkpoint.retry_policy import FINISHED, RUNNING, steps_lost
from ...checkpoint.run_directory import RunDirectory
from ...formatting import duration, moment, number, share, shortened, size
from ...storage.paths import redact_url
from ...training.time_breakdown import SENT, WHOLE
from .charts import Series, line_chart, spans_decades
from .facts import INTERRUPTED, RunFacts, read_facts
from .page import (
    Child,
    Markup,
    Section,
    facts,
    figure,
    folded,
    grid,
    page,
    paragraph,
    preformatted,
    table,
)
from .times import time_contents

# Characters of a cause, of a checkpoint's metrics and of a setting that differs between runs.
_LENGTH = 300
# Points of all curves together: what keeps the page small.
_POINTS = 24_000
# More metrics are left out: of the charts, and of the facts at the top.
_MOST_METRICS, _MOST_FACTS = 60, 8
# Layers of a model that are shown at once.
_MOST_LAYERS = 30


def write_report(directory: RunDirectory) -> None:
    """Write the report of a run into its directory, once the run has ended.

    Raises:
        InvalidInputError: there is no run.
        RunDirectoryError: its metrics are damaged.
        OSError: it cannot be written.
    """
    directory.report.write_text(run_page(read_facts(directory, time.time(), ended=True)))


def run_page(run: RunFacts) -> str:
    """Return the report of a run as an HTML page."""
    error = run.last_call.get("error")
    failed = error and run.state.state not in (FINISHED, RUNNING)
    top: list[Child] = [facts(_facts(run)), preformatted(str(error)) if failed else ""]
    sections = [
        Section("What is missing here", _notes([run])),
        Section("Metrics", _curves([run]), _left_out(run)),
        Section("Where the time went", time_contents(run)),
        Section("Attempts", _attempts(run)),
    ]
    tables = [
        Section("Model", _model(run)),
        Section("Checkpoints", _checkpoints(run)),
        Section("Ranks", _placement(run)),
        Section("Settings", _settings(run)),
        Section("Versions", _versions([run])),
    ]
    return page(run.name, run.place, sections, top, tables)


def comparison_page(runs: Sequence[RunFacts]) -> str:
    """Return a page that lays runs over each other.

    Args:
        runs: two, or more.
    """
    names = [run.name for run in runs]
    if len(set(names)) < len(names):  # folders of the same name in different places
        runs = [replace(run, name=f"{i} {run.name}") for i, run in enumerate(runs, 1)]
    sections = [
        Section("In short", _by_run(runs, [_facts(run) for run in runs])),
        Section("What is missing here", _notes(runs)),
        Section("Metrics", _curves(runs), "Training is dashed, validation is not."),
        *(Section(f"Where the time went: {run.name}", time_contents(run)) for run in runs),
        Section("Settings that differ", _differing(runs)),
        Section("Versions", _versions(runs)),
    ]
    title = " and ".join(run.name for run in runs)
    return page(f"Runs {title}", "; ".join(run.place for run in runs), sections)


def _facts(run: RunFacts) -> dict[str, Child]:
    """Return what a reader wants to know first."""
    state, newest, done = run.state, run.state.newest, len(run.epochs)
    progress = state.progress if newest else f"{done:,}/{state.epochs or '?'} epochs"
    # Metrics or checkpoints may be missing: only what both say is certain.
    if state.state == FINISHED and newest and newest.epoch == done < state.epochs:
        progress += ", stopped by a callback"
    facts: dict[str, Child] = {"state": state.state, "progress": progress}
    last = run.epochs[-1] if run.epochs else {}
    names = [name for one in run.metric_names() for name in (one, f"val_{one}")]
    final = [(name, value) for name in names if isinstance(value := last.get(name), float)]
    facts |= {f"last {name}": number(value) for name, value in final[:_MOST_FACTS]}
    if run.last_call.get("weights"):
        facts["weights of the model"] = str(run.last_call["weights"])
    best = next((line for line in state.checkpoints if line.best), None)
    if best is not None and isinstance(value := best.metrics.get(run.best_metric), float):
        facts[f"best {run.best_metric}"] = f"{number(value)}, checkpoint of epoch {best.epoch:,}"
    if run.seconds:
        killed = any(one.ending == INTERRUPTED for one in state.attempts)
        name = "time of all calls" + (", those that were killed left out" if killed else "")
        facts[name] = duration(run.seconds)
    rates = run.recorded("samples_per_second")[1]
    if rates:
        facts["samples/s, last epoch"] = number(rates[-1])
    counts = {
        "ranks": run.last_call.get("workers") or state.workers,
        "training rows": run.settings.get("rows"),
        "validation rows": run.settings.get("validation_rows"),
        "parameters": run.model.parameters if run.model else None,
    }
    facts |= {name: f"{count:,}" for name, count in counts.items() if count}
    tried = len(state.attempts)
    if tried > 1:
        facts["attempts"] = f"{tried}, {steps_lost(state.attempts):,} steps trained again"
    sent, whole = (sum(run.recorded(name)[1]) for name in (SENT, WHOLE))
    if sent < whole:
        facts["sent between ranks"] = f"{size(sent)}, {share(sent, whole)} of plain allreduce"
    if run.calls:
        facts["last call ended"] = moment(float(run.last_call.get("ended", 0.0)))
    return facts


def _notes(runs: Sequence[RunFacts]) -> list[Child]:
    """Return the notes on unreadable records, of several runs with their names."""
    return [
        paragraph(note if len(runs) == 1 else f"{run.name}: {note}")
        for run in runs
        for note in run.notes
    ]


def _left_out(run: RunFacts) -> str:
    more = len(run.metric_names()) - _MOST_METRICS
    rows = "Means over the rows of all ranks."
    return rows + (f" {more:,} more metrics are in metrics.jsonl." if more > 0 else "")


def _attempts(run: RunFacts) -> list[Child]:
    rows: list[list[Child]] = [
        [
            str(one.number),
            str(one.workers),
            _unbroken(moment(one.started)),
            _unbroken(duration(one.ended - one.started)),
            _unbroken(f"{one.first_step:,} to {one.last_step:,}"),
            one.ending,
            shortened(one.cause, _LENGTH),
        ]
        for one in run.state.attempts
    ]
    header = ["attempt", "ranks", "began", "took", "steps", "ended", "cause"]
    return [table(header, rows)] if rows else []


def _unbroken(text: str) -> str:
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _checkpoints(run: RunFacts) -> list[Child]:
    lines = run.state.checkpoints
    rows: list[list[Child]] = [
        [
            line.name,
            f"{line.epoch:,}" + (f" and {line.epoch_step:,} steps" if line.epoch_step else ""),
            f"cannot be used: {line.problem}"
            if line.problem
            else shortened(_metrics(line.metrics), _LENGTH),
            f"best {run.best_metric}" if line.best else "",
        ]
        for line in lines
    ]
    best = [i for i, line in enumerate(lines) if line.best]
    header = ["checkpoint", "epochs", "metrics", ""]
    return [table(header, rows, strong=best)] if rows else []


def _model(run: RunFacts) -> list[Child]:
    model = run.model
    if model is None:
        return []
    rows: list[list[Child]] = [
        [layer.name, layer.kind, layer.output, f"{layer.parameters:,}"] for layer in model.layers
    ]
    trainable = "all" if model.trainable == model.parameters else f"{model.trainable:,} of them"
    counts = f"{model.parameters:,} parameters, {trainable} trainable."
    more = f" {model.left_out:,} more layers are left out." if model.left_out else ""
    layers = table(["layer", "class", "output shape", "parameters"], rows, numeric=(3,))
    many = len(rows) > _MOST_LAYERS
    return [paragraph(counts + more), folded(f"{len(rows):,} layers", layers) if many else layers]


def _placement(run: RunFacts) -> list[Child]:
    rows: list[list[Child]] = [
        [f"{one['rank']:,}", one["host"], str(one["slot"]), ", ".join(one["gpus"]) or "CPU"]
        for one in run.last_call.get("placement", ())
    ]
    return [table(["rank", "host", "Spark task", "device"], rows)] if rows else []


def _settings(run: RunFacts) -> list[Child]:
    rows: list[list[Child]] = [
        [key, shortened(value, 2000)] for key, value in _flat(run.settings).items()
    ]
    whole = table(["setting", "value"], rows)
    return [folded("All settings of the newest call", whole)] if rows else []


def _versions(runs: Sequence[RunFacts]) -> list[Child]:
    tables = [{**run.last_call.get("versions", {})} for run in runs]
    for versions, run in zip(tables, runs, strict=True):
        if "master" in run.last_call:
            versions["Spark master"] = redact_url(str(run.last_call["master"]))
    return _by_run(runs, tables)


def _differing(runs: Sequence[RunFacts]) -> list[Child]:
    each = [_flat(run.settings) for run in runs]
    names = dict.fromkeys(name for one in each for name in one)
    differing = [name for name in names if len({one.get(name, "") for one in each}) > 1]
    shown = [{name: shortened(one.get(name, ""), _LENGTH) for name in differing} for one in each]
    return _by_run(runs, shown) or ["None."]


def _by_run(runs: Sequence[RunFacts], each: Sequence[Mapping[str, Child]]) -> list[Child]:
    """Return a table with a column for each run; none where there is nothing to show."""
    names = dict.fromkeys(name for one in each for name in one)
    rows: list[list[Child]] = [[name, *(one.get(name, "") for one in each)] for name in names]
    return [table(["", *(run.name for run in runs)], rows)] if rows else []


def _flat(settings: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Return settings one by one, those within others by their path; without secrets of URLs."""
    settings_by_path: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            settings_by_path.update(_flat(value, name))
        elif isinstance(value, str):
            settings_by_path[name] = redact_url(value)
        else:
            settings_by_path[name] = json.dumps(value)
    return settings_by_path


def _metrics(metrics: Mapping[str, object]) -> str:
    return ", ".join(
        f"{name} {number(value)}" for name, value in metrics.items() if isinstance(value, float)
    )


def _curves(runs: Sequence[RunFacts]) -> list[Markup]:
    """Return figures of metrics, throughput and learning rates of one run, or of several."""
    figures = [*_metric_figures(runs), *_pace_figures(runs)]
    return [grid(figures)] if figures else []


def _metric_figures(runs: Sequence[RunFacts]) -> list[Markup]:
    """Return a figure for each metric: training and validation."""
    names = list(dict.fromkeys(name for run in runs for name in run.metric_names()))
    shown = names[:_MOST_METRICS]
    points = _points(2 * len(shown) * len(runs))
    return [_metric(runs, name, points) for name in shown]


def _pace_figures(runs: Sequence[RunFacts]) -> list[Markup]:
    """Return figures of the throughput and of learning rates."""
    points = _points(4 * len(runs))
    figures = []
    rates = list(dict.fromkeys(name for run in runs for name in run.rate_names()))
    for name, title, unit in (
        ("samples_per_second", "Throughput", "samples/s"),
        *((rate, rate.replace("_", " ").capitalize(), "rate") for rate in rates[:4]),
    ):
        series = []
        for i, run in enumerate(runs):
            x, y = run.recorded(name)
            if x:
                label = unit if len(runs) == 1 else run.name
                series.append(Series(label, x, y, colour=i, about=f"last {number(y[-1])}"))
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
            figures.append(figure(title, chart))
    return figures


def _metric(runs: Sequence[RunFacts], name: str, points: int) -> Markup:
    series = []
    for i, run in enumerate(runs):
        for validation in (False, True):
            full = f"val_{name}" if validation else name
            if not validation and name.startswith("val_"):  # it is shown beside the training's
                continue
            x, y = run.curve(full)
            if not x:
                continue
            # Alone, colour tells training from validation; beside others, it tells the run.
            label = full if len(runs) == 1 else f"{run.name} {'val' if validation else 'train'}"
            colour = int(validation) if len(runs) == 1 else i
            series.append(Series(label, x, y, colour, not validation, about=_in_words(x, y)))
    chart = line_chart(
        series,
        x_title="epoch",
        y_title=name,
        whole_x=True,
        log_y=spans_decades([value for one in series for value in one.y]),
        points=points,
    )
    return figure(name, chart)


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
