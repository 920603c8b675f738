"""The steps of `run_training`: check, materialize, launch, wrap up."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import (
    RESUMES,
    CheckpointOptions,
    FitOptions,
    LaunchOptions,
    RestartOptions,
    check_choice,
    check_flag,
    check_workers,
)
from ..data.manifest import Manifest
from ..data.prepare.datasets import DataOptions, check_data, prepared, session_of
from ..data.prepare.schema import Roles
from ..errors import CheckpointError, DataError, InvalidInputError, RunDirectoryError
from ..launch.driver.head_start import import_meanwhile
from ..launch.driver.launch import RunResult
from ..ml.naming import PredictionCol, check_prediction_col
from ..ml.trained import read_trained_model
from ..ml.transformer import TFTransformer
from ..rundir.attempt import Attempt
from ..rundir.checkpoint import CheckpointInfo, newest_checkpoint
from ..rundir.directory import RunDirectory
from ..rundir.lock import RunLock
from ..serialize import check_picklable
from ..spark.capacity import check_slots
from ..spark.encryption import check_encryption
from ..spark.memory import check_memory_limit
from ..spark.session import runs_on_this_machine
from ..spark.stage_resources import TaskShape
from ..training.changes import check_same_data, settings_to_go_on_with
from ..training.engine import engine_named, engine_of
from ..training.entry import modules_for
from ..training.spec import (
    Binding,
    ModelSource,
    TrainingSpec,
    WarmStart,
)
from ..training.warm_start import read_warm_start
from .attempts import Attempts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# By input or output: a column, several that are joined, or (labels only) none.
ColumnNames = Sequence[str | Sequence[str] | None] | Mapping[str, str | Sequence[str] | None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingRequest:
    """What `run_training` was asked for; its docstring explains each field."""

    frame: DataFrame | str | Path
    model: Any
    custom_objects: Mapping[str, Any] | None
    feature_cols: ColumnNames
    label_cols: ColumnNames | None
    sample_weight_col: str | None
    data: DataOptions
    launching: LaunchOptions
    fit: FitOptions
    callbacks: Any
    run_dir: str | None
    resume: str
    initial_weights: str | Path | None
    skip_mismatch: bool
    checkpoints: CheckpointOptions
    restarts: RestartOptions
    prediction_col: PredictionCol

    def __post_init__(self) -> None:
        if self.run_dir == "":
            raise InvalidInputError(
                "run_dir is empty; give a folder or URL, or leave it out for runs/<time> on a "
                "local master"
            )
        if check_flag("initial_weights_skip_mismatch", self.skip_mismatch) and (
            self.initial_weights is None
        ):
            raise InvalidInputError(
                "initial_weights_skip_mismatch=True needs initial_weights: it says what becomes of "
                "those that do not fit"
            )


@dataclass(frozen=True)
class CheckedRequest:
    """A request that can be carried out, as far as can be told without computing the data.

    Attributes:
        request: what was asked.
        source: where the model comes from.
        inputs: columns of the model's inputs.
        outputs: columns its outputs are compared with.
        directory: the run directory.
        warm_start: weights to begin with.
        checkpoint: what the checkpoint to go on from is.
        begun_with: the ``initial_weights`` the run was begun with.
        shape: what each Spark task of the training will hold.
        seconds: what the checks took.
    """

    request: TrainingRequest
    source: ModelSource
    inputs: Binding
    outputs: Binding
    directory: RunDirectory
    warm_start: WarmStart | None
    checkpoint: CheckpointInfo | None
    begun_with: str | None
    shape: TaskShape
    seconds: float

    @property
    def roles(self) -> Roles:
        weight = self.request.sample_weight_col
        return Roles(self.inputs.columns, self.outputs.columns, weight)

    @property
    def settings(self) -> dict[str, Any]:
        """What checkpoints and the run directory record of the request."""
        return {
            "fit": asdict(self.request.fit),
            "num_workers": self.request.launching.num_workers,
            "checkpoints": asdict(self.request.checkpoints),
            "feature_cols": _recorded(self.inputs),
            "label_cols": _recorded(self.outputs),
            "sample_weight_col": self.request.sample_weight_col,
            "data": _recorded_data(self.request.data),
            "initial_weights": self.begun_with,
        }


def check_request(request: TrainingRequest) -> CheckedRequest:
    """Check all that can be checked before the data are computed or anything is launched."""
    began = time.monotonic()
    spark = session_of(request.frame)
    check_choice("resume", request.resume, RESUMES)
    check_workers(request.launching, request.restarts)
    check_prediction_col(request.prediction_col)
    engine = engine_named(engine_of(request.model))
    source = engine.source(request.model, request.custom_objects)
    check_picklable(
        {
            "model_fn": source.function,
            "callbacks": request.callbacks,
            "transforms": dict(request.data.transforms),
        }
    )
    engine.check_callbacks(request.callbacks)
    inputs = _binding(request.feature_cols, "feature_cols")
    outputs = _binding(request.label_cols, "label_cols")
    if request.fit.class_weight is not None:
        _check_class_weight(request, outputs)
    roles = Roles(inputs.columns, outputs.columns, request.sample_weight_col)
    check_data(request.frame, roles, request.data)
    directory = RunDirectory(request.run_dir or _default_run_dir(spark))
    check_encryption(spark, request.launching)
    check_memory_limit(spark)
    shape = check_slots(spark, request.launching)
    directory.check_writable()
    checkpoint = find_checkpoint(directory, request.resume)
    warm_start = None
    start = None if request.initial_weights is None else str(request.initial_weights)
    if checkpoint is not None:
        workers = request.launching.num_workers
        fit, start, warnings = settings_to_go_on_with(
            checkpoint, request.fit, workers, start, _recorded_data(request.data)
        )
        request = replace(request, fit=fit)
        for text in warnings:
            logger.warning("going on with run_dir %s: %s", directory.location, text)
    elif request.initial_weights is not None:
        warm_start = read_warm_start(request.initial_weights, request.skip_mismatch)
    seconds = time.monotonic() - began
    return CheckedRequest(
        request, source, inputs, outputs, directory, warm_start, checkpoint, start, shape, seconds
    )


def train_request(checked: CheckedRequest) -> TFTransformer:
    """Materialize the data, train on all ranks and return the transformer."""
    request, directory = checked.request, checked.directory
    began = time.monotonic()
    modules = modules_for(checked.source.engine)
    import_meanwhile(session_of(request.frame), request.launching, checked.shape, modules)
    with (
        RunLock(directory) as lock,
        prepared(
            request.frame, checked.roles, request.data, directory.data, request.fit.seed
        ) as data,
    ):
        materialized = time.monotonic()
        _check_enough_rows(data.train, request.launching.num_workers)
        if checked.checkpoint is not None:
            where = str(directory.location)
            check_same_data(checked.checkpoint, data.train.fingerprint, checked.settings, where)
        # The script's name only: its arguments may hold secrets.
        program = {"program": sys.argv[0]} if Path(sys.argv[0]).is_file() else {}
        try:
            spec = _training_spec(checked, data.train, data.validation)
            directory.write_config({**checked.settings, **program, "rows": data.train.rows})
        except OSError as error:
            raise CheckpointError(
                f"run_dir {directory.location} takes no files: {error}"
            ) from error
        launching = replace(request.launching, log_dir=str(directory.logs))
        attempts = Attempts(session_of(request.frame), launching, request.restarts, directory, lock)
        result = attempts.run(spec)
    trained = time.monotonic()
    transformer = _transformer(checked, result, attempts.done)
    ended = time.monotonic()
    transformer.timings = {
        **result.timings,
        **result.result.timings,
        "prepare": checked.seconds,
        "materialize": materialized - began,
        "attempts": max(0.0, trained - materialized - result.timings["total"]),
        "load": ended - trained,
        "total": checked.seconds + ended - began,
        "train": result.result.train_seconds,
        "samples_per_second": result.result.samples_per_second,
    }
    return transformer


def _training_spec(
    checked: CheckedRequest, train: Manifest, held_out: Manifest | None
) -> TrainingSpec:
    request = checked.request
    return TrainingSpec(
        model=checked.source,
        inputs=checked.inputs,
        outputs=checked.outputs,
        weight=request.sample_weight_col,
        fit=request.fit,
        allreduce=request.launching.allreduce,
        train=train,
        validation=held_out,
        run_dir=str(checked.directory.location),
        workers=request.launching.num_workers,
        checkpoint=None,
        warm_start=checked.warm_start,
        checkpoints=request.checkpoints,
        run_id=_run_id(checked),
        lock_token="",
        callbacks=request.callbacks,
        transforms=request.data.transforms,
        settings=checked.settings,
    )


def _transformer(
    checked: CheckedRequest, result: RunResult, attempts: Sequence[Attempt]
) -> TFTransformer:
    report = result.result
    transforms = checked.request.data.transforms
    model = read_trained_model(checked.directory, checked.source, report.saved, transforms)
    return TFTransformer(
        model,
        run_dir=str(checked.directory.location),
        history=report.history,
        placement=result.placement,
        prediction_col=checked.request.prediction_col,
        attempts=attempts,
    )


def _run_id(checked: CheckedRequest) -> str:
    """Return the identity that this run's checkpoints carry, kept in the run directory."""
    known = checked.directory.run_id()
    if known is None:
        known = uuid.uuid4().hex if checked.checkpoint is None else checked.checkpoint.run_id
        checked.directory.write_run_id(known)
    return known


def _binding(columns: ColumnNames | None, title: str) -> Binding:
    if columns is None and title == "label_cols":
        return Binding(())
    if isinstance(columns, str) or not isinstance(columns, (Sequence, Mapping)):
        raise InvalidInputError(
            f"{title} must be a list of column names or a dictionary from the model's names to "
            f"columns, got {columns!r}"
        )
    names = tuple(columns) if isinstance(columns, Mapping) else None
    given = columns.values() if isinstance(columns, Mapping) else columns
    slots = [_slot(one, title) for one in given]
    if names is not None and not all(isinstance(name, str) for name in names):
        raise InvalidInputError(f"{title} must name the model's inputs or outputs, got {names!r}")
    if title == "feature_cols" and names is None:
        flat = [name for slot in slots for name in slot]
        twice = sorted({name for name in flat if flat.count(name) > 1})
        if twice:
            raise DataError(f"feature_cols names {', '.join(map(repr, twice))} more than once")
    return Binding(tuple(slots), names)


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


def _slot(given: Any, title: str) -> tuple[str, ...]:
    """Return the columns of one input or output."""
    if isinstance(given, str):
        return (given,)
    if given is None and title == "label_cols":  # an output without a loss
        return ()
    if isinstance(given, (list, tuple)) and given and all(isinstance(n, str) for n in given):
        return tuple(given)
    raise InvalidInputError(
        f"{title} must hold column names, or lists of those that are joined into one, got {given!r}"
    )


def _recorded(binding: Binding) -> list[Any] | dict[str, Any]:
    """Return ``feature_cols`` or ``label_cols`` as JSON."""
    slots = [slot[0] if len(slot) == 1 else list(slot) or None for slot in binding.slots]
    return slots if binding.names is None else dict(zip(binding.names, slots, strict=True))


def _recorded_data(options: DataOptions) -> dict[str, Any]:
    validation = options.validation
    plain = validation is None or isinstance(validation, (str, float, int))
    return {
        "validation": validation if plain else "a DataFrame",
        "stratify": options.stratify,
        "shapes": {name: list(shape) for name, shape in options.shapes.items()},
        "dtypes": {name: str(dtype) for name, dtype in options.dtypes.items()},
        "transforms": sorted(options.transforms),
    }


def _default_run_dir(spark: Any) -> str:
    if not runs_on_this_machine(spark):
        raise InvalidInputError(
            "run_dir is needed on a cluster: a folder or URL that the driver and all executors "
            "can write to"
        )
    return str(Path("runs", time.strftime("%Y%m%d-%H%M%S")))


def find_checkpoint(directory: RunDirectory, resume: str) -> CheckpointInfo | None:
    """Return the checkpoint to go on from, or ``None`` to start anew.

    Raises:
        RunDirectoryError: ``resume`` forbids what is there, or nothing of it is whole.
        CheckpointError: the storage fails.
    """
    # What is skipped is said once, where the attempt looks again.
    skipped: list[str] = []
    newest = newest_checkpoint(directory, directory.run_id(), skipped.append)
    if newest is None:
        if resume == "required":
            raise RunDirectoryError(
                f"resume='required', but run_dir {directory.location} holds no checkpoint"
                + "".join(f"; {line}" for line in skipped)
            )
        return None
    folder, info = newest
    if resume == "never":
        raise RunDirectoryError(
            f"resume='never', but run_dir {directory.location} holds a run already "
            f"({folder.name}); give another run_dir, or resume='auto' to go on from it"
        )
    return info


def _check_enough_rows(train: Manifest, num_workers: int) -> None:
    if train.rows < num_workers:
        raise DataError(
            f"the training data have {train.rows} rows, fewer than the {num_workers} ranks asked "
            "for; lower num_workers"
        )
