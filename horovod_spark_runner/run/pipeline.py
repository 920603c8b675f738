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

from ..checkpoint.attachments import AttachmentWriter, open_attachments
from ..checkpoint.files import CheckpointInfo, best_step, read_info
from ..checkpoint.resume import check_rest_of_epoch, check_same_data, describe_interruption
from ..checkpoint.retry_policy import Attempt
from ..cluster.driver.launch import chosen_launcher
from ..cluster.driver.result import RunResult
from ..cluster.spark.jobs import watch_jobs
from ..cluster.spark.session import described, master_of, mute_console_progress
from ..config.prediction import PredictionSettings
from ..data.manifest import Manifest
from ..data.prepare.datasets import (
    Prepared,
    add_faulty_row_number,
    count_passes,
    prepare_datasets,
    rows_to_write,
    session_of,
)
from ..data.read.decode import absent_classes
from ..data.store import discard_datasets
from ..errors import CheckpointError, DataError, InvalidInputError
from ..formatting import duration
from ..model.load import ModelHandle, TrainingSummary, read_trained_model
from ..model.transformer import TrainedTransformer, transformer_class
from ..observe.console import Console
from ..observe.mlflow import begin_tracking
from ..storage.filesystem import Location
from ..training.engine import modules_for
from ..training.spec import TrainingReport, TrainingSpec
from ..training.time_breakdown import SENT, WHOLE
from .attempts import Attempts, Follower, Stopped
from .record import CallRecord, load_finished, record_end, versions
from .resolve import ResolvedRun, resolve_again

logger = logging.getLogger(__name__)

_PREPARING = "preparing the data"


def import_ahead(run: ResolvedRun, at_once: int = 1) -> None:
    """Let executors import the framework while data are prepared; return immediately.

    Args:
        run: the training.
        at_once: number of such trainings that will run concurrently.
    """
    allotment = replace(run.allotment, slots=at_once * run.allotment.slots)
    modules = modules_for(run.model.engine)
    spark = session_of(run.df)
    chosen_launcher().warm_up(spark, run.launch, allotment, modules)


@contextlib.contextmanager
def prepare_data(
    run: ResolvedRun, run_folder: Location, console: Console | None = None
) -> Iterator[Prepared]:
    """Materialize the data of a training, and report the passes; see `prepare_datasets`.

    Args:
        run: the training.
        run_folder: folder of the data if there is no cache directory.
        console: shows it; by default the run's.
    """
    config, console = run.config, console or run.console
    passes = count_passes(config.validation)
    if passes > 1:
        console.print(f"{passes} passes over the rows, to split them (Spark caches them meanwhile)")
    with prepare_datasets(
        run.df,
        run.columns.roles,
        config.data,
        config.validation,
        run_folder,
        run.fit.seed,
        console.print,
    ) as data:
        yield data


@contextlib.contextmanager
def show_preparation(
    run: ResolvedRun, console: Console, preparation: AbstractContextManager[Prepared]
) -> Iterator[Prepared]:
    """Prepare the data of a training, and show the progress.

    Args:
        run: the training.
        console: shows it.
        preparation: prepares the data.
    """
    began, spark = time.monotonic(), session_of(run.df)
    console.report(_PREPARING)
    expected = None if console.quiet else rows_to_write(run.df, run.config.validation)
    with contextlib.ExitStack() as stack:
        with (
            mute_console_progress(None if console.quiet else spark),
            watch_jobs(spark, expected) as progress,
            console.during(_PREPARING, progress),
        ):
            data = stack.enter_context(preparation)
        console.report(_describe(data, time.monotonic() - began))
        yield data


@dataclass(frozen=True)
class _Trained:
    """A finished training, with its model in the run directory.

    Attributes:
        report: report of rank 0.
        result: result of the launch.
        attempts: its attempts.
        began: its begin, on the monotonic clock.
        materialized: time when its rows were ready.
        ended: its end.
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
    with contextlib.closing(run.console):
        return _train_run(run, prepare, follower)


def _train_run(
    run: ResolvedRun,
    prepare: Callable[[], AbstractContextManager[Prepared]] | None,
    follower: Follower | None,
) -> TrainedTransformer:
    config, directory, console = run.config, run.directory, run.console
    settings = PredictionSettings(prediction_col=config.prediction_col)
    with described(session_of(run.df), f"Horovod: training {directory.location.name}"):
        if prepare is None and follower is None and (finished := load_finished(run)):
            handle, summary = finished
            return transformer_class(run.model.engine)(handle, summary=summary, settings=settings)
        try:
            trained = train_ranks(run, prepare, follower)
        except KeyboardInterrupt:
            text = describe_interruption(directory, run.fit.epochs)
            raise KeyboardInterrupt(text) from None
        except DataError as error:
            add_faulty_row_number(error, run.df, run.columns.roles, config.data)
            raise
    report, result = trained.report, trained.result
    transforms = config.data.transforms
    with console.during("loading the model"):
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
        weights=report.weights,
    )
    console.print(_describe_end(summary, _describe_best(run)))
    curves = f"tensorboard --logdir {directory.events} (epoch 1 is its step 0)"
    events = f", curves: {curves}" if config.checkpoints.event_files else ""
    console.print(f"report: {directory.report}{events}")
    return transformer_class(run.model.engine)(model, summary=summary, settings=settings)


def _describe_end(summary: TrainingSummary, best: str) -> str:
    """Describe a finished training: its time, metrics, and the weights of its model.

    Args:
        summary: its summary.
        best: its best checkpoint, in place of the last epoch's metrics.
    """
    last = summary.history[-1] if summary.history else {}
    # Lists, as of a confusion matrix, are in the summary.
    metrics = [f"{name} {value:.4g}" for name, value in last.items() if isinstance(value, float)]
    shown = [best] if best else [f"epoch {len(summary.history)}", *metrics]
    took = duration(summary.timings["total"])
    return "  ".join([f"finished in {took}", *shown, f"weights: {summary.weights}"])


def _describe_best(run: ResolvedRun) -> str:
    """Describe the checkpoint with the best metric; empty if none is kept."""
    options, directory = run.config.checkpoints, run.directory
    if options.best_metric is None or run.console.quiet:
        return ""
    infos: dict[int, CheckpointInfo] = {}
    with contextlib.suppress(OSError):
        for step in directory.checkpoint_steps():
            with contextlib.suppress(OSError, ValueError):
                infos[step] = read_info(directory.checkpoint(step))
    best = best_step(infos, options)
    if best is None:
        return ""
    value = infos[best].history[-1][options.best_metric]
    return (
        f"best {options.best_metric} {value:.4g} in epoch {infos[best].epoch} (checkpoint={best})"
    )


def train_ranks(
    run: ResolvedRun,
    prepare: Callable[[], AbstractContextManager[Prepared]] | None = None,
    follower: Follower | None = None,
) -> _Trained:
    """Materialize the data and train on all ranks.

    Args:
        run: what to train.
        prepare: prepares the data, where that is not for this training alone.
        follower: follows the training, and may end it.
    """
    config, directory = run.config, run.directory
    began = time.monotonic()
    alone = prepare is None
    if prepare is None:
        import_ahead(run)
        prepare = functools.partial(prepare_data, run, directory.data)
    preparation = show_preparation(run, run.console, prepare())
    with (
        directory.lease() as lease,
        open_attachments(directory) as attach,
        contextlib.ExitStack() as stack,
    ):
        spark = session_of(run.df)
        facts = {"workers": run.workers, "master": master_of(spark), "versions": versions()}
        record = CallRecord(directory, {"prepare": run.seconds}, facts)
        with _recording_refusal(run, record):
            data = stack.enter_context(preparation)
            materialized = time.monotonic()
            run = resolve_again(run)
            try:
                _check_enough_rows(data.train, run.workers)
            except DataError:
                # No checkpoint can depend on rows that are too few for any training.
                if alone and run.checkpoint is None and not config.data.keep_data:
                    discard_datasets(directory.data)
                raise
            spec = training_spec(run, data, _run_id(run))
            _check_data(run, spec)
        held_out = {"validation_rows": spec.validation.rows} if spec.validation else {}
        _begin_record(run, spec.run_id, {"rows": spec.train.rows, **held_out})
        record.rows_ready(materialized - began)
        tracking = begin_tracking(run.tracking, config.mlflow, directory, run.settings)
        try:
            attempts = Attempts(
                spark,
                run.launch,
                config.restarts,
                directory,
                lease,
                chosen_launcher(),
                run.console,
                start=run.start,
                followers=[one for one in (tracking, follower) if one is not None],
            )
            result = attempts.run(_attach_files(spec, attach))
        except BaseException as error:
            if tracking is not None:
                tracking.fail(error, stopped=isinstance(error, Stopped))
            record.fail(error)
            raise
        trained = time.monotonic()
        report: TrainingReport = result.result
        record.finish(result, report.accounts, report.weights)
        record_end(run, data.train, report)
        if alone and not config.data.keep_data:
            discard_datasets(directory.data)  # also of calls that failed
    if tracking is not None:
        tracking.finish(report.history)
    return _Trained(report, result, tuple(attempts.done), began, materialized, trained)


def _attach_files(spec: TrainingSpec, attach: AttachmentWriter) -> TrainingSpec:
    """Return a spec whose large contents the ranks read from the run directory."""
    model, start = spec.model, spec.warm_start
    if model.file is not None and not isinstance(model.file, str):
        model = replace(model, file=attach(model.file))
    if start is not None:
        start = replace(start, files={name: attach(one) for name, one in start.files.items()})
    return replace(spec, model=model, warm_start=start)


@contextlib.contextmanager
def _recording_refusal(run: ResolvedRun, record: CallRecord) -> Iterator[None]:
    """Record a new run whose rows could not be prepared: it is listed as any other."""
    try:
        yield
    except BaseException as error:
        if run.directory.run_id() is None and run.checkpoint is None:
            with contextlib.suppress(CheckpointError):
                _begin_record(run, _run_id(run), {})
                record.fail(error)
        raise


def _begin_record(run: ResolvedRun, run_id: str, rows: dict[str, int]) -> None:
    """Record the run's identity, its settings and its numbers of rows in the run directory."""
    directory = run.directory
    # The script's name only: its arguments may hold secrets.
    is_script = Path(sys.argv[0]).is_file() and "ipykernel" not in sys.modules
    program = {"program": sys.argv[0]} if is_script else {}
    try:
        directory.write_run_id(run_id)
        directory.write_config({**run.settings, **program, **rows})
    except OSError as error:
        raise CheckpointError(f"run_dir {directory.location} is not writable: {error}") from error


def _describe(data: Prepared, seconds: float) -> str:
    """Describe the datasets, for the console."""
    held_out = "" if data.validation is None else f", {data.validation.rows:,} to validate on"
    how = "reused" if data.reused else "written"
    return f"{data.train.rows:,} rows to train on{held_out}, {how} in {seconds:.1f} s"


def training_spec(run: ResolvedRun, data: Prepared, run_id: str) -> TrainingSpec:
    """Return the spec of a training for the ranks."""
    return TrainingSpec(
        config=run.config.for_ranks(),
        model=run.model,
        inputs=run.columns.inputs,
        outputs=run.columns.outputs,
        train=data.train,
        validation=data.validation,
        run_dir=str(run.directory.location),
        run_id=run_id,
        workers=run.workers,
        settings=run.settings,
        warm_start=run.start.warm_start,
    )


def _run_id(run: ResolvedRun) -> str:
    """Return the identity of this run's checkpoints: a new one for a new run."""
    if (run_id := run.directory.run_id()) is not None:
        return run_id
    return uuid.uuid4().hex if run.checkpoint is None else run.checkpoint.run_id


def _check_enough_rows(train: Manifest, num_workers: int) -> None:
    if train.rows < num_workers:
        raise DataError(
            f"the training data have {train.rows} rows, fewer than num_workers={num_workers}; "
            "lower it"
        )


def _check_data(run: ResolvedRun, spec: TrainingSpec) -> None:
    """Check that the prepared rows fit the settings, and the run to resume."""
    _check_profile_steps(spec)
    _warn_of_absent_classes(run, spec.train)
    if run.checkpoint is not None:
        directory, step = run.directory, run.checkpoint.step
        place = str(directory.location)
        rows = spec.train
        check_same_data(run.checkpoint, rows.fingerprint, run.settings, place, rows.tables)
        check_rest_of_epoch(run.checkpoint, spec.order, str(directory.checkpoint(step)))


def _check_profile_steps(spec: TrainingSpec) -> None:
    """Check that the run will have the steps to profile."""
    wanted, steps = spec.config.checkpoints.profile_steps, spec.steps
    if wanted is not None and wanted[1] > steps.total:
        raise InvalidInputError(
            f"profile_steps={tuple(wanted)}, but the run has {steps.total:,} steps: "
            f"{spec.fit.epochs:,} epochs of {steps.per_epoch:,}; name earlier ones"
        )


def _warn_of_absent_classes(run: ResolvedRun, train: Manifest) -> None:
    weights, labels = run.fit.class_weight, run.columns.outputs.columns
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
