"""Interface of a compression: ranks obtain an approximate sum of their gradients.

A codec knows neither frameworks nor MPI: it is given one flat array for all of an optimizer's
gradients (or those of a bucket of them) and a `Wire`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..cluster.worker.reporting import notify
from ..config.sync import Compression, PowerSGD, Threshold, TopK

Shape = tuple[int, ...]


@dataclass
class Place:
    """A rank's state for the gradients of one optimizer (or bucket).

    Attributes:
        name: the same on all ranks and in every step.
        shapes: of its tensors, in the order in which they lie in flat arrays.
        local: flat arrays of this rank's, by name: what it has not sent, say. Terms of a sum over
            the ranks.
        shared: arrays that are the same on all ranks.
    """

    name: str
    shapes: Sequence[Shape]
    local: dict[str, np.ndarray] = field(default_factory=dict)
    shared: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """The numbers of entries of its tensors."""
        return [int(np.prod(shape)) for shape in self.shapes]

    def split(self, flat: np.ndarray) -> list[np.ndarray]:
        """Return the parts of a flat array that belong to each tensor, without copies."""
        return np.split(flat, np.cumsum(self.sizes)[:-1])

    def local_array(self, name: str, like: np.ndarray) -> np.ndarray:
        """Return one of this rank's arrays; zeros as ``like`` where there is none yet."""
        array = self.local.get(name)
        return np.zeros_like(like) if array is None else array.astype(like.dtype, copy=False)


class Wire(Protocol):
    """Collectives of NumPy arrays; all ranks call the same in the same order.

    Attributes:
        size: number of ranks.
        rank: this one's.
        sent: bytes this rank has sent, as a ring sends them.
    """

    size: int
    rank: int
    sent: float

    def sum(self, array: np.ndarray) -> np.ndarray:
        """Return the sum over all ranks of arrays of one shape and type."""
        ...

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """Return all ranks' flat arrays, which are of one type and as long as each likes."""
        ...

    def swap(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Send each rank its part; return the parts that all have sent to this one.

        Args:
            parts: flat arrays of one type, one for each rank, as long as all ranks' for that one.
        """
        ...


class Codec(Protocol):
    """One compression; all ranks call the same in the same order.

    Attributes:
        keeps: what it keeps in a `Place` from step to step, as names in checkpoints begin (see
            `names_of`).
        sends_places: whether it says where entries are, by numbers of 32 bits.
    """

    @property
    def keeps(self) -> tuple[str, ...]: ...

    @property
    def sends_places(self) -> bool: ...

    def total(self, local: np.ndarray, place: Place, wire: Wire, step: int) -> np.ndarray:
        """Return an approximation of the sum over all ranks, bit-identical on each.

        Args:
            local: this rank's term of the sum, flat, of single precision or more.
            place: what is kept of it from step to step; changed.
            wire: leads to the other ranks.
            step: how many steps of the run are done.
        """
        ...


RESIDUAL, VELOCITY = "residual", "velocity"


def _moving(local: np.ndarray, place: Place, momentum: float) -> np.ndarray:
    """Apply and update this rank's momentum; return the term unchanged without one."""
    if not momentum:
        return local
    moved: np.ndarray = (
        place.local_array(VELOCITY, local) * np.asarray(momentum, local.dtype) + local
    )
    place.local[VELOCITY] = _numbers_of(moved)
    return moved


def _keeping(momentum: float) -> tuple[str, ...]:
    """Return the names in checkpoints of codecs' unsent state."""
    return tuple(f"sum/{name}" for name in ((RESIDUAL, VELOCITY) if momentum else (RESIDUAL,)))


def _numbers_of(values: np.ndarray) -> np.ndarray:
    """Return a copy with 0 for values that are not finite. Pure."""
    return np.where(np.isfinite(values), values, 0)


def parts_like(flat: np.ndarray, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the parts of a flat array, without copies, in the shapes of ``arrays``. Pure."""
    ends = np.cumsum([array.size for array in arrays])[:-1]
    parts = zip(np.split(flat, ends), arrays, strict=True)
    return [part.reshape(array.shape) for part, array in parts]


def _sum_whole(local: np.ndarray, place: Place, wire: Wire) -> np.ndarray:
    """Return the sum over all ranks, including their unsent residuals."""
    total = wire.sum(place.local_array(RESIDUAL, local) + local)
    place.local[RESIDUAL] = np.zeros_like(local)
    return total


def names_of(place: Place) -> Mapping[str, np.ndarray]:
    """Return a place's arrays for a checkpoint, by name.

    ``sum/…`` are terms of a sum over the ranks, ``shared/…`` the same on all.
    """
    local = {f"sum/{name}/{place.name}": array for name, array in place.local.items()}
    shared = {f"shared/{name}/{place.name}": array for name, array in place.shared.items()}
    return {**local, **shared}


class HalfCodec:
    """Half-precision `Codec`; rounding errors are dropped."""

    keeps: tuple[str, ...] = ()
    sends_places = False

    def total(self, local: np.ndarray, place: Place, wire: Wire, step: int) -> np.ndarray:
        if wire.size == 1:
            return local
        parts = wire.swap(np.array_split(rounded(local), wire.size))
        summed = np.zeros(parts[0].size, np.float32)
        for part in parts:
            summed += widened(part)
        return np.concatenate([widened(part) for part in wire.gather(rounded(summed))])


def rounded(values: np.ndarray) -> np.ndarray:
    """Return the nearest numbers of bfloat16, as their bits; of two, the even one. Pure."""
    single = values.astype(np.float32, copy=False)
    bits = single.view(np.uint32)
    odd = (bits >> 16) & 1
    nearest: np.ndarray = ((bits + (odd + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    nearest[np.isnan(single)] = 0x7FC0
    return nearest


def widened(bits: np.ndarray) -> np.ndarray:
    """Return numbers of bfloat16, given as their bits, as float32. Pure."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class TopKCodec:
    """Top-k `Codec`.

    Args:
        options: how many entries, and the momentum of each rank.
    """

    sends_places = True

    def __init__(self, options: TopK) -> None:
        self._options = options
        self.keeps = _keeping(options.momentum)

    def total(self, local: np.ndarray, place: Place, wire: Wire, step: int) -> np.ndarray:
        options = self._options
        local = _moving(local, place, options.momentum)
        held: np.ndarray = place.local_array(RESIDUAL, local) + local
        if wire.size == 1:  # there is nobody to send to, so nothing is held back
            place.local[RESIDUAL] = np.zeros_like(held)
            return held
        counts = _counts_of(place.sizes, _share_at(options, step))
        chosen = _chosen_of(place.split(held), counts)
        values = held[chosen]
        rest = _numbers_of(held)  # NaN is not kept; at least one entry is sent
        rest[chosen] = 0
        place.local[RESIDUAL] = rest
        if options.momentum:
            # Momentum that was sent would push once more in the direction of an old step.
            place.local[VELOCITY][chosen] = 0
        if sum(counts) * (values.itemsize + chosen.itemsize) * wire.size >= 2 * held.nbytes:
            return wire.sum(held - rest)  # shorter than indices and values
        total: np.ndarray = np.zeros_like(held)
        for message in wire.gather(_encode_entries(chosen, values)):
            where, what = _decode_entries(message, held.dtype)
            total[where] += what
        return total


def _share_at(options: TopK, step: int) -> float:
    """Return the share of entries that is sent after so many steps. Pure."""
    if step >= options.warmup_steps:
        return options.ratio
    return float(options.ratio ** (step / options.warmup_steps))


def _counts_of(sizes: Sequence[int], share: float) -> list[int]:
    """Return how many entries of each tensor are sent: one at least, of those that have any."""
    return [min(size, max(1, int(np.ceil(size * share)))) for size in sizes]


def _chosen_of(parts: Sequence[np.ndarray], counts: Sequence[int]) -> np.ndarray:
    """Return the places, in all parts together, of the largest entries of each, ascending. Pure."""
    indices, begin = [], 0
    for part, count in zip(parts, counts, strict=True):
        indices.append(largest(part, count) + begin)
        begin += part.size
    chosen: np.ndarray = np.concatenate(indices).astype(np.uint32)
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


def _encode_entries(chosen: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return places and values as bytes. Pure."""
    return np.concatenate([chosen.view(np.uint8), values.view(np.uint8)])


def _decode_entries(message: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the places and values of a message, of values of ``dtype``. Pure."""
    count = message.size // (4 + dtype.itemsize)
    return message[: 4 * count].view(np.uint32), message[4 * count :].view(dtype)


# The second factor of each matrix, with which the next step begins.
_FACTOR = "factor"
# A column is linearly dependent if less than this part of it is orthogonal to those before.
_NOTHING = 1e-6


class PowerCodec:
    """PowerSGD `Codec`.

    Args:
        options: how thin the factors are.
    """

    keeps = (f"sum/{RESIDUAL}", f"shared/{_FACTOR}")
    sends_places = False

    def __init__(self, options: PowerSGD) -> None:
        self._options = options

    def total(self, local: np.ndarray, place: Place, wire: Wire, step: int) -> np.ndarray:
        if wire.size == 1 or step < self._options.warmup_steps:
            return _sum_whole(local, place, wire)
        held = place.local_array(RESIDUAL, local) + local
        parts = place.split(held)
        forms = [_matrix_form(shape, self._options.rank) for shape in place.shapes]
        thin = [n for n, form in enumerate(forms) if form is not None]
        matrices = {n: parts[n].reshape(forms[n] or ()) for n in thin}
        bases = {n: self._basis(place, n, matrices[n]) for n in thin}
        # One message: the first factors, and the tensors that are sent whole.
        first: list[np.ndarray] = list(parts)
        for n in thin:
            first[n] = matrices[n] @ bases[n]
        summed = _sum(first, wire)
        if not _finite(summed):  # the same on all ranks
            # Nothing was made of what was sent: numbers are kept, and what is none is not.
            place.local[RESIDUAL] = held if _finite(first) else np.zeros_like(held)
            return np.full_like(held, np.nan)
        left = {n: _orthonormal(summed[n]) for n in thin}
        rights = {n: matrices[n].T @ left[n] for n in thin}
        sums = dict(zip(thin, _sum([rights[n] for n in thin], wire), strict=True))
        total, rest = list(summed), [np.zeros_like(part) for part in parts]
        for n in thin:
            place.shared[_name(n)] = sums[n]
            total[n] = product(left[n], sums[n]).reshape(-1)
            rest[n] = (matrices[n] - left[n] @ rights[n].T).reshape(-1)
        place.local[RESIDUAL] = np.concatenate(rest)
        return np.concatenate(total)

    def _basis(self, place: Place, number: int, matrix: np.ndarray) -> np.ndarray:
        """Return the orthonormal right basis of a matrix, from the previous step where possible."""
        rank = min(self._options.rank, *matrix.shape)
        shape = (matrix.shape[1], rank)
        stream = np.random.default_rng([zlib.crc32(place.name.encode()), number])
        basis: np.ndarray = stream.standard_normal(shape).astype(matrix.dtype)
        before = place.shared.get(_name(number))
        if before is not None and before.shape == shape:
            # A zero or NaN basis would stay so for ever.
            usable = before.any(axis=0) & np.isfinite(before).all(axis=0)
            basis = np.where(usable, before, basis).astype(matrix.dtype)
        return _orthonormal(basis)


def _name(number: int) -> str:
    return f"{_FACTOR}/{number:05d}"


def _finite(arrays: Sequence[np.ndarray]) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays)


def _sum(arrays: Sequence[np.ndarray], wire: Wire) -> list[np.ndarray]:
    """Return the sums over the ranks, by one message."""
    if not arrays:
        return []
    flat = wire.sum(np.concatenate([array.reshape(-1) for array in arrays]))
    return parts_like(flat, arrays)


def _matrix_form(shape: Shape, rank: int) -> tuple[int, int] | None:
    """Return the matrix nearest to a square that a tensor can be read as. Pure.

    ``None`` if its factors would be no smaller than itself.
    """
    size = int(np.prod(shape))
    forms = [(int(np.prod(shape[:cut])), int(np.prod(shape[cut:]))) for cut in range(1, len(shape))]
    if not forms or not size:
        return None
    rows, columns = min(forms, key=sum)
    return (rows, columns) if min(rank, rows, columns) * (rows + columns) < size else None


def _orthonormal(matrix: np.ndarray) -> np.ndarray:
    """Return the columns made orthogonal and of length 1, by Gram and Schmidt, twice. Pure.

    A column that others make up is 0. The result is the same to the bit on all processors.
    """
    columns: list[np.ndarray] = []
    for column in matrix.T.astype(np.float64):
        length = np.sqrt(_dot(column, column))
        for _ in range(2):
            for other in columns:
                column = column - _dot(other, column) * other
        left = np.sqrt(_dot(column, column))
        # NaN stays NaN, and shows.
        columns.append(np.zeros_like(column) if left <= _NOTHING * length else column / left)
    return np.stack(columns, axis=1).astype(matrix.dtype)


def _dot(one: np.ndarray, other: np.ndarray) -> np.floating:
    accumulated: np.floating = np.add.accumulate(one * other)[-1]
    return accumulated


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return ``left`` times the transpose of ``right``, the same to the bit everywhere. Pure."""
    total: np.ndarray = left[:, 0, None] * right[None, :, 0]
    for column in range(1, left.shape[1]):
        total += left[:, column, None] * right[None, :, column]
    return total


_THRESHOLD = "threshold"
# Factor of the threshold per step: it halves in twenty.
_DECAY = 0.5 ** (1 / 20)
# The part of what it began with that the threshold does not fall below: where gradients are 0 for
# long, it would end as 0.
_LEAST = 1e-6
# Steps between clippings of the residual, as in Deeplearning4j.
_CUT_EVERY = 5
# Encodings of a message: by index, two bits per entry, or "not finite".
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
        self.keeps = (*_keeping(options.momentum), f"shared/{_THRESHOLD}")

    def total(self, local: np.ndarray, place: Place, wire: Wire, step: int) -> np.ndarray:
        options = self._options
        local = _moving(local, place, options.momentum)
        if wire.size == 1 or step < options.warmup_steps:
            return _sum_whole(local, place, wire)
        saved = place.shared.get(_THRESHOLD)
        threshold = options.start if saved is None else float(saved)
        held: np.ndarray = place.local_array(RESIDUAL, local) + local
        value = held.dtype.type(threshold)
        positive, negative = held >= value, held <= -value
        rest = held - value * positive + value * negative
        total: np.ndarray = np.zeros_like(held)
        count = 0
        finite = bool(np.isfinite(held).all())
        for message in wire.gather(_encode_signs(positive, negative, finite=finite)):
            indices = _decode_signs(message, held.size)
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


def _encode_signs(positive: np.ndarray, negative: np.ndarray, *, finite: bool) -> np.ndarray:
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


def _decode_signs(message: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the places of positive and negative entries, or ``None`` if one is no number. Pure."""
    kind, body = int(message[0]), message[1:]
    if kind == _NOT_FINITE:
        return None
    if kind == _PLACES:
        below = body >= _NEGATIVE
        return body[~below], body[below] & ~_NEGATIVE
    bits = np.unpackbits(body.view(np.uint8).reshape(2, -1), axis=1, count=size)
    return np.flatnonzero(bits[0]), np.flatnonzero(bits[1])
