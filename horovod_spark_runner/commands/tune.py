"""``horovod-spark-runner tune``: list searches, from their studies' directories."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import RunDirectoryError
from ..storage.contents import convert_parse_errors
from ..storage.filesystem import Location
from ..storage.lease import read_lease, seems_held
from ..tune.call import needing_optuna
from ..tune.directory import FINISHED, STATES, StudyDirectory, TrialLine, trial_line
from .output import json_text, show


@dataclass(frozen=True)
class _StudySummary:
    """Summary of a study's directory.

    Attributes:
        place: the directory.
        metric: what is searched by.
        direction: whether ``"min"`` or ``"max"`` is best.
        holder: who is searching; empty if nobody is.
        best: number of the best trial; ``None`` if none is finished.
        trials: by number.
    """

    place: str
    metric: str
    direction: str
    holder: str
    best: int | None
    trials: tuple[TrialLine, ...]


def _read_study(directory: StudyDirectory, now: float) -> _StudySummary:
    """Read a study's directory.

    Args:
        directory: the study's directory.
        now: seconds since the epoch.

    Raises:
        RunDirectoryError: it holds no study, or a damaged one.
        EnvironmentProblem: optuna is not installed.
    """
    record = directory.read_record()
    if record is None:
        raise RunDirectoryError(f"{directory.location} holds no study: it has no study.json")
    lock = read_lease(directory.lock.lock)
    alive = lock is not None and seems_held(lock, now)
    with convert_parse_errors(f"the journal and record of a study in {directory.location}"):
        study = needing_optuna().Study(directory)
        best = study.best()
        return _StudySummary(
            place=str(directory.location),
            metric=str(record["metric"]),
            direction=str(record["direction"]),
            holder=f"process {lock.get('pid')} on {lock.get('host')}" if alive and lock else "",
            best=None if best is None else best.number,
            trials=tuple(trial_line(one, directory, searching=alive) for one in study.trials()),
        )


def _describe_study(study: _StudySummary) -> list[str]:
    """Return all of a study for people, in lines."""
    counts = Counter(line.state for line in study.trials)
    summary = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    lines = [
        f"study   {study.place}",
        "state   " + (f"searching ({study.holder})" if study.holder else "nobody is searching"),
        f"metric  {study.metric}, {study.direction}",
        f"trials  {len(study.trials)}" + (f": {summary}" if summary else ""),
        *_table(study),
    ]
    if study.best is not None:
        best = next(line for line in study.trials if line.trial == study.best)
        lines.append(f"best    trial {best.trial}: {_number(best.value)} with {dict(best.params)}")
        lines.append(f"        {best.run_dir}")
    return lines + [
        f"failed  trial {line.trial}: {_first(line.error)}" for line in study.trials if line.error
    ]


def _table(study: _StudySummary) -> list[str]:
    names = list(dict.fromkeys(name for line in study.trials for name in line.params))
    rows = [["trial", "state", study.metric, "epochs", "seconds", *names]]
    for line in study.trials:
        params = [_number(line.params[name]) if name in line.params else "" for name in names]
        seconds = "" if line.seconds is None else f"{line.seconds:.1f}"
        state = line.state + (" *" if line.trial == study.best and line.state == FINISHED else "")
        rows.append(
            [str(line.trial), state, _number(line.value), str(line.epochs), seconds, *params]
        )
    return _columns(rows) if study.trials else []


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _first(text: str) -> str:
    return text.partition("\n")[0]


def show_command(arguments: argparse.Namespace) -> int:
    """Show one study."""
    study = _read_study(StudyDirectory(Location(arguments.study_dir)), time.time())
    show(*(json_text(asdict(study)).split("\n") if arguments.json else _describe_study(study)))
    return 0
