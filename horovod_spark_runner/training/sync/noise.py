"""The gradient noise scale: up to which global batch more rows save steps.

A rank's gradient is one of few rows, that of all ranks one of more. The less they are alike, the
more a step gains by more rows. Source: McCandlish et al. (2018), "An Empirical Model of Large-Batch
Training", appendix A.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from .allreduce import AllreduceSynchroniser
from .synchroniser import Collectives, Share, Tensor


class Tally(Protocol):
    """Numbers that steps add to."""

    def add(self, numbers: Sequence[Tensor]) -> None:
        """Add one number to each; may be called while a step is traced."""
        ...

    def read(self) -> list[float]:
        """Return the sums of all steps so far."""
        ...


@runtime_checkable
class SquaringCollectives(Collectives, Protocol):
    """Collectives of a framework that can tell how large gradients are."""

    def square(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squares of all numbers, as one number of single precision."""
        ...

    def tally(self, count: int) -> Tally:
        """Return so many sums, which begin with 0."""
        ...


class NoiseSynchroniser(AllreduceSynchroniser):
    """`Allreduce` that adds up the squares of gradients before and after ranks have met.

    Args:
        compression: of what is sent.
        collectives: sums of the framework's tensors.
    """

    def __init__(self, compression: str, collectives: SquaringCollectives) -> None:
        super().__init__(compression, collectives)
        self._squares = collectives
        self.tally = collectives.tally(2)

    def gradients(
        self,
        gradients: Sequence[Tensor | None],
        share: Share,
        name: str,
        place: str,
        along: Sequence[Tensor] = (),
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        own = self._squares.square([one for one in gradients if one is not None])
        result, summed = super().gradients(gradients, share, name, place, [*along, own])
        *others, every = summed
        self.tally.add([every, self._squares.square([one for one in result if one is not None])])
        return result, others


def noise_scale(small: float, large: float, batch_size: int, ranks: int) -> float | None:
    """Return the gradient noise scale in rows. Pure.

    Args:
        small: mean square of the gradients of single ranks.
        large: mean square of the gradients of all ranks.
        batch_size: rows of a rank.
        ranks: how many there are, 2 at least.

    Returns:
        The trace of the covariance of single rows' gradients over the square of their mean;
        ``None`` where the mean cannot be told from noise.
    """
    mean = (ranks * large - small) / (ranks - 1)
    spread = (small - large) * batch_size * ranks / (ranks - 1)
    return max(spread, 0.0) / mean if mean > 0 else None
