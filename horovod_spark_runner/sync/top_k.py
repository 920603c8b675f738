"""Top-k: the entries with the largest absolute values; see `TopK`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..config.compression import TopK
from .codec import RESIDUAL, VELOCITY, Place, keeping, moving, numbers_of
from .wire import Wire


class TopKCodec:
    """See `Codec`.

    Args:
        options: how many entries, and the momentum of each rank.
    """

    sends_places = True

    def __init__(self, options: TopK) -> None:
        self._options = options
        self.keeps = keeping(options.momentum)

    def total(self, own: np.ndarray, place: Place, wire: Wire, step: int) -> np.ndarray:
        options = self._options
        own = moving(own, place, options.momentum)
        held: np.ndarray = place.kept(RESIDUAL, own) + own
        if wire.size == 1:  # there is nobody to send to, so nothing is held back
            place.own[RESIDUAL] = np.zeros_like(held)
            return held
        counts = counts_of(place.sizes, share_at(options, step))
        chosen = chosen_of(place.split(held), counts)
        values = held[chosen]
        rest = numbers_of(held)  # what is no number is not kept, and one at least is sent
        rest[chosen] = 0
        place.own[RESIDUAL] = rest
        if options.momentum:
            # Momentum that was sent would push once more in the direction of an old step.
            place.own[VELOCITY][chosen] = 0
        if sum(counts) * (values.itemsize + chosen.itemsize) * wire.size >= 2 * held.nbytes:
            return wire.sum(held - rest)  # which is shorter than places and values
        total: np.ndarray = np.zeros_like(held)
        for message in wire.gather(encode(chosen, values)):
            where, what = decode(message, held.dtype)
            total[where] += what
        return total


def share_at(options: TopK, step: int) -> float:
    """Return the share of entries that is sent after so many steps. Pure."""
    if step >= options.warmup_steps:
        return options.ratio
    return float(options.ratio ** (step / options.warmup_steps))


def counts_of(sizes: Sequence[int], share: float) -> list[int]:
    """Return how many entries of each tensor are sent: one at least, of those that have any."""
    return [min(size, max(1, int(np.ceil(size * share)))) for size in sizes]


def chosen_of(parts: Sequence[np.ndarray], counts: Sequence[int]) -> np.ndarray:
    """Return the places, in all parts together, of the largest entries of each, ascending. Pure."""
    found, begin = [], 0
    for part, count in zip(parts, counts, strict=True):
        found.append(largest(part, count) + begin)
        begin += part.size
    chosen: np.ndarray = np.concatenate(found).astype(np.uint32)
    return chosen


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the places of so many entries with the largest absolute values, ascending. Pure.

    Of equal ones, the first; what is no number counts as the largest, so that it is not hidden.
    """
    if count >= values.size:
        return np.arange(values.size)
    sizes = np.abs(values)
    sizes[np.isnan(sizes)] = np.inf
    least = np.partition(sizes, values.size - count)[values.size - count]
    above = np.flatnonzero(sizes > least)
    equal = np.flatnonzero(sizes == least)[: count - above.size]
    return np.sort(np.concatenate([above, equal]))


def encode(chosen: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return places and values as bytes. Pure."""
    return np.concatenate([chosen.view(np.uint8), values.view(np.uint8)])


def decode(message: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the places and values of a message, of values of ``dtype``. Pure."""
    count = message.size // (4 + dtype.itemsize)
    return message[: 4 * count].view(np.uint32), message[4 * count :].view(dtype)
