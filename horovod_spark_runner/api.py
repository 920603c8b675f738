"""`run_training`: from a DataFrame to a transformer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import (
    MATERIALIZERS,
    AllreduceOptions,
    FitOptions,
    LaunchOptions,
    check_choice,
    check_count,
)
from .data.manifest import Manifest
from .data.materialize import DataRequest, materialize
from .data.schema import Roles, check_shape_names, sources_of
from .data.split import check_validation, split_rows
from .errors import DataError, InvalidInputError, RunDirectoryError
from .launch.capacity import check_slots
from .launch.console import Console
from .launch.driver import RunResult, launch
from .ml.transformer import TFTransformer, read_trained_model
from .serialize import check_picklable
from .session import runs_on_this_machine
from .storage.checkpoint import CheckpointInfo, newest_checkpoint, read_info
from .storage.filesystem import Location
from .storage.run_directory import RunDirectory
from .training.entry import MODULES, train_rank
from .training.spec import Binding, ModelSource, TrainingSpec, model_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RESUMES = ("auto", "never", "required")
ColumnNames = Sequence[str] | Mapping[str, str]


def run_training(
    df: DataFrame,
    model_fn: Callable[[], Any] | str | Path,
    *,
    feature_cols: ColumnNames,
    label_cols: ColumnNames,
    num_workers: int,
    batch_size: int = 32,
    epochs: int = 1,
    run_dir: str | None = None,
    validation: float | str | DataFrame | None = None,
    sample_weight_col: str | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    shuffle: bool = True,
    gpus_per_worker: int = 0,
    lr_scaling: str = "none",
    warmup_epochs: float = 0.0,
    allreduce: AllreduceOptions | None = None,
    callbacks: Sequence[Any] | Callable[[], Sequence[Any]] = (),
    resume: str = "auto",
    keep_checkpoints: int = 3,
    custom_objects: Mapping[str, Any] | None = None,
    materializer: str = "petastorm",
    data_dir: str | None = None,
    keep_data: bool = False,
    window_bytes: int = 256 * 1024 * 1024,
    prediction_col: str = "prediction",
    start_timeout: float = 10.0,
    env: Mapping[str, str] | None = None,
    mpi_parameters: Mapping[str, str] | None = None,
    verbose: bool = True,
) -> TFTransformer:
    """Train a Keras model on a DataFrame with Horovod, and return it as a transformer.

    Args:
        df: the rows to train on. Features and labels are numbers, booleans, decimals, Spark ML
            vectors or arrays of numbers; real numbers are trained as float32.
        model_fn: function without arguments that returns a compiled ``keras.Model``, called on
            every worker; or the path of a ``.keras`` file, or of the ``.json`` of a compiled model.
        feature_cols: columns that feed the model's inputs: a list, in the inputs' order or by
            their names, or a dictionary from input name to column.
        label_cols: columns the model's outputs are compared with, likewise.
        num_workers: ranks, one per Spark task.
        batch_size: rows per rank and step (32); a global batch is ``num_workers`` times as large.
        epochs: epochs the run is to have in the end (1); a resumed run trains those that lack.
        run_dir: folder or URL for checkpoints and the model, reached by the driver and all
            executors. On a ``local`` master ``runs/<time>`` by default; required elsewhere.
        validation: fraction of the rows, name of a boolean or integer column that is true for
            validation rows, another DataFrame, or ``None`` (default).
        sample_weight_col: column of weights of the rows in the loss.
        shapes: shapes of array and vector columns, such as ``{"image": (8, 8, 1)}``; flat by
            default.
        seed: seed of the order of rows, the split and the model's initial weights (0).
        shuffle: take the rows in another order every epoch (default).
        gpus_per_worker: GPUs of each rank as Spark schedules them; 0 (default) for CPU.
        lr_scaling: ``"linear"`` multiplies the learning rate by ``num_workers``, ``"sqrt"`` by
            its root; ``"none"`` (default).
        warmup_epochs: epochs over which the rate rises to its scaled value (0).
        allreduce: see `AllreduceOptions`.
        callbacks: Keras callbacks that can be pickled, or a function, called on each worker, that
            returns them. Those that write files run on rank 0 only.
        resume: ``"auto"`` (default) goes on from the newest checkpoint in ``run_dir`` if there is
            one; ``"never"`` refuses a ``run_dir`` that has some; ``"required"`` one that has none.
        keep_checkpoints: checkpoints to keep, the newest (3).
        custom_objects: the model's own classes and functions by name, for a model file.
        materializer: ``"petastorm"`` (default), or ``"spark"`` for Spark's own Parquet writer.
        data_dir: folder for the materialized rows; inside ``run_dir`` by default.
        keep_data: leave the materialized rows there; by default they are deleted at the end.
        window_bytes: memory of the shuffle window of one rank, in bytes (256 MiB).
        prediction_col: column the transformer adds.
        start_timeout: seconds to wait for Spark's executors to offer enough slots (10).
        env: environment variables to set on every rank.
        mpi_parameters: further Open MPI parameters by name.
        verbose: show progress and the ranks' output on the driver (default).

    Returns:
        The trained model; `TFTransformer.history` has its metrics.

    Raises:
        DataError: columns, types or values cannot be trained on.
        ModelError: ``model_fn`` or its model cannot be trained on these columns.
        RunDirectoryError: ``run_dir`` cannot be used, or holds another model's run.
        InvalidInputError: another argument cannot be right (the three above are kinds of it).
        NotEnoughSlotsError: Spark cannot run ``num_workers`` tasks at once.
        RankFailedError: a rank raised, exited or was killed.
        LaunchError: the ranks could not be started, or Spark lost them.
    """
    spark = df.sparkSession
    exchange = allreduce or AllreduceOptions()
    launching = LaunchOptions(
        num_workers=num_workers,
        gpus_per_worker=gpus_per_worker,
        start_timeout=start_timeout,
        env=env or {},
        mpi_parameters=mpi_parameters or {},
        allreduce=exchange,
        stream_logs=verbose,
    )
    fit = FitOptions(
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        shuffle=shuffle,
        lr_scaling=lr_scaling,
        warmup_epochs=warmup_epochs,
        window_bytes=window_bytes,
    )
    check_choice("resume", resume, RESUMES)
    check_count("keep_checkpoints", keep_checkpoints)
    check_choice("materializer", materializer, MATERIALIZERS)
    source = model_source(model_fn, custom_objects)
    check_picklable({"model_fn": source.function, "callbacks": callbacks})
    inputs, outputs = _binding(feature_cols, "feature_cols"), _binding(label_cols, "label_cols")
    roles = Roles(inputs.columns, outputs.columns, sample_weight_col)
    sources_of(df, roles)
    check_shape_names(shapes or {}, roles.columns)
    check_validation(df, validation, roles)
    directory = RunDirectory(run_dir or _default_run_dir(spark))
    check_slots(spark, launching)
    directory.check_writable()
    checkpoint = find_checkpoint(directory, resume)

    request = DataRequest(
        roles, {name: tuple(shape) for name, shape in (shapes or {}).items()}, materializer
    )
    began = time.monotonic()
    folder = Location(data_dir) if data_dir else directory.data
    with _materialized(df, request, validation, fit.seed, folder, keep_data) as (train, held_out):
        timings = {"materialize": time.monotonic() - began}
        _check_enough_rows(train, num_workers)
        if checkpoint is not None:
            _check_same_data(checkpoint[1], train, directory)
        settings = {
            "fit": asdict(fit),
            "num_workers": num_workers,
            "feature_cols": list(inputs.columns),
            "label_cols": list(outputs.columns),
            "sample_weight_col": sample_weight_col,
        }
        spec = TrainingSpec(
            model=source,
            inputs=inputs,
            outputs=outputs,
            weight=sample_weight_col,
            fit=fit,
            allreduce=exchange,
            train=train,
            validation=held_out,
            run_dir=str(directory.location),
            checkpoint=None if checkpoint is None else str(checkpoint[0]),
            keep_checkpoints=keep_checkpoints,
            callbacks=callbacks,
            settings=settings,
        )
        directory.write_config({**settings, "rows": train.rows})
        console = Console(show_logs=verbose, show_progress=verbose)
        result = launch(spark, launching, train_rank, (spec,), {}, console, modules=MODULES)
    return _transformer(result, source, directory, timings, prediction_col)


def _transformer(
    result: RunResult,
    source: ModelSource,
    directory: RunDirectory,
    timings: dict[str, float],
    prediction_col: str,
) -> TFTransformer:
    report = result.result
    return TFTransformer(
        read_trained_model(directory, source, {}),
        run_dir=str(directory.location),
        history=report.history,
        placement=result.placement,
        timings={
            **timings,
            **result.timings,
            "train": report.train_seconds,
            "samples_per_second": report.samples_per_second,
        },
        prediction_col=prediction_col,
    )


def _binding(columns: ColumnNames, title: str) -> Binding:
    if isinstance(columns, str) or not isinstance(columns, (Sequence, Mapping)):
        raise InvalidInputError(
            f"{title} must be a list of column names or a dictionary from the model's names to "
            f"columns, got {columns!r}"
        )
    values = list(columns.values()) if isinstance(columns, Mapping) else list(columns)
    if not all(isinstance(name, str) for name in values):
        raise InvalidInputError(f"{title} must hold column names, got {values!r}")
    names = tuple(columns) if isinstance(columns, Mapping) else None
    return Binding(tuple(values), names)


def _default_run_dir(spark: Any) -> str:
    if not runs_on_this_machine(spark):
        raise InvalidInputError(
            "run_dir is needed on a cluster: a folder or URL that the driver and all executors "
            "can write to"
        )
    return str(Path("runs", time.strftime("%Y%m%d-%H%M%S")))


def find_checkpoint(directory: RunDirectory, resume: str) -> tuple[Location, CheckpointInfo] | None:
    """Return the checkpoint to go on from, or ``None`` to start anew.

    Raises:
        RunDirectoryError: ``resume`` forbids what is there.
    """
    newest = newest_checkpoint(directory)
    if newest is None:
        if resume == "required":
            raise RunDirectoryError(
                f"resume='required', but run_dir {directory.location} holds no checkpoint"
            )
        return None
    if resume == "never":
        raise RunDirectoryError(
            f"resume='never', but run_dir {directory.location} holds a run already "
            f"({newest.name}); give another run_dir, or resume='auto' to go on from it"
        )
    return newest, read_info(newest)


@contextlib.contextmanager
def _materialized(
    df: DataFrame,
    request: DataRequest,
    validation: Any,
    seed: int,
    folder: Location,
    keep: bool,
) -> Iterator[tuple[Manifest, Manifest | None]]:
    made: list[Manifest] = []
    try:
        with split_rows(df, validation, request.roles, seed) as (rows, held_out):
            made.append(_materialize_part(rows, request, folder, "train", validation))
            if held_out is not None:
                made.append(_materialize_part(held_out, request, folder, "validation", validation))
                made[1] = _like(made[1], made[0])
        yield made[0], made[1] if len(made) > 1 else None
    finally:
        if not keep:
            for manifest in made:
                Location(manifest.url).delete_folder()


def _materialize_part(
    frame: DataFrame, request: DataRequest, folder: Location, part: str, validation: Any
) -> Manifest:
    try:
        return materialize(frame, request, folder, part)
    except DataError as error:
        if validation is None:
            raise
        raise DataError(f"{part} rows (validation={_name(validation)}): {error}") from error


def _name(validation: Any) -> str:
    return repr(validation) if isinstance(validation, (str, int, float)) else "a DataFrame"


def _like(held_out: Manifest, train: Manifest) -> Manifest:
    """Return ``held_out`` if its columns are those of ``train``."""
    for ours, theirs in zip(held_out.columns, train.columns, strict=True):
        if ours.shape != theirs.shape:
            raise DataError(
                f"the validation rows have column {ours.describe()}, the training rows "
                + theirs.describe()
            )
    return replace(held_out, columns=train.columns)


def _check_enough_rows(train: Manifest, num_workers: int) -> None:
    if train.rows < num_workers:
        raise DataError(
            f"the training data have {train.rows} rows, fewer than the {num_workers} ranks asked "
            "for; lower num_workers"
        )


def _check_same_data(info: CheckpointInfo, train: Manifest, directory: RunDirectory) -> None:
    if info.data_fingerprint != train.fingerprint:
        columns = [*info.settings.get("feature_cols", []), *info.settings.get("label_cols", [])]
        raise RunDirectoryError(
            f"run_dir {directory.location} holds a run on other data (fingerprint "
            f"{info.data_fingerprint}, columns {columns}; these have {train.fingerprint}, columns "
            f"{[column.name for column in train.columns]}); give another run_dir to train anew"
        )
