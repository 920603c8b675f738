"""Learning-rate scaling and warm-up.

With N ranks a global batch is N times as large; scaling the rate by N, reached over a few epochs
of warm-up, keeps what training gives (Goyal et al., "Accurate, Large Minibatch SGD: Training
ImageNet in 1 Hour", 2017). ``"sqrt"`` scales by the square root (Krizhevsky, 2014).
"""

from __future__ import annotations

import math
from typing import Any

from ..config import FitOptions
from ..errors import ModelError


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
    """Sets the learning rate of a model during the warm-up; leaves it alone after that.

    Args:
        optimizer: the model's optimizer.
        options: scaling and length of the warm-up.
        world: number of ranks.
        state: `state` of the run that is resumed. Its rate came with the optimizer and is not
            scaled again; callbacks may have changed it since.

    Raises:
        ModelError: scaling is asked for, but the rate is a schedule.
    """

    def __init__(
        self, optimizer: Any, options: FitOptions, world: int, state: dict[str, Any] | None = None
    ) -> None:
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self._options = options
        self._world = world
        rate = self._optimizer._learning_rate
        if options.lr_scaling == "none":
            self._base, self._done = 0.0, True
        elif not hasattr(rate, "assign"):
            raise ModelError(
                f"lr_scaling={options.lr_scaling!r} needs a model compiled with a plain learning "
                f"rate, but it is a {type(rate).__name__}; scale the schedule in model_fn instead"
            )
        else:
            state = state or {"base": float(self._optimizer.learning_rate), "done": False}
            self._base, self._done = float(state["base"]), bool(state["done"])

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed run needs to know, as JSON."""
        return {"base": self._base, "done": self._done}

    def before_step(self, progress: float) -> None:
        """Set the rate for the step that begins after ``progress`` epochs."""
        if not self._done:
            self._done = progress >= self._options.warmup_epochs
            factor = warmup_factor(self._options, self._world, progress)
            self._optimizer.learning_rate = self._base * factor
