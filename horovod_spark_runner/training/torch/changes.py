"""What makes a PyTorch model this one, and how it differs from the one of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..changes import ModelChanges, joined, otherwise
from .optimizers import describe_optimizer
from .schedulers import Schedulers
from .torch_model import TorchModel

# What is trained with as it is now, and warned of.
_TRAINED_WITH = ("loss", "schedule", "autocast", "clip_norm", "clip_value")


def describe(
    model: TorchModel,
    module: nn.Module,
    optimizers: Mapping[str, Optimizer],
    schedulers: Schedulers,
) -> dict[str, Any]:
    """Return what makes a model this one, as JSON."""
    return {
        "module": type(module).__qualname__,
        "optimizers": {name: describe_optimizer(one) for name, one in optimizers.items()},
        "schedulers": schedulers.describe(),
        "loss": _named(model.loss),
        "train_step": _named(model.train_step),
        "schedule": model.schedule,
        "autocast": model.autocast,
        "clip_norm": model.clip_norm,
        "clip_value": model.clip_value,
        "sync_batch_norm": model.sync_batch_norm,
    }


def compare(then: Mapping[str, Any], now: Mapping[str, Any], *, in_epoch: bool) -> ModelChanges:
    """Compare two results of `describe`; see `Trainee.compare`."""
    record = dict(now)
    if not then:
        return ModelChanges(None, record=record)
    refused = [
        otherwise(name, then.get(name), now[name])
        for name in ("module", "schedulers", "sync_batch_norm")
        if then.get(name) != now[name]
    ]
    refused += _of_optimizers(then.get("optimizers", {}), now["optimizers"])
    warnings = [
        otherwise(name, then[name], now[name]) + ": what is left is trained with the new one"
        for name in (*_TRAINED_WITH, "train_step")
        if name in then and then[name] != now[name]
    ]
    warnings += _of_rates(then.get("optimizers", {}), now["optimizers"])
    return ModelChanges(joined(refused) if refused else None, tuple(warnings), record=record)


def _of_optimizers(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    kinds = [{name: one["class"] for name, one in each.items()} for each in (then, now)]
    if kinds[0] != kinds[1]:
        return [otherwise("optimizer", *(", ".join(kind.values()) for kind in kinds))]
    sizes = [{name: len(one["groups"]) for name, one in each.items()} for each in (then, now)]
    if sizes[0] != sizes[1]:
        return [otherwise("the number of parameter groups", *sizes)]
    return []


def _of_rates(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for name, one in now.items():
        for first, last in zip(then.get(name, {}).get("groups", ()), one["groups"], strict=False):
            if first.get("lr") != last.get("lr"):
                what = f"the learning rate of optimizer {name!r}" if name else "the learning rate"
                text = otherwise(what, first.get("lr"), last.get("lr"))
                found.append(f"{text}: a resumed run keeps the checkpoint's")
    return list(dict.fromkeys(found))


def _named(thing: Any) -> Any:
    """Return what a loss or a function is called, without what differs from call to call."""
    if thing is None or isinstance(thing, str):
        return thing
    if isinstance(thing, Mapping):
        return {str(name): _named(one) for name, one in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_named(one) for one in thing]
    return getattr(thing, "__qualname__", None) or type(thing).__qualname__
