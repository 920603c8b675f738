"""Allreduce: every step adds up the gradients of all ranks, so that all make the same step.

Each rank's gradient is the mean over its own rows, so it counts by the rows it stands for: the sum
of ``rows · gradient`` over the ranks, divided by the sum of the rows, is the gradient of the global
batch, also when the last one is partial and spread unevenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .synchroniser import Collectives, Share, SyncedState, Tensor, Traffic, Variables, bytes_of_sum


class AllreduceSynchroniser:
    """All ranks hold the same model after every step; see `Synchroniser`.

    Args:
        compression: of what is sent, by the framework's own means.
        collectives: sums of the framework's tensors.
    """

    meets_in_every_step = in_step = True
    synced_state = SyncedState.EVERYTHING
    delays_gradients = False

    def __init__(self, compression: str, collectives: Collectives) -> None:
        self._collectives = collectives
        self._compression = collectives.compression(compression)

    def begin(self, variables: Variables) -> None:
        """There is nothing to note."""

    def before_step(self, step: int) -> None:
        """All steps are alike."""

    def gradients(
        self,
        gradients: Sequence[Tensor | None],
        share: Share,
        name: str,
        place: str,
        along: Sequence[Tensor] = (),
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        packed, contexts = [], []
        for i in present:
            small, context = self._compression.compress(share.term(gradients[i]))
            packed.append(small)
            contexts.append(context)
        self._count([*packed, *along], [*(gradients[i] for i in present), *along])
        # One group for all, so that the requests need no message of their own.
        summed = self._collectives.sum([*packed, *along], name)
        result: list[Tensor | None] = [None] * len(gradients)
        for i, tensor, context in zip(present, summed, contexts, strict=False):
            result[i] = share.total(self._compression.decompress(tensor, context))
        return result, summed[len(packed) :]

    def changes(self, changes: Sequence[Tensor], share: Share, name: str) -> list[Tensor]:
        self._count(changes, changes)
        summed = self._collectives.sum([share.term(change) for change in changes], name)
        return [share.total(change) for change in summed]

    def after_step(self, variables: Variables, step: int, rows: int) -> bool:
        return True

    def meet(self, variables: Variables) -> None:
        """All ranks hold the same model already."""

    def traffic(self) -> Traffic:
        return self._collectives.counted()

    def _count(self, sent: Sequence[Tensor], whole: Sequence[Tensor]) -> None:
        shared = self._collectives
        self._collectives.count(
            *(bytes_of_sum(shared.nbytes(tensors), shared.size) for tensors in (sent, whole))
        )

    def capture(self, rank: int) -> dict[str, np.ndarray]:
        return {}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """There is nothing to keep."""


# Large enough for a message, small enough to be sent early (benchmarks/overlap.py).
BUCKET_BYTES = 2 << 20


def in_buckets(sizes: Sequence[int], least: int) -> list[list[int]]:
    """Return the numbers of tensors in parts, in the order in which they come to be, about. Pure.

    The backward pass begins with what the forward pass has used last.

    Args:
        sizes: bytes of each tensor, in the order in which the forward pass uses them.
        least: a part ends with the tensor that makes it so many bytes.

    Returns:
        The parts, the one that leaves first at the beginning; in each, numbers go down.
    """
    buckets: list[list[int]] = []
    size = least
    for number in reversed(range(len(sizes))):
        if size >= least:
            buckets.append([])
            size = 0
        buckets[-1].append(number)
        size += sizes[number]
    return buckets
