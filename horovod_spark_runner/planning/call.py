"""`plan_training`: what is asked of a plan, checked, measured and computed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.prepare.datasets import frame_of, session_of
from ..errors import InvalidInputError, brief
from ..run.default_place import default_place
from ..run.request import TrainingRequest, check_request
from ..rundir.directory import RunDirectory
from ..settings.data import DataOptions
from ..settings.kinds import ColumnNames, check_count, check_flag, check_options
from ..settings.launching import LaunchOptions
from ..settings.sync import Allreduce
from ..settings.training import CheckpointOptions, FitOptions, RestartOptions
from ..spark.session import described
from .advice import advise
from .links import Link, link_of
from .measure import Measurement, measure
from .model import Cluster
from .plan import TrainingPlan
from .table import link_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RANKS = tuple(2**exponent for exponent in range(13))
NETWORKS = ("1gbit", "10gbit", "100gbit")
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
    num_workers: int | None = None,
    gpus_per_worker: int = 0,
    batch_size: int = 32,
    epochs: int = 1,
    custom_objects: Mapping[str, Any] | None = None,
    data: DataOptions | None = None,
    launch: LaunchOptions | None = None,
    batch_sizes: Sequence[int] | None = None,
    networks: Sequence[str | Link] = NETWORKS,
    ranks: Sequence[int] = RANKS,
    ranks_per_host: int | None = None,
    cores_per_host: int | None = None,
    sample_rows: int = 100_000,
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
        num_workers: ranks to measure with, after one alone; by default as many as Spark can run at
            once.
        gpus_per_worker: see `run_training`.
        batch_size: rows per rank and step (32).
        epochs: epochs of the whole training (1).
        custom_objects: see `run_training`.
        data: see `DataOptions`.
        launch: see `LaunchOptions`.
        batch_sizes: other batch sizes to measure a step with; by default a quarter and the double
            of ``batch_size``.
        networks: what hosts may be joined by: speeds per second such as ``"10gbit"``, or a `Link`.
            A cluster of several hosts is measured as well.
        ranks: numbers of ranks to tell of; 1 is added. By default powers of two up to 4,096.
        ranks_per_host: ranks that a host holds; by default as many as the fullest one held.
        cores_per_host: cores of a host; by default as found, or what limits the container.
        sample_rows: of larger DataFrames, rows to measure with, about (100,000).
        noise_scale: also train two ranks or more for some seconds to tell the gradient noise scale
            (false): the global batch far above which more rows hardly save steps. It is that of
            the beginning of the training, and grows later.
        plan_dir: folder, reached by the driver and all executors, for these rows, and in the end
            for ``plan.json`` and ``plan.html``. On a ``local`` master ``plans/<time>`` by default;
            required elsewhere.
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
    counts = _counts("ranks", ranks)
    named_links(networks)
    check_flag("noise_scale", noise_scale)
    wanted_rows = check_count("sample_rows", sample_rows)
    _check_hosts(ranks_per_host, cores_per_host)
    place = plan_dir or default_place(session_of(df), "plan_dir", "plans")
    directory = RunDirectory(str(place))
    if directory.config.exists():
        raise InvalidInputError(
            f"plan_dir {directory.location} is the directory of a run; give another folder, or "
            "plan from the run: horovod-spark-runner plan RUN"
        )
    frame = frame_of(df)
    request = TrainingRequest(
        frame=frame,
        model=model_fn,
        feature_cols=feature_cols,
        label_cols=label_cols,
        num_workers=num_workers,
        gpus_per_worker=gpus_per_worker,
        stream_logs=stream_logs,
        sample_weight_col=sample_weight_col,
        validation=None,
        custom_objects=custom_objects,
        callbacks=(),
        run_dir=str(place),
        resume="never",
        initial_weights=None,
        prediction_col=None,
        fit=FitOptions(batch_size=batch_size, epochs=epochs),
        data=check_options("data", data, DataOptions),
        checkpoints=CheckpointOptions(),
        restarts=RestartOptions(),
        launch=check_options("launch", launch, LaunchOptions),
        sync=Allreduce(),
    )
    sizes = _batch_sizes(batch_sizes, request.fit.batch_size)
    checked = check_request(request)
    if noise_scale and checked.workers < 2:
        raise InvalidInputError(
            "noise_scale=True compares the gradients of several ranks, but there is 1; give "
            "num_workers=2, or more slots"
        )
    with described(session_of(frame), "Horovod: counting rows to plan a training with"):
        rows = frame.count()
    if rows > wanted_rows:
        sample = replace(request, frame=frame.sample(wanted_rows / rows, seed=0))
        checked = replace(checked, request=sample)
    measured = measure(checked, sizes, _SECONDS, rows, noise=noise_scale)
    plan = plan_of(
        directory.location.name, measured, networks, counts, ranks_per_host, cores_per_host
    )
    plan.write(str(directory.location.join("plan.json")))
    plan.write(str(directory.location.join("plan.html")))
    return plan


def plan_of(
    name: str,
    measured: Measurement,
    networks: Sequence[str | Link],
    ranks: Sequence[int],
    ranks_per_host: int | None,
    cores_per_host: int | None,
) -> TrainingPlan:
    """Return what follows from a measurement; see `plan_training`.

    Raises:
        InvalidInputError: a network or a number cannot be right.
    """
    _check_hosts(ranks_per_host, cores_per_host)
    own = [] if measured.between is None else [(MEASURED, measured.between)]
    here, cores = ranks_per_host or measured.ranks_per_host, cores_per_host or measured.cores
    counts = sorted({1, *_counts("ranks", ranks)})
    plans = tuple(
        advise(called, measured.workload, Cluster(here, cores, link), counts)
        for called, link in (*own, *named_links(networks))
    )
    return TrainingPlan(name, measured, plans)


def _check_hosts(ranks_per_host: int | None, cores_per_host: int | None) -> None:
    for name, given in (("ranks_per_host", ranks_per_host), ("cores_per_host", cores_per_host)):
        if given is not None:
            check_count(name, given)


def named_links(networks: Sequence[str | Link]) -> list[tuple[str, Link]]:
    """Return the networks with their names.

    Raises:
        InvalidInputError: one is none.
    """
    if isinstance(networks, (str, Link)) or not isinstance(networks, Sequence):
        raise InvalidInputError(f"networks must be a list, got {brief(networks)}")
    links = [link_of(given) for given in networks]
    return [
        (given if isinstance(given, str) else link_text(link), link)
        for given, link in zip(networks, links, strict=True)
    ]


def _batch_sizes(given: Sequence[int] | None, batch_size: int) -> list[int]:
    """Return the batch sizes to measure a step with, that of the training the first."""
    others = [max(1, batch_size // 4), 2 * batch_size] if given is None else given
    return list(dict.fromkeys([batch_size, *_counts("batch_sizes", others)]))


def _counts(name: str, given: object) -> list[int]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidInputError(f"{name} must be a list of whole numbers, got {brief(given)}")
    return [check_count(name, one) for one in given]
