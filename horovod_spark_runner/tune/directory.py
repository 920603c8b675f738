"""The layout of a study's directory; the one place that knows its names. Needs no optuna.

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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint.run_directory import RunDirectory
from ..errors import RunDirectoryError
from ..storage.filesystem import Location
from ..typed_json import load_json, read_fields

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
        # A link to the journal, which is not there for those who follow it if the journal is not.
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
