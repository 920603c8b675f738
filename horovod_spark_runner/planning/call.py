"""`plan_training`: what is asked of a plan, checked, measured and computed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.prepare.datasets import frame_of, session_of
from ..data.prepare.split import training_rows
from ..errors import InvalidInputError
from ..launch.driver.console import Console
from ..run.default_place import default_place
from ..run.request import CheckedRequest, TrainingRequest, check_request
from ..rundir.directory import RunDirectory
from ..settings.data import DataOptions
from ..settings.kinds import ColumnNames, check_options
from ..settings.launching import LaunchOptions
from ..settings.sync import Allreduce
from ..settings.training import CheckpointOptions, FitOptions, RestartOptions
from ..spark.session import described
from .advice import advise
from .asked import NETWORKS, RANKS, SAMPLE_ROWS, Asked, named_links
from .links import Link
from .measure import measure
from .measurement import Measurement
from .model import Cluster
from .plan import TrainingPlan
from .writing import left_as_found

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MEASURED = "this cluster"
# How long ranks train with each batch size, in seconds.
_SECONDS = 2.0


def plan_training(
    df: DataFrame | str | Path,
    model_fn: Callable[[], Any] | str | Path,
    *,
    feature_cols: ColumnNames | None = None,
    label_cols: ColumnNames | None = None,
    sample_weight_col: str | None = None,
    validation: float | str | DataFrame | None = None,
    num_workers: int | None = None,
    gpus_per_worker: int = 0,
    batch_size: int = 32,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    data: DataOptions | None = None,
    launch: LaunchOptions | None = None,
    batch_sizes: Sequence[int] | None = None,
    networks: Sequence[str | Link] = NETWORKS,
    ranks: Sequence[int] = RANKS,
    ranks_per_host: int | None = None,
    cores_per_host: int | None = None,
    sample_rows: int = SAMPLE_ROWS,
    noise_scale: bool = False,
    plan_dir: str | os.PathLike[str] | None = None,
    stream_logs: bool = True,
) -> TrainingPlan:
    """Measure a training for some seconds on this cluster, and tell what more ranks would bring.

    One rank, and then ``num_workers`` at once, train on some of the rows, read, and add up messages
    of several sizes, as `run_training` would. From that follow samples per second, time and
    rank-hours for any number of ranks. The model is thrown away.

    Args:
        df: see `run_training`.
        model_fn: see `run_training`.
        feature_cols: see `run_training`.
        label_cols: see `run_training`.
        sample_weight_col: see `run_training`.
        validation: see `run_training`; these rows are left out.
        num_workers: ranks to measure with, after one alone; by default as many as Spark can run at
            once.
        gpus_per_worker: see `run_training`.
        batch_size: rows per rank and step (32).
        epochs: epochs of the whole training (1).
        steps_per_epoch: steps of an epoch on ``num_workers`` ranks, as `run_training` takes them.
            On other numbers of ranks an epoch has as many rows. By default, all rows once.
        custom_objects: see `run_training`.
        data: see `DataOptions`.
        launch: see `LaunchOptions`.
        batch_sizes: other batch sizes to measure a step with; by default a quarter and the double
            of ``batch_size``.
        networks: what hosts may be joined by: speeds per second such as ``"10gbit"``, or a `Link`.
            A cluster of several hosts is measured as well.
        ranks: numbers of ranks to tell of; 1 and ``num_workers`` are added. By default powers of
            two up to 4,096.
        ranks_per_host: ranks that a host holds; by default as many as the fullest one held.
        cores_per_host: cores of a host; by default as found, or what limits the container.
        sample_rows: of larger DataFrames, rows to measure with, about (100,000). Parquet files
            that are read where they lie are taken whole.
        noise_scale: also train two ranks or more for some seconds to tell the gradient noise scale
            (false): the global batch far above which more rows hardly save steps. It is that of
            the beginning of the training, and grows later.
        plan_dir: folder, reached by the driver and all executors, for these rows, and in the end
            for ``plan.json`` and ``plan.html``. On a ``local`` master ``plans/<time>`` by default;
            required elsewhere. Of a plan that fails, the logs of ranks that had started stay there,
            and nothing else. If it is the ``run_dir`` of the training to come, the report of that
            run compares the two.
        stream_logs: show what is being done on the driver (default).

    Returns:
        The plan: ``print`` shows it as a table.

    Raises:
        DataError: columns, types or values cannot be trained on.
        ModelError: ``model_fn`` or its model cannot be trained on these columns.
        RunDirectoryError: ``plan_dir`` cannot be written to.
        InvalidInputError: another argument cannot be right.
        EnvironmentProblem: something is not installed or set up as it must be.
        NotEnoughSlotsError: Spark cannot run ``num_workers`` tasks at once.
        RunFailedError: the ranks have failed; see `run_training` for the kinds of it.
    """
    asked = Asked(
        networks, ranks, ranks_per_host, cores_per_host, batch_sizes, sample_rows, noise_scale
    )
    request = TrainingRequest(
        frame=df,
        model=model_fn,
        feature_cols=feature_cols,
        label_cols=label_cols,
        num_workers=num_workers,
        gpus_per_worker=gpus_per_worker,
        stream_logs=stream_logs,
        sample_weight_col=sample_weight_col,
        validation=validation,
        custom_objects=custom_objects,
        callbacks=(),
        run_dir=None,
        resume="never",
        initial_weights=None,
        prediction_col=None,
        fit=FitOptions(batch_size=batch_size, epochs=epochs, steps_per_epoch=steps_per_epoch),
        data=check_options("data", data, DataOptions),
        checkpoints=CheckpointOptions(),
        restarts=RestartOptions(),
        launch=check_options("launch", launch, LaunchOptions),
        sync=Allreduce(),
    )
    place = plan_dir or default_place(session_of(df), "plan_dir", "plans")
    return plan_request(request, asked, str(place))


def plan_request(request: TrainingRequest, asked: Asked, place: str) -> TrainingPlan:
    """Measure what is to be trained, and write the plan of it.

    What it is trained by counts, and on which rows; what a run does besides (callbacks,
    checkpoints, restarts, MLflow) is left out, and the exchange is plain allreduce.

    Args:
        request: the training.
        asked: what the plan is to tell.
        place: folder for rows, while they are measured on, and the plan.

    Raises:
        HorovodSparkError: see `plan_training`.
    """
    directory = RunDirectory(place)
    if directory.config.exists():
        raise InvalidInputError(
            f"plan_dir {directory.location} is the directory of a run; give another folder, or "
            "plan from the run: horovod-spark-runner plan RUN"
        )
    with left_as_found(directory.location, keeping=True):
        return _measured_plan(request, asked, place, directory)


def _measured_plan(
    request: TrainingRequest, asked: Asked, place: str, directory: RunDirectory
) -> TrainingPlan:
    measured_as = replace(
        request,
        callbacks=(),
        run_dir=place,
        resume="never",
        initial_weights=None,
        prediction_col=None,
        checkpoints=CheckpointOptions(),
        restarts=RestartOptions(),
        sync=Allreduce(),
        mlflow=None,
    )
    checked = check_request(measured_as, to_train=False)
    if asked.noise_scale and checked.workers < 2:
        raise InvalidInputError(
            "noise_scale=True compares the gradients of several ranks, but there is 1; give "
            "num_workers=2, or more slots"
        )
    spark = session_of(request.frame)
    Console(directory.location.name, quiet=not request.stream_logs).say("counting the rows")
    with described(spark, "Horovod: counting rows to plan a training with"):
        checked = _without_validation(checked)
        rows = frame_of(checked.request.frame).count()
    measured = measure(checked, asked, _SECONDS, rows)
    plan = plan_of(directory.location.name, measured, asked)
    plan.write(str(directory.plan))
    plan.write(str(directory.plan_page))
    return plan


def _without_validation(checked: CheckedRequest) -> CheckedRequest:
    """Return a request for the rows that are trained on, and none to validate with."""
    request = checked.request
    if isinstance(request.validation, (str, float)):
        frame = training_rows(
            frame_of(request.frame), request.validation, checked.roles, checked.fit.seed
        )
        request = replace(request, frame=frame)
    data = replace(request.data, stratify=None)
    return replace(checked, request=replace(request, validation=None, data=data))


def plan_of(name: str, measured: Measurement, asked: Asked) -> TrainingPlan:
    """Return what follows from a measurement.

    Args:
        name: what the plan is called.
        measured: what was measured, or told by a run.
        asked: what the plan is to tell; the ranks that were measured are added.
    """
    here = asked.ranks_per_host or measured.ranks_per_host
    between = measured.link_between(here)
    own = [] if between is None else [(MEASURED, between)]
    cores = asked.cores_per_host or measured.cores
    counts = sorted({1, measured.workers, *asked.ranks})
    plans = tuple(
        advise(called, measured.workload, Cluster(here, cores, link), counts)
        for called, link in (*own, *named_links(asked.networks))
    )
    return TrainingPlan(name, measured, plans)
