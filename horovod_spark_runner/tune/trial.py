"""One trial of a search: a training, followed epoch by epoch."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..checkpoint.files import PlainLogs
from ..cluster.protocol.messages import Progress
from ..errors import InvalidInputError, ModelError, RunDirectoryError
from ..run.attempts import Stopped
from ..storage.filesystem import Location
from ..training.progress import numbers

if TYPE_CHECKING:
    from optuna.trial import Trial

PRUNED = "pruned by the search"
_ENDED = "the search has ended"


class TrialFollower:
    """Reports a trial's metric after every epoch, and ends it if it is pruned.

    Args:
        trial: optuna's.
        metric: name of the metric.
        reported: values of epochs that are known already, by number from 1.
        ended: set once the whole search is to end.
        alone: is held while the study is asked.
    """

    def __init__(
        self,
        trial: Trial,
        metric: str,
        reported: Mapping[int, float],
        ended: threading.Event,
        alone: threading.Lock,
    ) -> None:
        self._trial = trial
        self._metric = metric
        self._reported = set(reported)
        self._ended = ended
        self._alone = alone
        self._end: Exception | None = None

    @property
    def pruned(self) -> bool:
        """True if the search has pruned the trial."""
        return isinstance(self._end, Stopped)

    @property
    def broken(self) -> InvalidInputError | None:
        """Why no trial of the search can have a value; ``None`` if they can."""
        return self._end if isinstance(self._end, InvalidInputError) else None

    def take_over(self, history: Sequence[PlainLogs]) -> None:
        """Report the epochs recorded in a checkpoint."""
        for number, metrics in enumerate(history, start=1):
            self._report(number, numbers(metrics))

    def epoch(self, progress: Progress) -> None:
        """Report an epoch, unless the end of the trial is decided already."""
        if self._end is not None:
            return
        try:
            self._report(progress.epoch + 1, progress.metrics)
        except InvalidInputError as error:
            self._end = error
            return
        with self._alone:
            # After the last epoch there is nothing to be saved, but a result to be lost.
            prune = progress.epoch + 1 < progress.epochs and self._trial.should_prune()
        if prune:
            self._end = Stopped(f"{PRUNED} after epoch {progress.epoch + 1}")

    def poll(self) -> None:
        """End the training if the trial is pruned, or the search ends."""
        if self._end is not None:
            raise self._end
        if self._ended.is_set():
            raise Stopped(_ENDED)

    def _report(self, number: int, metrics: Mapping[str, float]) -> None:
        value = _value_of(metrics, self._metric)
        with self._alone:
            if number not in self._reported:  # epochs may be trained again after a failure
                self._reported.add(number)
                self._trial.report(value, number)


def check_trial_run(
    before: Mapping[str, Any] | None, params: Mapping[str, Any], place: Location
) -> None:
    """Check that a trial's run directory was trained with the trial's parameters.

    Args:
        before: the parameters of the run there.
        params: those of the trial.
        place: the run directory.

    Raises:
        RunDirectoryError: it was not.
    """
    if before != json.loads(json.dumps(params)):
        raise RunDirectoryError(
            f"{place} holds a run with the parameters {before}, and the trial has {dict(params)}: "
            "it is of another search; give another study_dir"
        )


def final_value(history: Sequence[PlainLogs], final: PlainLogs | None, metric: str) -> float:
    """Return the metric of the model that a trial has made.

    Args:
        history: metrics of its epochs.
        final: metrics of the model if it is another one than after the last epoch.
        metric: name of the metric.

    Raises:
        ModelError: it is not known.
    """
    if final is None:
        return _value_of(numbers(history[-1]), metric)
    if metric not in final:
        raise ModelError(
            "a callback or the optimizer has changed the model after its last epoch (as "
            "EarlyStopping(restore_best_weights=True) does), so that its "
            f"{metric!r} is not known; search by a metric of validation rows, such as 'val_loss'"
        )
    return _value_of(numbers(final), metric)


def _value_of(metrics: Mapping[str, float], metric: str) -> float:
    """Return the metric of an epoch.

    Raises:
        InvalidInputError: it is not there.
    """
    if metric not in metrics:
        raise InvalidInputError(
            f"metric={metric!r} is no metric of the trials; they have "
            f"{', '.join(sorted(metrics))}. Name one of these, and another study_dir"
        )
    return float(metrics[metric])
