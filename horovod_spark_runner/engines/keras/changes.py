"""Compare a Keras model with that of a checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...checkpoint.config_diff import (
    ModelChanges,
    describe_change,
    diff_optimizer,
    diff_training,
    diff_values,
    join_changes,
)


def compare_models(
    then: Mapping[str, Any], now: Mapping[str, Any], *, in_epoch: bool
) -> ModelChanges:
    """Compare two results of `describe_model`.

    Args:
        then: that of the checkpoint; empty for one that recorded nothing.
        now: that of this call's model.
        in_epoch: whether the checkpoint was taken within an epoch, whose sums are continued.
    """
    if not then:
        return ModelChanges(None, record=dict(now))
    layers = _layer_changes(then.get("layers", {}), now["layers"])
    if layers:
        return ModelChanges(join_changes(layers))
    before, after = then.get("optimizers", []), now["optimizers"]
    kinds = [[entry["class"] for entry in entries] for entries in (before, after)]
    if kinds[0] != kinds[1]:
        return ModelChanges(describe_change("optimizer", ", ".join(kinds[0]), ", ".join(kinds[1])))
    refusal, warnings = diff_training(
        then,
        now,
        summed=("loss", "loss_weights", "metrics"),
        warned=("loss", "loss_weights"),
        in_epoch=in_epoch,
        prefix="compile's ",
    )
    if refusal is not None:
        return ModelChanges(refusal)
    ignored, changed, optimizers = _optimizer_changes(before, after)
    return ModelChanges(None, (*warnings, *ignored), changed, {**now, "optimizers": optimizers})


def _layer_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    lost, new = ([n for n in a if n not in b] for a, b in ((then, now), (now, then)))
    if lost or new:
        had, has = (
            names[0] if names else f"no more than {len(layers) - 1} layers"
            for names, layers in ((lost, then), (new, now))
        )
        return [f"it had {had}, this one has {has}"]
    return [describe_change(path, *pair) for path, *pair in diff_values(then, now)]


def _optimizer_changes(
    then: Sequence[Any], now: Sequence[Any]
) -> tuple[tuple[str, ...], tuple[str, ...], list[Any]]:
    """Return warnings of overridden settings, all changes, and the new record."""
    ignored: list[str] = []
    changed: list[str] = []
    records = []
    for before, after in zip(then, now, strict=True):
        old, new = before.get("config"), after.get("config")
        records.append(after)
        if old is None or new is None:
            continue
        messages, every, config = diff_optimizer(
            f"optimizer {after['class']}", old, new, _is_variable
        )
        ignored += [
            f"{text}. Set another by a callback, or begin a new run with initial_weights"
            for text in messages
        ]
        changed += every
        records[-1] = {**after, "config": config}
    return tuple(ignored), tuple(changed), records


def _is_variable(path: str, one: object, other: object) -> bool:
    """Return whether a setting is only what a variable, which a checkpoint holds, begins with."""
    name = path.rpartition(".")[2]
    if "learning_rate." in path or not all(isinstance(v, (int, float)) for v in (one, other)):
        return False  # a schedule recomputes its rates
    return name == "learning_rate" or name.startswith("initial_")
