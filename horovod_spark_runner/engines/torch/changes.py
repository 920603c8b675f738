"""Describe a PyTorch model, and compare it with that of a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...checkpoint.config_diff import (
    ModelChanges,
    describe_change,
    diff_optimizer,
    diff_training,
    join_changes,
)
from .losses import loss_named
from .optimizers import describe_optimizer
from .schedulers import Schedulers
from .torch_model import TorchModel

# What is trained with as it is now, and warned of; the first also decide what is summed.
_SUMMED = ("loss", "train_step")
_TRAINED_WITH = (*_SUMMED, "schedule", "autocast", "clip_norm", "clip_value")
# Settings that say what they are.
_PLAIN = (bool, int, float, str)


def describe(
    model: TorchModel,
    module: nn.Module,
    optimizers: Mapping[str, Optimizer],
    schedulers: Schedulers,
) -> dict[str, Any]:
    """Return the properties that identify a model, as JSON."""
    return {
        "module": type(module).__qualname__,
        "optimizers": {name: describe_optimizer(one) for name, one in optimizers.items()},
        "schedulers": schedulers.describe(),
        "loss": _named(_losses(model.loss)),
        "train_step": _named(model.train_step),
        "metrics": _named(model.metrics),
        "schedule": model.schedule,
        "autocast": model.autocast,
        "clip_norm": model.clip_norm,
        "clip_value": model.clip_value,
        "sync_batch_norm": model.sync_batch_norm,
    }


def compare(then: Mapping[str, Any], now: Mapping[str, Any], *, in_epoch: bool) -> ModelChanges:
    """Compare two results of `describe`; see `Trainee.compare`."""
    if not then:
        return ModelChanges(None, record=dict(now))
    before, after = then.get("optimizers", {}), now["optimizers"]
    refused = [
        describe_change(name, then.get(name), now[name])
        for name in ("module", "schedulers", "sync_batch_norm")
        if then.get(name) != now[name]
    ]
    refused += _of_optimizers(before, after)
    if refused:
        return ModelChanges(join_changes(refused))
    refusal, warnings = diff_training(
        then, now, summed=(*_SUMMED, "metrics"), warned=_TRAINED_WITH, in_epoch=in_epoch
    )
    if refusal is not None:
        return ModelChanges(refusal)
    ignored, changed, optimizers = _of_settings(before, after)
    return ModelChanges(
        None, (*warnings, *ignored), tuple(changed), {**now, "optimizers": optimizers}
    )


def _of_optimizers(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    kinds = [{name: one["class"] for name, one in each.items()} for each in (then, now)]
    if kinds[0] != kinds[1]:
        return [describe_change("optimizer", *(", ".join(kind.values()) for kind in kinds))]
    sizes = [{name: len(one["groups"]) for name, one in each.items()} for each in (then, now)]
    if sizes[0] != sizes[1]:
        return [describe_change("the number of parameter groups", *sizes)]
    return []


def _of_settings(
    then: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Return warnings of overridden settings, all changes, and the new record."""
    ignored: list[str] = []
    changed: list[str] = []
    records = {}
    for name, one in now.items():
        what = f"optimizer {name!r}" if name else f"optimizer {one['class']}"
        groups = []
        for first, last in zip(then[name]["groups"], one["groups"], strict=True):
            messages, every, group = diff_optimizer(what, first, last, _is_rate)
            ignored += [
                f"{text}; begin a new run with initial_weights for another" for text in messages
            ]
            changed += every
            groups.append(group)
        records[name] = {**one, "groups": groups}
    return [*dict.fromkeys(ignored)], [*dict.fromkeys(changed)], records


def _is_rate(path: str, *_: object) -> bool:
    return path == "lr"


def _losses(losses: Any) -> Any:
    """Return losses, those of torch.nn looked up by their names."""
    if isinstance(losses, Mapping):
        return {name: _losses(one) for name, one in losses.items()}
    if isinstance(losses, (list, tuple)):
        return [_losses(one) for one in losses]
    return loss_named(losses) if isinstance(losses, str) else losses


def _named(thing: Any) -> Any:
    """Return the name of a loss or a function, and its settings, as JSON."""
    if thing is None or isinstance(thing, str):
        return thing
    if isinstance(thing, Mapping) and not isinstance(thing, nn.Module):
        return {str(name): _named(one) for name, one in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_named(one) for one in thing]
    name = getattr(thing, "__qualname__", None)
    if isinstance(name, str):  # wherever it is defined
        return name.rpartition("<locals>.")[2]
    settings: dict[str, Any]
    if isinstance(thing, functools.partial):
        arguments = {f"argument {number}": each for number, each in enumerate(thing.args)}
        name, settings = _named(thing.func), arguments | thing.keywords
    else:
        name, settings = type(thing).__qualname__, getattr(thing, "__dict__", {})
    fields: dict[str, Any] = {
        key: value
        for key, value in settings.items()
        if isinstance(value, _PLAIN) and key != "training" and not key.startswith("_")
    }
    if isinstance(thing, nn.Module):
        fields.update((key, _named(part)) for key, part in thing.named_children())
        fields.update((key, held.tolist()) for key, held in thing.named_buffers(recurse=False))
    return {"class": name, **fields} if fields else name
