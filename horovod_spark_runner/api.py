"""`run_training`: from a DataFrame to a transformer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import (
    AllreduceOptions,
    CheckpointOptions,
    FitOptions,
    LaunchOptions,
    RestartOptions,
)
from .data.prepare.datasets import DataOptions
from .data.read.decode import Transform
from .ml.transformer import TFTransformer
from .run.pipeline import ColumnNames, TrainingRequest, check_request, train_request

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def run_training(
    df: DataFrame | str | Path,
    model_fn: Callable[[], Any] | str | Path,
    *,
    feature_cols: ColumnNames,
    label_cols: ColumnNames | None = None,
    num_workers: int,
    batch_size: int = 32,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    run_dir: str | None = None,
    validation: float | str | DataFrame | None = None,
    validation_freq: int | Sequence[int] = 1,
    stratify: str | None = None,
    sample_weight_col: str | None = None,
    class_weight: Mapping[int, float] | None = None,
    shapes: Mapping[str, Sequence[int] | int] | None = None,
    dtypes: Mapping[str, str] | None = None,
    transforms: Mapping[str, Transform] | None = None,
    allow_nan: bool = False,
    seed: int = 0,
    shuffle: bool = True,
    gpus_per_worker: int = 0,
    lr_scaling: str = "none",
    warmup_epochs: float = 0.0,
    allreduce: AllreduceOptions | None = None,
    callbacks: Sequence[Any] | Callable[[], Sequence[Any]] | None = (),
    resume: str = "auto",
    initial_weights: str | Path | None = None,
    initial_weights_skip_mismatch: bool = False,
    checkpoint_every_steps: int | None = None,
    checkpoint_every_minutes: float | None = None,
    keep_checkpoints: int = 3,
    best_metric: str | None = None,
    best_mode: str = "min",
    on_checkpoint_error: str = "raise",
    max_restarts: int = 0,
    min_workers: int | None = None,
    restart_backoff: float = 0.5,
    custom_objects: Mapping[str, Any] | None = None,
    materializer: str = "petastorm",
    data_dir: str | None = None,
    keep_data: bool | None = None,
    window_bytes: int = 256 * 1024 * 1024,
    prediction_col: str | Mapping[str, str] | Sequence[str] | None = None,
    resources: Any = None,
    share_gpus: bool = False,
    start_timeout: float | None = None,
    stall_timeout: float | None = None,
    heartbeat_timeout: float = 30.0,
    worker_idle_timeout: float = 60.0,
    network_interface: str | None = None,
    allow_unencrypted: bool = False,
    env: Mapping[str, str] | None = None,
    mpi_parameters: Mapping[str, str] | None = None,
    verbose: bool = True,
) -> TFTransformer:
    """Train a Keras model on a DataFrame with Horovod, and return it as a transformer.

    Args:
        df: the rows to train on, or the path or URL of Parquet files (a folder, or one file), which
            are read as they are if their types allow. Features and labels are numbers, booleans,
            decimals, Spark ML vectors, arrays (also nested) of numbers, or bytes: encoded images
            (PNG, JPEG, GIF, WebP, BMP, TIFF), NumPy arrays as Petastorm's codecs write them, or the
            raw elements of an array. Features may be strings or arrays of strings, for models that
            begin with ``StringLookup``, ``TextVectorization`` or ``Hashing``.
        model_fn: function without arguments that returns a compiled ``keras.Model``, called on
            every worker; or the path or URL of a ``.keras`` file, or of the ``.json`` of a compiled
            model.
        feature_cols: columns that feed the model's inputs: a list, in the inputs' order or by
            their names, or a dictionary from input name to column. A list in place of a column
            (``[["age", "height"]]``) joins several into one input. A subclassed model's ``call``
            gets the only column as it is, those of a list as a tuple, those of a dictionary as
            one.
        label_cols: columns the model's outputs are compared with, likewise; a feature column may
            be a label too (autoencoders), and one column the label of several outputs. An output
            without a loss is left out, or ``None``. ``None`` (default) for a model that needs no
            labels.
        num_workers: ranks, one per Spark task.
        batch_size: rows per rank and step (32); a global batch is ``num_workers`` times as large.
        epochs: epochs the run is to have in the end (1); a resumed run trains the remaining ones.
        steps_per_epoch: steps of an epoch; the next one goes on in the data where it ended. By
            default, an epoch is all rows once.
        run_dir: folder or URL for checkpoints and the model, reached by the driver and all
            executors. On a ``local`` master ``runs/<time>`` by default; required elsewhere.
        validation: fraction of the rows, name of a boolean or integer column that is true for
            validation rows, another DataFrame, or ``None`` (default).
        validation_freq: validate after every so many epochs (1), or after those of these numbers,
            counted from 1.
        stratify: column of whose values both parts get the same proportions; with a fraction.
        sample_weight_col: column of weights of the rows in the loss, none of them negative.
        class_weight: weights of the classes in the loss, such as ``{0: 1.0, 1: 5.0}``; 1 where
            not given. For a model with one output, and not beside ``sample_weight_col``.
        shapes: shapes of columns, such as ``{"image": (8, 8, 1)}``; by default that of the
            (nested) arrays. Encoded images are resized to it, (height, width, channels).
        dtypes: NumPy dtypes to train columns in, such as ``{"price": "float64"}``. By default real
            numbers are float32, integers keep their size, strings stay strings and bytes are uint8;
            grey images of 16 bits are uint16, those of real numbers float32. Values are never
            scaled.
        transforms: functions that vary a column's values, such as images, by column: called on
            threads, once per row, with the value (a NumPy array of its own in the column's shape,
            ``()`` for a single number or string; booleans come as int8, 0 and 1) and a
            ``numpy.random.Generator`` (``None`` in validation and prediction) that depends on seed,
            epoch and the row's place in the epoch's order, which is the same on any number of
            ranks with the same global batch. All columns of a row get equal ones. The result has
            the column's shape and fits its type: to make real numbers of an image of uint8, give
            ``dtypes={"image": "float32"}`` too.
        allow_nan: let NaN and infinite values pass, also those that ``transforms`` return (refused
            by default).
        seed: seed of the order of rows, the split and the model's initial weights (0).
        shuffle: take the rows in another order every epoch (default).
        gpus_per_worker: GPUs of each rank as Spark schedules them; 0 (default) for CPU.
        lr_scaling: ``"linear"`` multiplies the learning rate by ``num_workers``, ``"sqrt"`` by
            its root; ``"none"`` (default).
        warmup_epochs: epochs over which the rate rises to its scaled value (0).
        allreduce: see `AllreduceOptions`.
        callbacks: Keras callbacks that can be pickled, or a function, called on each worker, that
            returns them. Keras' own that write files run on rank 0 only.
        resume: ``"auto"`` (default) goes on from the newest checkpoint in ``run_dir`` if there is
            one; ``"never"`` refuses a ``run_dir`` that has some; ``"required"`` one that has none.
            What may change from call to call: ``epochs``, callbacks, checkpoints, restarts,
            metrics, settings of the optimizer other than its rate (clipping, decay, schedules),
            and, from an epoch's end on, ``num_workers``, ``batch_size``, ``shuffle`` and
            ``window_bytes``. A new loss, ``class_weight``, ``steps_per_epoch`` or column of
            ``transforms`` is trained with, and warned of. What the checkpoint decides is kept, with
            a warning that names both values: the learning rate that ``compile`` gave,
            ``lr_scaling``, ``warmup_epochs``, ``initial_weights``, and of ``seed`` all but the
            order of rows. Refused by name: other training rows (also by
            another ``validation``), columns, layers or settings of layers, optimizer classes.
            Automatic names (``dense_3``) do not count.
        initial_weights: weights to begin a new run with: another run's directory or one of its
            checkpoints, a ``.keras`` or ``.weights.h5`` file, or a SavedModel written by Keras.
            They must fit, weight by weight, in the model's order.
        initial_weights_skip_mismatch: take over only the weights that are there and fit, such as
            all but a new head's (false by default); the others keep their initial values. Weights
            go by their paths (layer and variable names), those of Keras files as
            ``load_weights(skip_mismatch=True)`` finds them. Which were taken is reported; it is
            an error if none was.
        checkpoint_every_steps: take a checkpoint after every so many steps too; by default, at
            every epoch's end only.
        checkpoint_every_minutes: take one whenever so many minutes have passed, too.
        keep_checkpoints: checkpoints to keep, the newest (3).
        best_metric: keep the checkpoint of the epoch with the best value of this metric as well,
            such as ``"val_loss"``.
        best_mode: whether ``"min"`` (default) or ``"max"`` is best.
        on_checkpoint_error: ``"raise"`` (default) ends the training when a checkpoint cannot be
            written; ``"warn"`` goes on to the next one.
        max_restarts: how often a run that was cut short (a rank killed, an executor lost) is
            started again from its newest checkpoint (0); errors of your own code are not retried.
        min_workers: ranks a restart may make do with if Spark has no slots for ``num_workers``;
            the global batch stays the same. By default, all.
        restart_backoff: seconds before the first restart (0.5); doubled while there is no progress.
        custom_objects: the model's own classes and functions by name, for a model file.
        materializer: ``"petastorm"`` (default), or ``"spark"`` for Spark's own Parquet writer; on
            Spark Connect always that.
        data_dir: cache directory of the materialized rows, where later runs on the same data find
            them; by default Spark's setting ``spark.horovod.dataDir``, else inside ``run_dir``.
        keep_data: whether the rows stay after the run: in a cache directory they do by default
            (see ``horovod-spark-runner data``), in ``run_dir`` until the run has succeeded.
        window_bytes: memory of the shuffle window of one rank, in bytes (256 MiB). Rows that take
            no more than this in all are read from storage only once.
        prediction_col: columns the transformer adds: ``None`` (default) for "prediction", or, of
            a model with several outputs, their names; see `TFTransformer`.
        resources: what each task of the training asks of Spark in place of the session's
            settings: amounts by name, such as ``{"cpus": 4, "gpu": 1}``, or a ``ResourceProfile``.
        share_gpus: allow several ranks on one device.
        start_timeout: seconds to wait for free slots; by default no longer than the executors of
            a new session take to register (10), or Spark to start the tasks (60).
        stall_timeout: seconds without a step of training or validation after which the run ends
            with the Python stacks of all ranks in the error; never by default.
        heartbeat_timeout: seconds of silence after which a host counts as lost (30).
        worker_idle_timeout: seconds for which a process that has imported the framework stays on
            each executor for the next run (60); 0 keeps none.
        network_interface: interface the ranks talk over: a name, an address or a network such as
            ``10.0.0.0/8``; by default that of the route to the other hosts.
        allow_unencrypted: run across hosts although Spark is set to encrypt its own traffic:
            MPI's is not encrypted.
        env: environment variables to set on every rank. Otherwise it has its executor's, not the
            driver's, and the executor's working directory: name files by whole paths.
        mpi_parameters: further Open MPI parameters by name.
        verbose: show progress and the ranks' output on the driver (default); without, only
            warnings. (Spark's own bar is a matter of ``spark.ui.showConsoleProgress``.)

    Returns:
        The trained model; `TFTransformer.history` has its metrics.

    Raises:
        DataError: columns, types or values cannot be trained on.
        ModelError: ``model_fn`` or its model cannot be trained on these columns.
        RunDirectoryError: ``run_dir`` cannot be used, or holds another model's run.
        InvalidInputError: another argument cannot be right (the three above are kinds of it).
        EnvironmentProblem: something is not installed or set up as it must be.
        NotEnoughSlotsError: Spark cannot run ``num_workers`` tasks at once.
        RankFailedError: a rank raised, exited, was killed or lost.
        RanksDivergedError: a callback or train_step made the ranks' models differ.
        CheckpointError: a checkpoint could not be written.
        PreemptedError: a rank got SIGTERM; a checkpoint was saved.
        StalledError: no rank made progress for ``stall_timeout``.
        RunCancelledError: the Spark job was cancelled.
        LaunchError: the ranks could not be started, or Spark lost them.
    """
    launching = LaunchOptions(
        num_workers=num_workers,
        gpus_per_worker=gpus_per_worker,
        resources=resources,
        share_gpus=share_gpus,
        start_timeout=start_timeout,
        stall_timeout=stall_timeout,
        heartbeat_timeout=heartbeat_timeout,
        worker_idle_timeout=worker_idle_timeout,
        network_interface=network_interface,
        allow_unencrypted=allow_unencrypted,
        env=env or {},
        mpi_parameters=mpi_parameters or {},
        allreduce=allreduce or AllreduceOptions(),
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
        steps_per_epoch=steps_per_epoch,
        validation_freq=validation_freq,
        class_weight=class_weight,
    )
    request = TrainingRequest(
        frame=df,
        model=model_fn,
        custom_objects=custom_objects,
        feature_cols=feature_cols,
        label_cols=label_cols,
        sample_weight_col=sample_weight_col,
        data=DataOptions(
            shapes=shapes or {},
            dtypes=dtypes or {},
            transforms=transforms or {},
            allow_nan=allow_nan,
            validation=validation,
            stratify=stratify,
            materializer=materializer,
            data_dir=data_dir,
            keep_data=keep_data,
        ),
        launching=launching,
        fit=fit,
        callbacks=() if callbacks is None else callbacks,
        run_dir=run_dir,
        resume=resume,
        initial_weights=initial_weights,
        skip_mismatch=initial_weights_skip_mismatch,
        checkpoints=CheckpointOptions(
            every_steps=checkpoint_every_steps,
            every_minutes=checkpoint_every_minutes,
            keep=keep_checkpoints,
            best_metric=best_metric,
            best_mode=best_mode,
            on_error=on_checkpoint_error,
        ),
        restarts=RestartOptions(
            max_restarts=max_restarts, min_workers=min_workers, backoff_seconds=restart_backoff
        ),
        prediction_col=prediction_col,
    )
    return train_request(check_request(request))
