"""The directory of a study: its layout, and the records in it. Needs no optuna.

::

    STUDY_DIR/
        study.json              what is searched, written once
        journal.log             optuna's journal of the trials
        lock.json, .lock        who is searching here, while a search runs
        data/                   materialized rows, until the search is complete
        trials/trial-00003/     a run directory for each trial
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..checkpoint.run_directory import RunDirectory
from ..errors import RunDirectoryError
from ..storage.filesystem import Location
from ..typed_json import load_json, read_fields

if TYPE_CHECKING:
    import pandas as pd
    from optuna.trial import FrozenTrial

_FORMAT = 1
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class _Written:
    """The field of ``study.json`` that every format has."""

    format: int


class StudyDirectory:
    """A study's directory.

    Args:
        place: its path, on a file system that is mounted.

    Raises:
        RunDirectoryError: it is a URL.
    """

    def __init__(self, place: Location) -> None:
        if not place.is_local:
            raise RunDirectoryError(
                f"study_dir {place} is a URL; the journal of a study needs a folder of a mounted "
                "file system, which the driver and all executors can write to"
            )
        self.location = place

    @property
    def record(self) -> Location:
        return self.location.join("study.json")

    @property
    def journal(self) -> Location:
        return self.location.join("journal.log")

    @property
    def trials(self) -> Location:
        return self.location.join("trials")

    @property
    def lock(self) -> RunDirectory:
        """The directory as one that a single search writes to."""
        return RunDirectory(self.location)

    def trial(self, number: int) -> RunDirectory:
        """Return the run directory of a trial."""
        return RunDirectory(self.trials.join(f"trial-{number:05d}"))

    def read_record(self) -> dict[str, Any] | None:
        """Return the study's recorded settings; ``None`` if there are none yet.

        Raises:
            RunDirectoryError: it is damaged, or of a newer format.
        """
        try:
            record = load_json(self.record.read_text())
            number = read_fields(record, _Written).format
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{self.record} cannot be read: {error}") from error
        if number > _FORMAT:
            raise RunDirectoryError(
                f"{self.record} has format {number}, this version knows {_FORMAT}; it was written "
                "by a newer one"
            )
        return dict(record)

    def write_record(self, record: Mapping[str, object]) -> None:
        self.record.write_text(json.dumps({"format": _FORMAT, **record}, indent=1))

    def check_journal(self) -> None:
        """Check that optuna's journal, if there is one, is an ordinary file of bounded size.

        Raises:
            RunDirectoryError: it is a link, a device or a pipe, or larger than 1 GiB.
        """
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(str(self.journal))
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
                raise RunDirectoryError(
                    f"{self.journal} must be an ordinary file of 1 GiB at most, which optuna reads "
                    "and appends to; give another study_dir"
                )

    def mend_journal(self) -> None:
        """Remove the traces of a killed driver: half a line, and optuna's own lock.

        Only the holder of the directory's lock may.
        """
        self.check_journal()
        data = self.journal.read_bytes() if self.journal.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self.journal.write_bytes(whole)
        # The lock links to the journal: it exists only if the journal does.
        lock = self.journal.parent.join(f"{self.journal.name}.lock")
        if lock.exists():
            lock.delete_file()


def check_whole(directory: StudyDirectory) -> None:
    """Check that trials' files are not mistaken for results of other parameters.

    Args:
        directory: a study's directory, whose lock is held.

    Raises:
        RunDirectoryError: a part of an earlier study is missing.
    """
    parts = {
        "study.json": directory.record.exists(),
        "journal.log": directory.journal.exists(),
        "trials": bool(directory.trials.list()) if directory.trials.exists() else False,
    }
    # A study that was ended before its first trial has its record alone.
    if parts["trials"] or parts["journal.log"]:
        for name in ("study.json", "journal.log"):
            if not parts[name]:
                left = " and ".join(one for one, there in parts.items() if there)
                raise RunDirectoryError(
                    f"study_dir {directory.location} holds {left} of an earlier study, and its "
                    f"{name} is missing: which parameters its trials had, and what was searched, "
                    "cannot be known. Put it back, or give another study_dir"
                )


def check_same(directory: StudyDirectory, wanted: Mapping[str, object]) -> None:
    """Check that an existing study has the same settings as this call.

    Args:
        directory: its directory, whose lock is held.
        wanted: the settings of this call, as JSON; ``settings`` are those of the trainings.

    Raises:
        RunDirectoryError: something differs; the message names it, with both values.
    """
    record = directory.read_record() or wanted
    for name, value in wanted.items():
        before = record.get(name)
        if before == value:
            continue
        while isinstance(value, dict) and isinstance(before, dict):
            name = next(one for one in {**value, **before} if value.get(one) != before.get(one))
            before, value = before.get(name), value.get(name)
        raise RunDirectoryError(
            f"study_dir {directory.location} holds a study with {name} {before!r}, now it is "
            f"{value!r}: their trials could not be compared; give another study_dir"
        )


def begin_or_check(directory: StudyDirectory, wanted: Mapping[str, object]) -> None:
    """Record a new study's settings, or check an existing one's; see `check_same`."""
    check_same(directory, wanted)
    if not directory.record.exists():
        directory.write_record(wanted)


# States of trials, for people.
FINISHED, PRUNED, FAILED, RUNNING, INTERRUPTED = STATES = (
    "finished",
    "pruned",
    "failed",
    "running",
    "interrupted",
)


# This package's attributes of a trial, beside optuna's.
PARAMS, ERROR, FIT_SECONDS = "params", "error", "fit_seconds"


@dataclass(frozen=True)
class TrialLine:
    """One trial.

    Attributes:
        trial: its number, from 0.
        state: ``"finished"``, ``"pruned"``, ``"failed"``, ``"running"``, or ``"interrupted"``: the
            same call resumes it.
        value: its metric; of a pruned one, that of its last epoch; ``None`` if there is none.
        epochs: epochs that were reported.
        seconds: what it took; ``None`` if it has not ended.
        fit_seconds: what its epochs took of that; ``None`` if it has not finished.
        params: its parameters.
        error: why it failed; empty if it has not.
        run_dir: its run directory.
    """

    trial: int
    state: str
    value: float | None
    epochs: int
    seconds: float | None
    fit_seconds: float | None
    params: Mapping[str, Any]
    error: str
    run_dir: str


def trial_line(trial: FrozenTrial, directory: StudyDirectory, *, searching: bool) -> TrialLine:
    """Return a trial as a line of the result table.

    Args:
        trial: optuna's.
        directory: the study's directory.
        searching: whether a search is running there now.
    """
    states = {
        "COMPLETE": FINISHED,
        "PRUNED": PRUNED,
        "FAIL": FAILED,
        "RUNNING": RUNNING if searching else INTERRUPTED,
        "WAITING": INTERRUPTED,
    }
    reported = trial.intermediate_values
    last = reported[max(reported)] if reported else None
    return TrialLine(
        trial=trial.number,
        state=states[trial.state.name],
        value=last if trial.value is None else trial.value,
        epochs=max(reported, default=0),
        seconds=None if trial.duration is None else trial.duration.total_seconds(),
        fit_seconds=trial.user_attrs.get(FIT_SECONDS),
        params=_with_integer_classes(trial.user_attrs.get(PARAMS, trial.params)),
        error=trial.user_attrs.get(ERROR, ""),
        run_dir=str(directory.trial(trial.number).location),
    )


def _with_integer_classes(params: Mapping[str, object]) -> dict[str, Any]:
    """Return parameters with the classes of ``class_weight`` as numbers, which JSON has as text."""
    weights = params.get("class_weight")
    if not isinstance(weights, Mapping):
        return dict(params)
    return {**params, "class_weight": {int(name): one for name, one in weights.items()}}


def trial_table(lines: Sequence[TrialLine]) -> pd.DataFrame:
    """Return trials as a table, with a column for each parameter, such as ``params.lr``."""
    import pandas as pd

    names = list(dict.fromkeys(name for line in lines for name in line.params))
    rows = []
    for line in lines:
        plain = asdict(line)
        params = plain.pop("params")
        rows.append({**plain, **{f"params.{name}": params.get(name) for name in names}})
    params_columns = [f"params.{name}" for name in names]
    ends = ["epochs", "seconds", "fit_seconds", "error", "run_dir"]
    order = ["trial", "state", "value", *params_columns, *ends]
    table: pd.DataFrame = pd.DataFrame(rows, columns=order)
    return table
