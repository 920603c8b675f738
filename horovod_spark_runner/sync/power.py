"""PowerSGD: gradients of matrices as two thin factors; see `PowerSGD`.

What all ranks compute from factors is the same on each to the bit, whatever their processors: it is
made of products and sums in an order of its own, not by libraries that choose one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ..config.compression import PowerSGD
from .codec import RESIDUAL, Place, Shape, parts_like, whole
from .wire import Wire

# The second factor of each matrix, with which the next step begins.
_FACTOR = "factor"
# What is left of a column by those before it counts as nothing below this part of it.
_NOTHING = 1e-6


class PowerCodec:
    """See `Codec`.

    Args:
        options: how thin the factors are.
    """

    keeps = (f"sum/{RESIDUAL}", f"shared/{_FACTOR}")
    sends_places = False

    def __init__(self, options: PowerSGD) -> None:
        self._options = options

    def total(self, own: np.ndarray, place: Place, wire: Wire, step: int) -> np.ndarray:
        if wire.size == 1 or step < self._options.warmup_steps:
            return whole(own, place, wire)
        held = place.kept(RESIDUAL, own) + own
        parts = place.split(held)
        forms = [matrix_form(shape, self._options.rank) for shape in place.shapes]
        thin = [n for n, form in enumerate(forms) if form is not None]
        matrices = {n: parts[n].reshape(forms[n] or ()) for n in thin}
        bases = {n: self._basis(place, n, matrices[n]) for n in thin}
        # The first factors, and in one message with them what is sent whole.
        first: list[np.ndarray] = list(parts)
        for n in thin:
            first[n] = matrices[n] @ bases[n]
        summed = _sum(first, wire)
        if not _finite(summed):  # the same on all ranks
            # Nothing was made of what was sent: numbers are kept, and what is none is not.
            place.own[RESIDUAL] = held if _finite(first) else np.zeros_like(held)
            return np.full_like(held, np.nan)
        left = {n: orthonormal(summed[n]) for n in thin}
        rights = {n: matrices[n].T @ left[n] for n in thin}
        sums = dict(zip(thin, _sum([rights[n] for n in thin], wire), strict=True))
        total, rest = list(summed), [np.zeros_like(part) for part in parts]
        for n in thin:
            place.shared[_name(n)] = sums[n]
            total[n] = product(left[n], sums[n]).reshape(-1)
            rest[n] = (matrices[n] - left[n] @ rights[n].T).reshape(-1)
        place.own[RESIDUAL] = np.concatenate(rest)
        return np.concatenate(total)

    def _basis(self, place: Place, number: int, matrix: np.ndarray) -> np.ndarray:
        """Return what a matrix is multiplied with: the other factor of the step before."""
        rank = min(self._options.rank, *matrix.shape)
        shape = (matrix.shape[1], rank)
        stream = np.random.default_rng([zlib.crc32(place.name.encode()), number])
        basis: np.ndarray = stream.standard_normal(shape).astype(matrix.dtype)
        before = place.shared.get(_name(number))
        if before is not None and before.shape == shape:
            # One that has shown nothing, or no numbers, would do so for ever.
            usable = before.any(axis=0) & np.isfinite(before).all(axis=0)
            basis = np.where(usable, before, basis).astype(matrix.dtype)
        return orthonormal(basis)


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


def matrix_form(shape: Shape, rank: int) -> tuple[int, int] | None:
    """Return the matrix nearest to a square that a tensor can be read as. Pure.

    ``None`` if its factors would be no smaller than itself.
    """
    size = int(np.prod(shape))
    forms = [(int(np.prod(shape[:cut])), int(np.prod(shape[cut:]))) for cut in range(1, len(shape))]
    if not forms or not size:
        return None
    rows, columns = min(forms, key=sum)
    return (rows, columns) if min(rank, rows, columns) * (rows + columns) < size else None


def orthonormal(matrix: np.ndarray) -> np.ndarray:
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
        # What is no number stays so, and shows.
        columns.append(np.zeros_like(column) if left <= _NOTHING * length else column / left)
    return np.stack(columns, axis=1).astype(matrix.dtype)


def _dot(one: np.ndarray, other: np.ndarray) -> np.floating:
    found: np.floating = np.add.accumulate(one * other)[-1]
    return found


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return ``left`` times the transpose of ``right``, the same to the bit everywhere. Pure."""
    total: np.ndarray = left[:, 0, None] * right[None, :, 0]
    for column in range(1, left.shape[1]):
        total += left[:, column, None] * right[None, :, column]
    return total
