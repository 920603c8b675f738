"""`tune`: validate the arguments of a search, and run it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..api import run_training
from ..cluster.spark.session import mute_console_progress, new_folder
from ..config.keywords import unknown_argument, usage_of
from ..config.training import Resume, training_usage
from ..config.validators import check_choice, check_count, check_flag
from ..data.prepare.datasets import session_of
from ..errors import EnvironmentProblem, InvalidInputError, RunDirectoryError
from ..observe.console import Console
from ..run.pipeline import import_ahead, prepare_data, show_preparation
from ..run.resolve import ResolvedRun, resolve
from ..storage.filesystem import Location
from .directory import StudyDirectory, begin_or_check, check_same, check_whole
from .search import Search, TuneResult
from .space import Space, check_space, describe_space, suggest
from .trial_config import (
    TrialConfigs,
    check_names,
    checked_params,
    shared_defaults,
    trial_configs,
)

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial
    from pyspark.sql import DataFrame

    from .study import PrunerName, SamplerName

logger = logging.getLogger(__name__)

Direction = Literal["min", "max"]


def tune(
    df: DataFrame | str | Path,
    model_fn: Callable[[dict[str, Any]], object],
    space: Space,
    *,
    metric: str = "val_loss",
    direction: Direction | None = None,
    max_trials: int = 20,
    parallel: int | None = None,
    workers_per_trial: int = 1,
    sampler: SamplerName | BaseSampler = "tpe",
    pruner: PrunerName | BasePruner | None = None,
    seed: int = 0,
    study_dir: str | os.PathLike[str] | None = None,
    resume: Resume = "auto",
    stream_logs: bool = True,
    **training: Any,
) -> TuneResult:
    """Search for the parameters that train the best model, by optuna, and return it.

    A trial is a training as `run_training` does it, in a run directory of its own in
    ``study_dir/trials``. The rows are prepared once for all of them. A trial that fails is marked
    and does not end the search; if it was cut short by something else than its own code, it is
    started once more, from its newest checkpoint.

    A search that was ended, by Ctrl-C, by cancelling its Spark jobs or with its driver, is
    resumed by the same call: finished trials are kept, and those that were running resume from
    their checkpoints.

    Args:
        df: the rows to train on; see `run_training`.
        model_fn: function that takes the parameters of a trial, a dictionary, and returns a
            compiled ``keras.Model`` or a `TorchModel`; called on every worker.
        space: what to choose from, by name: ``uniform``, ``loguniform``, ``integer`` and ``choice``
            of `horovod_spark_runner.tune`; or a function that takes an ``optuna.Trial`` and returns
            the parameters, a dictionary. Parameters called as these settings are set, and not
            given to ``model_fn``: ``batch_size``, ``epochs``, ``steps_per_epoch``,
            ``class_weight``, ``shuffle``, ``lr_scaling``, ``warmup_epochs``, ``compression`` and
            ``window_bytes``.
        metric: the metric to search by (``"val_loss"``), as the model of a trial has it: after the
            last epoch, or evaluated once more if callbacks have changed the model after it.
        direction: whether ``"min"`` or ``"max"`` is best; has to be given, but for losses.
        max_trials: trials of the whole study (20), those of earlier calls included.
        parallel: trials at once; by default, and at most, as many as Spark has slots for.
        workers_per_trial: ranks of a trial (1).
        sampler: what chooses parameters: ``"tpe"`` (default), ``"random"``, ``"grid"`` (every
            combination of ``choice`` and ``integer`` once, then the search ends), or a sampler of
            optuna's, which is used as it is, with its own seed.
        pruner: what ends trials early that do worse than others after as many epochs:
            ``"median"`` (once five have finished), ``"asha"`` (successive halving),
            ``"hyperband"``, or a pruner of optuna's; ``None`` (default) for none.
        seed: seed of the sampler and of the trainings (0). With ``parallel=1``, the same seed gives
            the same trials, also if the search was ended and goes on.
        study_dir: folder of the study, reached by the driver and all executors; not a URL. On a
            ``local`` master ``studies/<time>`` by default; required elsewhere.
        resume: ``"auto"`` (default) resumes the study in ``study_dir`` if there is one;
            ``"never"`` refuses it; ``"required"`` refuses a folder without one. What is searched,
            the rows and the settings of the trainings must be as they were.
        stream_logs: show a line for each trial on the driver (default). What the ranks print is in
            the trials' run directories.
        training: arguments of `run_training` that all trials share, such as ``feature_cols``,
            ``validation`` and ``epochs``. ``restarts`` is ``RestartOptions(max_restarts=1)`` unless
            given.

    Returns:
        The best parameters, the best trial's transformer and a table of the trials.

    Raises:
        InvalidInputError: an argument cannot be right, or the trials have no such metric.
        DataError: columns, types or values cannot be trained on.
        ModelError: ``model_fn`` is no function of a dictionary.
        RunDirectoryError: ``study_dir`` cannot be used, or holds another search.
        EnvironmentProblem: something is not installed or set up as it must be.
        NotEnoughSlotsError: Spark cannot run ``workers_per_trial`` tasks at once.
        StorageError: the study, or what its trials save, could not be written or read.
        RunFailedError: all trials have failed.
        RunCancelledError: a Spark job of the search was cancelled.
    """
    _check_keywords(training)
    studies = needing_optuna()
    space = check_space(space)
    check_names(space, training)
    best_is = _check_metric(metric, direction, training)
    max_trials = check_count("max_trials", max_trials)
    check_choice("resume", resume, get_args(Resume))
    studies.check_sampler(sampler, space)
    place = study_dir or new_folder(session_of(df), "study_dir", "studies")
    directory = StudyDirectory(Location(str(place)))
    configs = trial_configs(
        df,
        model_fn,
        training,
        workers=check_count("workers_per_trial", workers_per_trial),
        seed=seed,
        study_dir=directory.location,
    )
    made_pruner = studies.make_pruner(pruner, _epochs(space, configs))
    console = Console(directory.location.name, quiet=not check_flag("stream_logs", stream_logs))
    _check_resume(resume, directory)
    run = resolve(df, configs.base)
    at_once = _at_once(parallel, run, max_trials)
    wanted = {
        "metric": metric,
        "direction": best_is,
        "space": describe_space(space),
        "seed": configs.base.fit.seed,
        "settings": _lasting(run.settings),
    }
    with directory.lock.lease():
        check_whole(directory)
        check_same(directory, wanted)
        import_ahead(run, at_once)
        preparation = prepare_data(run, directory.lock.data, console)
        with (
            contextlib.closing(console),
            show_preparation(run, console, preparation) as data,
            mute_console_progress(None if console.quiet else session_of(df)),
        ):
            begin_or_check(directory, {**wanted, "rows": data.train.fingerprint})
            directory.mend_journal()
            choosing = partial(studies.sampler_for, sampler, space, seed, side_by_side=at_once > 1)
            study = studies.Study(directory, best_is, choosing, made_pruner)
            search = Search(
                study=study,
                directory=directory,
                configs=configs,
                choose=lambda trial: _chosen(space, trial, training),
                metric=metric,
                max_trials=max_trials,
                data=data,
                console=console,
            )
            search.run(at_once)
            return search.result()


def _check_keywords(training: Mapping[str, object]) -> None:
    shared = shared_defaults()
    for name in training:
        if name not in shared:
            hidden = usage_of(run_training).keys() - shared.keys()
            usage = {one: how for one, how in training_usage().items() if one not in hidden}
            raise unknown_argument("tune", name, {**usage, **usage_of(tune)})


def needing_optuna() -> ModuleType:
    """Return the module `horovod_spark_runner.tune.study`, which needs optuna.

    Raises:
        EnvironmentProblem: it is not installed.
    """
    try:
        from . import study
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "optuna":
            raise
        raise EnvironmentProblem(
            "tune needs optuna, which is not installed: pip install 'horovod_spark_runner[tune]'"
        ) from error
    return study


def _chosen(space: Space, trial: Trial, training: Mapping[str, object]) -> dict[str, object]:
    return checked_params(suggest(space, trial), training)


def _check_metric(metric: object, direction: object, training: Mapping[str, object]) -> str:
    """Return the direction of the search."""
    if not isinstance(metric, str) or not metric:
        raise InvalidInputError(f"metric must be the name of a metric, got {metric!r}")
    if metric.startswith("val_"):
        if training.get("validation") is None:
            raise InvalidInputError(
                f"metric={metric!r} is of validation rows, which are missing; give validation, "
                f"or metric={metric.removeprefix('val_')!r} to search by the training rows"
            )
        if training.get("validation_freq", 1) != 1:
            raise InvalidInputError(
                f"validation_freq={training['validation_freq']!r}: trials are compared by "
                f"{metric!r} after every epoch, so that each must be validated"
            )
    if direction is None:
        if metric != "loss" and not metric.endswith("_loss"):
            raise InvalidInputError(
                f'direction is not given: is the least ("min") or the greatest ("max") '
                f"{metric!r} best?"
            )
        return "min"
    return check_choice("direction", direction, ("min", "max"))


def _epochs(space: Space, configs: TrialConfigs) -> int | None:
    """Return the epochs of every trial; ``None`` if they may differ."""
    searched = not isinstance(space, Mapping) or "epochs" in space
    return None if searched else configs.base.fit.epochs


def _check_resume(resume: str, directory: StudyDirectory) -> None:
    exists = directory.record.exists()
    if exists and resume == "never":
        raise RunDirectoryError(
            f"resume='never', but study_dir {directory.location} holds a study already; give "
            "another one, or resume='auto' to go on with it"
        )
    if not exists and resume == "required":
        raise RunDirectoryError(
            f"resume='required', but study_dir {directory.location} holds no study"
        )


def _at_once(parallel: int | None, run: ResolvedRun, max_trials: int) -> int:
    """Return the number of parallel trials."""
    total = run.allotment.total
    room = 1 if total is None else max(1, total // run.allotment.slots)
    requested = room if parallel is None else check_count("parallel", parallel)
    if requested > room:
        logger.warning(
            "parallel=%d, but Spark has room for %d trials of %d ranks at once",
            requested,
            room,
            run.workers,
        )
    return min(requested, room, max_trials)


def _lasting(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that trials must share to be compared."""
    shared = {name: value for name, value in settings.items() if name != "checkpoints"}
    plain: dict[str, Any] = json.loads(json.dumps(shared))
    return plain
