"""Resolve a configuration: check all that can be before data are computed or ranks start."""

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

from ..checkpoint.config_diff import check_same_engine, describe_rest, settings_to_go_on_with
from ..checkpoint.files import CheckpointInfo, read_steps
from ..checkpoint.resume import find_checkpoint
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
from ..training.spec import FEATURES, Binding, ModelNames, ModelSource, WarmStart, bind_columns
from ..training.warm_start import read_warm_start
from ..typed_json import parse_plain, to_json
from .tracking import check_tracking

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Where Horovod is to write a timeline.
_TIMELINE = "HOROVOD_TIMELINE"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartingPoint:
    """Where a training starts: a checkpoint of its run directory, initial weights or neither.

    Attributes:
        checkpoint: checkpoint to resume from; ``None`` for a new run.
        steps: steps of all checkpoints there were; while they are the same, so is this.
        fit: how the model is fitted; a resumed run keeps some of what it was begun with.
        warm_start: weights to begin with.
        initial_weights: the ``initial_weights`` to record, those that the run was begun with.
    """

    checkpoint: CheckpointInfo | None
    steps: tuple[int, ...]
    fit: FitOptions
    warm_start: WarmStart | None
    initial_weights: str | None


@dataclass(frozen=True)
class ResolvedRun:
    """A training that can be carried out, as far as is known without computing its rows.

    Attributes:
        df: the rows.
        config: the configuration.
        model: where the model comes from.
        inputs: columns of the model's inputs.
        outputs: columns its outputs are compared with.
        directory: the run directory.
        launch: how the ranks are started.
        allotment: what Spark gives them.
        start: where the training starts.
        seconds: what the checks took.
        tracking: MLflow's client and experiment, if it is to be told of the training.
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
        """How the model is fitted."""
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
        """What checkpoints and the run directory record of the configuration."""
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
            "data": _recorded_data(config),
            "initial_weights": self.start.initial_weights,
        }


def resolve(df: DataFrame | str | Path, config: TrainingConfig) -> ResolvedRun:
    """Resolve a configuration: model, columns, cluster, run directory, in this order.

    Args:
        df: the rows.
        config: the configuration.

    Raises:
        InvalidInputError: it cannot be carried out.
        NotEnoughSlotsError: Spark cannot run as many tasks at once.
        EnvironmentProblem: something is not installed or set up as it must be.
    """
    began = time.monotonic()
    Console("a new run", quiet=not config.stream_logs).report("checking what is asked for")
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
    if bindings is None:  # takes a Spark job: after all that can be checked without one
        console.report("building the model once, to learn which columns its inputs are named like")
        columns = by_name(names_of_model(model, spark), config.label_cols, frame_of(df).columns)
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
    """Resolve again where a run starts, now that the lease of its directory is held.

    Another run may have trained there in between. Then its checkpoints are refused, or resumed
    from, as by `resolve`.
    """
    if run.start.steps == read_steps(run.directory):
        return run
    engine = run.model.engine
    start = _resolve_start(run.config, run.directory, engine, run.workers, run.console)
    return replace(run, start=start)


def _resolve_model(config: TrainingConfig) -> ModelSource:
    """Return where the model comes from; check that all code of the user reaches the ranks."""
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
    """Return feature and label columns as given or by convention; ``None`` if the model decides."""
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
    """Return what feeds the model's inputs, and what its outputs are compared with."""
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
        check_saved_model(model, inputs, config.data.transforms)
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
    """Return how the ranks are started, and what Spark gives them."""
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
                f"timeline=True and {_TIMELINE}={env[_TIMELINE]!r} in launch.env: Horovod keeps "
                "one timeline; leave one of them out"
            )
        env[_TIMELINE] = "DYNAMIC"  # begun by the training, not with Horovod
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
    """Return the checkpoint to resume from and what of the configuration then holds."""
    steps, checkpoint = find_checkpoint(directory, config.resume)
    weights = config.initial_weights
    origin = str(weights.place) if isinstance(weights, InitialWeights) else None
    if checkpoint is None:
        warm_start = None
        if isinstance(weights, InitialWeights):
            warm_start = read_warm_start(weights, engine, engine_named(engine).weights_formats)
        return StartingPoint(None, steps, config.fit, warm_start, origin)
    check_same_engine(checkpoint, engine, str(directory.location))
    fit, begun_with, warnings = settings_to_go_on_with(
        checkpoint, config.fit, workers, origin, _recorded_data(config), recorded_sync(config.sync)
    )
    rest = describe_rest(checkpoint, config.fit.epochs)
    if rest:
        console.report(f"resuming from {directory.checkpoint(checkpoint.step).name}: {rest}")
    for text in warnings:
        logger.warning("resuming run_dir %s: %s", directory.location, text)
    return StartingPoint(checkpoint, steps, fit, None, begun_with)


def _recorded_data(config: TrainingConfig) -> dict[str, Any]:
    options, validation = config.data, config.validation
    plain = validation is None or isinstance(validation, (str, float, int))
    return {
        "validation": validation if plain else "a DataFrame",
        "stratify": options.stratify,
        "shapes": {name: list(shape) for name, shape in options.shapes.items()},
        "dtypes": {name: str(dtype) for name, dtype in options.dtypes.items()},
        "transforms": sorted(options.transforms),
    }


@dataclass(frozen=True)
class Answer:
    """What a worker tells: the names, or the traceback of why there are none."""

    names: ModelNames | None = None
    problem: str = ""


@dataclass(frozen=True)
class _Names:
    """Builds the model in one of Spark's Python workers and tells its names."""

    source: bytes = field(repr=False)

    def __call__(self) -> str:
        try:
            source: ModelSource = cloudpickle.loads(self.source)
            return to_json(Answer(engine_named(source.engine).names(source)))
        except Exception as error:  # the function that builds it is the user's
            return to_json(Answer(problem=describe_exception(error)[2]))


def names_of_model(source: ModelSource, spark: SparkSession) -> ModelNames:
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
    answer = parse_plain(text, Answer)
    if answer.names is None:
        raise ModelError(
            "feature_cols is not given, and the model, whose inputs may be named like columns, "
            f"could not be built:\n{answer.problem.rstrip()}"
        )
    return answer.names


# Those of this process: several threads may begin a run in one second.
_named: set[str] = set()
_naming = threading.Lock()


def default_place(spark: Any, setting: str, folder: str) -> str:
    """Return where something goes that was given no place: named after the time, once each.

    Args:
        spark: the session, of a ``local`` master.
        setting: what names the place.
        folder: where it is to be.

    Raises:
        InvalidInputError: the executors are on other machines.
    """
    if not runs_on_this_machine(spark):
        raise InvalidInputError(
            f"{setting} is needed on a cluster: a place that the driver and all executors can "
            "write to"
        )
    now = str(Path(folder, time.strftime("%Y%m%d-%H%M%S")))
    with _naming:
        names = (now if number == 1 else f"{now}-{number}" for number in itertools.count(1))
        # What is there is of another process that began in this second, or of before a clock was
        # put back: a run would go on with it.
        name = next(name for name in names if name not in _named and not os.path.lexists(name))
        _named.add(name)
    return name


def check_saved_model(source: ModelSource, inputs: Binding, transforms: Container[str]) -> None:
    """Check it as far as the columns tell.

    Args:
        source: the model.
        inputs: its feature columns.
        transforms: columns that are given a transform.

    Raises:
        InvalidInputError: no SavedModel can be made of models of this engine.
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
