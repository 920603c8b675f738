"""Named states: what a checkpoint holds of a training beside its variables.

Each object has ``state_dict`` and ``load_state_dict``: optimizers' settings, schedulers, callbacks,
and what `TorchModel.state` names. A checkpoint has those of every rank, but of large arrays those
of rank 0 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ...checkpoint.rank_state import SMALL
from ...cluster.worker.reporting import notify
from ...errors import RanksDivergedError
from ...storage.arrays import Arrays
from ...training.agreement import checksum
from .packing import pack_state, unpack_state

if TYPE_CHECKING:
    from mpi4py import MPI


class Stateful(Protocol):
    """An object with a state; as PyTorch's."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> object:
        """Take a state over."""


class NamedStates:
    """The states of some objects.

    Args:
        objects: the objects, by name, in the order in which they are restored.
        shared: names of those that should be equal on all ranks.
        world: communicator of all ranks.
    """

    def __init__(
        self, objects: Mapping[str, Stateful], shared: Mapping[str, str], world: MPI.Comm
    ) -> None:
        self._objects, self._shared, self._world = objects, shared, world
        self._warned = False

    @property
    def objects(self) -> list[Stateful]:
        """The objects."""
        return list(self._objects.values())

    def capture(self) -> tuple[dict[str, Any], Arrays]:
        """Return the states, as JSON and the arrays it refers to.

        Raises:
            ModelError: a state holds what a checkpoint cannot.
            RanksDivergedError: a large array differs between ranks; on all ranks.
        """
        arrays: Arrays = {}
        packed = {
            name: pack_state(one.state_dict(), name, arrays, type(one).__name__)
            for name, one in self._objects.items()
        }
        if self._shared:
            self._compare(packed, arrays)
        return packed, arrays

    def restore(self, packed: Mapping[str, Any], arrays: Arrays) -> None:
        """Restore the states from `capture`; objects without one stay as they are."""
        for name, one in self._objects.items():
            if name in packed:
                one.load_state_dict(unpack_state(packed[name], arrays))

    def _compare(self, packed: Mapping[str, object], arrays: Arrays) -> None:
        """Compare the shared states of all ranks; warn once of small ones that differ."""
        large, small = (
            {
                name: [
                    checksum(array)
                    for key, array in arrays.items()
                    if f"{key}/".startswith(f"{name}/") and (array.nbytes > SMALL) == is_large
                ]
                for name in self._shared
            }
            for is_large in (True, False)
        )
        values = {name: (repr(packed[name]), sums) for name, sums in small.items()}
        every = self._world.allgather((large, values))
        ranks = [rank for rank, (sums, _) in enumerate(every) if sums != every[0][0]]
        if ranks:
            raise RanksDivergedError(
                f"large tensors of TorchModel(state=…) differ between rank 0 and rank {ranks[0]}, "
                "and checkpoints hold those of rank 0: let them follow from what all ranks share"
            )
        unequal = [name for name in values if any(o[name] != values[name] for _, o in every)]
        if unequal and not self._warned and self._world.Get_rank() == 0:
            notify(
                f"{', '.join(repr(self._shared[name]) for name in unequal)} of "
                "TorchModel(state=…) differ between ranks, and each keeps its own: let them follow "
                "from what all ranks share, if the training depends on them"
            )
        self._warned |= bool(unequal)
