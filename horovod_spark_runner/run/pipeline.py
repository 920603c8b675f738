"""The steps of `run_training` once all is checked: materialize, launch, wrap up."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from ..data.manifest import Manifest
from ..data.prepare.counting import rows_to_write
from ..data.prepare.datasets import Prepared, name_faulty_row, prepared, session_of
from ..data.read.classes import absent_classes
from ..data.store import discard_datasets
from ..errors import CheckpointError, DataError, InvalidInputError
from ..launch.driver.console import Console
from ..launch.driver.launch import RunResult
from ..launch.driver.launcher import chosen_launcher
from ..ml.naming import added_columns
from ..ml.served import ServedModel
from ..ml.summary import TrainingSummary
from ..ml.trained import read_trained_model
from ..ml.trained_transformer import TrainedTransformer
from ..ml.transformers import transformer_class
from ..rundir.attempt import Attempt
from ..rundir.handed import HandOver, handing_over
from ..settings.prediction import PredictionSettings
from ..spark.followed_jobs import told_of
from ..spark.session import described, master_of
from ..storage.filesystem import Location
from ..training.accounting import SENT, WHOLE
from ..training.changes import check_same_data
from ..training.entry import modules_for
from ..training.spec import TrainingReport, TrainingSpec
from .attempts import Attempts, Follower, Stopped
from .found_checkpoint import describe_interruption
from .record import CallRecord, versions
from .request import CheckedRequest, as_locked
from .tracking import begin_tracking

logger = logging.getLogger(__name__)


def import_ahead(checked: CheckedRequest, at_once: int = 1) -> None:
    """Have the executors import what ranks will need, while data are prepared; returns at once.

    Args:
        checked: what the ranks will train.
        at_once: trainings like it that will go on at once.
    """
    allotment = replace(checked.allotment, slots=at_once * checked.allotment.slots)
    modules = modules_for(checked.source.engine)
    spark = session_of(checked.request.frame)
    chosen_launcher().prepare(spark, checked.launching, allotment, modules)


@contextlib.contextmanager
def prepare_data(checked: CheckedRequest, own: Location) -> Iterator[Prepared]:
    """Materialize the data of a request, and tell how far that is; see `prepared`.

    Args:
        checked: the request.
        own: where they go if there is no cache directory.
    """
    request = checked.request
    rows = prepared(
        request.frame, checked.roles, request.data, request.validation, own, checked.fit.seed
    )
    console = Console(checked.directory.location.name, quiet=not request.stream_logs)
    expected = rows_to_write(request.frame, request.validation) if request.stream_logs else None
    with contextlib.ExitStack() as kept:
        with told_of(session_of(request.frame), console.say, expected):
            data = kept.enter_context(rows)
        yield data


@dataclass(frozen=True)
class Trained:
    """A training that has come to its end, with its model in the run directory.

    Attributes:
        report: what rank 0 tells of it.
        result: what the launch tells of it.
        attempts: those it took.
        began: when it began, on the monotonic clock.
        materialized: when its rows were there.
        ended: when it ended.
    """

    report: TrainingReport
    result: RunResult
    attempts: Sequence[Attempt]
    began: float
    materialized: float
    ended: float


def train_request(
    checked: CheckedRequest,
    prepare: Callable[[], AbstractContextManager[Prepared]] | None = None,
    follower: Follower | None = None,
) -> TrainedTransformer:
    """Materialize the data, train on all ranks and return the transformer.

    Args:
        checked: what to train.
        prepare: prepares the data, where that is not for this request alone.
        follower: follows the training, and may end it.
    """
    request, directory = checked.request, checked.directory
    with described(session_of(request.frame), f"Horovod: training {directory.location.name}"):
        try:
            trained = train_ranks(checked, prepare, follower)
        except KeyboardInterrupt:
            text = describe_interruption(directory, checked.fit.epochs)
            raise KeyboardInterrupt(text) from None
        except DataError as error:
            name_faulty_row(error, request.frame, checked.roles, request.data)
            raise
    report, result = trained.report, trained.result
    transforms = request.data.transforms
    model = ServedModel(read_trained_model(directory, checked.source, report.saved, transforms))
    ended = time.monotonic()
    launching = trained.ended - trained.materialized
    timings = {
        **result.timings,
        **report.timings,
        "prepare": checked.seconds,
        "materialize": trained.materialized - trained.began,
        "attempts": max(0.0, launching - result.timings["total"]),
        "load": ended - trained.ended,
        "total": checked.seconds + ended - trained.began,
        "train": report.train_seconds,
        "samples_per_second": report.samples_per_second,
    }
    summary = TrainingSummary(
        run_dir=str(directory.location),
        history=result.result.history,
        placement=result.placement,
        timings=timings,
        attempts=tuple(trained.attempts),
        traffic={name: report.accounts[name] for name in (SENT, WHOLE)},
        staleness=tuple(report.staleness),
    )
    settings = PredictionSettings(prediction_col=request.prediction_col)
    return transformer_class(checked.source.engine)(model, summary=summary, settings=settings)


def train_ranks(
    checked: CheckedRequest,
    prepare: Callable[[], AbstractContextManager[Prepared]] | None = None,
    follower: Follower | None = None,
) -> Trained:
    """Materialize the data and train on all ranks.

    Args:
        checked: what to train.
        prepare: prepares the data, where that is not for this request alone.
        follower: follows the training, and may end it.
    """
    request, directory = checked.request, checked.directory
    began = time.monotonic()
    spark = session_of(request.frame)
    console = Console(directory.location.name, quiet=not request.stream_logs)
    console.say("preparing the data")
    alone = prepare is None
    if prepare is None:
        import_ahead(checked)
        prepare = functools.partial(prepare_data, checked, directory.data)
    rows = prepare()
    with directory.lease() as lease, rows as data, handing_over(directory) as hand:
        materialized = time.monotonic()
        console.say(_describe(data, materialized - began))
        checked = as_locked(checked)
        try:
            _check_enough_rows(data.train, checked.workers)
        except DataError:
            # No training goes on from rows that none could begin with.
            if alone and checked.checkpoint is None and not request.data.keep_data:
                discard_datasets(directory.data)
            raise
        _check_profile_steps(checked, data.train.rows)
        _warn_of_absent_classes(checked, data.train)
        if checked.checkpoint is not None:
            where = str(directory.location)
            check_same_data(checked.checkpoint, data.train.fingerprint, checked.settings, where)
        run_id = _begin_record(checked, data.train.rows)
        seconds = {"prepare": checked.seconds, "materialize": materialized - began}
        facts = {"workers": checked.workers, "master": master_of(spark), "versions": versions()}
        record = CallRecord(directory, seconds, facts)
        tracking = begin_tracking(checked.tracking, request.mlflow, directory, checked.settings)
        try:
            attempts = Attempts(
                spark,
                checked.launching,
                checked.workers,
                request.restarts,
                directory,
                lease,
                chosen_launcher(),
                found=checked.found,
                followers=[one for one in (tracking, follower) if one is not None],
            )
            handed = _handed(checked, hand)
            result = attempts.run(
                lambda checkpoint, token: training_spec(handed, data, run_id, checkpoint, token),
                run_id,
            )
        except BaseException as error:
            if tracking is not None:
                tracking.fail(error, stopped=isinstance(error, Stopped))
            record.fail(error)
            raise
        trained = time.monotonic()
        report: TrainingReport = result.result
        record.finish(result, report.accounts)
        if alone and not request.data.keep_data:
            discard_datasets(directory.data)  # also of calls that failed
    if tracking is not None:
        tracking.finish(report.history)
    return Trained(report, result, tuple(attempts.done), began, materialized, trained)


def _handed(checked: CheckedRequest, hand: HandOver) -> CheckedRequest:
    """Return the request as ranks are told of it, without contents that are large."""
    source, start = checked.source, checked.warm_start
    if source.file is not None and not isinstance(source.file, str):
        source = replace(source, file=hand(source.file))
    if start is not None:
        start = replace(start, files={name: hand(one) for name, one in start.files.items()})
    return replace(checked, source=source, warm_start=start)


def _begin_record(checked: CheckedRequest, rows: int) -> str:
    """Record in the run directory what is trained, on so many rows; return the run's id."""
    directory = checked.directory
    # The script's name only: its arguments may hold secrets.
    program = {"program": sys.argv[0]} if Path(sys.argv[0]).is_file() else {}
    try:
        run_id = _run_id(checked)
        directory.write_config({**checked.settings, **program, "rows": rows})
    except OSError as error:
        raise CheckpointError(f"run_dir {directory.location} takes no files: {error}") from error
    return run_id


def _describe(data: Prepared, seconds: float) -> str:
    """Say which rows there are, for people."""
    held_out = "" if data.validation is None else f", {data.validation.rows:,} to validate on"
    how = "found again" if data.reused else "written"
    return f"{data.train.rows:,} rows to train on{held_out}, {how} in {seconds:.1f} s"


def training_spec(
    checked: CheckedRequest, data: Prepared, run_id: str, checkpoint: int | None, lock_token: str
) -> TrainingSpec:
    """Return what the ranks of one attempt are told."""
    request = checked.request
    return TrainingSpec(
        model=checked.source,
        inputs=checked.inputs,
        outputs=checked.outputs,
        weight=request.sample_weight_col,
        fit=checked.fit,
        sync=request.sync,
        window_bytes=request.data.window_bytes,
        train=data.train,
        validation=data.validation,
        run_dir=str(checked.directory.location),
        workers=checked.workers,
        checkpoint=checkpoint,
        warm_start=checked.warm_start,
        checkpoints=request.checkpoints,
        run_id=run_id,
        lock_token=lock_token,
        callbacks=request.callbacks,
        transforms=dict(request.data.transforms),
        settings=checked.settings,
        name_outputs=functools.partial(added_columns, given=request.prediction_col)
        if request.checkpoints.saved_model
        else None,
        check_outputs=request.check_outputs,
        final_metrics=request.params is not None,
        keep_sample=request.data.keep_data is not False,
    )


def _run_id(checked: CheckedRequest) -> str:
    """Return the identity that this run's checkpoints carry, kept in the run directory."""
    known = checked.directory.run_id()
    if known is None:
        known = uuid.uuid4().hex if checked.checkpoint is None else checked.checkpoint.run_id
        checked.directory.write_run_id(known)
    return known


def _check_enough_rows(train: Manifest, num_workers: int) -> None:
    if train.rows < num_workers:
        raise DataError(
            f"the training data have {train.rows} rows, fewer than the {num_workers} ranks asked "
            "for; lower num_workers"
        )


def _check_profile_steps(checked: CheckedRequest, rows: int) -> None:
    """Check that the run will have the steps that are to be profiled."""
    wanted, fit = checked.request.checkpoints.profile_steps, checked.fit
    steps = fit.steps_per_epoch or -(-rows // (fit.batch_size * checked.workers))
    if wanted is not None and wanted[1] > steps * fit.epochs:
        raise InvalidInputError(
            f"profile_steps={tuple(wanted)}, but the run has {steps * fit.epochs:,} steps: "
            f"{fit.epochs:,} epochs of {steps:,}; name earlier ones"
        )


def _warn_of_absent_classes(checked: CheckedRequest, train: Manifest) -> None:
    weights, labels = checked.fit.class_weight, checked.outputs.columns
    transformed = set(labels) & set(checked.request.data.transforms)
    if weights is None or len(labels) != 1 or transformed or train.column(labels[0]).encoding:
        return
    absent = absent_classes(train, labels[0], weights)
    if absent:
        logger.warning(
            "class_weight gives weights to classes that no training row has: column %r never "
            "holds %s",
            labels[0],
            ", ".join(map(str, absent)),
        )
