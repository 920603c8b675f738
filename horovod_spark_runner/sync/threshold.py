"""Entries beyond a threshold, which the others take for their value; see `Threshold`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..cluster.worker.reporting import notify
from ..config.compression import Compression, Threshold
from .codec import RESIDUAL, Place, keeping, moving, whole

if TYPE_CHECKING:  # loads MPI, which Spark's Python workers must not
    from .wire import Wire

_THRESHOLD = "threshold"
# By which the threshold moves in a step: to the half in twenty.
_DECAY = 0.5 ** (1 / 20)
# The part of what it began with that the threshold does not fall below: where gradients are 0 for
# long, it would end as 0.
_LEAST = 1e-6
# Steps from one cut of what is left over to the next, as in Deeplearning4j.
_CUT_EVERY = 5
# How a message says its entries: by places, by two bits for each, or that one is no number.
_PLACES, _BITS, _NOT_FINITE = range(3)
_NEGATIVE = np.uint32(1 << 31)


class ThresholdCodec:
    """Threshold `Codec`. The threshold is the same on all ranks, since all read all messages.

    Args:
        options: the threshold to begin with, and how it moves.
    """

    sends_places = True

    def __init__(self, options: Threshold) -> None:
        self._options = options
        self.keeps = (*keeping(options.momentum), f"shared/{_THRESHOLD}")

    def total(self, local: np.ndarray, place: Place, wire: Wire, step: int) -> np.ndarray:
        options = self._options
        local = moving(local, place, options.momentum)
        if wire.size == 1 or step < options.warmup_steps:
            return whole(local, place, wire)
        saved = place.shared.get(_THRESHOLD)
        threshold = options.start if saved is None else float(saved)
        held: np.ndarray = place.local_array(RESIDUAL, local) + local
        value = held.dtype.type(threshold)
        positive, negative = held >= value, held <= -value
        rest = held - value * positive + value * negative
        total: np.ndarray = np.zeros_like(held)
        count = 0
        finite = bool(np.isfinite(held).all())
        for message in wire.gather(encode(positive, negative, finite=finite)):
            indices = decode(message, held.size)
            if indices is None:  # as it would be without compression
                total[:] = np.nan
                continue
            total[indices[0]] += value
            total[indices[1]] -= value
            count += indices[0].size + indices[1].size
        place.local[RESIDUAL] = rest if finite else np.zeros_like(rest)
        if options.clip_residual is not None and step % _CUT_EVERY == _CUT_EVERY - 1:
            most = held.dtype.type(options.clip_residual * threshold)
            place.local[RESIDUAL] = np.clip(place.local[RESIDUAL], -most, most)
        share = count / (wire.size * max(held.size, 1))
        place.shared[_THRESHOLD] = np.array(_adapted(options, threshold, share))
        return total


def notice_late_momentum(compression: Compression, *, moves: bool) -> None:
    """Warn that momentum on late gradients may make the training diverge.

    Args:
        compression: what is chosen.
        moves: whether an optimizer has momentum.
    """
    if isinstance(compression, Threshold) and moves:
        notify(
            "the optimizer's momentum adds to what compression=Threshold(…) sends late, which may "
            "make the training diverge. Threshold(…, momentum=0.9) with an optimizer without "
            "momentum sends the optimizer's steps, as Deeplearning4j does"
        )


def _adapted(options: Threshold, threshold: float, share: float) -> float:
    """Return the next step's threshold, after one in which a share of entries was sent. Pure."""
    low, high = options.target_sparsity
    if share > high:
        return threshold / _DECAY
    return max(threshold * _DECAY, options.start * _LEAST) if share < low else threshold


def encode(positive: np.ndarray, negative: np.ndarray, *, finite: bool) -> np.ndarray:
    """Return the shorter of two ways to say which entries are sent, and their signs. Pure."""
    if not finite:
        return np.array([_NOT_FINITE], np.uint32)
    above = np.flatnonzero(positive).astype(np.uint32)
    below = np.flatnonzero(negative).astype(np.uint32) | _NEGATIVE
    words = -(-positive.size // 32)
    if above.size + below.size <= 2 * words:
        return np.concatenate([np.array([_PLACES], np.uint32), above, below])
    bits = np.zeros((2, 32 * words), bool)
    bits[0, : positive.size], bits[1, : positive.size] = positive, negative
    packed = np.packbits(bits, axis=1).reshape(-1).view(np.uint32)
    return np.concatenate([np.array([_BITS], np.uint32), packed])


def decode(message: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the places of positive and negative entries, or ``None`` if one is no number. Pure."""
    kind, body = int(message[0]), message[1:]
    if kind == _NOT_FINITE:
        return None
    if kind == _PLACES:
        below = body >= _NEGATIVE
        return body[~below], body[below] & ~_NEGATIVE
    bits = np.unpackbits(body.view(np.uint8).reshape(2, -1), axis=1, count=size)
    return np.flatnonzero(bits[0]), np.flatnonzero(bits[1])
