"""The optimizer and the schedulers that ``configure_optimizers`` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ....errors import ModelError, brief
from ..optimizers import check_optimizers
from ..schedulers import Planned
from .recognise import CUSTOM_STEP_ADVICE, check_automatic


def configure_optimizers(module: Any) -> tuple[Optimizer, dict[str, Planned]]:
    """Return a module's optimizer, and its schedulers by number.

    Raises:
        ModelError: they are given in no form that is known here, or cannot be used.
    """
    returned = module.configure_optimizers()
    check_automatic(module)
    optimizers, schedulers = _parse(returned)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise ModelError(
            "configure_optimizers must return one optimizer, ([optimizer], [scheduler]), or a "
            "dictionary with 'optimizer' and 'lr_scheduler', but returned "
            f"{brief(returned)}. To train with several, {CUSTOM_STEP_ADVICE}"
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


def _parse(returned: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return the optimizers, and the schedulers as dictionaries."""
    if isinstance(returned, (list, tuple)) and len(returned) == 1:
        returned = returned[0]
    if isinstance(returned, Mapping):
        _check_keys(returned, ("optimizer", "lr_scheduler", "monitor"), {})
        scheduler = returned.get("lr_scheduler")
        watched = {"monitor": returned.get("monitor")}
        settings = [] if scheduler is None else [{**watched, **_settings(scheduler)}]
        return [returned.get("optimizer")], settings
    pair = isinstance(returned, (list, tuple)) and len(returned) == 2
    if pair and isinstance(returned[0], (list, tuple)):
        return list(returned[0]), [_settings(one) for one in _listed(returned[1])]
    return _listed(returned), []


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _settings(scheduler: Any) -> dict[str, Any]:
    return dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}


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
    config: Mapping[str, Any], supported: Sequence[str], defaults: Mapping[str, object]
) -> None:
    """Check that a dictionary has supported keys, and others at Lightning's defaults only."""
    for key, value in config.items():
        if key not in supported and (key not in defaults or value != defaults[key]):
            raise ModelError(
                f"configure_optimizers returns {key!r} ({brief(value)}), which is not honoured "
                f"here; known are {', '.join(map(repr, supported))}"
            )
