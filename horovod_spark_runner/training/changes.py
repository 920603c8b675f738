"""What a call that goes on with a run asks for otherwise than the call that began it. Pure.

A change is honoured (and nothing is said), cannot be honoured (a warning names both values), or
makes it another run (refused). Values that an earlier version did not record count as unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import RunDirectoryError
from ..rundir.checkpoint import CheckpointInfo
from ..settings.training import FitOptions

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
        refusal: why the run cannot be gone on with; ``None`` if it can.
        warnings: what is not honoured, or means something else for what is left of the run.
        optimizers: changed settings of the optimizers, for the message if variables do not fit.
        record: what to record of the model from now on.
    """

    refusal: str | None
    warnings: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    record: dict[str, Any] = field(default_factory=dict)


def compare_models(
    then: Mapping[str, Any], now: Mapping[str, Any], *, in_epoch: bool
) -> ModelChanges:
    """Compare two results of `describe_model`.

    Args:
        then: that of the checkpoint; empty for one that recorded nothing.
        now: that of this call's model.
        in_epoch: whether the checkpoint was taken within an epoch, whose sums are gone on with.
    """
    if not then:
        return ModelChanges(None, record=dict(now))
    layers = _layer_changes(then.get("layers", []), now["layers"])
    if layers:
        return ModelChanges(_joined(layers))
    before, after = then.get("optimizers", []), now["optimizers"]
    kinds = [[entry["class"] for entry in entries] for entries in (before, after)]
    if kinds[0] != kinds[1]:
        return ModelChanges(_otherwise("optimizer", ", ".join(kinds[0]), ", ".join(kinds[1])))
    if in_epoch:
        for name in ("loss", "loss_weights", "metrics"):
            if then.get(name) != now[name]:
                return ModelChanges(
                    f"{_since(_argument(name), then.get(name), now[name])}, within an epoch, "
                    "whose sums go on; finish that epoch with the same, then change it"
                )
    warnings = [
        f"{_since(_argument(name), then.get(name), now[name])}: what is left is trained with the "
        "new one"
        for name in ("loss", "loss_weights")
        if then.get(name) != now[name]
    ]
    ignored, changed, kept = _optimizer_changes(before, after)
    return ModelChanges(None, (*warnings, *ignored), changed, {**now, "optimizers": kept})


def _layer_changes(then: Sequence[Any], now: Sequence[Any]) -> list[str]:
    kinds = [[entry["class"] for entry in entries] for entries in (then, now)]
    if kinds[0] != kinds[1]:
        place = next(
            (n for n, pair in enumerate(zip(*kinds, strict=False)) if pair[0] != pair[1]),
            min(map(len, kinds)),
        )
        shown = [
            f"{names[place]} as layer {place}" if place < len(names) else f"{len(names) - 1} layers"
            for names in kinds
        ]
        return [f"it had {shown[0]}, this one has {shown[1]}"]
    found = []
    for place, (before, after) in enumerate(zip(then, now, strict=True)):
        name = f"layer {place} ({after['class']})" if place else "the model"
        for part in ("config", "graph"):
            old, new = before.get(part), after.get(part)
            if old is None or new is None:
                continue  # a class that does not tell its settings
            if part == "graph" and old != new:
                found.append("its layers are connected otherwise")
            elif part == "config":
                found += [_otherwise(f"{name}: {path}", *pair) for path, *pair in _differ(old, new)]
    return found


def _optimizer_changes(
    then: Sequence[Any], now: Sequence[Any]
) -> tuple[tuple[str, ...], tuple[str, ...], list[Any]]:
    """Return warnings of what the checkpoint decides, all changes, and what to record."""
    ignored: list[str] = []
    changed: list[str] = []
    kept = []
    for before, after in zip(then, now, strict=True):
        old, new = before.get("config"), after.get("config")
        kept.append(after)
        if old is None or new is None:
            continue
        for path, one, other in _differ(old, new):
            held = _is_variable(path, one, other)
            say = _otherwise if held else _since
            told = say(f"{path} of optimizer {after['class']}", one, other)
            changed.append(told)
            if held:
                ignored.append(
                    f"{told}: the checkpoint's value is gone on with. Set another by a callback, "
                    "or begin a new run with initial_weights"
                )
                kept[-1] = {**after, "config": _with(kept[-1]["config"], path.split("."), one)}
    return tuple(ignored), tuple(changed), kept


def _is_variable(path: str, one: Any, other: Any) -> bool:
    """Tell whether a setting is only what a variable, which a checkpoint holds, begins with."""
    name = path.rpartition(".")[2]
    if "learning_rate." in path or not all(isinstance(v, (int, float)) for v in (one, other)):
        return False  # a schedule computes its rates anew
    return name == "learning_rate" or name.startswith("initial_")


def _with(config: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**config, first: _with(config[first], rest, value) if rest else value}


def _differ(then: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield where two JSON values differ: path, the old value, the new one."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in sorted({*then, *now}):
            below = f"{path}.{key}" if path else key
            # A setting that only one version of Keras knows tells of no change.
            if key in then and key in now:
                yield from _differ(then[key], now[key], below)
    elif then != now:
        yield path, then, now


def _otherwise(what: str, then: Any, now: Any) -> str:
    return f"{what} is {_show(now)} now, the run was begun with {_show(then)}"


def _since(what: str, then: Any, now: Any) -> str:
    """Say the same of what an earlier call may have changed already."""
    return f"{what} is {_show(now)} now, the checkpoint was taken with {_show(then)}"


def _argument(name: str) -> str:
    return f"compile's {name}"


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, Mapping) and "class" in value:
        settings = ", ".join(f"{k}={_show(v)}" for k, v in value.items() if k != "class")
        text = f"{value['class']}({settings})"
    else:
        text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _joined(changes: Sequence[str]) -> str:
    more = len(changes) - _SHOWN
    return "; ".join(changes[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def settings_to_go_on_with(
    info: CheckpointInfo,
    fit: FitOptions,
    workers: int,
    start: str | None,
    data: Mapping[str, Any],
) -> tuple[FitOptions, str | None, list[str]]:
    """Return what a resumed run does with the arguments of the call that goes on with it.

    Args:
        info: the checkpoint.
        fit: what was asked for.
        workers: ranks asked for.
        start: ``initial_weights``.
        data: what checkpoints record of how data are prepared, of this call.

    Returns:
        The settings that hold, the ``initial_weights`` to record, and warnings.
    """
    begun = info.settings.get("fit", {})
    warnings = []
    kept = {
        name: begun[name]
        for name in ("lr_scaling", "warmup_epochs")
        if name in begun and begun[name] != getattr(fit, name)
    }
    for name, value in kept.items():
        warnings.append(
            _otherwise(name, value, getattr(fit, name))
            + ": a resumed run keeps what it was begun with"
        )
    held = replace(fit, **kept)
    warnings += _new_ones(info, fit, data)
    # Where the split follows from it, too, the rows are others, which is refused.
    splits = isinstance(data["validation"], float)
    if info.order.get("seed", fit.seed) != fit.seed and not splits:
        warnings.append(
            _since("seed", info.order["seed"], fit.seed)
            + ": it changes the order of rows only; weights and random generators go on from the "
            "checkpoint"
        )
    rate = info.state.get("learning_rate", {})
    before = info.settings.get("num_workers", workers)
    if held.lr_scaling != "none" and rate.get("done") and before != workers:
        warnings.append(
            _since("num_workers", before, workers)
            + f": the learning rate stays as lr_scaling={held.lr_scaling!r} has scaled it"
        )
    recorded = info.settings.get("initial_weights", _ABSENT)
    if start is not None and start != recorded:
        begun_with = "" if recorded is _ABSENT else f"; the run was begun with {recorded!r}"
        warnings.append(
            f"initial_weights={start!r} is ignored: the run goes on from its checkpoint{begun_with}"
        )
    return held, start if recorded is _ABSENT else recorded, warnings


def _new_ones(info: CheckpointInfo, fit: FitOptions, data: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is said of arguments whose new values are trained with."""
    then = {**info.settings.get("fit", {}), **info.settings.get("data", {})}
    now = {
        "class_weight": fit.class_weight,
        "steps_per_epoch": fit.steps_per_epoch,
        "transforms": data["transforms"],
    }
    for name, value in now.items():
        # Checkpoints are JSON, whose keys are text.
        if name in then and _as_json(then[name]) != _as_json(value):
            yield f"{_since(name, then[name], value)}: what is left is trained with the new one"


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def check_same_data(
    info: CheckpointInfo, fingerprint: str, settings: Mapping[str, Any], where: str
) -> None:
    """Check that a run goes on with the rows it was begun with.

    Args:
        info: the checkpoint.
        fingerprint: that of this call's training rows.
        settings: this call's settings, as checkpoints record them.
        where: the run directory, for the message.

    Raises:
        RunDirectoryError: it does not; arguments that differ are named.
    """
    roles = [
        _otherwise(name, info.settings[name], settings[name])
        for name in _ROLES
        if name in info.settings and not _same_columns(info.settings[name], settings[name])
    ]
    if info.data_fingerprint == fingerprint and not roles:
        return
    begun, asked = info.settings.get("data", {}), settings["data"]
    split = [
        _since(name, begun[name], asked[name])
        for name in _SPLIT
        if name in begun and begun[name] != asked[name]
    ]
    seed = info.order.get("seed", settings["fit"]["seed"])
    if asked["validation"] is not None and seed != settings["fit"]["seed"]:
        split.append(_since("seed", seed, settings["fit"]["seed"]))
    if split:
        split[-1] += " (the split into training and validation rows follows from it)"
    others = [
        _otherwise(name, begun[name], asked[name])
        for name in _KINDS
        if name in begun and begun[name] != asked[name]
    ]
    found = [*roles, *split, *others]
    told = "; ".join(found) or "the arguments are the same, but the rows have changed"
    raise RunDirectoryError(
        f"run_dir {where} holds a run on other data: {told} (fingerprint of the training rows "
        f"{info.data_fingerprint}, now {fingerprint}). Go on with the same data, or give another "
        "run_dir to train anew"
    )


def _same_columns(then: Any, now: Any) -> bool:
    # A dictionary may name the inputs that a list gave in their order.
    if isinstance(then, Mapping) and isinstance(now, list):
        return sorted(then.values()) == sorted(now)
    if isinstance(now, Mapping) and isinstance(then, list):
        return sorted(now.values()) == sorted(then)
    return bool(then == now)
