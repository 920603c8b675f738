"""Record of a finished run, by which the same call is known to have nothing left to train."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from ..checkpoint.files import read_steps
from ..checkpoint.resume import check_same_data, is_over
from ..data.manifest import Manifest
from ..data.prepare.datasets import holds_rows, session_of
from ..data.prepare.materialize import RowsIdentity
from ..errors import CheckpointError, ModelError, RunDirectoryError
from ..model.load import ModelHandle, TrainingSummary, read_trained_model
from ..training.spec import TrainingReport
from ..typed_json import load_json, read_fields, to_json
from .resolve import ResolvedRun, resolve_again

logger = logging.getLogger(__name__)


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
    if not _is_over(run):
        return None
    with run.directory.lease():
        finished = _load(resolve_again(run))
    if finished is not None:
        weights = finished[1].weights
        run.console.print(f"loaded the model of the finished run (weights: {weights})")
    return finished


def _is_over(run: ResolvedRun) -> bool:
    return run.checkpoint is not None and is_over(run.checkpoint, run.fit.epochs)


def _load(run: ResolvedRun) -> tuple[ModelHandle, TrainingSummary] | None:
    info, directory, config = run.checkpoint, run.directory, run.config
    if info is None or not _is_over(run):  # another run has trained there meanwhile
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
