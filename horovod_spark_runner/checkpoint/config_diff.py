"""Compare the resuming call's settings with the original run's. Pure.

A change is honoured (and nothing is said), cannot be honoured (a warning names both values), or
makes it another run (refused). Values that an earlier version did not record count as unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.sync import STRATEGIES, AsyncServer
from ..config.training import FitOptions
from ..errors import RunDirectoryError
from ..frameworks import model_of
from .files import CheckpointInfo

# What a checkpoint keeps of batches that ranks take as they come; see `TakenShares`.
TAKEN = "taken"
_SHOWN = 3
_LONGEST = 80
_ABSENT = object()
# Arguments that decide which rows are trained on, and how.
_ROLES = ("feature_cols", "label_cols", "sample_weight_col")
_SPLIT = ("validation", "stratify")
_KINDS = ("shapes", "dtypes")


@dataclass(frozen=True)
class ModelChanges:
    """How a model differs from the one that a checkpoint was taken of.

    Attributes:
        refusal: why the run cannot be resumed; ``None`` if it can.
        warnings: what is not honoured, or means something else for what is left of the run.
        optimizers: changed settings of the optimizers, for the message if variables do not fit.
        record: what to record of the model from now on.
    """

    refusal: str | None
    warnings: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    record: dict[str, Any] = field(default_factory=dict)


def differ(then: object, now: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield where two JSON values differ: path, the old value, the new one."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in sorted({*then, *now}):
            below = f"{path}.{key}" if path else key
            # A setting that only one version of Keras knows tells of no change.
            if key in then and key in now:
                yield from differ(then[key], now[key], below)
    elif then != now:
        yield path, then, now


def trained_otherwise(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    summed: Collection[str],
    warned: Collection[str],
    in_epoch: bool,
    prefix: str = "",
) -> tuple[str | None, list[str]]:
    """Compare what a model is trained with, which may change from an epoch's end on.

    Args:
        then: the checkpoint's description of the model.
        now: that of this call's model.
        summed: what an epoch's sums are sums of.
        warned: what changes the training.
        in_epoch: whether the checkpoint was taken within an epoch, whose sums are continued.
        prefix: what stands before the names.

    Returns:
        Why the run cannot be resumed, if so, and warnings.
    """
    changed = {
        name: since(f"{prefix}{name}", then[name], now[name])
        for name in dict.fromkeys((*summed, *warned))
        if name in then and then[name] != now[name]
    }
    for name in summed:
        if in_epoch and name in changed:
            refusal = (
                f"{changed[name]}, within an epoch, whose sums go on; finish that epoch with the "
                "same, then change it"
            )
            return refusal, []
    texts = [text for name, text in changed.items() if name in warned]
    return None, [f"{text}: what is left is trained with the new one" for text in texts]


def optimized_otherwise(
    what: str,
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    held: Callable[[str, object, object], bool],
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Compare the settings of an optimizer, of which the checkpoint decides some.

    Args:
        what: whose settings they are.
        then: those that the checkpoint records.
        now: those of this call.
        held: tells of a path and both values whether the checkpoint's is kept.

    Returns:
        What differs and is kept, all that differs, and the settings to record: with what is kept.
    """
    ignored: list[str] = []
    changed: list[str] = []
    record = dict(now)
    for path, one, other in differ(then, now):
        keeps = held(path, one, other)
        changed.append((otherwise if keeps else since)(f"{path} of {what}", one, other))
        if keeps:
            ignored.append(f"{changed[-1]}: the checkpoint's value is kept")
            record = _with(record, path.split("."), one)
    return ignored, changed, record


def _with(config: Mapping[str, Any], path: Sequence[str], value: object) -> dict[str, Any]:
    first, *rest = path
    return {**config, first: _with(config[first], rest, value) if rest else value}


def other_model(then: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Return how two descriptions of a model differ, ``None`` if they do not."""
    changes = [otherwise(path, *pair) for path, *pair in differ(then, now)]
    return joined(changes) if changes else None


def otherwise(what: str, then: object, now: object) -> str:
    """Say how a setting differs from that of the call that began the run."""
    return f"{what} is {_show(now)} now, the run was begun with {_show(then)}"


def since(what: str, then: object, now: object) -> str:
    """Say the same of what an earlier call may have changed already."""
    return f"{what} is {_show(now)} now, the checkpoint was taken with {_show(then)}"


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, Mapping) and "class" in value:
        settings = ", ".join(f"{k}={_show(v)}" for k, v in value.items() if k != "class")
        text = f"{value['class']}({settings})"
    else:
        text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def joined(changes: Sequence[str]) -> str:
    """Return the first of some differences as one text, and how many more there are."""
    more = len(changes) - _SHOWN
    return "; ".join(changes[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def settings_to_go_on_with(
    info: CheckpointInfo,
    fit: FitOptions,
    workers: int,
    start: str | None,
    data: Mapping[str, Any],
    sync: Mapping[str, object],
) -> tuple[FitOptions, str | None, list[str]]:
    """Return what a resumed run does with the arguments of the call that resumes it.

    Args:
        info: the checkpoint.
        fit: what was asked for.
        workers: ranks asked for.
        start: ``initial_weights``.
        data: what checkpoints record of how data are prepared, of this call.
        sync: what they record of how ranks are kept one model, of this call.

    Returns:
        The settings that hold, the ``initial_weights`` to record, and warnings.

    Raises:
        RunDirectoryError: what is left of the checkpoint's epoch is for ``AsyncServer`` only.
    """
    if STRATEGIES[str(sync["sync"])] is not AsyncServer:
        check_not_taken(info.state, info.epoch)
    original = info.settings.get("fit", {})
    restored = {
        name: original[name]
        for name in ("lr_scaling", "warmup_epochs")
        if name in original and original[name] != getattr(fit, name)
    }
    warnings = [
        otherwise(name, value, getattr(fit, name)) + ": a resumed run keeps what it was begun with"
        for name, value in restored.items()
    ]
    settings = replace(fit, **restored)
    if not is_over(info, fit.epochs):
        warnings += _new_ones(info, fit, fit.batch_size * workers, data, sync)
        splits = isinstance(data["validation"], float)
        warnings += _without_effect(info, settings, workers, splits=splits)
    recorded = info.settings.get("initial_weights", _ABSENT)
    if start is not None and start != recorded:
        original_start = "" if recorded is _ABSENT else f"; the run was begun with {recorded!r}"
        warnings.append(
            f"initial_weights={start!r} is ignored: the run resumes from its checkpoint"
            f"{original_start}"
        )
    if is_over(info, fit.epochs):
        why = f"the run has trained {info.epoch}, and epochs={fit.epochs}"
        more = "more epochs"
        if info.state.get("stopped_at") is not None:
            why = f"a callback stopped the run after epoch {info.epoch}, which ends it for good"
            more = "initial_weights=… and a new run_dir to train its model further"
        warnings.append(
            f"nothing is left to train: {why}. The model stays as it is, whatever else has changed "
            f"in the call; give a new run_dir to train anew, or {more}"
        )
    return settings, start if recorded is _ABSENT else recorded, warnings


def is_over(info: CheckpointInfo, epochs: int) -> bool:
    """Return whether a run of ``epochs`` has nothing left to train after a checkpoint."""
    return info.epoch >= epochs or info.state.get("stopped_at") is not None


def describe_rest(info: CheckpointInfo, epochs: int) -> str:
    """Describe which epochs are left of a run after a checkpoint; empty if none are."""
    if is_over(info, epochs):
        return ""
    first = info.epoch + 1
    left = f"epochs {first} to {epochs}" if first < epochs else f"epoch {first}"
    within = f", epoch {first} after its step {info.epoch_step}" if info.epoch_step else ""
    return f"{left} of {epochs} {'are' if first < epochs else 'is'} left{within}"


def check_not_taken(state: Mapping[str, Any], epoch: int) -> None:
    """Check that what is left of a checkpoint's epoch is the same part of every batch.

    Args:
        state: that of the checkpoint.
        epoch: whole epochs of it.

    Raises:
        RunDirectoryError: ranks took whole batches of it.
    """
    if state.get(TAKEN) is not None:
        raise RunDirectoryError(
            f"the checkpoint was taken within epoch {epoch + 1}, whose batches ranks have taken as "
            "they came, with sync=AsyncServer(…): what is left of it is no part of every batch. "
            "Finish the epoch with sync=AsyncServer(…), then change it"
        )


def _without_effect(
    info: CheckpointInfo, held: FitOptions, workers: int, *, splits: bool
) -> Iterator[str]:
    """Yield what is said of new values that change less than they would in a new run.

    Args:
        info: the checkpoint.
        held: the settings that hold.
        workers: ranks asked for.
        splits: whether the split into training and validation rows follows from the seed.
    """
    # Where the split follows from it, too, the rows are others, which is refused.
    if info.order.get("seed", held.seed) != held.seed and not splits:
        yield (
            since("seed", info.order["seed"], held.seed)
            + ": it changes the order of rows only; weights and random generators go on from the "
            "checkpoint"
        )
    rate = info.state.get("learning_rate", {})
    before = info.settings.get("num_workers", workers)
    if held.lr_scaling != "none" and rate.get("done") and before != workers:
        yield (
            since("num_workers", before, workers)
            + f": the learning rate stays as lr_scaling={held.lr_scaling!r} has scaled it"
        )


def _new_ones(
    info: CheckpointInfo,
    fit: FitOptions,
    global_batch: int,
    data: Mapping[str, Any],
    sync: Mapping[str, object],
) -> Iterator[str]:
    """Yield what is said of arguments whose new values are trained with."""
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
            yield f"{since(name, then[name], value)}: what is left is trained with the new one"
    batch = info.order.get("global_batch", global_batch)
    if fit.steps_per_epoch is not None and batch != global_batch:
        yield (
            f"{since('the global batch', batch, global_batch)} rows: with steps_per_epoch the "
            "position in the data is counted in batches, so rows of the current pass may come "
            "twice or not at all"
        )


def _as_json(value: object) -> object:
    """Return ``value`` as a checkpoint gives it back: keys are text."""
    return json.loads(json.dumps(value))


def check_same_engine(info: CheckpointInfo, engine: str, where: str) -> None:
    """Check that a run is resumed by the engine it was begun with.

    Args:
        info: the checkpoint.
        engine: dotted name of the engine of this call's model.
        where: the run directory, for the message.

    Raises:
        RunDirectoryError: it is not.
    """
    if info.engine != engine:
        raise RunDirectoryError(
            f"run_dir {where} holds the run of a {model_of(info.engine)}, but a "
            f"{model_of(engine)} is to be trained. Go on with the model the run was begun with, or "
            "give another run_dir"
        )


def check_same_data(
    info: CheckpointInfo, fingerprint: str, settings: Mapping[str, Any], where: str
) -> None:
    """Check that a run is resumed with the rows it was begun with.

    Args:
        info: the checkpoint.
        fingerprint: that of this call's training rows.
        settings: this call's settings, as checkpoints record them.
        where: the run directory, for the message.

    Raises:
        RunDirectoryError: it does not; arguments that differ are named.
    """
    roles = [
        otherwise(name, info.settings[name], settings[name])
        for name in _ROLES
        if name in info.settings and not _same_columns(info.settings[name], settings[name])
    ]
    if info.data_fingerprint == fingerprint and not roles:
        return
    then, now = info.settings.get("data", {}), settings["data"]
    split = [
        since(name, then[name], now[name])
        for name in _SPLIT
        if name in then and then[name] != now[name]
    ]
    seed = info.order.get("seed", settings["fit"]["seed"])
    if now["validation"] is not None and seed != settings["fit"]["seed"]:
        split.append(since("seed", seed, settings["fit"]["seed"]))
    if split:
        split[-1] += " (the split into training and validation rows follows from it)"
    others = [
        otherwise(name, then[name], now[name])
        for name in _KINDS
        if name in then and then[name] != now[name]
    ]
    changes = [*roles, *split, *others]
    reason = "; ".join(changes) or "the arguments are the same, but the rows have changed"
    raise RunDirectoryError(
        f"run_dir {where} holds a run on other data: {reason} (fingerprint of the training rows "
        f"{info.data_fingerprint}, now {fingerprint}). Go on with the same data, or give another "
        "run_dir to train anew"
    )


def _same_columns(then: Any, now: Any) -> bool:
    # A list feeds inputs by their order, a dictionary by their names: which is which shows only
    # where there is one.
    one, other = (list(x.values()) if isinstance(x, Mapping) else x for x in (then, now))
    if isinstance(then, Mapping) != isinstance(now, Mapping) and one is not None:
        return bool(one == other) and len(one) == 1
    return bool(then == now)
