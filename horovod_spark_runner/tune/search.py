"""Trials of a search: which come next, in parallel, each followed epoch by epoch."""

from __future__ import annotations

import contextlib
import contextvars
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..checkpoint.files import PlainLogs
from ..cluster.protocol.messages import Progress
from ..cluster.spark.session import described, inheriting_thread
from ..data.prepare.datasets import Prepared, session_of
from ..errors import (
    CheckpointError,
    HorovodSparkError,
    InvalidInputError,
    ModelError,
    RunCancelledError,
    RunDirectoryError,
    RunFailedError,
    StorageError,
    UnreachableError,
)
from ..model.transformer import TrainedTransformer, transformer_class
from ..observe.console import Console
from ..observe.notebook import heading_html, never_failing, report_of, table_html
from ..run.attempts import Stopped
from ..run.pipeline import train_ranks
from ..run.resolve import ResolvedRun, resolve
from ..storage.filesystem import Location
from ..training.engine import engine_of
from ..training.progress import numbers
from .directory import PRUNED, StudyDirectory, trial_line, trial_table
from .trial_config import TrialConfigs

if TYPE_CHECKING:
    import pandas as pd
    from optuna.trial import Trial

    from .study import Study


@dataclass(frozen=True)
class TuneResult:
    """Result of a search.

    Attributes:
        best_params: the parameters of the best trial.
        best_value: the metric of its model.
        best_trial: its number.
        best_transformer: its trained model.
        trials: a row for each trial: ``trial`` (its number), ``state`` (``"finished"``,
            ``"pruned"`` or ``"failed"``), ``value``, a column for each parameter (``params.lr``),
            ``epochs``, ``seconds``, of these ``fit_seconds`` (from the first epoch to the end of
            the last), ``error`` and ``run_dir``.
        study_dir: the study's directory.
    """

    best_params: dict[str, Any]
    best_value: float
    best_trial: int
    best_transformer: TrainedTransformer = field(repr=False)
    trials: pd.DataFrame = field(repr=False)
    study_dir: str

    @never_failing
    def _repr_html_(self) -> str:
        trials = self.trials.drop(columns=["error", "run_dir"], errors="ignore")
        rows = trials.head(_SHOWN_TRIALS).values.tolist()
        best = self.trials[self.trials["trial"] == self.best_trial]["run_dir"].iloc[0]
        facts = {
            "trials": str(len(trials)),
            "study": self.study_dir,
            "best run": str(best),
            "report": report_of(str(best)),
        }
        title = f"best trial {self.best_trial}: {self.best_value:.4g} with {self.best_params}"
        strong = list(trials["trial"]).index(self.best_trial)
        return heading_html(title, facts) + table_html(list(trials.columns), rows, strong)


# Rows of a study's table in notebooks.
_SHOWN_TRIALS = 50
# Errors that no trial has caused, and that would fail the next one, too.
_OF_STORAGE = (CheckpointError, OSError, UnreachableError)


class Search:
    """The trials of one call.

    Args:
        study: where they are kept.
        directory: the study's directory.
        configs: makes what is trained.
        choose: has the parameters of a trial suggested.
        metric: name of the metric.
        max_trials: trials of the whole study.
        data: the rows.
        console: reports each trial.
    """

    def __init__(
        self,
        *,
        study: Study,
        directory: StudyDirectory,
        configs: TrialConfigs,
        choose: Callable[[Trial], dict[str, Any]],
        metric: str,
        max_trials: int,
        data: Prepared,
        console: Console,
    ) -> None:
        self._study = study
        self._directory = directory
        self._configs = configs
        self._choose = choose
        self._metric = metric
        self._max_trials = max_trials
        # Written before the first trial, so no trial waits for it or cleans up.
        self._data = replace(data, reused=True)
        self._console = console
        self._alone = threading.Lock()  # for the study
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._going_on = self._ended_trials = 0

    def run(self, parallel: int) -> None:
        """Carry out the trials that are left.

        Raises:
            KeyboardInterrupt: the search was interrupted.
            RunCancelledError: a Spark job of it was cancelled.
            StorageError: the study, or what its trials save, could not be written or read.
            InvalidInputError: no trial can have a value.
        """
        taken_up = self._study.take_up()
        if taken_up:
            self._console.print(f"{taken_up} trials that were interrupted go on")
        with self._console.during("searching", self._progress):
            if parallel == 1:
                self._work()
            else:
                self._work_in_threads(parallel)
        if isinstance(self._error, RunCancelledError):
            raise RunCancelledError(f"{self._error}; {self._saved_trials()}") from self._error
        if isinstance(self._error, _OF_STORAGE):
            raise StorageError(
                f"study_dir {self._directory.location} or its storage cannot be used: "
                f"{self._error}. No trial has failed of that: once the storage takes files again, "
                "the same call goes on"
            ) from self._error
        if self._error is not None:
            raise self._error

    def _progress(self) -> str:
        return (
            f"{self._ended_trials} of {self._max_trials} trials ended, {self._going_on} in progress"
        )

    def _saved_trials(self) -> str:
        counts = [one.state.name for one in self._study.trials()].count("COMPLETE")
        return (
            f"study_dir {self._directory.location} keeps {counts} finished trials, and the same "
            "call goes on"
        )

    def _work_in_threads(self, parallel: int) -> None:
        spark = session_of(self._configs.df)
        threads = []
        for number in range(parallel):
            work = partial(contextvars.copy_context().run, self._work)
            threads.append(inheriting_thread(spark, work, f"hsr-trials-{number}"))
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.1)
        except BaseException as error:  # Ctrl-C
            self._end_with(error)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()

    def _end_with(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._ended.set()

    def _work(self) -> None:
        """Carry out one trial after the other."""
        try:
            while not self._ended.is_set():
                with self._alone:
                    assignment = self._next()
                if assignment is None:
                    return
                self._carry_out(*assignment)
        except BaseException as error:
            self._end_with(error)

    def _next(self) -> tuple[Trial, dict[str, object]] | None:
        """Return the next trial and its parameters; ``None`` if there are enough."""
        while True:
            ended = sum(one.state.is_finished() for one in self._study.trials())
            self._ended_trials = ended
            if ended + self._going_on >= self._max_trials or self._study.exhausted:
                return None
            assignment = self._study.ask(self._choose)
            if assignment is not None:
                self._going_on += 1
                return assignment

    def _carry_out(self, trial: Trial, params: dict[str, Any]) -> None:
        number, finished = trial.number, False
        try:
            with self._alone:
                reported = self._study.reported(number)
            follower = _TrialFollower(trial, self._metric, reported, self._ended, self._alone)
            self._train(trial, params, follower)
            finished = True
        finally:
            with self._alone:
                self._going_on -= 1
                if not finished:
                    self._study.put_back(number)

    def _train(self, trial: Trial, params: dict[str, Any], follower: _TrialFollower) -> None:
        """Train a trial and report it to the study; raise errors that end the whole search."""
        began = time.monotonic()
        place = self._directory.trial(trial.number).location
        try:
            run = resolve(self._configs.df, self._configs.config(params, place))
        except _OF_STORAGE:
            raise
        except HorovodSparkError as error:
            self._fail(trial, params, error, began)
            return
        if run.checkpoint is not None:
            _check_trial_run(run.checkpoint.settings.get("params"), params, place)
        try:
            value, fitting = self._trained(trial, run, follower)
        except Stopped:
            if not follower.pruned:
                raise
        except (RunCancelledError, *_OF_STORAGE):
            raise
        except HorovodSparkError as error:
            if follower.broken is not None:
                raise follower.broken from error
            self._fail(trial, params, error, began)
            return
        if follower.pruned:
            with self._alone:
                self._study.prune(trial)
            self._say(trial, params, "pruned", began)
        else:
            with self._alone:
                self._study.finish(trial, value, fitting)
            self._say(trial, params, f"{self._metric} {value:.4g}", began)

    def _fail(
        self, trial: Trial, params: dict[str, Any], error: HorovodSparkError, began: float
    ) -> None:
        why = f"{type(error).__name__}: {error}"
        with self._alone:
            self._study.fail(trial, why)
        self._say(trial, params, f"failed: {why.partition(chr(10))[0]}", began)

    def _trained(
        self, trial: Trial, run: ResolvedRun, follower: _TrialFollower
    ) -> tuple[float, float]:
        """Return the value of a trial, and how long its epochs took."""
        if run.checkpoint is not None:
            follower.take_over(run.checkpoint.history)
        name = f"Horovod: trial {trial.number} of {self._directory.location.name}"
        with described(session_of(self._configs.df), name):
            trained = train_ranks(run, lambda: contextlib.nullcontext(self._data), follower)
        if follower.broken is not None:
            raise follower.broken
        report = trained.report
        value = _final_value(report.history, report.final, self._metric)
        return value, report.timings["epochs"]

    def _say(self, trial: Trial, params: dict[str, Any], how: str, began: float) -> None:
        with self._alone:
            best = self._study.best()
        best_text = "" if best is None else f"; best: trial {best.number}, {best.value:.4g}"
        seconds = time.monotonic() - began
        self._console.print(f"trial {trial.number} {params}: {how} ({seconds:.1f} s){best_text}")

    def result(self) -> TuneResult:
        """Return the result of the search.

        Raises:
            RunFailedError: no trial has a value.
        """
        trials = self._study.trials()
        lines = [trial_line(one, self._directory, searching=False) for one in trials]
        best = self._study.best()
        if best is None:
            failed = [line for line in lines if line.error]
            pruned = sum(line.state == PRUNED for line in lines)
            first = f": trial {failed[0].trial}: {failed[0].error}" if failed else ""
            raise RunFailedError(
                f"none of {len(lines)} trials has a value: {pruned} were pruned, {len(failed)} "
                f"failed{first}"
            )
        best_line = next(line for line in lines if line.trial == best.number)
        base = self._configs.base
        self._console.print(
            f"best: trial {best.number} {dict(best_line.params)}: {self._metric} {best.value:.4g}, "
            f"in {best_line.run_dir}"
        )
        build = self._configs.model_function(best_line.params)
        model = transformer_class(engine_of(build)).from_run(
            best_line.run_dir,
            model_fn=build,
            transforms=base.data.transforms,
            prediction_col=base.prediction_col,
        )
        return TuneResult(
            best_params=dict(best_line.params),
            best_value=float(best.value or 0.0),
            best_trial=best.number,
            best_transformer=model,
            trials=trial_table(lines),
            study_dir=str(self._directory.location),
        )


class _TrialFollower:
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
            # After the last epoch, pruning would only lose the result.
            prune = progress.epoch + 1 < progress.epochs and self._trial.should_prune()
        if prune:
            self._end = Stopped(f"pruned by the search after epoch {progress.epoch + 1}")

    def poll(self) -> None:
        """End the training if the trial is pruned, or the search ends."""
        if self._end is not None:
            raise self._end
        if self._ended.is_set():
            raise Stopped("the search has ended")

    def _report(self, number: int, metrics: Mapping[str, float]) -> None:
        value = _value_of(metrics, self._metric)
        with self._alone:
            if number not in self._reported:  # epochs may be trained again after a failure
                self._reported.add(number)
                self._trial.report(value, number)


def _check_trial_run(
    before: Mapping[str, Any] | None, params: Mapping[str, object], place: Location
) -> None:
    """Check that a trial's run directory was trained with the trial's parameters.

    Args:
        before: the parameters of the run there.
        params: those of the trial.
        place: the run directory.

    Raises:
        RunDirectoryError: the run is not of this trial.
    """
    if before != json.loads(json.dumps(params)):
        raise RunDirectoryError(
            f"{place} holds a run with the parameters {before}, and the trial has {dict(params)}: "
            "it is of another search; give another study_dir"
        )


def _final_value(history: Sequence[PlainLogs], final: PlainLogs | None, metric: str) -> float:
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
            f"unknown metric={metric!r}; the trials have "
            f"{', '.join(sorted(metrics))}. Name one of these, and another study_dir"
        )
    return float(metrics[metric])
