"""Learning-rate scaling and warm-up.

With N ranks a global batch is N times as large; scaling the rate by N, reached over a few epochs
of warm-up, keeps what training gives (Goyal et al., "Accurate, Large Minibatch SGD: Training
ImageNet in 1 Hour", 2017). ``"sqrt"`` scales by the square root (Krizhevsky, 2014).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..config.training import FitOptions
from ..typed_json import JsonObject

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)


class Rates(Protocol):
    """The learning rates of a model's optimizers, in the same order on all ranks."""

    def read(self) -> list[float]:
        """Return the rates as they are now."""
        ...

    def write(self, values: Sequence[float]) -> None:
        """Set the rates."""
        ...


def _warmup_factor(options: FitOptions, world: int, progress: float) -> float:
    """Return the factor of the model's learning rate. Pure.

    Args:
        options: scaling and length of the warm-up.
        world: number of ranks.
        progress: epochs trained so far, with fractions.
    """
    target = {"none": 1.0, "linear": float(world), "sqrt": math.sqrt(world)}[options.lr_scaling]
    if progress >= options.warmup_epochs:
        return target
    return 1.0 + (target - 1.0) * progress / options.warmup_epochs


class LearningRate:
    """Sets the learning rates of a model during the warm-up; leaves them alone after that.

    Without a warm-up the rate is scaled before any callback is called. A callback that sets a rate
    has the last word: what it sets is neither scaled nor warmed up. One that sets what the rate is
    anyway is seen in a later epoch, when it sets another; it is reported.

    Args:
        rates: the rates; ``None`` if they are not to be scaled.
        options: scaling and length of the warm-up.
        world: number of ranks.
        state: `state` of the run that is resumed. Its rates came with the optimizers and are not
            scaled again; callbacks may have changed them since.
    """

    def __init__(
        self,
        rates: Rates | None,
        options: FitOptions,
        world: int,
        state: JsonObject | None = None,
    ) -> None:
        self._options = options
        self._world = world
        self._base: list[float] = []
        # The rates set last; empty once a callback has set others.
        self._last: list[float] = []
        self._done = rates is None
        self._epoch: int | None = None
        self._rates = rates
        if rates is None:
            return
        now = rates.read()
        saved = state or {"base": now, "last": now, "done": False}
        self._base, self._last = list(saved["base"]), list(saved["last"])
        self._done = bool(saved["done"])
        if not state and not options.warmup_epochs:
            self._scale(_warmup_factor(options, world, 0.0))  # callbacks find it so

    @property
    def state(self) -> JsonObject:
        """State for a resumed run, as JSON."""
        return {"base": self._base, "last": self._last, "done": self._done}

    def share(self, world: MPI.Comm) -> None:
        """Broadcast the rates of rank 0, whose `state` holds for all; all ranks must call it.

        Ranks that make steps by themselves are not equally far in the warm-up, and have rates of
        their own in a checkpoint.
        """
        if self._rates is not None:
            self._rates.write(world.bcast(self._rates.read()))

    def before_step(self, progress: float) -> None:
        """Set the rates for the step that begins after ``progress`` epochs."""
        epoch = int(progress)
        if self._rates is None or not self._last or (self._done and epoch == self._epoch):
            return
        self._epoch = epoch
        now = self._rates.read()
        if now != self._last:
            logger.warning(
                "a callback set the learning rate from %s to %s after %.2f epochs; lr_scaling "
                "leaves it so%s: what a callback does not compute from the scaled rate is unscaled",
                _shown(self._last),
                _shown(now),
                progress,
                "" if progress >= self._options.warmup_epochs else ", and the warm-up ends here",
            )
            self._done, self._last = True, []
            return
        if self._done:
            return
        self._done = progress >= self._options.warmup_epochs
        self._scale(_warmup_factor(self._options, self._world, progress))

    def _scale(self, factor: float) -> None:
        assert self._rates is not None
        self._rates.write([base * factor for base in self._base])
        self._last = self._rates.read()


def _shown(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in rates)
