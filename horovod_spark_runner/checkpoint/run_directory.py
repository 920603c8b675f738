"""Run directory: its layout, and all names of its files.

::

    RUN_DIR/
        run.json                    identity of the run
        lock.json                   lease of the run that writes here, while it lasts
        .lock                       empty; is locked while lock.json changes hands
        config.json                 settings of the newest call
        attempts.jsonl              one line per attempt: times, first and last step, ending
        data/                       materialized rows, while they are needed
        logs/rank-00000.log         all output of each rank
        checkpoints/step-00000042/  variables.npz, ranks.npz, checkpoint.json (written last)
        metrics.jsonl               one line per epoch: metrics and time breakdown
        calls.jsonl                 one line per call: time breakdown, ranks, versions
        finished.json               end of the newest call that trained to its end: step, rows
        report.html                 report of the run, as one page
        mlflow.json                 identity of the run in MLflow, if it is logged there
        events/train, validation    event files, for TensorBoard
        events/profile/             profiles of chosen steps, if requested, for TensorBoard
        events/timeline-00000000.json  Horovod's timeline from that step on, if requested
        model/                      model.keras or module.pt2, weights.npz, sample.npz,
                                    signature.json (the last)
        saved_model/                the model as a SavedModel, if requested
        handed/                     attachments: contents too large for the ranks' call, while it
                                    lasts
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeAlias

from ..errors import CheckpointError, RunDirectoryError
from ..storage.filesystem import Location
from ..storage.lease import Lease, Terms, check_held, holds
from ..typed_json import JsonObject, load_json, read_fields
from .retry_policy import Attempt

# Time breakdown of an epoch, as JSON; ``None`` if unknown.
Account: TypeAlias = "Mapping[str, Any] | None"
# Called with a sentence about a record that cannot be read.
_Say: TypeAlias = Callable[[str], object]
# Keys of an epoch's line besides its metrics; metrics of these names are in the last one.
_NUMBER, _ACCOUNT, _NAMESAKES = "epoch", "accounting", "metrics"
_RESERVED = frozenset((_NUMBER, _ACCOUNT, _NAMESAKES))
_Check: TypeAlias = Callable[[object], bool]
_STEP = re.compile(r"step-(\d{8,})")
# Temporary files of `Location.write_bytes` and `replace_folder`, without the lock's: its holder
# writes it all the time.
_ASIDE = re.compile(r"\.(?!lock\.).+\.[0-9a-f]{8}(\.old)?")


def _ignore(what: str) -> None:
    """Ignore the message."""


class RunDirectory:
    """A run directory in local or shared storage.

    Args:
        place: path or URL.
        token: of the attempt that writes here: what ranks write appears only while it holds the
            lease. ``None`` for no such check.
    """

    def __init__(self, place: str | os.PathLike[str] | Location, token: str | None = None) -> None:
        self.location = place if isinstance(place, Location) else Location(place)
        self._token = token

    @property
    def config(self) -> Location:
        return self.location.join("config.json")

    @property
    def identity(self) -> Location:
        return self.location.join("run.json")

    @property
    def lock(self) -> Location:
        return self.location.join("lock.json")

    def lease(self) -> Lease:
        """Return the lease of one run on this directory, a context manager.

        It raises `RunDirectoryError` if another run holds it, and `CheckpointError` if the storage
        fails.
        """
        return Lease(self.lock, self.location.join(".lock"), self._terms)

    def check_held(self) -> None:
        """Check that the writer holds the lease; see `horovod_spark_runner.storage.lease`."""
        if self._token is not None:
            check_held(self.lock, self._token, self._terms)

    def is_held(self) -> bool:
        """Return whether the writer holds the lease, for files that are no reason to fail."""
        return self._token is None or holds(self.lock, self._token)

    @property
    def _terms(self) -> Terms:
        return Terms(
            resource=f"run_dir {self.location}",
            holder="run",
            instead="give another run_dir",
            refused=RunDirectoryError,
            failed=CheckpointError,
        )

    @property
    def attempts(self) -> Location:
        return self.location.join("attempts.jsonl")

    @property
    def data(self) -> Location:
        return self.location.join("data")

    @property
    def checkpoints(self) -> Location:
        return self.location.join("checkpoints")

    @property
    def logs(self) -> Location:
        return self.location.join("logs")

    @property
    def metrics(self) -> Location:
        return self.location.join("metrics.jsonl")

    @property
    def calls(self) -> Location:
        return self.location.join("calls.jsonl")

    @property
    def finished(self) -> Location:
        return self.location.join("finished.json")

    @property
    def report(self) -> Location:
        return self.location.join("report.html")

    @property
    def events(self) -> Location:
        return self.location.join("events")

    @property
    def model(self) -> Location:
        return self.location.join("model")

    @property
    def mlflow(self) -> Location:
        return self.location.join("mlflow.json")

    @property
    def saved_model(self) -> Location:
        return self.location.join("saved_model")

    @property
    def attachments(self) -> Location:
        return self.location.join("handed")

    @property
    def signature(self) -> Location:
        return self.model.join("signature.json")

    def checkpoint(self, step: int) -> Location:
        """Return the folder of the checkpoint taken after ``step`` steps of the whole run."""
        return self.checkpoints.join(f"step-{step:08d}")

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of all checkpoint folders, newest first, whole or not."""
        matches = (_STEP.fullmatch(folder.name) for folder in self.checkpoints.list())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def run_id(self) -> str | None:
        """Return the identity that checkpoints of this run carry; ``None`` before the first."""
        try:
            return str(load_json(self.identity.read_text())["run_id"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(f"{self.identity} cannot be read: {error}") from error

    def write_run_id(self, run_id: str) -> None:
        self.identity.write_text(json.dumps({"run_id": run_id}))

    def check_writable(self) -> None:
        """Create the directory and check that a file can be written to it.

        Raises:
            RunDirectoryError: it cannot be.
        """
        probe = self.location.join(f".probe-{uuid.uuid4().hex[:8]}")
        try:
            self.location.make_folder()
            probe.write_text("probe")  # on a full disk an empty file still fits
            probe.delete_file()
        except OSError as error:
            raise RunDirectoryError(
                f"{self.location} is not writable: {error}. Give a folder that the driver and all "
                "executors can write to"
            ) from error

    def sweep(self) -> None:
        """Delete temporary files of killed writers; nobody else may write meanwhile."""
        for folder in (self.location, self.model):
            with contextlib.suppress(OSError):  # they only take up space
                for left in folder.list():
                    if _ASIDE.fullmatch(left.name):
                        left.delete_folder() if left.is_folder else left.delete_file()

    def mlflow_run(self) -> str | None:
        """Return the identity of the run in MLflow; ``None`` if there is none."""
        try:
            return str(load_json(self.mlflow.read_text())["run_id"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(f"{self.mlflow} is damaged: {error!r}") from error

    def write_mlflow_run(self, run_id: str) -> None:
        self.mlflow.write_text(json.dumps({"run_id": run_id}))

    def write_config(self, settings: JsonObject) -> None:
        self.config.write_text(json.dumps(settings, indent=1))

    def write_metrics(
        self, epochs: Sequence[Mapping[str, object]], accounts: Sequence[Account] = ()
    ) -> None:
        """Write the metrics of all epochs so far, one JSON object per line.

        Args:
            epochs: the metrics of each.
            accounts: time breakdown of each: ``accounting`` in its line, where its number is
                ``epoch``. Metrics of these names, or ``metrics``, are within ``metrics``.
        """
        lines = []
        for number, (logs, account) in enumerate(zip_longest(epochs, accounts[: len(epochs)])):
            line: dict[str, object] = {_NUMBER: number}
            if account is not None:
                line[_ACCOUNT] = account
            if namesakes := {name: value for name, value in logs.items() if name in _RESERVED}:
                line[_NAMESAKES] = namesakes
            line |= {name: value for name, value in logs.items() if name not in _RESERVED}
            lines.append(json.dumps(line))
        self.metrics.write_text("".join(f"{line}\n" for line in lines))

    def read_metrics(self, say: _Say = _ignore) -> list[dict[str, float]]:
        """Return the metrics of each epoch; none if there is no file of them.

        Args:
            say: called with a message about a last line that was cut short.

        Raises:
            RunDirectoryError: it is damaged elsewhere.
        """
        try:
            text = self.metrics.read_text()
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{self.metrics} is damaged: {error}") from error
        lines = text.splitlines()
        epochs = []
        for number, line in enumerate(lines, 1):
            try:
                epoch = load_json(line)
                if epoch.get(_NUMBER) != number - 1:
                    raise ValueError(f"its number is {epoch.get(_NUMBER)!r} and not {number - 1}")
                logs = {name: value for name, value in epoch.items() if name not in _RESERVED}
                epochs.append(logs | epoch.get(_NAMESAKES, {}))
            except (ValueError, AttributeError, TypeError) as error:
                if number == len(lines) and not text.endswith("\n"):
                    say(f"metrics.jsonl is cut short in line {number}, which is left out.")
                    break
                raise RunDirectoryError(
                    f"{self.metrics} is damaged: line {number} is not an epoch ({error})"
                ) from error
        return epochs

    def read_accounts(self, epochs: int, say: _Say = _ignore) -> list[Account]:
        """Return the time breakdown of each of the first ``epochs`` epochs, where it is known."""
        accounts: list[Account] = []
        damaged = []
        try:
            for number, line in enumerate(self.metrics.read_text().splitlines()[:epochs], 1):
                account = load_json(line).get(_ACCOUNT)
                if account is not None and not _is_account(account):
                    damaged.append(str(number))
                    account = None
                accounts.append(account)
        except (OSError, ValueError, AttributeError):  # not needed to train
            pass
        if damaged:
            lines = ", ".join(damaged[:5]) + (", …" if len(damaged) > 5 else "")
            say(f"metrics.jsonl is damaged: the time breakdown is left out of line {lines}.")
        return accounts + [None] * (epochs - len(accounts))

    def read_config(self, say: _Say = _ignore) -> JsonObject:
        """Return the settings of the newest call; none if they cannot be read."""
        settings = _parsed(self.config, say, _is_settings)
        if settings == {}:
            say("config.json holds no settings.")
        return settings if isinstance(settings, dict) else {}

    def write_attempts(self, attempts: Sequence[Mapping[str, object]]) -> None:
        """Write the records of all attempts of the run, one JSON object per line."""
        self.attempts.write_text("".join(f"{json.dumps(attempt)}\n" for attempt in attempts))

    def attempts_so_far(self) -> list[JsonObject]:
        """Return the records that `write_attempts` wrote; none if the file is missing.

        Raises:
            OSError: the storage fails.
            ValueError: it is damaged.
        """
        return _lines(self.attempts)

    def read_attempts(self, say: _Say = _ignore) -> list[JsonObject]:
        """Return the records that `write_attempts` wrote; none if they cannot be read."""
        return _readable(self.attempts, _is_attempt, say)

    def add_call(self, call: Mapping[str, object]) -> None:
        """Add the record of a call that has ended.

        Raises:
            OSError: the storage fails; nothing was written.
            ValueError: the records of earlier calls are damaged; they are unchanged.
        """
        lines = [json.dumps(one) for one in (*_lines(self.calls), call)]
        self.calls.write_text("".join(f"{line}\n" for line in lines))

    def read_calls(self, say: _Say = _ignore) -> list[JsonObject]:
        """Return the records that `add_call` has added; none if they cannot be read."""
        return _readable(self.calls, _is_call, say)


# Fields of records, to validate them. A damaged record is not shown at all: a part of its calls
# would look like all of them.


@dataclass(frozen=True)
class _Account:
    ranks: list[int]
    seconds: dict[str, list[float]]
    mean: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rank:
    rank: int
    host: str
    slot: int
    gpus: list[str]


@dataclass(frozen=True)
class _Call:
    seconds: dict[str, float]
    ended: float = 0.0
    placement: list[_Rank] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    workers: int = 0
    weights: str = ""


@dataclass(frozen=True)
class _Fit:
    epochs: int = 0
    batch_size: int = 0


@dataclass(frozen=True)
class _Sync:
    sync: str = ""


@dataclass(frozen=True)
class _Settings:
    fit: _Fit = _Fit()
    num_workers: int = 0
    rows: int = 0
    validation_rows: int = 0
    sync: _Sync = _Sync()


def _has_fields(value: object, cls: type[object]) -> bool:
    try:
        read_fields(value, cls)
    except ValueError:
        return False
    return True


def _is_object(value: object) -> bool:
    """Return whether ``value`` is a dictionary."""
    return isinstance(value, dict)


def _is_account(value: object) -> bool:
    """Return whether ``value`` is a time breakdown by rank."""
    return _has_fields(value, _Account) and all(
        len(each) == len(value["ranks"])  # type: ignore[index]
        for each in value["seconds"].values()  # type: ignore[index]
    )


def _is_attempt(value: object) -> bool:
    """Return whether ``value`` has the fields of an `Attempt`."""
    return _has_fields(value, Attempt)


def _is_call(value: object) -> bool:
    """Return whether ``value`` is the record of a call."""
    if not (isinstance(value, dict) and _has_fields(value, _Call)):
        return False
    accounts = value.get("accounts", {})
    return accounts == {} or _is_account(accounts)


def _is_settings(value: object) -> bool:
    """Return whether ``value`` holds settings of a run."""
    return _has_fields(value, _Settings)


def _lines(file: Location) -> list[JsonObject]:
    try:
        return [load_json(line) for line in file.read_text().splitlines()]
    except FileNotFoundError:
        return []


def _readable(file: Location, is_whole: _Check, say: _Say) -> list[JsonObject]:
    try:
        records = _lines(file)
    except (OSError, ValueError) as error:
        say(f"{file.name} cannot be read, and is left out: {error}.")
        return []
    damaged = [number for number, each in enumerate(records, 1) if not is_whole(each)]
    if damaged:
        say(f"{file.name} is damaged in line {damaged[0]}, and is left out.")
    return [] if damaged else records


def _parsed(file: Location, say: _Say, is_whole: _Check = _is_object) -> object:
    try:
        value = load_json(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        say(f"{file.name} cannot be read, and is left out: {error}.")
        return None
    if is_whole(value):
        return value
    say(f"{file.name} is damaged, and is left out.")
    return None
