"""`plan_training`: measure a training, and predict it for other numbers of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.run_directory import RunDirectory
from ..cluster.spark.session import described, new_folder
from ..config.data import DataOptions
from ..config.keywords import check_keywords
from ..config.launch import LaunchOptions
from ..config.training import TrainingConfig
from ..config.validators import ColumnNames, check_count
from ..data.prepare.datasets import frame_of, session_of
from ..data.prepare.split import training_rows
from ..errors import InvalidInputError
from ..observe.console import Console
from ..run.resolve import ResolvedRun, resolve
from .measure import measure_training, removed_on_failure
from .model import Link
from .plan import NETWORKS, RANKS, PlanOptions, TrainingPlan, build_plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SAMPLE_ROWS = 100_000
# Arguments that are those of `run_training`.
_SHARED = (
    *("model_fn", "feature_cols", "label_cols", "sample_weight_col", "validation", "num_workers"),
    *("gpus_per_worker", "batch_size", "epochs", "steps_per_epoch", "custom_objects", "data"),
    *("launch", "stream_logs"),
)
# Seconds that a rank measures its steps.
_SECONDS = 2.0


@check_keywords("plan_training")
def plan_training(
    df: DataFrame | str | Path,
    model_fn: Callable[[], object] | str | Path,
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
    custom_objects: Mapping[str, object] | None = None,
    data: DataOptions | None = None,
    launch: LaunchOptions | None = None,
    networks: Sequence[str | Link] = NETWORKS,
    ranks: Sequence[int] = RANKS,
    ranks_per_host: int | None = None,
    cores_per_host: int | None = None,
    sample_rows: int = _SAMPLE_ROWS,
    plan_dir: str | os.PathLike[str] | None = None,
    stream_logs: bool = True,
) -> TrainingPlan:
    """Measure a training for some seconds on this cluster, and predict it for more ranks.

    One rank, and then ``num_workers`` ranks at once, train on some of the rows, read, and sum
    messages of several sizes, as `run_training` would. The plan predicts samples per second, time
    and rank-hours for any number of ranks, each with a core or a GPU of its own. The trained model
    is discarded. Callbacks, checkpoints and restarts are left out; the exchange is plain
    allreduce.

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
        networks: networks between hosts to predict for: speeds per second such as ``"10gbit"``, or
            a `Link`. A cluster of several hosts is measured as well.
        ranks: numbers of ranks to predict for; 1 and ``num_workers`` are added. By default powers
            of two up to 4,096.
        ranks_per_host: ranks of a host; by default those of the fullest one when measured.
        cores_per_host: cores of a host; by default those of this cluster, or a container's limit.
        sample_rows: rows to measure with of a larger DataFrame, about (100,000). Parquet files
            that are read where they lie are taken whole.
        plan_dir: folder, reached by the driver and all executors, for these rows during the
            measurement, and for ``plan.json`` and ``plan.html``. On a ``local`` master
            ``plans/<time>`` by default; required elsewhere. A plan that fails leaves only the logs
            of ranks that had started.
        stream_logs: show progress on the driver (default).

    Returns:
        The plan: ``print`` shows it as a table.

    Raises:
        DataError: columns, types or values cannot be trained on.
        ModelError: ``model_fn`` or its model cannot be trained on these columns.
        RunDirectoryError: ``plan_dir`` cannot be written to.
        InvalidInputError: another argument is invalid, or ranks would share cores.
        EnvironmentProblem: something is not installed or set up as it must be.
        NotEnoughSlotsError: Spark cannot run ``num_workers`` tasks at once.
        RunFailedError: the ranks have failed; see `run_training` for the kinds of it.
    """
    given = dict(locals())
    options = PlanOptions(networks, ranks, ranks_per_host, cores_per_host)
    check_count("sample_rows", sample_rows)
    place = str(plan_dir or new_folder(session_of(df), "plan_dir", "plans"))
    directory = RunDirectory(place)
    if directory.config.exists():
        raise InvalidInputError(
            f"plan_dir {directory.location} is the directory of a run; give another folder, or "
            "plan from the run: horovod-spark-runner plan RUN"
        )
    config = TrainingConfig.from_arguments(
        {**{name: given[name] for name in _SHARED}, "run_dir": place, "resume": "never"}
    )
    with removed_on_failure(directory.location, keeping=True):
        run = resolve(df, config)
        Console(directory.location.name, quiet=not stream_logs).report("counting the rows")
        with described(session_of(df), "Horovod: counting rows to plan a training with"):
            run = _without_validation(run)
            rows = frame_of(run.df).count()
        measured = measure_training(run, sample_rows, _SECONDS, rows)
        plan = build_plan(directory.location.name, measured, options)
        for name in ("plan.json", "plan.html"):
            plan.write(str(directory.location.join(name)))
    return plan


def _without_validation(run: ResolvedRun) -> ResolvedRun:
    """Drop the validation rows."""
    config, df = run.config, run.df
    if isinstance(config.validation, (str, float)):
        df = training_rows(frame_of(df), config.validation, run.fit.seed)
    data = replace(config.data, stratify=None)
    return replace(run, df=df, config=replace(config, validation=None, data=data))
