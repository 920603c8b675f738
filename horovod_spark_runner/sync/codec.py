"""Interface of a compression: ranks obtain an approximate sum of their gradients.

A codec knows neither frameworks nor MPI: it is given one flat array for all of an optimizer's
gradients (or those of a bucket of them) and a `Wire`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:  # loads MPI, which Spark's Python workers must not
    from .wire import Wire

Shape = tuple[int, ...]


@dataclass
class Place:
    """What a rank keeps of the gradients that one optimizer (or bucket) is given.

    Attributes:
        name: the same on all ranks and in every step.
        shapes: of its tensors, in the order in which they lie in flat arrays.
        own: flat arrays of this rank's, by name: what it has not sent, say. Terms of a sum over the
            ranks.
        shared: arrays that are the same on all ranks.
    """

    name: str
    shapes: Sequence[Shape]
    own: dict[str, np.ndarray] = field(default_factory=dict)
    shared: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """The numbers of entries of its tensors."""
        return [int(np.prod(shape)) for shape in self.shapes]

    def split(self, flat: np.ndarray) -> list[np.ndarray]:
        """Return the parts of a flat array that belong to each tensor, without copies."""
        return np.split(flat, np.cumsum(self.sizes)[:-1])

    def kept(self, name: str, like: np.ndarray) -> np.ndarray:
        """Return one of this rank's arrays; zeros as ``like`` where there is none yet."""
        found = self.own.get(name)
        return np.zeros_like(like) if found is None else found.astype(like.dtype, copy=False)


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

    def total(self, own: np.ndarray, place: Place, wire: Wire, step: int) -> np.ndarray:
        """Return what stands for the sum over all ranks, the same on each to the bit.

        Args:
            own: this rank's term of the sum, flat, of single precision or more.
            place: what is kept of it from step to step; changed.
            wire: leads to the other ranks.
            step: how many steps of the run are done.
        """
        ...


RESIDUAL, VELOCITY = "residual", "velocity"


def moving(own: np.ndarray, place: Place, momentum: float) -> np.ndarray:
    """Return this rank's term as a step of its own momentum, which is kept; as it is without."""
    if not momentum:
        return own
    moved: np.ndarray = place.kept(VELOCITY, own) * np.asarray(momentum, own.dtype) + own
    place.own[VELOCITY] = numbers_of(moved)
    return moved


def keeping(momentum: float) -> tuple[str, ...]:
    """Return the names in checkpoints of what ranks keep that have not sent all."""
    return tuple(f"sum/{name}" for name in ((RESIDUAL, VELOCITY) if momentum else (RESIDUAL,)))


def numbers_of(values: np.ndarray) -> np.ndarray:
    """Return a copy with 0 for what is not finite. Pure."""
    return np.where(np.isfinite(values), values, 0)


def parts_like(flat: np.ndarray, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the parts of a flat array, without copies, in the shapes of ``arrays``. Pure."""
    ends = np.cumsum([array.size for array in arrays])[:-1]
    parts = zip(np.split(flat, ends), arrays, strict=True)
    return [part.reshape(array.shape) for part, array in parts]


def whole(own: np.ndarray, place: Place, wire: Wire) -> np.ndarray:
    """Return the sum of all that ranks have, also of what they have not sent so far."""
    total = wire.sum(place.kept(RESIDUAL, own) + own)
    place.own[RESIDUAL] = np.zeros_like(own)
    return total


def names_of(place: Place) -> Mapping[str, np.ndarray]:
    """Return what a place keeps for a checkpoint, by name.

    ``sum/…`` are terms of a sum over the ranks, ``shared/…`` the same on all.
    """
    own = {f"sum/{name}/{place.name}": array for name, array in place.own.items()}
    shared = {f"shared/{name}/{place.name}": array for name, array in place.shared.items()}
    return {**own, **shared}
