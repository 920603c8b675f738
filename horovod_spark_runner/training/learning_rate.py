"""Learning-rate scaling and warm-up.

With N ranks a global batch is N times as large; scaling the rate by N, reached over a few epochs
of warm-up, keeps what training gives (Goyal et al., "Accurate, Large Minibatch SGD: Training
ImageNet in 1 Hour", 2017). ``"sqrt"`` scales by the square root (Krizhevsky, 2014).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from ..errors import ModelError
from ..settings.training import FitOptions
from .optimizers import leaf_optimizers

logger = logging.getLogger(__name__)


def scale_factor(scaling: str, world: int) -> float:
    """Return what the learning rate is multiplied by after the warm-up. Pure."""
    return {"none": 1.0, "linear": float(world), "sqrt": math.sqrt(world)}[scaling]


def warmup_factor(options: FitOptions, world: int, progress: float) -> float:
    """Return what the model's learning rate is multiplied by. Pure.

    Args:
        options: scaling and length of the warm-up.
        world: number of ranks.
        progress: epochs trained so far, with fractions.
    """
    target = scale_factor(options.lr_scaling, world)
    if progress >= options.warmup_epochs:
        return target
    return 1.0 + (target - 1.0) * progress / options.warmup_epochs


class LearningRate:
    """Sets the learning rates of a model during the warm-up; leaves them alone after that.

    A callback that sets a rate has the last word: what it sets is neither scaled nor warmed up.

    Args:
        optimizers: the model's optimizers.
        options: scaling and length of the warm-up.
        world: number of ranks.
        state: `state` of the run that is resumed. Its rates came with the optimizers and are not
            scaled again; callbacks may have changed them since.

    Raises:
        ModelError: scaling is asked for, but a rate is a schedule.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        options: FitOptions,
        world: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._optimizers: list[Any] = []
        self._options = options
        self._world = world
        if options.lr_scaling == "none":
            self._base: list[float] = []
            self._last: list[float] = []
            self._done = True
            return
        self._optimizers = leaf_optimizers(optimizers)
        for optimizer in self._optimizers:
            if not hasattr(optimizer._learning_rate, "assign"):
                raise ModelError(
                    f"lr_scaling={options.lr_scaling!r} needs a model compiled with a plain "
                    f"learning rate, but that of {optimizer.name!r} is a "
                    f"{type(optimizer._learning_rate).__name__}; scale the schedule in model_fn "
                    "instead"
                )
        rates = self._rates()
        state = state or {"base": rates, "last": rates, "done": False}
        self._base, self._last = list(state["base"]), list(state["last"])
        self._done = bool(state["done"])

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed run needs to know, as JSON."""
        return {"base": self._base, "last": self._last, "done": self._done}

    def before_step(self, progress: float) -> None:
        """Set the rates for the step that begins after ``progress`` epochs."""
        if self._done:
            return
        if self._rates() != self._last:
            logger.warning(
                "a callback set the learning rate after %.2f epochs; lr_scaling leaves it so",
                progress,
            )
            self._done = True
            return
        self._done = progress >= self._options.warmup_epochs
        factor = warmup_factor(self._options, self._world, progress)
        for optimizer, base in zip(self._optimizers, self._base, strict=True):
            optimizer.learning_rate = base * factor
        self._last = self._rates()

    def _rates(self) -> list[float]:
        return [float(optimizer.learning_rate) for optimizer in self._optimizers]
