"""Resolve a configuration: validate all of it before data are computed or ranks start."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.files import CheckpointInfo, read_steps
from ..checkpoint.resume import StartingPoint, resolve_start
from ..checkpoint.run_directory import RunDirectory
from ..cluster.spark.capacity import Allotment, check_slots
from ..cluster.spark.session import check_running, new_folder
from ..config.fields import derive
from ..config.importable import explain_misfit
from ..config.launch import LaunchSettings
from ..config.sync import check_servers, recorded_sync
from ..config.training import FitOptions, InitialWeights, TrainingConfig, check_min_workers
from ..data.prepare.datasets import session_of
from ..errors import InvalidInputError
from ..observe.console import Console
from ..observe.mlflow import check_tracking
from ..serialize import check_picklable
from ..training.engine import engine_named, engine_of
from ..training.spec import ModelSource
from ..training.warm_start import read_warm_start
from .columns import (
    Columns,
    check_labels,
    recorded_columns,
    resolve_columns,
    resolve_columns_by_model,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Where Horovod is to write a timeline.
_TIMELINE = "HOROVOD_TIMELINE"

# Activity of the ranks until they build the model, for display.
_TASK = "starting the ranks"


@dataclass(frozen=True)
class ResolvedRun:
    """A validated training, whose rows are not computed yet.

    Attributes:
        df: the rows.
        config: the configuration; of a resumed run, with the settings that it keeps.
        model: the model's source.
        columns: its columns.
        directory: the run directory.
        launch: settings of starting the ranks.
        allotment: slots that Spark has for them.
        start: the starting point.
        seconds: duration of the validation.
        console: shows the run.
        tracking: MLflow's client and experiment, if the training is logged there.
    """

    df: DataFrame | str | Path
    config: TrainingConfig
    model: ModelSource
    columns: Columns
    directory: RunDirectory
    launch: LaunchSettings
    allotment: Allotment
    start: StartingPoint
    seconds: float
    console: Console
    tracking: tuple[object, str] | None = None

    @property
    def fit(self) -> FitOptions:
        """The options of fitting the model."""
        return self.config.fit

    @property
    def checkpoint(self) -> CheckpointInfo | None:
        """The checkpoint to resume from."""
        return self.start.checkpoint

    @property
    def workers(self) -> int:
        """Ranks of the run."""
        return self.allotment.workers

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration as checkpoints and the run directory record it."""
        config = self.config
        return {
            **({"params": dict(config.params)} if config.params is not None else {}),
            "fit": asdict(self.fit),
            "sync": recorded_sync(config.sync),
            "num_workers": self.workers,
            "checkpoints": asdict(config.checkpoints),
            "feature_cols": recorded_columns(self.columns.inputs),
            "label_cols": recorded_columns(self.columns.outputs),
            "sample_weight_col": config.sample_weight_col,
            "data": config.recorded_data(),
            "initial_weights": self.start.initial_weights,
        }


def resolve(df: DataFrame | str | Path, config: TrainingConfig) -> ResolvedRun:
    """Resolve a configuration: model, columns, cluster, run directory, in this order.

    Args:
        df: the rows.
        config: the configuration.

    Raises:
        InvalidInputError: it is invalid.
        NotEnoughSlotsError: Spark cannot run as many tasks at once.
        EnvironmentProblem: something is not installed or set up.
    """
    console = Console("a new run", quiet=not config.stream_logs, title=config.title, task=_TASK)
    with contextlib.closing(console):
        return _resolve(df, config, console)


def _resolve(df: DataFrame | str | Path, config: TrainingConfig, console: Console) -> ResolvedRun:
    began = time.monotonic()
    console.report("checking the configuration")
    spark = check_running(session_of(df))
    model = _resolve_model(config)
    columns = resolve_columns(df, config, model)

    directory = RunDirectory(config.run_dir or new_folder(spark, "run_dir", "runs"))
    console.name = directory.location.name
    launch = _launch_settings(config, directory)
    allotment = check_slots(spark, launch, config.num_workers)
    check_min_workers(allotment.workers, config.restarts)
    check_servers(config.sync, allotment.workers)
    tracking = None if config.mlflow is None else check_tracking(config.mlflow)
    if config.num_workers is None:
        console.report(allotment.describe())

    directory.check_writable()
    start = _resolve_start(config, directory, model.engine, allotment.workers, console)
    # What needs a Spark job comes after all checks that need none.
    if columns is None:
        console.report("building the model once, to match its inputs with columns")
        columns = resolve_columns_by_model(df, config, model)
    elif not columns.outputs.slots and start.checkpoint is None:
        console.report("building the model once, to see whether it needs labels")
        check_labels(df, config, model)
    return ResolvedRun(
        df=df,
        config=replace(config, fit=start.fit),
        model=model,
        columns=columns,
        directory=directory,
        launch=launch,
        allotment=allotment,
        start=start,
        seconds=time.monotonic() - began,
        console=console,
        tracking=tracking,
    )


def resolve_again(run: ResolvedRun) -> ResolvedRun:
    """Resolve the starting point again, now that the lease of the run directory is held.

    Another run may have trained there in between. Its checkpoints are refused, or resumed from, as
    in `resolve`.
    """
    if run.start.steps == read_steps(run.directory):
        return run
    engine = run.model.engine
    start = _resolve_start(run.config, run.directory, engine, run.workers, run.console)
    return replace(run, start=start, config=replace(run.config, fit=start.fit))


def _resolve_model(config: TrainingConfig) -> ModelSource:
    """Return the model's source; check that all code of the user can be sent to the ranks."""
    engine = engine_named(engine_of(config.model_fn))
    source = engine.source(config.model_fn, config.custom_objects)
    check_picklable(
        {
            "model_fn": source.function,
            "callbacks": config.callbacks,
            "custom_objects": dict(source.custom_objects),
            "transforms": dict(config.data.transforms),
        }
    )
    engine.check_callbacks(config.callbacks)
    if callable(config.callbacks) and (wrong := explain_misfit(config.callbacks)):
        raise InvalidInputError(f"callbacks must be a function without arguments, but {wrong}")
    return source


def _launch_settings(config: TrainingConfig, directory: RunDirectory) -> LaunchSettings:
    env = dict(config.launch.env)
    if config.checkpoints.timeline:
        if _TIMELINE in env:
            raise InvalidInputError(
                f"timeline=True and {_TIMELINE}={env[_TIMELINE]!r} in launch.env: Horovod has "
                "one timeline; leave one of them out"
            )
        env[_TIMELINE] = "DYNAMIC"  # started by the training, not with Horovod
    return derive(
        LaunchSettings,
        config.launch,
        env=env,
        num_workers=config.num_workers,
        gpus_per_worker=config.gpus_per_worker,
        stream_logs=config.stream_logs,
        log_dir=str(directory.logs),
    )


def _resolve_start(
    config: TrainingConfig, directory: RunDirectory, engine: str, workers: int, console: Console
) -> StartingPoint:
    """Return the checkpoint to resume from, or the weights to begin with."""
    start = resolve_start(config, directory, engine, workers, console.print)
    weights = config.initial_weights
    if start.checkpoint is None and isinstance(weights, InitialWeights):
        warm_start = read_warm_start(weights, engine, engine_named(engine).weights_formats)
        start = replace(start, warm_start=warm_start)
    return start
