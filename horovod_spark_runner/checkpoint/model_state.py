"""Variables of a training, shared by its ranks: capture, restore, compare and broadcast them."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from ..errors import RunDirectoryError
from ..storage.arrays import Arrays

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI counts in 32 bits.
_BROADCAST_BYTES = 1 << 30


class Variable(Protocol):
    """A value that training changes."""

    @property
    def path(self) -> str: ...

    @property
    def shape(self) -> Iterable[int]: ...

    @property
    def dtype(self) -> object: ...

    def numpy(self) -> np.ndarray:
        """Return the value."""
        ...

    def assign(self, value: np.ndarray) -> object:
        """Set the value."""
        ...


class Described(NamedTuple):
    """Description of one variable."""

    name: str
    path: str
    shape: list[int]
    dtype: str

    @property
    def kind(self) -> tuple[str, str, list[int], str]:
        """The part that does not depend on the names of layers and models."""
        group = self.name.partition("/")[0]
        last = re.sub(r"_\d+$", "", self.path.rpartition("/")[2])
        # An optimizer's variables carry the names of the weights they are for.
        role = last.rpartition("_")[2] if group.startswith("optimizer") else last
        return group, role, list(self.shape), self.dtype

    def show(self) -> str:
        """Return it for a message."""
        return f"{self.path!r} ({self.dtype}, shape {tuple(self.shape)})"


class TrainingVariables(ABC):
    """All variables that a training resumes from: weights, optimizers, seeds of random layers.

    Weights and optimizers have one value on all ranks if the strategy keeps it so; each rank's
    random layers have other seeds. An engine lists them.
    """

    # Not cached: an optimizer, or a layer, may create variables in the first step.

    @property
    @abstractmethod
    def groups(self) -> dict[str, list[Variable]]:
        """The shared variables: ``model`` (weights), ``optimizer``, ``optimizer1`` and so on."""

    @property
    def seeds(self) -> list[Variable]:
        """The states of random layers."""
        return []

    def view(self, variable: Variable) -> ArrayLike:
        """Return a variable's value as NumPy can read it, without a copy where that is possible."""
        return variable.numpy()

    def trained_by(self) -> list[list[int] | None]:
        """Return, for each optimizer, the indices of the weights it was built for, as JSON.

        ``None`` stands for one that is not built, or was built for other variables.
        """
        return []

    def build_optimizers(self, trained: Sequence[Sequence[int] | None]) -> None:
        """Build the optimizers that were built when `trained_by` was called, for the same weights.

        One that is built only in its first step would have no variables to restore. An optimizer
        that creates a weight's variables in that weight's first step has variables of these weights
        afterwards, and of no others.
        """

    def is_trained(self, variable: Variable) -> bool:
        """Return whether an optimizer changes it."""
        return bool(getattr(variable, "trainable", True))

    def is_rate(self, variable: Variable) -> bool:
        """Return whether others differ between ranks because this one does, such as a rate."""
        return False

    def likely_cause(self, differing: Sequence[Variable]) -> str:
        """Return a sentence on why ``differing`` are not the same on all ranks, and what to do."""
        return (
            "Their values depend on what only one rank knows; change them equally on all ranks, by "
            "exchanged gradients"
        )

    @property
    def named(self) -> dict[str, Variable]:
        """The shared variables, by group and number: ``model/00000``."""
        return {
            f"{group}/{number:05d}": variable
            for group, variables in self.groups.items()
            for number, variable in enumerate(variables)
        }

    @property
    def shared(self) -> list[Variable]:
        """The variables that have one value on all ranks."""
        return list(self.named.values())

    def describe(self) -> list[Described]:
        """Return the descriptions of all variables, as JSON."""
        seeds = {f"seed/{number:05d}": variable for number, variable in enumerate(self.seeds)}
        return [
            Described(name, variable.path, list(variable.shape), str(variable.dtype))
            for name, variable in {**self.named, **seeds}.items()
        ]

    def capture(self, arrays: Arrays | None = None) -> Arrays:
        """Return a copy of what all ranks share.

        Args:
            arrays: the result of an earlier call, no longer used; it is filled again, because new
                memory from the system costs more than the copy.
        """
        room = arrays or {}
        return {
            name: _copied(np.asarray(self.view(variable)), room.get(name))
            for name, variable in self.named.items()
        }

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set the values that `capture` returned."""
        for name, variable in self.named.items():
            variable.assign(arrays[name])

    def check_same(
        self, described: Iterable[Iterable[Any]], where: str, changes: Sequence[str] = ()
    ) -> None:
        """Check that a checkpoint's variables are those of this model, whatever their names.

        Args:
            described: the result of `describe`, as JSON gives it back.
            where: the checkpoint.
            changes: known differences, which may explain others.

        Raises:
            RunDirectoryError: they are others; the first difference is shown.
        """
        current, saved = self.describe(), [Described(*entry) for entry in described]
        differ = next(
            (
                index
                for index, (one, other) in enumerate(zip(current, saved, strict=False))
                if one.kind != other.kind
            ),
            None if len(current) == len(saved) else min(len(current), len(saved)),
        )
        if differ is None:
            return
        shown = [
            entries[differ].show() if differ < len(entries) else "no further variable"
            for entries in (saved, current)
        ]
        why = f" ({'; '.join(changes)})" if changes else ""
        raise RunDirectoryError(_other_model(where, shown[0], shown[1] + why))

    def separate_seeds(self, rank: int) -> None:
        """Give the random layers of this rank separate streams."""
        for variable in self.seeds:
            variable.assign(separate_seed(variable.numpy(), rank))


def _copied(value: np.ndarray, room: np.ndarray | None) -> np.ndarray:
    """Return a copy, in an existing array if it has the same shape and type.

    A number of an optimizer may have changed its type.
    """
    if room is None or (room.shape, room.dtype) != (value.shape, value.dtype):
        return np.array(value)
    np.copyto(room, value)
    return room


@contextlib.contextmanager
def preserve_shared(variables: TrainingVariables) -> Iterator[None]:
    """Restore the shared variables after a step.

    All but integers: the steps that an optimizer counts are those of all ranks.
    """
    before = {n: v for n, v in variables.capture().items() if v.dtype.kind not in "iub"}
    yield
    named = variables.named
    for name, value in before.items():
        named[name].assign(value)


def broadcast(variables: TrainingVariables, world: MPI.Comm) -> None:
    """Give the shared variables of every rank the values they have on rank 0."""
    if world.Get_size() == 1:
        return
    for variable in variables.shared:
        # In C order: otherwise its flat form would be a copy.
        value = np.array(variables.view(variable), order="C")
        # As bytes, in pieces: MPI knows neither all types nor counts beyond 32 bits.
        flat = value.reshape(-1).view(np.uint8)
        for begin in range(0, flat.size, _BROADCAST_BYTES):
            world.Bcast(flat[begin : begin + _BROADCAST_BYTES], root=0)
        if world.Get_rank():
            variable.assign(value)


def separate_seed(seed: np.ndarray, rank: int) -> np.ndarray:
    """Return the state of a random layer on ``rank``, given that of rank 0. Pure.

    All ranks start from rank 0's state; without this, every rank would drop the same units.
    """
    value = np.array(seed)
    if value.dtype.kind in "iu" and rank:  # int64 with TensorFlow, uint32 elsewhere
        value[..., 0] += np.array(rank * 0x9E3779B1 % 2**32, dtype=value.dtype)
    return value


def _other_model(where: str, theirs: str, ours: str) -> str:
    return (
        f"run_dir holds a run of another model: {where} has {theirs} where this model has {ours}. "
        "Give another run_dir; initial_weights takes over what fits"
    )
