"""Resolve a configuration: validate all of it before data are computed or ranks start."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Container
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from ..checkpoint.files import CheckpointInfo, read_steps
from ..checkpoint.resume import StartingPoint, resolve_start
from ..checkpoint.run_directory import RunDirectory
from ..cluster.driver.console import Console
from ..cluster.driver.result import explain_spark_error
from ..cluster.protocol.outcome import describe_exception
from ..cluster.spark.capacity import Allotment, check_slots
from ..cluster.spark.session import (
    check_encryption,
    check_memory_limit,
    check_running,
    is_case_sensitive,
    runs_on_this_machine,
)
from ..cluster.spark.tasks import query_worker
from ..config.fields import derive
from ..config.launch import LaunchSettings
from ..config.prediction import PredictionSettings
from ..config.sync import check_servers, recorded_sync
from ..config.training import FitOptions, InitialWeights, check_min_workers
from ..config.training_config import TrainingConfig
from ..config.validators import ColumnNames
from ..data.prepare.datasets import check_data, frame_of, session_of
from ..data.prepare.schema import Roles
from ..errors import InvalidInputError, ModelError
from ..frameworks import model_of
from ..model.frame import check_added, surely_added
from ..serialize import check_picklable, dumps
from ..storage.filesystem import Location
from ..training.columns import by_convention, by_name, recorded_columns
from ..training.engine import SAVED_MODEL, engine_named, engine_of
from ..training.spec import FEATURES, Binding, ModelNames, ModelSource, bind_columns
from ..training.warm_start import read_warm_start
from ..typed_json import parse_plain, to_json
from .tracking import check_tracking

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Where Horovod is to write a timeline.
_TIMELINE = "HOROVOD_TIMELINE"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedRun:
    """A validated training, whose rows are not computed yet.

    Attributes:
        df: the rows.
        config: the configuration.
        model: the model's source.
        inputs: columns of the model's inputs.
        outputs: columns that its outputs are compared with.
        directory: the run directory.
        launch: settings of starting the ranks.
        allotment: slots that Spark has for them.
        start: the starting point.
        seconds: duration of the validation.
        tracking: MLflow's client and experiment, if the training is logged there.
    """

    df: DataFrame | str | Path
    config: TrainingConfig
    model: ModelSource
    inputs: Binding
    outputs: Binding
    directory: RunDirectory
    launch: LaunchSettings
    allotment: Allotment
    start: StartingPoint
    seconds: float
    tracking: tuple[Any, str] | None = None

    @property
    def roles(self) -> Roles:
        weight = self.config.sample_weight_col
        return Roles(self.inputs.columns, self.outputs.columns, weight)

    @property
    def fit(self) -> FitOptions:
        """The options of fitting the model that hold."""
        return self.start.fit

    @property
    def checkpoint(self) -> CheckpointInfo | None:
        """The checkpoint to resume from."""
        return self.start.checkpoint

    @property
    def workers(self) -> int:
        """Ranks of the run."""
        return self.allotment.workers

    @property
    def console(self) -> Console:
        """A console that shows the run by its name."""
        return Console(self.directory.location.name, quiet=not self.config.stream_logs)

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
            "feature_cols": recorded_columns(self.inputs),
            "label_cols": recorded_columns(self.outputs),
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
    began = time.monotonic()
    Console("a new run", quiet=not config.stream_logs).report("checking the configuration")
    spark = check_running(session_of(df))
    model = _resolve_model(config)
    columns = _columns_without_model(df, config)
    bindings = None if columns is None else _resolve_columns(df, config, model, *columns)
    directory = RunDirectory(Location(config.run_dir or default_place(spark, "run_dir", "runs")))
    launch, allotment = _resolve_cluster(spark, config, directory)
    tracking = None if config.mlflow is None else check_tracking(config.mlflow)
    console = Console(directory.location.name, quiet=not config.stream_logs)
    if config.num_workers is None:
        console.report(allotment.describe())
    directory.check_writable()
    start = _resolve_start(config, directory, model.engine, allotment.workers, console)
    if bindings is None:  # needs a Spark job: after all checks that need none
        console.report("building the model once, to match its inputs with columns")
        columns = by_name(_names_of_model(model, spark), config.label_cols, frame_of(df).columns)
        bindings = _resolve_columns(df, config, model, *columns)
    return ResolvedRun(
        df=df,
        config=config,
        model=model,
        inputs=bindings[0],
        outputs=bindings[1],
        directory=directory,
        launch=launch,
        allotment=allotment,
        start=start,
        seconds=time.monotonic() - began,
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
    return replace(run, start=start)


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
    return source


def _columns_without_model(
    df: DataFrame | str | Path, config: TrainingConfig
) -> tuple[ColumnNames, ColumnNames | None] | None:
    """Return the set or conventional feature and label columns; ``None`` if the model decides."""
    if config.feature_cols is not None:
        return config.feature_cols, config.label_cols
    available = frame_of(df).columns
    return by_convention(config.label_cols, available) if FEATURES in available else None


def _resolve_columns(
    df: DataFrame | str | Path,
    config: TrainingConfig,
    model: ModelSource,
    features: ColumnNames,
    labels: ColumnNames | None,
) -> tuple[Binding, Binding]:
    """Return the columns of the model's inputs, and those its outputs are compared with."""
    inputs, outputs = bind_columns(features, "feature_cols"), bind_columns(labels, "label_cols")
    if config.fit.class_weight is not None:
        _check_class_weight(config, outputs)
    roles = Roles(inputs.columns, outputs.columns, config.sample_weight_col)
    check_data(df, roles, config.data, config.validation)
    if config.prediction_col is not None:
        settings = PredictionSettings(prediction_col=config.prediction_col)
        added = surely_added(settings, len(outputs.slots))
        by_case = is_case_sensitive(session_of(df))
        check_added(added, frame_of(df).columns, settings, by_case=by_case)
    if config.checkpoints.saved_model:
        _check_saved_model(model, inputs, config.data.transforms)
    return inputs, outputs


def _check_class_weight(config: TrainingConfig, outputs: Binding) -> None:
    if config.sample_weight_col is not None:
        raise InvalidInputError(
            "class_weight and sample_weight_col cannot both be given; multiply the weights in the "
            "column"
        )
    if len(outputs.slots) != 1:
        raise InvalidInputError(
            "class_weight is for a model with one output, but label_cols gives "
            f"{len(outputs.slots)}: {outputs.describe()}"
        )


def _resolve_cluster(
    spark: SparkSession, config: TrainingConfig, directory: RunDirectory
) -> tuple[LaunchSettings, Allotment]:
    """Return the settings of starting the ranks, and the slots that Spark has for them."""
    launch = _launch_settings(config, directory)
    if config.num_workers is not None:
        check_min_workers(config.num_workers, config.restarts)
    check_encryption(spark, launch)
    check_memory_limit(spark)
    allotment = check_slots(spark, launch, config.num_workers)
    check_min_workers(allotment.workers, config.restarts)
    check_servers(config.sync, allotment.workers)
    return launch, allotment


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
    start = resolve_start(config, directory, engine, workers, console.report)
    weights = config.initial_weights
    if start.checkpoint is None and isinstance(weights, InitialWeights):
        warm_start = read_warm_start(weights, engine, engine_named(engine).weights_formats)
        start = replace(start, warm_start=warm_start)
    return start


@dataclass(frozen=True)
class _Answer:
    """Answer of a worker: the names, or the traceback of the failure."""

    names: ModelNames | None = None
    problem: str = ""


@dataclass(frozen=True)
class _Names:
    """Builds the model in one of Spark's Python workers, and returns its names."""

    source: bytes = field(repr=False)

    def __call__(self) -> str:
        try:
            source: ModelSource = cloudpickle.loads(self.source)
            return to_json(_Answer(engine_named(source.engine).names(source)))
        except Exception as error:  # the user's function
            return to_json(_Answer(problem=describe_exception(error)[2]))


def _names_of_model(source: ModelSource, spark: SparkSession) -> ModelNames:
    """Build the model once, in one of Spark's Python workers, and return its names.

    Raises:
        ModelError: it cannot be built; with the traceback.
        EnvironmentProblem: Spark's Python lacks something.
        LaunchError: Spark could not run the job.
    """
    try:
        text = query_worker(spark, _Names(dumps(source)))
    except Exception as error:
        raise explain_spark_error(error) from error
    answer = parse_plain(text, _Answer)
    if answer.names is None:
        raise ModelError(
            "feature_cols is missing, and the model, whose inputs may have names of columns, could "
            f"not be built:\n{answer.problem.rstrip()}"
        )
    return answer.names


# Default names used by this process: several threads may start a run in one second.
_named: set[str] = set()
_naming = threading.Lock()


def default_place(spark: Any, setting: str, folder: str) -> str:
    """Return a default location, named after the time and unique.

    Args:
        spark: the session, of a ``local`` master.
        setting: the setting that is missing.
        folder: its parent folder.

    Raises:
        InvalidInputError: the executors are on other machines.
    """
    if not runs_on_this_machine(spark):
        raise InvalidInputError(
            f"{setting} is needed on a cluster: a folder or URL that the driver and all executors "
            "can write to"
        )
    now = str(Path(folder, time.strftime("%Y%m%d-%H%M%S")))
    with _naming:
        names = (now if number == 1 else f"{now}-{number}" for number in itertools.count(1))
        # An existing one is of another process that started in this second, or of a time before the
        # clock was put back: it would be resumed.
        name = next(name for name in names if name not in _named and not os.path.lexists(name))
        _named.add(name)
    return name


def _check_saved_model(source: ModelSource, inputs: Binding, transforms: Container[str]) -> None:
    """Check that a SavedModel can be written, as far as the columns show.

    Args:
        source: the model.
        inputs: its feature columns.
        transforms: columns with a transform.

    Raises:
        InvalidInputError: the engine has no SavedModel.
        ModelError: a column cannot be an input of one.
    """
    transformed = [name for name in inputs.columns if name in transforms]
    engine = engine_named(source.engine)
    if SAVED_MODEL not in engine.export_formats:
        raise InvalidInputError(
            "CheckpointOptions(saved_model=True) is for Keras models, but a "
            f"{model_of(source.engine)} is to be trained. Leave it out, and export the trained "
            "model in another format: TorchTransformer.export, for a PyTorch module"
        )
    engine.check_export(SAVED_MODEL, inputs.columns, transformed)
