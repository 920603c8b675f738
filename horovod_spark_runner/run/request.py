"""What `run_training` is asked for, and what is left of it once it is checked."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..config.data import DataOptions
from ..config.fields import derive
from ..config.launch import LaunchOptions, LaunchSettings
from ..config.mlflow import MlflowOptions
from ..config.prediction import PredictionCol, PredictionSettings, check_prediction_col
from ..config.sync import Sync, check_servers, recorded_sync
from ..config.training import (
    CheckpointOptions,
    FitOptions,
    InitialWeights,
    RestartOptions,
    check_min_workers,
)
from ..config.validators import ColumnNames, check_choice, check_place
from ..data.prepare.datasets import check_data, frame_of, session_of
from ..data.prepare.schema import Roles
from ..errors import InvalidInputError, brief
from ..launch.driver.console import Console
from ..ml.naming import check_added, surely_added
from ..rundir.checkpoint import CheckpointInfo, read_steps
from ..rundir.directory import RunDirectory
from ..serialize import check_picklable
from ..spark.capacity import Allotment, check_slots
from ..spark.encryption import check_encryption
from ..spark.memory import check_memory_limit
from ..spark.session import check_running, is_case_sensitive
from ..storage.filesystem import Location
from ..training.changes import check_same_engine, describe_rest, settings_to_go_on_with
from ..training.columns import by_convention, by_name, recorded_columns
from ..training.engine import engine_named, engine_of
from ..training.spec import (
    FEATURES,
    Binding,
    ModelSource,
    OutputSpec,
    WarmStart,
    bind_columns,
)
from ..training.warm_start import read_warm_start
from .default_place import default_place
from .found_checkpoint import FoundCheckpoint, find_checkpoint
from .names import names_of_model
from .saved_model import check_saved_model
from .tracking import check_tracking

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Where Horovod is to write a timeline.
_TIMELINE = "HOROVOD_TIMELINE"
Resume = Literal["auto", "never", "required"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingRequest:
    """What `run_training` was asked for; its docstring explains each field."""

    frame: DataFrame | str | Path
    model: Any
    feature_cols: ColumnNames | None
    label_cols: ColumnNames | None
    num_workers: int | None
    gpus_per_worker: int
    stream_logs: bool
    sample_weight_col: str | None
    validation: Any
    custom_objects: Mapping[str, Any] | None
    callbacks: Any
    run_dir: str | os.PathLike[str] | None
    resume: Resume
    initial_weights: str | os.PathLike[str] | InitialWeights | None
    prediction_col: PredictionCol
    fit: FitOptions
    data: DataOptions
    checkpoints: CheckpointOptions
    restarts: RestartOptions
    launch: LaunchOptions
    sync: Sync
    mlflow: MlflowOptions | None = None
    # The parameters of a trial of a search; `run_training` has none.
    params: Mapping[str, Any] | None = None
    # See `TrainingSpec.check_outputs`; an estimator's model may be asked for more than outputs.
    check_outputs: Callable[[Sequence[OutputSpec]], None] | None = None

    def __post_init__(self) -> None:
        if self.run_dir == "":
            raise InvalidInputError(
                "run_dir is empty; give a folder or URL, or leave it out for runs/<time> on a "
                "local master"
            )
        if self.run_dir is not None:
            check_place("run_dir", self.run_dir)
        check_choice("resume", self.resume, get_args(Resume))
        weight = self.sample_weight_col
        if weight is not None and (not isinstance(weight, str) or not weight):
            raise InvalidInputError(
                f"sample_weight_col must be a column's name, got {brief(weight)}"
            )
        check_prediction_col("prediction_col", self.prediction_col)
        if isinstance(self.validation, Real) and not isinstance(self.validation, bool):
            object.__setattr__(self, "validation", float(self.validation))
        given = self.initial_weights
        if given is not None and not isinstance(given, InitialWeights):
            object.__setattr__(self, "initial_weights", InitialWeights(given))


@dataclass(frozen=True)
class CheckedRequest:
    """A request that can be carried out, as far as can be told without computing the data.

    Attributes:
        request: what was asked.
        source: where the model comes from.
        inputs: columns of the model's inputs.
        outputs: columns its outputs are compared with.
        directory: the run directory.
        launching: how the ranks are started.
        allotment: what Spark gives them.
        fit: how the model is fitted; a resumed run keeps some of what it was begun with.
        warm_start: weights to begin with.
        found: the checkpoint to go on from.
        begun_with: the ``initial_weights`` the run was begun with.
        seconds: what the checks took.
        tracking: MLflow's client and experiment, if it is to be told of the training.
    """

    request: TrainingRequest
    source: ModelSource
    inputs: Binding
    outputs: Binding
    directory: RunDirectory
    launching: LaunchSettings
    allotment: Allotment
    fit: FitOptions
    warm_start: WarmStart | None
    found: FoundCheckpoint
    begun_with: str | None
    seconds: float
    tracking: tuple[Any, str] | None = None

    @property
    def roles(self) -> Roles:
        weight = self.request.sample_weight_col
        return Roles(self.inputs.columns, self.outputs.columns, weight)

    @property
    def checkpoint(self) -> CheckpointInfo | None:
        """What the checkpoint to go on from is."""
        return self.found.info

    @property
    def workers(self) -> int:
        """Ranks of the run."""
        return self.allotment.workers

    @property
    def settings(self) -> dict[str, Any]:
        """What checkpoints and the run directory record of the request."""
        params = self.request.params
        return {
            **({} if params is None else {"params": dict(params)}),
            "fit": asdict(self.fit),
            "sync": recorded_sync(self.request.sync),
            "num_workers": self.workers,
            "checkpoints": asdict(self.request.checkpoints),
            "feature_cols": recorded_columns(self.inputs),
            "label_cols": recorded_columns(self.outputs),
            "sample_weight_col": self.request.sample_weight_col,
            "data": _recorded_data(self.request),
            "initial_weights": self.begun_with,
        }


def check_request(request: TrainingRequest) -> CheckedRequest:
    """Check all that can be checked before the data are computed or anything is launched.

    Args:
        request: what is asked for.
    """
    began = time.monotonic()
    Console("a new run", quiet=not request.stream_logs).say("checking what is asked for")
    spark = check_running(session_of(request.frame))
    engine = engine_named(engine_of(request.model))
    source = engine.source(request.model, request.custom_objects)
    check_picklable(
        {
            "model_fn": source.function,
            "callbacks": request.callbacks,
            "custom_objects": dict(source.custom_objects),
            "transforms": dict(request.data.transforms),
        }
    )
    engine.check_callbacks(request.callbacks)
    given = _given_columns(request)
    bound = None if given is None else _check_columns(request, *given)
    directory = RunDirectory(Location(request.run_dir or default_place(spark, "run_dir", "runs")))
    launching = _launching(request, directory)
    allotment = _check_spark(spark, launching, request.restarts)
    check_servers(request.sync, allotment.workers)
    tracking = None if request.mlflow is None else check_tracking(request.mlflow)
    console = Console(directory.location.name, quiet=not request.stream_logs)
    if request.num_workers is None:
        console.say(allotment.describe())
    directory.check_writable()
    found = find_checkpoint(directory, request.resume)
    if found.info is not None:
        check_same_engine(found.info, source.engine, str(directory.location))
    if bound is None:  # takes a Spark job: after all that can be checked without one
        console.say("building the model once, to learn which columns its inputs are named like")
        bound = _check_columns(request, *_columns_by_name(request, source, spark))
    if request.checkpoints.saved_model:
        check_saved_model(source, bound[0], request.data.transforms)
    fit, warm_start, begun_with = _beginning(
        request, found.info, allotment.workers, directory, source.engine
    )
    return CheckedRequest(
        request,
        source,
        *bound,
        directory,
        launching,
        allotment,
        fit,
        warm_start,
        found,
        begun_with,
        seconds=time.monotonic() - began,
        tracking=tracking,
    )


def as_locked(checked: CheckedRequest) -> CheckedRequest:
    """Return a request as it is now that the lock of its run directory is held.

    Another run may have trained there since it was checked; then what there is to go on from is
    looked at again, and refused, as by `check_request`.
    """
    request, directory, engine = checked.request, checked.directory, checked.source.engine
    if checked.found.steps == read_steps(directory):
        return checked
    found = find_checkpoint(directory, request.resume)
    if found.info is not None:
        check_same_engine(found.info, engine, str(directory.location))
    fit, start, begun_with = _beginning(request, found.info, checked.workers, directory, engine)
    return replace(checked, found=found, fit=fit, warm_start=start, begun_with=begun_with)


def _launching(request: TrainingRequest, directory: RunDirectory) -> LaunchSettings:
    """Return how the ranks are started."""
    env = dict(request.launch.env)
    if request.checkpoints.timeline:
        if _TIMELINE in env:
            raise InvalidInputError(
                f"timeline=True and {_TIMELINE}={env[_TIMELINE]!r} in launch.env: Horovod keeps "
                "one timeline; leave one of them out"
            )
        env[_TIMELINE] = "DYNAMIC"  # begun by the training, not with Horovod
    return derive(
        LaunchSettings,
        request.launch,
        env=env,
        num_workers=request.num_workers,
        gpus_per_worker=request.gpus_per_worker,
        stream_logs=request.stream_logs,
        log_dir=str(directory.logs),
    )


def _beginning(
    request: TrainingRequest,
    checkpoint: CheckpointInfo | None,
    workers: int,
    directory: RunDirectory,
    engine: str,
) -> tuple[FitOptions, WarmStart | None, str | None]:
    """Return the options that hold, weights to begin with, and what to record of those."""
    asked = _origin(request.initial_weights)
    if checkpoint is not None:
        data, sync = _recorded_data(request), recorded_sync(request.sync)
        fit, begun_with, warnings = settings_to_go_on_with(
            checkpoint, request.fit, workers, asked, data, sync
        )
        rest = describe_rest(checkpoint, request.fit.epochs)
        if rest:
            console = Console(directory.location.name, quiet=not request.stream_logs)
            console.say(f"resuming from {directory.checkpoint(checkpoint.step).name}: {rest}")
        for text in warnings:
            logger.warning("resuming run_dir %s: %s", directory.location, text)
        return fit, None, begun_with
    if isinstance(request.initial_weights, InitialWeights):
        formats = engine_named(engine).weights_formats
        start = read_warm_start(request.initial_weights, engine, formats)
        return request.fit, start, asked
    return request.fit, None, asked


def _given_columns(request: TrainingRequest) -> tuple[ColumnNames, ColumnNames | None] | None:
    """Return feature and label columns as given or by convention; ``None`` if neither tells."""
    if request.feature_cols is not None:
        return request.feature_cols, request.label_cols
    available = frame_of(request.frame).columns
    return by_convention(request.label_cols, available) if FEATURES in available else None


def _columns_by_name(
    request: TrainingRequest, source: ModelSource, spark: SparkSession
) -> tuple[ColumnNames, ColumnNames | None]:
    """Return the columns that are called as the model's inputs and outputs."""
    names = names_of_model(source, spark)
    return by_name(names, request.label_cols, frame_of(request.frame).columns)


def _check_columns(
    request: TrainingRequest, features: ColumnNames, labels: ColumnNames | None
) -> tuple[Binding, Binding]:
    """Return what feeds the model's inputs, and what its outputs are compared with."""
    inputs, outputs = bind_columns(features, "feature_cols"), bind_columns(labels, "label_cols")
    if request.fit.class_weight is not None:
        _check_class_weight(request, outputs)
    roles = Roles(inputs.columns, outputs.columns, request.sample_weight_col)
    check_data(request.frame, roles, request.data, request.validation)
    if request.prediction_col is not None:
        settings = PredictionSettings(prediction_col=request.prediction_col)
        added = surely_added(settings, len(outputs.slots))
        columns, by_case = (
            frame_of(request.frame).columns,
            is_case_sensitive(session_of(request.frame)),
        )
        check_added(added, columns, settings, by_case=by_case)
    return inputs, outputs


def _check_spark(
    spark: SparkSession, launching: LaunchSettings, restarts: RestartOptions
) -> Allotment:
    """Return what Spark gives the ranks."""
    if launching.num_workers is not None:
        check_min_workers(launching.num_workers, restarts)
    check_encryption(spark, launching)
    check_memory_limit(spark)
    allotment = check_slots(spark, launching, launching.num_workers)
    if launching.num_workers is None:
        check_min_workers(allotment.workers, restarts)
    return allotment


def _check_class_weight(request: TrainingRequest, outputs: Binding) -> None:
    if request.sample_weight_col is not None:
        raise InvalidInputError(
            "class_weight and sample_weight_col cannot both be given; multiply the weights in the "
            "column"
        )
    if len(outputs.slots) != 1:
        raise InvalidInputError(
            "class_weight is for a model with one output, but label_cols gives "
            f"{len(outputs.slots)}: {outputs.describe()}"
        )


def _origin(weights: str | os.PathLike[str] | InitialWeights | None) -> str | None:
    """Return what is recorded of ``initial_weights``."""
    return str(weights.place) if isinstance(weights, InitialWeights) else None


def _recorded_data(request: TrainingRequest) -> dict[str, Any]:
    options, validation = request.data, request.validation
    plain = validation is None or isinstance(validation, (str, float, int))
    return {
        "validation": validation if plain else "a DataFrame",
        "stratify": options.stratify,
        "shapes": {name: list(shape) for name, shape in options.shapes.items()},
        "dtypes": {name: str(dtype) for name, dtype in options.dtypes.items()},
        "transforms": sorted(options.transforms),
    }
