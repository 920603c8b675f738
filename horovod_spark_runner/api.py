"""`run_training`: from a DataFrame to a transformer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .config.data import DataOptions
from .config.keywords import check_keywords
from .config.launch import LaunchOptions
from .config.sync import Sync
from .config.training import (
    CheckpointOptions,
    InitialWeights,
    LrScaling,
    MlflowOptions,
    RestartOptions,
    Resume,
    TrainingConfig,
    training_usage,
)
from .config.validators import ColumnNames
from .model.transformer import TrainedTransformer
from .run.pipeline import train_run
from .run.resolve import resolve

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@check_keywords("run_training", training_usage)
def run_training(
    df: DataFrame | str | Path,
    model_fn: Callable[[], object] | str | Path,
    *,
    feature_cols: ColumnNames | None = None,
    label_cols: ColumnNames | None = None,
    sample_weight_col: str | None = None,
    validation: float | str | DataFrame | None = None,
    validation_freq: int | Sequence[int] = 1,
    num_workers: int | None = None,
    gpus_per_worker: int = 0,
    batch_size: int = 32,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    class_weight: Mapping[int, float] | None = None,
    lr_scaling: LrScaling = "none",
    warmup_epochs: float = 0.0,
    seed: int = 0,
    shuffle: bool = True,
    callbacks: Sequence[object] | Callable[[], Sequence[object]] | None = (),
    custom_objects: Mapping[str, object] | None = None,
    initial_weights: str | os.PathLike[str] | InitialWeights | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: Resume = "auto",
    prediction_col: str | Mapping[str, str] | Sequence[str] | None = None,
    stream_logs: bool = True,
    data: DataOptions | None = None,
    checkpoints: CheckpointOptions | None = None,
    restarts: RestartOptions | None = None,
    launch: LaunchOptions | None = None,
    sync: Sync | None = None,
    mlflow: MlflowOptions | None = None,
) -> TrainedTransformer:
    """Train a model on a DataFrame with Horovod, and return it as a transformer.

    Args:
        df: the rows to train on, or the path or URL of Parquet files (a folder, or one file), which
            are read in place if their types allow. Features and labels are numbers, booleans,
            decimals, Spark ML vectors, arrays (also nested) of numbers, or bytes: encoded images
            (PNG, JPEG, GIF, WebP, BMP, TIFF), NumPy arrays as Petastorm's codecs write them, or the
            raw elements of an array. Features may be strings or arrays of strings, for models that
            begin with ``StringLookup``, ``TextVectorization`` or ``Hashing``.
        model_fn: function without arguments that returns a compiled ``keras.Model`` or a
            `TorchModel`, called on every worker; or the path or URL of a ``.keras`` file, or of the
            ``.json`` of a compiled model. A function for another framework names its engine by an
            attribute ``horovod_engine``, the dotted name of the engine's module; see
            `horovod_spark_runner.training.engine`.
        feature_cols: columns that feed the model's inputs: a list, in the inputs' order or by their
            names, or a dictionary from input name to column. A list in place of a column
            (``[["age", "height"]]``) joins several into one input. A subclassed model's ``call``
            gets a single column directly, a list as a tuple, a dictionary as one. By default the
            column ``features``, Spark ML's name; without it, the columns with the names of the
            model's inputs (their layers, or the keys of a dictionary). To get these names, one of
            Spark's Python workers builds the model once more.
        label_cols: columns the model's outputs are compared with, likewise; a feature column may be
            a label too (autoencoders), and one column the label of several outputs. An output
            without a loss is left out, or ``None``. By default, without ``feature_cols``, the
            column ``label`` if there is one, or, if the model's inputs name the feature columns,
            those with the names of its outputs; else none, for a model that needs no labels. If
            both exist, or columns of some outputs only, a `DataError` asks you to choose.
        sample_weight_col: column of weights of the rows in the loss, none of them negative; for a
            Keras model, it may hold an array for each row, a weight for each step of a sequence.
        validation: fraction of the rows, name of a column that is true or 1 for validation rows and
            false or 0 for the others, another DataFrame, or ``None`` (default).
        validation_freq: validate after every so many epochs (1), or after those of these numbers,
            counted from 1.
        num_workers: ranks, one per Spark task; by default as many as Spark can run at once, which
            is printed.
        gpus_per_worker: GPUs of each rank as Spark schedules them; 0 (default) for CPU.
        batch_size: rows per rank and step (32); a global batch is ``num_workers`` times as large.
        epochs: total epochs of the run (1); a resumed run trains the remaining ones.
        steps_per_epoch: steps of an epoch; the next one continues in the data where it ended. By
            default, an epoch is all rows once.
        class_weight: weights of the classes in the loss, such as ``{0: 1.0, 1: 5.0}``; 1 for
            others. For a model with one output, and not beside ``sample_weight_col``.
        lr_scaling: ``"linear"`` multiplies the learning rate by the number of ranks, ``"sqrt"`` by
            its root; ``"none"`` (default).
        warmup_epochs: epochs over which the rate rises to its scaled value (0). A callback that
            sets the rate ends the warm-up.
        seed: seed of the order of rows, the split and the model's initial weights (0).
        shuffle: shuffle the rows anew every epoch (default).
        callbacks: Keras callbacks (`TorchCallback` for a PyTorch module) that can be pickled, or a
            function, called on each worker, that returns them. They run as copies: the metrics are
            in ``summary.history``. Keras' own that write files run on rank 0 only.
        custom_objects: the model's own classes and functions by name, for a model file.
        initial_weights: weights to begin a new run with: another run's directory or one of its
            checkpoints; or, for a Keras model, a ``.keras`` or ``.weights.h5`` file or a SavedModel
            written by Keras; for a PyTorch module, a ``.pt`` or ``.pth`` file of
            ``torch.save(module.state_dict())``; as
            `InitialWeights`, to take over only those that fit.
        run_dir: folder or URL for checkpoints and the model, reached by the driver and all
            executors. On a ``local`` master ``runs/<time>`` by default; required elsewhere.
        resume: ``"auto"`` (default) resumes from the newest checkpoint in ``run_dir`` if there is
            one; ``"never"`` refuses a ``run_dir`` that has some; ``"required"`` one that has none.
            May change from call to call: ``epochs``, callbacks, checkpoints, restarts, ``launch``,
            ``validation_freq``, ``prediction_col``, ``stream_logs``, metrics, settings of the
            optimizer other than its rate (clipping, decay, schedules), and, from an epoch's end on,
            ``num_workers``, ``batch_size``, ``shuffle`` and ``window_bytes``. Used with a warning:
            a new loss, ``class_weight``, ``steps_per_epoch``, ``sync`` or column of ``transforms``.
            Kept as in the checkpoint, with a warning that names both values: the learning rate that
            ``compile`` set, ``lr_scaling``, ``warmup_epochs``, ``initial_weights``, and ``seed``
            but for the order of rows. Refused by name: other training rows (also by another
            ``validation``), columns, layers or settings of layers, optimizer classes; and, within
            an epoch, another ``seed`` or ``steps_per_epoch``, or ``epochs`` that leave it out.
            Automatic names (``dense_3``) do not count. A run that a callback stopped has nothing
            left to train, whatever ``epochs`` is. Where nothing is left, the model is loaded, and
            neither rows are written nor ranks started; a new loss or optimizer changes nothing.
        prediction_col: columns the transformer adds: ``None`` (default) for "prediction", or, of a
            model with several outputs, their names; see `TFTransformer`.
        stream_logs: show progress, placement and output of the ranks on the driver (default);
            otherwise only warnings.
        data: see `DataOptions`: shapes, types and transforms of columns, and the folder of the
            rows.
        checkpoints: see `CheckpointOptions`: when they are taken besides every epoch's end, and
            which are kept.
        restarts: see `RestartOptions`: automatic restarts after a failure.
        launch: see `LaunchOptions`: starting and monitoring the ranks, and MPI.
        sync: strategy of synchronising the ranks: `Allreduce` (default), `LocalSGD`, `DiLoCo` or
            `AsyncServer`.
        mlflow: see `MlflowOptions`: log parameters, every epoch's metrics and the model to MLflow;
            ``None`` (default) does not.

    Returns:
        The trained model, a `TFTransformer` or `TorchTransformer`; its ``summary`` has the metrics.

    Raises:
        DataError: columns, types or values cannot be trained on.
        ModelError: ``model_fn`` or its model cannot be trained on these columns.
        RunDirectoryError: ``run_dir`` cannot be used, or holds another model's run.
        UnreachableError: the storage of ``run_dir`` or of the rows cannot be reached.
        InvalidInputError: another argument is invalid (the four above are kinds of it).
        EnvironmentProblem: something is not installed or set up.
        NotEnoughSlotsError: Spark cannot run ``num_workers`` tasks at once.
        RankFailedError: a rank raised, exited, was killed or lost.
        RanksDivergedError: a callback or train_step made the ranks' models differ.
        CheckpointError: a checkpoint could not be written, or rows not be read.
        PreemptedError: a rank got SIGTERM; a checkpoint was saved.
        StalledError: no rank made progress for ``stall_timeout``.
        RunCancelledError: the Spark job was cancelled.
        LaunchError: the ranks could not be started, or Spark lost them.
    """
    arguments = dict(locals())
    return train_run(resolve(arguments.pop("df"), TrainingConfig.from_arguments(arguments)))
