"""How far a training has come, and telling the driver."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..launch.shared.messages import Progress as ProgressReport
from ..launch.worker.reporting import send
from ..rundir.checkpoint import LogValue
from .logs import Logs, numbers, plain

PROGRESS_SECONDS = 0.2


@dataclass
class Progress:
    """How far a training has come.

    Attributes:
        step: steps of the whole run.
        epoch: whole epochs.
        epoch_step: steps of the epoch after those.
        history: metrics of the whole epochs.
        stopped_at: ``epochs`` of the call that a callback ended early; ``None`` otherwise.
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


class ProgressReporter:
    """Tells the driver about steps, not too often, and about epochs.

    Args:
        rank: only rank 0 tells.
        epochs: epochs the run is to have.
    """

    def __init__(self, rank: int, epochs: int) -> None:
        self._silent = rank != 0
        self._epochs = epochs
        self._last = 0.0

    def step(self, progress: Progress, steps: int, logs: Logs | None) -> None:
        """Tell of a step of an epoch of ``steps``, unless the epoch's own report follows."""
        now = time.monotonic()
        if now - self._last >= PROGRESS_SECONDS and progress.epoch_step < steps:
            self._last = now
            self._send(progress.epoch, progress, progress.epoch_step, steps, numbers(plain(logs)))

    def epoch(self, progress: Progress, steps: int, rate: float) -> None:
        """Tell of the epoch just completed, at ``rate`` samples per second."""
        self._last = time.monotonic()
        logs = numbers(progress.history[-1])
        self._send(progress.epoch - 1, progress, steps, steps, logs, rate)

    def _send(
        self,
        epoch: int,
        progress: Progress,
        step: int,
        steps: int,
        logs: dict[str, float],
        rate: float | None = None,
    ) -> None:
        if not self._silent:
            send(
                ProgressReport(
                    epoch=epoch,
                    epochs=self._epochs,
                    step=step,
                    steps=steps,
                    run_step=progress.step,
                    metrics=logs,
                    samples_per_second=rate,
                )
            )


class PhaseWatch:
    """Notes the seconds of phases that follow each other, from now on."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """Take note that ``phase`` has ended."""
        now = time.monotonic()
        self.seconds[phase], self._last = now - self._last, now
