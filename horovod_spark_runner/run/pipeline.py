"""Carry out a resolved training: materialize, launch, load the model."""

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

from ..checkpoint.attachments import HandOver, handing_over
from ..checkpoint.config_diff import check_same_data
from ..checkpoint.resume import describe_interruption
from ..checkpoint.retry_policy import Attempt
from ..cluster.driver.launch import RunResult
from ..cluster.driver.launcher import chosen_launcher
from ..cluster.spark.followed_jobs import told_of
from ..cluster.spark.session import described, master_of
from ..config.prediction import PredictionSettings
from ..data.manifest import Manifest
from ..data.prepare.datasets import Prepared, name_faulty_row, prepared, rows_to_write, session_of
from ..data.read.decode import absent_classes
from ..data.store import discard_datasets
from ..errors import CheckpointError, DataError, InvalidInputError
from ..model.load import ModelHandle, read_trained_model
from ..model.summary import TrainingSummary
from ..model.trained_transformer import TrainedTransformer
from ..model.transformers import transformer_class
from ..storage.filesystem import Location
from ..training.entry import modules_for
from ..training.spec import TrainingReport, TrainingSpec
from ..training.time_breakdown import SENT, WHOLE
from .attempts import Attempts, Follower, Stopped
from .record import CallRecord, versions
from .resolve import ResolvedRun, resolve_again
from .tracking import begin_tracking

logger = logging.getLogger(__name__)


def import_ahead(run: ResolvedRun, at_once: int = 1) -> None:
    """Have the executors import what ranks will need, while data are prepared; returns at once.

    Args:
        run: what the ranks will train.
        at_once: trainings like it that will go on at once.
    """
    allotment = replace(run.allotment, slots=at_once * run.allotment.slots)
    modules = modules_for(run.model.engine)
    spark = session_of(run.df)
    chosen_launcher().prepare(spark, run.launch, allotment, modules)


@contextlib.contextmanager
def prepare_data(run: ResolvedRun, own: Location) -> Iterator[Prepared]:
    """Materialize the data of a training, and tell how far that is; see `prepared`.

    Args:
        run: the training.
        own: where they go if there is no cache directory.
    """
    config = run.config
    rows = prepared(run.df, run.roles, config.data, config.validation, own, run.fit.seed)
    console = run.console
    expected = rows_to_write(run.df, config.validation) if config.stream_logs else None
    with contextlib.ExitStack() as kept:
        with told_of(session_of(run.df), console.say, expected):
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


def train_run(
    run: ResolvedRun,
    prepare: Callable[[], AbstractContextManager[Prepared]] | None = None,
    follower: Follower | None = None,
) -> TrainedTransformer:
    """Materialize the data, train on all ranks and return the transformer.

    Args:
        run: what to train.
        prepare: prepares the data, where that is not for this training alone.
        follower: follows the training, and may end it.
    """
    config, directory = run.config, run.directory
    with described(session_of(run.df), f"Horovod: training {directory.location.name}"):
        try:
            trained = train_ranks(run, prepare, follower)
        except KeyboardInterrupt:
            text = describe_interruption(directory, run.fit.epochs)
            raise KeyboardInterrupt(text) from None
        except DataError as error:
            name_faulty_row(error, run.df, run.roles, config.data)
            raise
    report, result = trained.report, trained.result
    transforms = config.data.transforms
    model = ModelHandle(read_trained_model(directory, run.model, report.saved, transforms))
    ended = time.monotonic()
    launching = trained.ended - trained.materialized
    timings = {
        **result.timings,
        **report.timings,
        "prepare": run.seconds,
        "materialize": trained.materialized - trained.began,
        "attempts": max(0.0, launching - result.timings["total"]),
        "load": ended - trained.ended,
        "total": run.seconds + ended - trained.began,
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
    settings = PredictionSettings(prediction_col=config.prediction_col)
    return transformer_class(run.model.engine)(model, summary=summary, settings=settings)


def train_ranks(
    run: ResolvedRun,
    prepare: Callable[[], AbstractContextManager[Prepared]] | None = None,
    follower: Follower | None = None,
) -> Trained:
    """Materialize the data and train on all ranks.

    Args:
        run: what to train.
        prepare: prepares the data, where that is not for this training alone.
        follower: follows the training, and may end it.
    """
    config, directory = run.config, run.directory
    began = time.monotonic()
    run.console.say("preparing the data")
    alone = prepare is None
    if prepare is None:
        import_ahead(run)
        prepare = functools.partial(prepare_data, run, directory.data)
    rows = prepare()
    with directory.lease() as lease, rows as data, handing_over(directory) as hand:
        materialized = time.monotonic()
        run.console.say(_describe(data, materialized - began))
        run = resolve_again(run)
        try:
            _check_enough_rows(data.train, run.workers)
        except DataError:
            # No training goes on from rows that none could begin with.
            if alone and run.checkpoint is None and not config.data.keep_data:
                discard_datasets(directory.data)
            raise
        _check_profile_steps(run, data.train.rows)
        _warn_of_absent_classes(run, data.train)
        if run.checkpoint is not None:
            where = str(directory.location)
            check_same_data(run.checkpoint, data.train.fingerprint, run.settings, where)
        run_id = _begin_record(run, data.train.rows)
        seconds = {"prepare": run.seconds, "materialize": materialized - began}
        spark = session_of(run.df)
        facts = {"workers": run.workers, "master": master_of(spark), "versions": versions()}
        record = CallRecord(directory, seconds, facts)
        tracking = begin_tracking(run.tracking, config.mlflow, directory, run.settings)
        try:
            attempts = Attempts(
                spark,
                run.launch,
                config.restarts,
                directory,
                lease,
                chosen_launcher(),
                start=run.start,
                followers=[one for one in (tracking, follower) if one is not None],
            )
            result = attempts.run(_hand_over(training_spec(run, data, run_id), hand))
        except BaseException as error:
            if tracking is not None:
                tracking.fail(error, stopped=isinstance(error, Stopped))
            record.fail(error)
            raise
        trained = time.monotonic()
        report: TrainingReport = result.result
        record.finish(result, report.accounts)
        if alone and not config.data.keep_data:
            discard_datasets(directory.data)  # also of calls that failed
    if tracking is not None:
        tracking.finish(report.history)
    return Trained(report, result, tuple(attempts.done), began, materialized, trained)


def _hand_over(spec: TrainingSpec, hand: HandOver) -> TrainingSpec:
    """Return a spec whose large contents the ranks read from the run directory."""
    model, start = spec.model, spec.warm_start
    if model.file is not None and not isinstance(model.file, str):
        model = replace(model, file=hand(model.file))
    if start is not None:
        start = replace(start, files={name: hand(one) for name, one in start.files.items()})
    return replace(spec, model=model, warm_start=start)


def _begin_record(run: ResolvedRun, rows: int) -> str:
    """Record in the run directory what is trained, on so many rows; return the run's id."""
    directory = run.directory
    # The script's name only: its arguments may hold secrets.
    program = {"program": sys.argv[0]} if Path(sys.argv[0]).is_file() else {}
    try:
        run_id = _run_id(run)
        directory.write_config({**run.settings, **program, "rows": rows})
    except OSError as error:
        raise CheckpointError(f"run_dir {directory.location} takes no files: {error}") from error
    return run_id


def _describe(data: Prepared, seconds: float) -> str:
    """Say which rows there are, for people."""
    held_out = "" if data.validation is None else f", {data.validation.rows:,} to validate on"
    how = "found again" if data.reused else "written"
    return f"{data.train.rows:,} rows to train on{held_out}, {how} in {seconds:.1f} s"


def training_spec(run: ResolvedRun, data: Prepared, run_id: str) -> TrainingSpec:
    """Return a training as the ranks need to know it."""
    return TrainingSpec(
        config=run.config.for_ranks(),
        model=run.model,
        inputs=run.inputs,
        outputs=run.outputs,
        fit=run.fit,
        train=data.train,
        validation=data.validation,
        run_dir=str(run.directory.location),
        run_id=run_id,
        workers=run.workers,
        settings=run.settings,
        warm_start=run.start.warm_start,
    )


def _run_id(run: ResolvedRun) -> str:
    """Return the identity that this run's checkpoints carry, kept in the run directory."""
    known = run.directory.run_id()
    if known is None:
        known = uuid.uuid4().hex if run.checkpoint is None else run.checkpoint.run_id
        run.directory.write_run_id(known)
    return known


def _check_enough_rows(train: Manifest, num_workers: int) -> None:
    if train.rows < num_workers:
        raise DataError(
            f"the training data have {train.rows} rows, fewer than the {num_workers} ranks asked "
            "for; lower num_workers"
        )


def _check_profile_steps(run: ResolvedRun, rows: int) -> None:
    """Check that the run will have the steps that are to be profiled."""
    wanted, fit = run.config.checkpoints.profile_steps, run.fit
    steps = fit.steps_per_epoch or -(-rows // (fit.batch_size * run.workers))
    if wanted is not None and wanted[1] > steps * fit.epochs:
        raise InvalidInputError(
            f"profile_steps={tuple(wanted)}, but the run has {steps * fit.epochs:,} steps: "
            f"{fit.epochs:,} epochs of {steps:,}; name earlier ones"
        )


def _warn_of_absent_classes(run: ResolvedRun, train: Manifest) -> None:
    weights, labels = run.fit.class_weight, run.outputs.columns
    transformed = set(labels) & set(run.config.data.transforms)
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
