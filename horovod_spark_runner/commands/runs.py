"""``horovod-spark-runner runs`` and ``report``: list runs, and write a page about some."""

from __future__ import annotations

import argparse
import shlex
import time
from dataclasses import asdict

from ..checkpoint.files import LogValue, PlainLogs
from ..checkpoint.retry_policy import FINISHED, RUNNING, describe_attempts, steps_lost
from ..checkpoint.run_directory import RunDirectory
from ..errors import HorovodSparkError, InvalidInputError, RunDirectoryError
from ..observe.report.facts import UNREADABLE, WHOLE, RunSummary, read_facts, read_run
from ..observe.report.run_page import comparison_page, run_page
from ..storage.contents import convert_parse_errors
from ..storage.filesystem import Location
from ..storage.folders import make_parent
from ..tune.directory import StudyDirectory
from .output import json_text, output_file, show


def _describe_run(run: RunSummary) -> list[str]:
    """Return all of a run for people, in lines."""
    ranks = f", {run.workers} ranks" if run.workers else ""
    lines = [
        f"run         {run.place}",
        f"state       {run.state}" + (f" ({run.holder})" if run.holder else ""),
        f"progress    {run.progress}{ranks}",
        "checkpoints" + ("" if run.checkpoints else " none"),
    ]
    for line in run.checkpoints:
        if line.problem:
            lines.append(f"  {line.name}  cannot be used: {line.problem}")
            continue
        within = f" + {line.epoch_step} steps" if line.epoch_step else ""
        best = "  best" if line.best else ""
        lines.append(f"  {line.name}  epoch {line.epoch}{within}  {_metrics(line.metrics)}{best}")
    lines += [f"missing     {note}" for note in run.notes]
    if run.events:
        lines.append(f"curves      tensorboard --logdir {shlex.quote(run.events)}")
    if run.model:
        lines.append("model       " + ("" if run.model == WHOLE else "damaged: ") + run.model)
    if run.attempts:
        lines.append(f"attempts, at least {steps_lost(run.attempts)} steps trained again")
        lines += describe_attempts(run.attempts)
    return [*lines, *_resume_lines(run)]


def _resume_lines(run: RunSummary) -> list[str]:
    if run.state == RUNNING or (run.state == FINISHED and run.model == WHOLE):
        return []
    program = shlex.quote(run.program) if run.program else "your program"
    newest = run.newest
    start = "starts anew" if newest is None else f"resumes from {newest.name}"
    return [
        f"resume      run {program} again, as before, with run_dir={run.place!r} and the arguments "
        f"it had: it {start}"
    ]


def _metrics(metrics: PlainLogs) -> str:
    return " ".join(f"{name}={_value(value)}" for name, value in metrics.items())


def _value(value: LogValue) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _list_runs(folder: Location, now: float) -> list[RunSummary]:
    """Return the runs whose directories are in ``folder``, from their manifests.

    Raises:
        InvalidInputError: there is no such folder.
    """
    if not folder.is_folder:
        raise InvalidInputError(f"{folder} is not a folder of run directories")
    runs = []
    for place in folder.list():
        directory = RunDirectory(place)
        if directory.config.exists() or directory.attempts.exists():
            try:
                runs.append(read_run(directory, now, verify=False))
            except (HorovodSparkError, OSError) as error:  # the other runs are still listed
                runs.append(RunSummary(str(place), UNREADABLE, notes=(str(error),)))
    return runs


def show_command(arguments: argparse.Namespace) -> int:
    """Show one run."""
    run = read_run(RunDirectory(arguments.run_dir), time.time(), verify=True)
    show(*(json_text(asdict(run)).split("\n") if arguments.json else _describe_run(run)))
    return 0


def list_command(arguments: argparse.Namespace) -> int:
    """Show a line for each run in a folder."""
    runs = _list_runs(Location(arguments.folder), time.time())
    if arguments.json:
        show(*json_text([asdict(run) for run in runs]).split("\n"))
        return 0
    rows = [("RUN", "STATE", "PROGRESS", "ATTEMPTS", "METRICS")]
    for run in runs:
        metrics = _metrics(run.newest.metrics) if run.newest else ""
        name = Location(run.place).name
        rows.append((name, run.state, run.progress, str(len(run.attempts)), metrics))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        show("  ".join([*cells, row[4]]).rstrip())
    return 0


def report_command(arguments: argparse.Namespace) -> int:
    """Write the report of one run, or of several.

    Raises:
        RunDirectoryError: a folder holds no run; or holds a study.
        InvalidInputError: the report would take the place of a folder.
    """
    output = arguments.output
    if output is None and len(arguments.run_dir) > 1:
        output = "report.html"
    file = None if output is None else output_file(output)
    for path in arguments.run_dir:
        study = StudyDirectory(Location(path)) if Location(path).is_local else None
        if study is not None and study.record.exists():
            raise RunDirectoryError(
                f"{path} holds a study: horovod-spark-runner tune show {path} prints it; a "
                f"report is of one of its trials, in {study.trials}"
            )
    places = [RunDirectory(place) for place in arguments.run_dir]
    with convert_parse_errors(f"the records of a run in {', '.join(arguments.run_dir)}"):
        runs = [read_facts(directory, time.time()) for directory in places]
        text = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs)
    file = file or places[0].report
    make_parent(file)
    file.write_text(text)
    show(str(output or file))
    return 0
