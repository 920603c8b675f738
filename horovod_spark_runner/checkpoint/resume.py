"""Resume a run from the newest checkpoint of its run directory.

In the order of a run:

1. `resolve_start`, on the driver: the checkpoint, and which settings of the call hold.
2. `check_same_data` and, once more, `check_rest_of_epoch`, on the driver once the rows are
   prepared: they are those of the run, in its order.
3. `restore_checkpoint`, on the ranks: rank 0 reads the arrays, checks order of rows and model,
   restores the shared variables and sends each rank its state.
4. `horovod_spark_runner.checkpoint.rank_state.restore_rank`, on each rank once its callbacks and
   metrics are there. `horovod_spark_runner.training.loop` calls both.
5. `horovod_spark_runner.training.epochs.Epochs.steps_from`, on each rank: it continues at the
   checkpoint's position in the rows.

A changed setting is honoured silently, cannot be honoured (a warning names both values) or makes it
another run (refused). Values that an earlier version did not record count as unchanged.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..cluster.protocol.messages import Resumed
from ..cluster.worker.reporting import notify, send
from ..config.sync import STRATEGIES, AsyncServer, recorded_sync
from ..config.training import FitOptions, InitialWeights, TrainingConfig
from ..errors import HorovodSparkError, RunDirectoryError
from ..frameworks import model_of
from ..storage.filesystem import Location
from .config_diff import describe_change, describe_change_since
from .files import (
    RANKS_FILE,
    VARIABLES_FILE,
    CheckpointInfo,
    load_checkpoint,
    newest_checkpoint,
    newest_readable,
    read_steps,
)
from .rank_state import RankState, split_states, state_for
from .run_directory import RunDirectory

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..training.spec import TrainingSpec, WarmStart
    from ..training.trainee import Trainee

logger = logging.getLogger(__name__)

# Key of the state of batches that ranks take as they come; see `OnDemandBatches`.
TAKEN = "taken"
_ABSENT = object()
# Arguments that decide which rows are trained on, and how.
_ROLES = ("feature_cols", "label_cols", "sample_weight_col")
_SPLIT = ("validation", "stratify")
_KINDS = ("shapes", "dtypes")
_OTHER_ROW_ORDER = (
    "the DataFrame gives its rows in another order than before (or another number of partitions), "
    "and the files they were written to are gone"
)


# -- on the driver, before the data are prepared ---------------------------------------------------


@dataclass(frozen=True)
class StartingPoint:
    """Where a training starts: a checkpoint of its run directory, initial weights or neither.

    Attributes:
        checkpoint: checkpoint to resume from; ``None`` for a new run.
        steps: steps of all checkpoints there were; while they are the same, so is this.
        fit: how the model is fitted; a resumed run keeps some settings of the original call.
        warm_start: weights to begin with.
        initial_weights: the ``initial_weights`` to record, those of the original call.
    """

    checkpoint: CheckpointInfo | None
    steps: tuple[int, ...]
    fit: FitOptions
    warm_start: WarmStart | None
    initial_weights: str | None


def resolve_start(
    config: TrainingConfig,
    directory: RunDirectory,
    engine: str,
    workers: int,
    say: Callable[[str], object],
) -> StartingPoint:
    """Find the checkpoint to resume from, and resolve which settings of this call hold.

    Args:
        config: this call's configuration.
        directory: the run directory.
        engine: dotted name of the engine of this call's model.
        workers: ranks of this call.
        say: prints a line for the user.

    Returns:
        The starting point, of a new run without its `WarmStart`.

    Raises:
        RunDirectoryError: ``resume`` forbids what is there, nothing of it is whole, or it is
            another run.
        CheckpointError: the storage fails.
    """
    steps, checkpoint = _find_checkpoint(directory, config.resume)
    weights = config.initial_weights
    origin = str(weights.place) if isinstance(weights, InitialWeights) else None
    if checkpoint is None:
        say(f"new run in {directory.location}")
        return StartingPoint(None, steps, config.fit, None, origin)
    _check_same_engine(checkpoint, engine, str(directory.location))
    fit, recorded_origin, warnings = _resolve_settings(
        checkpoint,
        config.fit,
        workers,
        origin,
        config.recorded_data(),
        recorded_sync(config.sync),
    )
    folder = directory.checkpoint(checkpoint.step)
    order = fit.order_settings(workers, config.data.window_bytes)
    _check_whole_epochs(checkpoint, fit.epochs, str(folder))
    check_rest_of_epoch(checkpoint, order, str(folder))
    rest = _describe_rest(checkpoint, config.fit.epochs)
    if rest:
        say(f"resuming {directory.location} from {folder.name}: {rest}")
    for text in warnings:
        logger.warning("resuming run_dir %s: %s", directory.location, text)
    return StartingPoint(checkpoint, steps, fit, None, recorded_origin)


def _find_checkpoint(
    directory: RunDirectory, resume: str
) -> tuple[tuple[int, ...], CheckpointInfo | None]:
    """Return the steps of all checkpoints, and the one to resume from; warn of skipped ones.

    Args:
        directory: the run directory.
        resume: ``"auto"``, ``"never"`` or ``"required"``, see `run_training`.

    Raises:
        RunDirectoryError: ``resume`` forbids what is there, or nothing of it is whole.
        CheckpointError: the storage fails.
    """
    steps = read_steps(directory)
    skipped: list[str] = []
    newest = newest_checkpoint(directory, directory.run_id(), skipped.append)
    if newest is None:
        if resume == "required":
            raise RunDirectoryError(
                f"resume='required', but run_dir {directory.location} holds no checkpoint"
                + "".join(f"; {line}" for line in skipped)
            )
    elif resume == "never":
        raise RunDirectoryError(
            f"resume='never', but run_dir {directory.location} holds a run already "
            f"({newest[0].name}); give another run_dir, or resume='auto' to resume it"
        )
    for line in skipped:
        logger.warning(line)
    return steps, None if newest is None else newest[1]


def _check_same_engine(info: CheckpointInfo, engine: str, where: str) -> None:
    """Check that a run is resumed by the engine that started it.

    Args:
        info: the checkpoint.
        engine: dotted name of the engine of this call's model.
        where: the run directory, for the message.

    Raises:
        RunDirectoryError: it is another engine.
    """
    if info.engine != engine:
        raise RunDirectoryError(
            f"run_dir {where} holds the run of a {model_of(info.engine)}, but a "
            f"{model_of(engine)} is to be trained. Resume with the run's model, or give another "
            "run_dir"
        )


def _resolve_settings(
    info: CheckpointInfo,
    fit: FitOptions,
    workers: int,
    initial_weights: str | None,
    data: Mapping[str, object],
    sync: Mapping[str, object],
) -> tuple[FitOptions, str | None, list[str]]:
    """Resolve which settings of the resuming call hold. Pure.

    Args:
        info: the checkpoint.
        fit: this call's settings.
        workers: ranks of this call.
        initial_weights: this call's ``initial_weights``.
        data: what checkpoints record of this call's data options.
        sync: what they record of this call's strategy.

    Returns:
        The settings that hold, the ``initial_weights`` to record, and warnings.

    Raises:
        RunDirectoryError: only ``AsyncServer`` can finish the checkpoint's epoch.
    """
    if STRATEGIES[str(sync["sync"])] is not AsyncServer:
        check_not_taken(info.state, info.epoch)
    original = info.settings.get("fit", {})
    kept_settings = {
        name: original[name]
        for name in ("lr_scaling", "warmup_epochs")
        if name in original and original[name] != getattr(fit, name)
    }
    warnings = [
        describe_change(name, value, getattr(fit, name)) + ": a resumed run keeps its first value"
        for name, value in kept_settings.items()
    ]
    resolved = replace(fit, **kept_settings)
    if not is_over(info, fit.epochs):
        warnings += _honoured_changes(info, fit, fit.batch_size * workers, data, sync)
        splits = isinstance(data["validation"], float)
        warnings += _limited_changes(info, resolved, workers, splits=splits)
    recorded = info.settings.get("initial_weights", _ABSENT)
    if initial_weights is not None and initial_weights != recorded:
        first = "" if recorded is _ABSENT else f"; the run was started with {recorded!r}"
        warnings.append(
            f"initial_weights={initial_weights!r} is ignored: the run resumes from its "
            f"checkpoint{first}"
        )
    if is_over(info, fit.epochs):
        reason = f"the run has trained {info.epoch}, and epochs={fit.epochs}"
        more = "more epochs"
        if info.state.get("stopped_at") is not None:
            reason = f"a callback stopped the run after epoch {info.epoch}, which ends it for good"
            more = "initial_weights=… and a new run_dir to train its model further"
        warnings.append(
            f"nothing is left to train: {reason}. The model stays as it is; give a new run_dir to "
            f"train anew, or {more}"
        )
    return resolved, initial_weights if recorded is _ABSENT else recorded, warnings


def is_over(info: CheckpointInfo, epochs: int) -> bool:
    """Return whether a run of ``epochs`` has nothing left to train after a checkpoint."""
    return info.epoch >= epochs or info.state.get("stopped_at") is not None


def _check_whole_epochs(info: CheckpointInfo, epochs: int, where: str) -> None:
    """Check that a run does not end within an epoch.

    Raises:
        RunDirectoryError: the checkpoint has steps of an epoch that the call leaves out.
    """
    if info.epoch_step and info.epoch >= epochs:
        raise RunDirectoryError(
            f"checkpoint {where} was taken within epoch {info.epoch + 1}, but epochs={epochs}: its "
            f"model has trained {info.epoch_step} steps more. Give epochs={info.epoch + 1} or "
            "more, or load an earlier checkpoint with from_run(run_dir, checkpoint=…)"
        )


def _describe_rest(info: CheckpointInfo, epochs: int) -> str:
    """Describe which epochs are left of a run after a checkpoint; empty if none are."""
    if is_over(info, epochs):
        return ""
    first = info.epoch + 1
    left = f"epochs {first} to {epochs}" if first < epochs else f"epoch {first}"
    within = f", epoch {first} after its step {info.epoch_step}" if info.epoch_step else ""
    return f"{left} of {epochs} {'are' if first < epochs else 'is'} left{within}"


def check_not_taken(state: Mapping[str, object], epoch: int) -> None:
    """Check that the rest of a checkpoint's epoch is the same part of every batch.

    Args:
        state: that of the checkpoint.
        epoch: whole epochs of it.

    Raises:
        RunDirectoryError: ranks took whole batches of it.
    """
    if state.get(TAKEN) is not None:
        raise RunDirectoryError(
            f"the checkpoint was taken within epoch {epoch + 1}, in which ranks took whole batches "
            "(sync=AsyncServer(…)); only AsyncServer can train the rest. Finish the epoch with "
            "sync=AsyncServer(…), then change it"
        )


def _honoured_changes(
    info: CheckpointInfo,
    fit: FitOptions,
    global_batch: int,
    data: Mapping[str, object],
    sync: Mapping[str, object],
) -> Iterator[str]:
    """Yield warnings of settings whose new values hold."""
    parts = (info.settings.get(part, {}) for part in ("fit", "data", "sync"))
    then = {name: value for part in parts for name, value in part.items()}
    now = {
        **sync,
        "class_weight": fit.class_weight,
        "steps_per_epoch": fit.steps_per_epoch,
        "transforms": data["transforms"],
    }
    for name, value in now.items():
        if name in then and _as_json(then[name]) != _as_json(value):
            change = describe_change_since(name, then[name], value)
            yield f"{change}: the rest is trained with the new value"
    batch = info.order.get("global_batch", global_batch)
    if fit.steps_per_epoch is not None and batch != global_batch:
        yield (
            f"{describe_change_since('the global batch', batch, global_batch)} rows: with "
            "steps_per_epoch the position in the data is counted in batches, so rows of the "
            "current pass may come twice or not at all"
        )


def _limited_changes(
    info: CheckpointInfo, resolved: FitOptions, workers: int, *, splits: bool
) -> Iterator[str]:
    """Yield warnings of new values that change less than they would in a new run.

    Args:
        info: the checkpoint.
        resolved: the settings that hold.
        workers: ranks of this call.
        splits: whether the seed decides the split into training and validation rows.
    """
    # A seed that decides the split changes the rows, too, which is refused.
    if info.order.get("seed", resolved.seed) != resolved.seed and not splits:
        yield (
            describe_change_since("seed", info.order["seed"], resolved.seed)
            + ": it changes the order of rows only; weights and random generators continue from "
            "the checkpoint"
        )
    rate = info.state.get("learning_rate", {})
    before = info.settings.get("num_workers", workers)
    if resolved.lr_scaling != "none" and rate.get("done") and before != workers:
        yield (
            describe_change_since("num_workers", before, workers)
            + f": the learning rate stays as lr_scaling={resolved.lr_scaling!r} has scaled it"
        )


def _as_json(value: object) -> object:
    """Return ``value`` as a checkpoint gives it back: keys are text."""
    return json.loads(json.dumps(value))


# -- on the driver, once the data are prepared -----------------------------------------------------


def check_same_data(
    info: CheckpointInfo,
    fingerprint: str,
    settings: Mapping[str, Any],
    where: str,
    tables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that a run is resumed with its own rows.

    Args:
        info: the checkpoint.
        fingerprint: that of this call's training rows.
        settings: this call's settings, as checkpoints record them.
        where: the run directory, for the message.
        tables: versions of the tables that this call reads, by name.

    Raises:
        RunDirectoryError: they are other rows; arguments that differ are named.
    """
    roles = [
        describe_change(name, info.settings[name], settings[name])
        for name in _ROLES
        if name in info.settings and not _same_columns(info.settings[name], settings[name])
    ]
    if info.data_fingerprint == fingerprint and not roles:
        return
    then, now = info.settings.get("data", {}), settings["data"]
    split = [
        describe_change_since(name, then[name], now[name])
        for name in _SPLIT
        if name in then and then[name] != now[name]
    ]
    seed = info.order.get("seed", settings["fit"]["seed"])
    if now["validation"] is not None and seed != settings["fit"]["seed"]:
        split.append(describe_change_since("seed", seed, settings["fit"]["seed"]))
    if split:
        split[-1] += " (the split into training and validation rows follows from it)"
    kinds = [
        describe_change(name, then[name], now[name])
        for name in _KINDS
        if name in then and then[name] != now[name]
    ]
    changes = [*roles, *split, *kinds, *_moved_tables(info.tables, tables)]
    reason = "; ".join(changes) or "the arguments are the same, but the rows have changed"
    raise RunDirectoryError(
        f"run_dir {where} holds a run on other data: {reason} (fingerprint of the training rows "
        f"{info.data_fingerprint}, now {fingerprint}). Resume with the same data, or give another "
        "run_dir to train anew"
    )


def _moved_tables(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield how tables have moved on since the run began, and how to read them as they were."""
    for name, version in then.items():
        if name in now and now[name] != version:
            number = version.rpartition("_")[2]  # Iceberg's names a branch, too
            yield (
                f"table {name} has moved on to version {now[name].rpartition('_')[2]} since; read "
                f"it as it was, by SQL's VERSION AS OF {number} or .option('versionAsOf', {number})"
            )


def _same_columns(then: Any, now: Any) -> bool:
    # A list feeds inputs by their order, a dictionary by their names. The two can only be compared
    # where there is one column.
    one, other = (list(x.values()) if isinstance(x, Mapping) else x for x in (then, now))
    if isinstance(then, Mapping) != isinstance(now, Mapping) and one is not None:
        return bool(one == other) and len(one) == 1
    return bool(then == now)


def check_rest_of_epoch(info: CheckpointInfo, order: Mapping[str, object], where: str) -> None:
    """Check that the rest of a checkpoint's epoch has the rows that it would have had.

    Args:
        info: the checkpoint, which may be of an epoch's end.
        order: what the order of samples follows from, as far as it is known; see
            `FitOptions.order_settings` and `TrainingSpec.order`.
        where: the checkpoint's folder, for the message.

    Raises:
        RunDirectoryError: rows would come twice or not at all.
    """
    if info.epoch_step == 0:
        return
    changed = {
        name: (info.order[name], value)
        for name, value in order.items()
        if name in info.order and info.order[name] != value
    }
    begin = f"checkpoint {where} was taken within epoch {info.epoch + 1}, and "
    if "row_order" in changed:
        raise RunDirectoryError(
            f"{begin}{_OTHER_ROW_ORDER}: some would be trained on twice in that epoch, and others "
            "not at all. Give the DataFrame in the order it had (sort it by a column before both "
            "calls), or give another run_dir"
        )
    if changed:
        shown = ", ".join(f"{name} {old} (now {new})" for name, (old, new) in changed.items())
        raise RunDirectoryError(
            f"{begin}the rest of that epoch depends on {shown}. Finish the epoch with the same "
            "values (batch_size times num_workers is the global batch), then change them"
        )


# -- on the ranks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RestoredCheckpoint:
    """A checkpoint on one rank, whose shared variables are restored on rank 0.

    Attributes:
        info: all of it but its arrays.
        rank_state: this rank's state, for `restore_rank`.
        model: the model's description to record from now on; on rank 0.
    """

    info: CheckpointInfo
    rank_state: RankState
    model: Mapping[str, Any]


def restore_checkpoint(
    spec: TrainingSpec, world: MPI.Comm, trainee: Trainee
) -> RestoredCheckpoint | None:
    """Read the checkpoint to resume from on rank 0, and give each rank its state.

    The shared variables are restored on rank 0 only: they are broadcast afterwards. The arrays are
    read for the first time; if they are damaged, the checkpoint before counts.

    Args:
        spec: the training.
        world: communicator of all ranks.
        trainee: the built model, as it was compiled.

    Returns:
        ``None`` for a new run.

    Raises:
        RunDirectoryError: it is another model's, or all are damaged.
        CheckpointError: the storage fails.
    """
    if spec.attempt.checkpoint is None:
        return None
    from mpi4py.util import pkl5

    variables, epochs = trainee.variables, spec.fit.epochs
    info: CheckpointInfo | None = None
    states: list[RankState] | None = None
    model: Mapping[str, Any] = {}
    if world.Get_rank() == 0:
        folder, info, files = _read_newest(spec, spec.attempt.checkpoint)
        # Once more: it may be an earlier one than the driver has seen.
        check_rest_of_epoch(info, spec.order, str(folder))
        if info.order.get("row_order") != spec.train.row_order and not is_over(info, epochs):
            notify(
                f"resuming run_dir {spec.run_dir}: {_OTHER_ROW_ORDER}, so that the rest is trained "
                "in another order than the run would have taken"
            )
        changes = trainee.compare(info.model, trainee.describe(), in_epoch=info.epoch_step > 0)
        if changes.refusal is not None:
            raise RunDirectoryError(
                f"run_dir holds a run of another model ({folder}): {changes.refusal}. Resume with "
                "the run's model, or give another run_dir; initial_weights takes over what fits"
            )
        for text in () if is_over(info, epochs) else changes.warnings:
            notify(f"resuming run_dir {spec.run_dir}: {text}")
        model = changes.record
        variables.build_optimizers(info.model.get("trained_by", ()))
        variables.check_same(info.variables, str(folder), changes.optimizers)
        variables.restore(files[VARIABLES_FILE])
        saved = split_states(info.rank_states, files[RANKS_FILE])
        size = world.Get_size()
        states = [state_for(saved, rank, size) for rank in range(size)]
    # All ranks' states together may have 2 GiB and more, which plain pickles of mpi4py cannot.
    restored, state = world.bcast(info), pkl5.Intracomm(world).scatter(states)
    assert restored is not None
    variables.build_optimizers(restored.model.get("trained_by", ()))
    return RestoredCheckpoint(restored, state, model)


def _read_newest(
    spec: TrainingSpec, newest: int
) -> tuple[Location, CheckpointInfo, dict[str, dict[str, Any]]]:
    """Return the newest whole checkpoint, up to step ``newest``; report it to the driver."""
    directory = RunDirectory(spec.run_dir)
    checkpoint = newest_readable(directory, load_checkpoint, spec.run_id, newest=newest, say=notify)
    if checkpoint is None:
        raise RunDirectoryError(
            f"checkpoint {directory.checkpoint(newest)}, from which the run was to resume, is gone"
        )
    send(Resumed(checkpoint[1].step))
    return checkpoint


# -- after an interruption -------------------------------------------------------------------------


def describe_interruption(directory: RunDirectory, epochs: int) -> str:
    """Describe where an interrupted run of ``epochs`` stands, and how to resume it."""
    place = str(directory.location)
    newest = None
    with contextlib.suppress(HorovodSparkError, OSError):
        newest = newest_checkpoint(directory, directory.run_id(), logger.debug)
    if newest is None:
        return f"interrupted before a checkpoint was saved in {place}: the next call starts anew"
    folder, info = newest
    rest = _describe_rest(info, epochs) or "no epoch is left"
    return (
        f"interrupted; {folder.name} is saved, {rest}: the same call with run_dir={place!r} resumes"
    )
