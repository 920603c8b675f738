"""Display in notebooks: progress bars, and results as HTML."""

from __future__ import annotations

import functools
import html
import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from ..formatting import duration

# Rows of a table: of more, the first and the last ones are shown.
_FIRST, _LAST = 5, 15
_WIDTH, _HEIGHT = 240, 60


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel; IPython is not imported."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def bar_class() -> type[tqdm[Any]]:
    """Return the class of progress bars: in a notebook that has ipywidgets, a widget."""
    if in_notebook():
        try:
            importlib.import_module("ipywidgets")  # tqdm warns if it is missing
            from tqdm.notebook import tqdm as widget
        except ImportError:
            return tqdm
        return widget
    return tqdm


def never_failing(build: Callable[[Any], str]) -> Callable[[object], str]:
    """Make a ``_repr_html_`` fall back to the plain representation."""

    @functools.wraps(build)
    def display(value: Any) -> str:
        try:
            return build(value)
        except Exception:  # a notebook would show a traceback in place of the result
            return f"<pre>{html.escape(object.__repr__(value))}</pre>"

    return display


def training_html(
    title: str,
    facts: Mapping[str, str],
    history: Sequence[Mapping[str, Any]],
) -> str:
    """Return a training as HTML: facts, the curve of the loss, and metrics per epoch.

    Args:
        title: heading.
        facts: values by name; empty ones are left out.
        history: metrics of each epoch.
    """
    names = list(dict.fromkeys(name for logs in history for name in logs))
    rows = [[str(number), *(logs.get(name) for name in names)] for number, logs in _cut(history)]
    metrics = table_html(["epoch", *names], rows) if names else ""
    return f"<div>{heading_html(title, facts)}{_curves(history)}{metrics}</div>"


def facts_of_training(
    run_dir: str, seconds: float | None, ranks: Sequence[str], weights: str
) -> dict[str, str]:
    """Return the facts of a training for `training_html`; no storage is read.

    Args:
        run_dir: path or URL of the run directory.
        seconds: duration; ``None`` if it is unknown.
        ranks: the host of each rank.
        weights: the weights of the returned model.
    """
    hosts = ", ".join(dict.fromkeys(ranks))
    return {
        "time": "" if seconds is None else duration(seconds),
        "ranks": f"{len(ranks)} on {hosts}" if ranks else "",
        "weights": weights,
        "run directory": run_dir,
        "report": report_of(run_dir),
    }


def report_of(run_dir: str) -> str:
    """Return the path or URL of the report of a run directory; no storage is read."""
    return f"{run_dir.rstrip('/')}/report.html"


def heading_html(title: str, facts: Mapping[str, str]) -> str:
    """Return a heading and facts by name; empty ones are left out."""
    lines = (
        f"{html.escape(name)}: <code>{html.escape(value)}</code>"
        for name, value in facts.items()
        if value
    )
    return f"<b>{html.escape(title)}</b><br>" + "<br>".join(lines)


def table_html(
    header: Sequence[str], rows: Sequence[Sequence[object]], strong: int | None = None
) -> str:
    """Return a table.

    Args:
        header: the columns' names.
        rows: numbers, texts, and ``None`` for an empty cell.
        strong: index of the row to stress.
    """
    lines = ["".join(f"<th>{html.escape(name)}</th>" for name in header)]
    for number, row in enumerate(rows):
        tag = "th" if number == strong else "td"
        lines.append("".join(f"<{tag}>{html.escape(_text(value))}</{tag}>" for value in row))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _text(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "" if value is None else "NaN"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(history: Sequence[Mapping[str, Any]]) -> list[tuple[object, Mapping[str, object]]]:
    """Return the epochs to show, by number from 1."""
    numbered: list[tuple[object, Mapping[str, object]]] = list(enumerate(history, start=1))
    if len(numbered) <= _FIRST + _LAST:
        return numbered
    return [*numbered[:_FIRST], ("…", {}), *numbered[-_LAST:]]


def _curves(history: Sequence[Mapping[str, Any]]) -> str:
    """Return the curves of the loss, in the colour of the text; empty if there are none."""
    curves = {name: _points(history, name) for name in ("loss", "val_loss")}
    values = [value for points in curves.values() for _, value in points]
    if len(history) < 2 or not values:
        return ""
    low, high = min(values), max(values)
    lines = [
        f'<polyline fill="none" stroke="currentColor" {style} points="'
        + " ".join(
            f"{4 + (_WIDTH - 8) * number / (len(history) - 1):.1f},"
            f"{4 + (_HEIGHT - 8) * ((high - value) / (high - low) if high > low else 0.5):.1f}"
            for number, value in points
        )
        + '"/>'
        for (_, points), style in zip(curves.items(), ("", 'stroke-dasharray="3 3"'), strict=True)
        if points
    ]
    legend = "loss" + (", val_loss dashed" if curves["val_loss"] else "")
    span = f"{legend}: {_text(low)} to {_text(high)}"
    return (
        f'<br><svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{span}">'
        f"<title>{span}</title>{''.join(lines)}</svg><br><small>{span}</small>"
    )


def _points(history: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [
        (number, float(logs[name]))
        for number, logs in enumerate(history)
        if isinstance(logs.get(name), float) and math.isfinite(logs[name])
    ]
