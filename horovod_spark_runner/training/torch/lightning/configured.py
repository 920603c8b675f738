"""What ``configure_optimizers`` returns: optimizers, and when their schedulers step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ....errors import ModelError, brief
from ..optimizers import check_optimizers
from ..schedulers import Planned

_FORMS = (
    "an optimizer, a list of some, a pair of lists of optimizers and schedulers, or a dictionary "
    "with 'optimizer' and 'lr_scheduler'"
)
_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")


def configured(module: Any) -> tuple[dict[str, Optimizer], dict[str, Planned]]:
    """Return a module's optimizers by name, a single one as ``""``, and its schedulers.

    Raises:
        ModelError: they are given in no form that Lightning knows, or cannot be used.
    """
    optimizers, schedulers = _parsed(module.configure_optimizers())
    if module.automatic_optimization and len(optimizers) > 1:
        raise ModelError(
            f"configure_optimizers gives {len(optimizers)} optimizers; several need "
            "automatic_optimization = False, and a training_step that steps with each"
        )
    names = [""] if len(optimizers) == 1 else [str(number) for number in range(len(optimizers))]
    named = dict(zip(names, optimizers, strict=True))
    check_optimizers(named, module)
    planned = {
        str(number): _planned(one, monitor, manual=not module.automatic_optimization)
        for number, (one, monitor) in enumerate(schedulers)
    }
    for plan in planned.values():
        if not any(plan.scheduler.optimizer is optimizer for optimizer in optimizers):
            raise ModelError(
                f"scheduler {type(plan.scheduler).__name__} is of an optimizer that "
                "configure_optimizers does not return"
            )
    return named, planned


def _parsed(given: Any) -> tuple[list[Optimizer], list[tuple[Any, str | None]]]:
    """Return the optimizers, and each scheduler with what it watches if it does not say so."""
    if isinstance(given, Optimizer):
        return [given], []
    if isinstance(given, Mapping):
        return _of_dictionaries([given])
    if isinstance(given, Sequence) and given:
        if all(isinstance(one, Optimizer) for one in given):
            return list(given), []
        if all(isinstance(one, Mapping) for one in given):
            return _of_dictionaries(given)
        if len(given) == 2 and isinstance(given[0], (list, tuple)):
            schedulers = given[1] if isinstance(given[1], (list, tuple)) else [given[1]]
            if all(isinstance(one, Optimizer) for one in given[0]):
                return list(given[0]), [(one, None) for one in schedulers]
    raise ModelError(f"configure_optimizers must return {_FORMS}, but returned {brief(given)}")


def _of_dictionaries(
    given: Sequence[Mapping[str, Any]],
) -> tuple[list[Optimizer], list[tuple[Any, str | None]]]:
    for one in given:
        unknown = [key for key in one if key not in ("optimizer", "lr_scheduler", "monitor")]
        if unknown or not isinstance(one.get("optimizer"), Optimizer):
            what = f"knows no {unknown[0]!r}" if unknown else "needs an 'optimizer'"
            raise ModelError(
                f"a dictionary of configure_optimizers {what}; it has {', '.join(map(repr, one))}"
            )
    return (
        [one["optimizer"] for one in given],
        [(one["lr_scheduler"], one.get("monitor")) for one in given if one.get("lr_scheduler")],
    )


def _planned(given: Any, monitor: str | None, *, manual: bool) -> Planned:
    config = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    unknown = [key for key in config if key not in _KEYS]
    scheduler = config.get("scheduler")
    if unknown or not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
        what = (
            f"knows no {unknown[0]!r}" if unknown else f"needs a scheduler, not {brief(scheduler)}"
        )
        raise ModelError(f"the lr_scheduler of configure_optimizers {what}")
    interval, frequency = config.get("interval", "epoch"), config.get("frequency", 1)
    if interval not in ("step", "epoch"):
        raise ModelError(f"the interval of an lr_scheduler is 'step' or 'epoch', not {interval!r}")
    if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
        raise ModelError(f"the frequency of an lr_scheduler is a count, not {brief(frequency)}")
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    if config.get("reduce_on_plateau", plateau) is not plateau:
        raise ModelError("reduce_on_plateau is for ReduceLROnPlateau, which looks at a result")
    watched = config.get("monitor") or monitor
    if manual:  # training_step steps it itself
        return Planned(scheduler, "never")
    if plateau and watched is None:
        raise ModelError(
            "ReduceLROnPlateau needs a 'monitor', the name of a result that is logged: "
            "{'scheduler': …, 'monitor': 'val_loss'}"
        )
    return Planned(
        scheduler, interval, frequency, watched if plateau else None, config.get("strict", True)
    )
