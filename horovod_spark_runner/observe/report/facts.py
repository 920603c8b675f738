"""Facts of a run, read from its run directory alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeGuard

from ...checkpoint.files import CheckpointInfo, PlainLogs, best_step, read_info, verify_checkpoint
from ...checkpoint.retry_policy import FINISHED, RUNNING, Attempt
from ...checkpoint.run_directory import Account, RunDirectory
from ...config.training import CheckpointOptions
from ...errors import InvalidInputError, RunDirectoryError
from ...storage.contents import convert_parse_errors
from ...storage.lease import read_lease, seems_held
from ...storage.paths import redact_url
from ...training.time_breakdown import mean_seconds
from ...training.trained_model import ModelSummary, read_model
from ...typed_json import JsonObject, read_fields

INTERRUPTED, _UNFINISHED, UNREADABLE = "interrupted", "not finished", "cannot be read"
_LOST_DRIVER = "its driver was killed, or lost the storage; its time and steps are the least known"
# The model exists, and none of its files is damaged.
WHOLE = "whole"


@dataclass(frozen=True)
class _CheckpointLine:
    """One checkpoint as it is shown.

    Attributes:
        name: its folder's name.
        step: steps of the whole run.
        epoch: whole epochs.
        epoch_step: steps of the epoch after those.
        metrics: of the last whole epoch.
        best: whether it is the best by the run's metric.
        problem: why it cannot be resumed from; empty if it can.
    """

    name: str
    step: int
    epoch: int
    epoch_step: int
    metrics: PlainLogs
    best: bool = False
    problem: str = ""


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run directory.

    Attributes:
        place: the run directory.
        state: ``"finished"``, ``"running"``, ``"interrupted"`` (its process is gone) or how its
            last attempt ended.
        holder: who is writing, of a running one.
        epochs: epochs asked for; 0 if unknown.
        workers: ranks asked for; 0 if unknown.
        checkpoints: newest first.
        attempts: oldest first.
        program: the script that started it; empty if unknown.
        model: `WHOLE`, as far as it was read, or why the trained model cannot be used; empty if
            there is none yet.
        events: where its event files are; empty if there are none.
        notes: what of its settings and attempts cannot be read, a sentence each.
    """

    place: str
    state: str
    holder: str = ""
    epochs: int = 0
    workers: int = 0
    checkpoints: tuple[_CheckpointLine, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    program: str = ""
    model: str = ""
    events: str = ""
    notes: tuple[str, ...] = ()

    @property
    def newest(self) -> _CheckpointLine | None:
        """The checkpoint that would be resumed from."""
        return next((line for line in self.checkpoints if not line.problem), None)

    @property
    def progress(self) -> str:
        newest = self.newest
        if newest is None:
            return f"0/{self.epochs or '?'} epochs"
        within = f" and {newest.epoch_step} steps" if newest.epoch_step else ""
        return f"{newest.epoch}{within}/{self.epochs or '?'} epochs"


def read_run(
    directory: RunDirectory, now: float, *, verify: bool, ended: bool = False
) -> RunSummary:
    """Read the summary of a run directory.

    Args:
        directory: the run directory.
        now: seconds since the epoch.
        verify: read all files of checkpoints and model and check their sums; else what their
            manifests say is believed.
        ended: whether the run is known to have ended, though its lock is still held.

    Raises:
        InvalidInputError: it holds no run.
    """
    with convert_parse_errors(f"the records of a run in {directory.location}"):
        return _read_run(directory, now, verify, ended)


def _read_run(directory: RunDirectory, now: float, verify: bool, ended: bool) -> RunSummary:
    configured = directory.config.exists()
    if not (configured or directory.attempts.exists()):
        raise InvalidInputError(f"{directory.location} has no config.json: give a run directory")
    notes = [] if configured else ["config.json is not there: the settings are not known."]
    settings = directory.read_config(notes.append)
    written = [read_fields(one, Attempt) for one in directory.read_attempts(notes.append)]
    lock = read_lease(directory.lock)
    alive = not ended and lock is not None and seems_held(lock, now)
    holder = f"process {lock.get('pid')} on {lock.get('host')}" if alive and lock else ""
    fit = settings.get("fit", {})
    lines = tuple(_checkpoint_lines(directory, settings, verify))
    newest = max((line.step for line in lines), default=0)
    if written and newest > written[-1].last_step:  # reports of steps are rarer than steps
        written[-1] = replace(written[-1], last_step=newest)
    attempts = _close_attempts(
        written,
        now if alive else None,
        newest,
        _epoch_ends(directory, max((line.epoch for line in lines), default=0)),
    )
    return RunSummary(
        place=str(directory.location),
        state=RUNNING if alive else _ended_state(directory, attempts),
        holder=holder,
        epochs=int(fit.get("epochs", 0)),
        workers=int(settings.get("num_workers", 0)),
        checkpoints=lines,
        attempts=tuple(attempts),
        program=str(settings.get("program", "")),
        model=_model_state(directory, verify),
        events=str(directory.events) if directory.events.exists() else "",
        notes=tuple(notes),
    )


def _close_attempts(
    attempts: Sequence[Attempt], now: float | None, step: int, epoch_ends: Sequence[float]
) -> list[Attempt]:
    """Complete the records of attempts that have no recorded end. Pure.

    Args:
        attempts: oldest first.
        now: seconds since the epoch, if the last one may still run.
        step: that of the newest checkpoint.
        epoch_ends: when epochs ended, in seconds since the epoch.
    """
    closed = []
    for one, after in zip_longest(attempts, attempts[1:]):
        if one.ending == RUNNING:
            # The next attempt resumed from a checkpoint of this one.
            last_step = max(one.last_step, step if after is None else after.first_step)
            if after is None and now is not None:
                one = replace(one, ended=max(one.ended, now), last_step=last_step)
            else:
                until = math.inf if after is None else after.started
                one = replace(
                    one,
                    ended=max([one.ended, *(at for at in epoch_ends if at <= until)]),
                    last_step=last_step,
                    ending=INTERRUPTED,
                    cause=_LOST_DRIVER,
                )
        closed.append(one)
    return closed


def _epoch_ends(directory: RunDirectory, epochs: int) -> list[float]:
    times = [one.get("time") for one in directory.read_accounts(epochs) if one is not None]
    return [float(at) for at in times if isinstance(at, (int, float))]


def _model_state(directory: RunDirectory, verify: bool) -> str:
    if not directory.signature.exists():
        return ""
    try:
        model = read_model(directory)
        for name in model.sums if verify else ():
            model.read(name)
    except (RunDirectoryError, OSError) as error:
        return str(error)
    return WHOLE


def _ended_state(directory: RunDirectory, attempts: Sequence[Attempt]) -> str:
    if attempts:
        return attempts[-1].ending
    return FINISHED if directory.signature.exists() else _UNFINISHED


def _options(settings: JsonObject) -> CheckpointOptions:
    try:
        return CheckpointOptions(**settings.get("checkpoints", {}))
    except (TypeError, InvalidInputError):  # of another version
        return CheckpointOptions()


def _checkpoint_lines(
    directory: RunDirectory, settings: JsonObject, verify: bool
) -> list[_CheckpointLine]:
    read = verify_checkpoint if verify else read_info
    whole: dict[int, CheckpointInfo] = {}
    problems: dict[int, str] = {}
    for step in directory.checkpoint_steps():
        try:
            whole[step] = read(directory.checkpoint(step))
        except (OSError, ValueError) as error:
            problems[step] = str(error)
    best = best_step(whole, _options(settings))
    lines = [
        _CheckpointLine(
            directory.checkpoint(step).name,
            step,
            info.epoch,
            info.epoch_step,
            info.history[-1] if info.history else {},
            step == best,
        )
        for step, info in whole.items()
    ]
    for step, problem in problems.items():
        name = directory.checkpoint(step).name
        lines.append(_CheckpointLine(name, step, 0, 0, {}, problem=problem))
    return sorted(lines, key=lambda line: line.step, reverse=True)


@dataclass(frozen=True)
class RunFacts:
    """A run as its report shows it.

    Attributes:
        name: of its directory.
        place: the directory.
        state: what became of it, with attempts and checkpoints.
        settings: those of the newest call; empty if they are not known.
        epochs: metrics of each epoch.
        accounts: where the time of each of these went, as far as that is known.
        calls: what each call of `run_training` has recorded at its end, oldest first.
        notes: what of all this cannot be read, or is missing, a sentence each.
        model: layers and parameters of the trained model, if that is known.
    """

    name: str
    place: str
    state: RunSummary
    settings: Mapping[str, Any]
    epochs: Sequence[Mapping[str, object]]
    accounts: Sequence[Account]
    calls: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()
    model: ModelSummary | None = None

    def metric_names(self) -> list[str]:
        """Return the names of metrics that are numbers, without ``val_``, in order."""
        names: dict[str, None] = {}
        for epoch in self.epochs:
            for name, value in epoch.items():
                if _is_number(value):
                    names[name.removeprefix("val_")] = None
        # A loss is what is trained; the rest by name.
        return sorted(names, key=lambda name: (name != "loss", "loss" not in name, name))

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Return the epochs, from 1, that have a metric, and its values."""
        return _points(self.epochs, name)

    def recorded(self, name: str) -> tuple[list[float], list[float]]:
        """Return the epochs, from 1, whose account has a number of that name, and the numbers."""
        return _points(self.accounts, name)

    def rate_names(self) -> list[str]:
        """Return the names of learning rates that accounts tell."""
        names = {n for a in self.accounts if a is not None for n in a if n.startswith("learning_")}
        return sorted(names)

    @property
    def last_call(self) -> Mapping[str, Any]:
        return self.calls[-1] if self.calls else {}

    @property
    def best_metric(self) -> str:
        """The metric of the best checkpoint; empty if none is kept."""
        return _options(dict(self.settings)).best_metric or ""

    @property
    def seconds(self) -> float:
        """The wall-clock time of all calls that have ended."""
        return float(sum(sum(call.get("seconds", {}).values()) for call in self.calls))

    def mean_seconds(self) -> list[dict[str, float]]:
        """Return the mean over ranks of each epoch's seconds by kind; empty where not recorded."""
        return [mean_seconds(account) for account in self.accounts]


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _points(
    epochs: Sequence[Mapping[str, object] | None], name: str
) -> tuple[list[float], list[float]]:
    points = [
        (float(number), float(value))
        for number, epoch in enumerate(epochs, 1)
        if epoch is not None and _is_number(value := epoch.get(name))
    ]
    return [x for x, _ in points], [y for _, y in points]


def read_facts(directory: RunDirectory, now: float, *, ended: bool = False) -> RunFacts:
    """Read the facts of a run directory.

    Args:
        directory: the run directory.
        now: seconds since the epoch.
        ended: whether the run is known to have ended, though its lock is still held.

    Raises:
        InvalidInputError: it holds no run.
        RunDirectoryError: its metrics are damaged.
    """
    state = read_run(directory, now, verify=False, ended=ended)
    notes = list(state.notes)
    epochs = directory.read_metrics(notes.append)
    checkpointed = max((line.epoch for line in state.checkpoints), default=0)
    if checkpointed > len(epochs) and state.state != RUNNING:
        notes.append(
            f"metrics.jsonl tells of {len(epochs):,} whole epochs, checkpoints of "
            f"{checkpointed:,}: the last ones are missing here."
        )
    return RunFacts(
        name=directory.location.name,
        place=redact_url(str(directory.location)),
        state=state,
        settings=directory.read_config(),
        epochs=epochs,
        accounts=directory.read_accounts(len(epochs), notes.append),
        calls=directory.read_calls(notes.append),
        notes=notes,
        model=_model_summary(directory),
    )


def _model_summary(directory: RunDirectory) -> ModelSummary | None:
    try:
        return read_model(directory).signature.summary
    except (RunDirectoryError, OSError):
        return None
