"""The optimizer and the schedulers that ``configure_optimizers`` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ....errors import ModelError, brief
from ..optimizers import check_optimizers
from ..schedulers import Planned
from .recognise import OWN_STEP, check_automatic


def configure_optimizers(module: Any) -> tuple[Optimizer, dict[str, Planned]]:
    """Return a module's optimizer, and its schedulers by number.

    Raises:
        ModelError: they are given in no form that is known here, or cannot be used.
    """
    given = module.configure_optimizers()
    check_automatic(module)
    optimizers, schedulers = _parse(given)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise ModelError(
            "configure_optimizers must return one optimizer, ([optimizer], [scheduler]), or a "
            "dictionary with 'optimizer' and 'lr_scheduler', but returned "
            f"{brief(given)}. To train with several, {OWN_STEP}"
        )
    check_optimizers({"": optimizers[0]}, module)
    planned = {str(number): _plan(config) for number, config in enumerate(schedulers)}
    for plan in planned.values():
        if plan.scheduler.optimizer is not optimizers[0]:
            raise ModelError(
                f"scheduler {type(plan.scheduler).__name__} is of an optimizer that "
                "configure_optimizers does not return"
            )
    return optimizers[0], planned


def _parse(given: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return the optimizers, and the schedulers as dictionaries."""
    if isinstance(given, (list, tuple)) and len(given) == 1:
        given = given[0]
    if isinstance(given, Mapping):
        _check_keys(given, ("optimizer", "lr_scheduler", "monitor"), {})
        scheduler = given.get("lr_scheduler")
        watched = {"monitor": given.get("monitor")}
        found = [] if scheduler is None else [{**watched, **_settings(scheduler)}]
        return [given.get("optimizer")], found
    pair = isinstance(given, (list, tuple)) and len(given) == 2
    if pair and isinstance(given[0], (list, tuple)):
        return list(given[0]), [_settings(one) for one in _listed(given[1])]
    return _listed(given), []


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _settings(given: Any) -> dict[str, Any]:
    return dict(given) if isinstance(given, Mapping) else {"scheduler": given}


def _plan(settings: Mapping[str, Any]) -> Planned:
    scheduler, interval = settings.get("scheduler"), settings.get("interval", "epoch")
    kinds = (LRScheduler, ReduceLROnPlateau)
    if not isinstance(scheduler, kinds) or interval not in ("step", "epoch"):
        raise ModelError(
            "a scheduler of configure_optimizers must be one of torch.optim.lr_scheduler, with "
            f"interval 'step' or 'epoch', got {brief(scheduler)} and {interval!r}"
        )
    watches = isinstance(scheduler, ReduceLROnPlateau)
    # A name is for Lightning's LearningRateMonitor only.
    defaults = {"frequency": 1, "strict": True, "reduce_on_plateau": watches}
    _check_keys(settings, ("scheduler", "interval", "monitor", "name"), defaults)
    return Planned(scheduler, interval, settings.get("monitor") if watches else None)


def _check_keys(
    given: Mapping[str, Any], known: Sequence[str], defaults: Mapping[str, object]
) -> None:
    """Check that a dictionary has known keys, and others at Lightning's defaults only."""
    for key, value in given.items():
        if key not in known and (key not in defaults or value != defaults[key]):
            raise ModelError(
                f"configure_optimizers returns {key!r} ({brief(value)}), which is not honoured "
                f"here; known are {', '.join(map(repr, known))}"
            )
