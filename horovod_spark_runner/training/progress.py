"""Progress of a training, reported to the driver."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ..checkpoint.files import CheckpointInfo, LogValue
from ..cluster.protocol.messages import Progress as ProgressReport
from ..cluster.worker.reporting import send
from ..config.training import FitOptions
from ..data.manifest import Manifest
from .time_breakdown import Accounts, Kind, mean_seconds

# A value of parsed JSON.
Json: TypeAlias = "str | float | bool | list[Json] | dict[str, Json] | None"
# Results of a step, epoch or evaluation, by name: tensors, numbers, lists, or logs.
Logs: TypeAlias = Mapping[str, object]


def flat(logs: Logs) -> dict[str, object]:
    """Return ``logs`` without nesting, as Keras's callbacks see them."""
    result: dict[str, object] = {}
    for name, value in sorted(logs.items()):
        result.update(flat(value) if isinstance(value, Mapping) else {name: value})
    return result


def plain(logs: Logs | None) -> dict[str, LogValue]:
    """Return ``logs`` as JSON: numbers, and lists where a metric gives several."""
    return {name: _plain_value(value) for name, value in flat(logs or {}).items()}


def _plain_value(value: object) -> LogValue:
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return str(value)
    return array.item() if array.size == 1 and array.ndim <= 1 else array.tolist()


def numbers(logs: Logs) -> dict[str, float]:
    """Return the entries of plain ``logs`` that are one number."""
    return {name: value for name, value in logs.items() if isinstance(value, float)}


_PROGRESS_SECONDS = 0.2
# Reasons for which a rank waits.
_WAITS = (Kind.DATA, Kind.EXCHANGE, Kind.CHECKPOINT)


@dataclass
class Progress:
    """Progress of a training.

    Attributes:
        step: steps of the whole run.
        epoch: whole epochs.
        epoch_step: steps of the epoch after those.
        history: metrics of the whole epochs.
        stopped_at: ``epochs`` of the call that a callback stopped; ``None`` otherwise.
        rows: rows this rank has trained on since it was started.
        seconds: time it has spent in training steps.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    history: list[dict[str, LogValue]] = field(default_factory=list)
    stopped_at: int | None = None
    rows: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, info: CheckpointInfo) -> Progress:
        """Return how far a training had come at a checkpoint."""
        history = [dict(logs) for logs in info.history]
        stopped_at = info.state.get("stopped_at")
        return cls(info.step, info.epoch, info.epoch_step, history, stopped_at)

    def to_step(self, epoch_step: int) -> int:
        """Advance to a step of the epoch; return the number of steps advanced."""
        further = epoch_step - self.epoch_step
        self.step += further
        self.epoch_step = epoch_step
        return further

    def is_finished(self, epochs: int) -> bool:
        """Return whether a run of so many epochs is finished."""
        # A run that a callback stopped is over: it would stop there with more epochs, too.
        return self.epoch >= epochs or self.stopped_at is not None


@dataclass(frozen=True)
class _Began:
    """Start of the measurement of a training's pace.

    Attributes:
        at: when, by the clock.
        step: step of the whole run.
        epoch: whole epochs by then.
        validating: seconds spent validating by then.
        trying: seconds spent on first steps and trials by then.
    """

    at: float
    step: int
    epoch: int
    validating: float
    trying: float


class ProgressReporter:
    """Tells the driver about steps, not too often, and about epochs.

    Args:
        rank: only rank 0 tells.
        fit: how long the run is to be, and after which epochs it validates.
        validation: what it validates with; ``None`` if it does not.
        accounts: where this rank's time goes.
        clock: seconds of a steady clock.
        alone: whether this rank's logs are those of all ranks; others are not shown.
    """

    def __init__(
        self,
        rank: int,
        fit: FitOptions,
        validation: Manifest | None,
        accounts: Accounts,
        clock: Callable[[], float] = time.monotonic,
        alone: bool = True,
    ) -> None:
        self._silent = rank != 0
        self._alone = alone
        self._fit = fit
        self._accounts = accounts
        self._validates = validation is not None
        self._clock = clock
        self._began: _Began | None = None
        self._last = 0.0
        self._rows = 0
        self._spent: dict[str, float] = {}

    def step(self, progress: Progress, steps: int, logs: Logs | None, rows: int) -> None:
        """Report a step of an epoch of ``steps``, unless the epoch's own report follows.

        Args:
            progress: how far the training has come.
            steps: steps of an epoch.
            logs: those of the step.
            rows: rows of its global batch.
        """
        now = self._clock()
        self._rows += rows
        if self._began is None:  # after the first step, which takes a time of its own
            validating, trying = self._apart()
            self._began = _Began(now, progress.step, progress.epoch, validating, trying)
        late = now - self._last >= _PROGRESS_SECONDS and progress.epoch_step < steps
        if late and not self._silent:
            rate = self._rows / (now - self._last) if self._spent else None
            logged = numbers(plain(logs)) if self._alone else {}
            at = progress.epoch_step
            send(self._report(progress.epoch, progress, at, steps, logged, now, rate))

    def epoch(self, progress: Progress, steps: int, rate: float) -> Callable[[], None]:
        """Return a function that reports the completed epoch, at ``rate`` samples per second."""
        if self._silent:
            return lambda: None
        logs, now = numbers(progress.history[-1]), self._clock()
        report = self._report(progress.epoch - 1, progress, steps, steps, logs, now, rate)
        return functools.partial(send, report)

    def _report(
        self,
        epoch: int,
        progress: Progress,
        step: int,
        steps: int,
        logs: dict[str, float],
        now: float,
        rate: float | None,
    ) -> ProgressReport:
        spent = self._accounts.seconds()
        if step == steps:
            waits = shares(mean_seconds(self._accounts.epochs[-1]))
        else:
            waits = shares({kind: spent[kind] - before for kind, before in self._spent.items()})
        self._last, self._rows, self._spent = now, 0, spent
        return ProgressReport(
            epoch=epoch,
            epochs=self._fit.epochs,
            step=step,
            steps=steps,
            run_step=progress.step,
            metrics=logs,
            samples_per_second=rate,
            seconds_left=self._left(progress, steps, now),
            waits=waits,
        )

    def _apart(self) -> tuple[float, float]:
        """Return the seconds this rank has spent validating, and on first steps and trials."""
        spent = self._accounts.seconds()
        return spent[Kind.VALIDATION], spent[Kind.FIRST_STEP]

    def _left(self, progress: Progress, steps: int, now: float) -> float | None:
        """Return how long the rest of the run will take, at the pace since the first step.

        Validations that are to come take as long as those so far; until one was seen, nothing.

        Args:
            progress: how far the training has come.
            steps: steps of an epoch.
            now: by the clock.
        """
        began = self._began
        if began is None or progress.step <= began.step:
            return None
        validating, trying = self._apart()
        validating, trying = validating - began.validating, trying - began.trying
        done = progress.epoch * steps + progress.epoch_step
        rest = max(0, self._fit.epochs * steps - done)
        left = (now - began.at - validating - trying) / (progress.step - began.step) * rest
        seen = self._fit.validations(began.epoch, progress.epoch)
        if self._validates and seen:
            left += validating / seen * self._fit.validations(progress.epoch, self._fit.epochs)
        return left


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the fraction of ``seconds`` spent waiting, by kind."""
    total = sum(seconds.values())
    waited = {kind: seconds[kind] for kind in _WAITS if seconds.get(kind, 0.0) > 0}
    return {kind: round(part / total, 4) for kind, part in waited.items()}
