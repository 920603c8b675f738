"""Interface of a synchronisation strategy, and its requirements of a framework.

A way (allreduce, say) knows no framework, and a framework knows no way: gradients are whatever
tensors the framework computes with, and are summed by its `Collectives`. To add a way, write a
`Synchroniser` in a module of its own beside this one. To train with another framework, write a
`Collectives` and a `Share` for its tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

# A tensor of the framework that trains.
Tensor = Any


class SyncedState(enum.Enum):
    """State that is equal on all ranks once they have met."""

    EVERYTHING = "weights and optimizers"
    WEIGHTS = "weights"


class Traffic(NamedTuple):
    """Bytes that a rank has sent in its steps, as a ring of the ranks sends them.

    Whatever algorithm MPI chooses, that is what a sum takes at least; see `bytes_of_sum`.

    Attributes:
        sent: to synchronise.
        whole: what allreduce would have sent without compression.
    """

    sent: float
    whole: float


def bytes_of_sum(nbytes: float, ranks: int) -> float:
    """Return the bytes that one rank of a ring sends to sum so many bytes each. Pure."""
    return 2 * (ranks - 1) * nbytes / ranks


class Share(Protocol):
    """A rank's part of the rows of a step, in a mean over the rows of all ranks."""

    def term(self, tensor: Tensor) -> Tensor:
        """Return this rank's term of the mean, which the ranks add up."""
        ...

    def total(self, summed: Tensor) -> Tensor:
        """Return the mean, given the sum of all ranks' terms."""
        ...


class Compression(Protocol):
    """Compression of tensors between ranks."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, object]:
        """Return the compressed tensor, and the context for `decompress`."""
        ...

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Return a sum of compressed tensors as a tensor of the original type."""
        ...


class Collectives(Protocol):
    """Sums over all ranks of a framework's tensors; may be called while a step is traced.

    Attributes:
        size: number of ranks.
    """

    @property
    def size(self) -> int: ...

    def sum(self, tensors: Sequence[Tensor], name: str) -> list[Tensor]:
        """Return each tensor's sum over all ranks.

        Args:
            tensors: the same shapes and types on all ranks; outside a step, arrays of NumPy's will
                do, and what is returned can be read as such.
            name: the same on all ranks, and different for every call within one step.
        """
        ...

    def compression(self, name: str) -> Compression:
        """Return a way of compressing: ``"none"`` or ``"fp16"``."""
        ...

    def on_host(
        self,
        function: Callable[[Sequence[np.ndarray]], list[np.ndarray]],
        tensors: Sequence[Tensor],
    ) -> list[Tensor]:
        """Apply a function of arrays to tensors, on the host and in each step.

        Args:
            function: takes an array for each tensor, of single precision or more and not to be
                changed, and returns as many, of the same shapes.
            tensors: of real numbers.
        """
        ...

    def nbytes(self, tensors: Sequence[Tensor]) -> int:
        """Return how many bytes of tensors `sum` adds up."""
        ...

    def count(self, sent: float, whole: float) -> None:
        """Count the bytes sent each time a step reaches this point; see `Traffic`."""
        ...

    def counted(self) -> Traffic:
        """Return the counted bytes, summed over all steps so far."""
        ...


class Variable(Protocol):
    """One of `Variables`."""

    def assign(self, value: np.ndarray) -> object:
        """Set the value."""
        ...


class Variables(Protocol):
    """The variables of a model and its optimizers on this rank."""

    @property
    def named(self) -> Mapping[str, Any]:
        """Each `Variable` by its name, which begins with ``model/`` or ``optimizer``."""
        ...

    def view(self, variable: Any) -> ArrayLike:
        """Return a variable's value, without a copy where that is possible."""
        ...

    def is_trained(self, variable: Any) -> bool:
        """Return whether an optimizer changes it."""
        ...

    def is_rate(self, variable: Any) -> bool:
        """Return whether it is a learning rate."""
        ...


class Synchroniser(Protocol):
    """A synchronisation strategy, on one rank.

    The engine calls `gradients` and `changes` inside its step, `gradients` wherever an optimizer is
    about to be given some; the loop calls everything else, outside it. All ranks call the same in
    the same order.

    Attributes:
        meets_in_every_step: whether all ranks meet in each step: then `gradients` carries the
            requests. Otherwise each rank steps alone; ranks agree, validate and save checkpoints
            only where they meet.
        in_step: whether all ranks make equally many steps. Otherwise each takes batches on demand,
            and no step may wait for another rank.
        synced_state: the state that is equal on all ranks after they have met.
        delays_gradients: whether an update may include earlier steps' gradients.
    """

    @property
    def meets_in_every_step(self) -> bool: ...

    @property
    def in_step(self) -> bool: ...

    @property
    def synced_state(self) -> SyncedState: ...

    @property
    def delays_gradients(self) -> bool: ...

    def begin(self, variables: Variables) -> None:
        """Record the initial or resumed state, which is equal on all ranks."""
        ...

    def before_step(self, step: int) -> None:
        """Begin a step, after so many of the run."""
        ...

    def gradients(
        self,
        gradients: Sequence[Tensor | None],
        share: Share,
        name: str,
        place: str,
        along: Sequence[Tensor] = (),
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Return the optimizer's gradients, and the sums over the ranks of ``along``.

        Args:
            gradients: this rank's, of a mean over its own rows, of shapes that are known where the
                step is traced; ``None`` entries stay.
            share: this rank's part of the rows.
            name: for collectives; the same on all ranks, different for every call within a step.
            place: what the gradients are for (an optimizer, or some of its variables), the same on
                all ranks and in every step, and different for every call within one.
            along: small tensors whose sums are wanted as well; sums are empty where nothing is
                carried.
        """
        ...

    def changes(self, changes: Sequence[Tensor], share: Share, name: str) -> list[Tensor]:
        """Return the changes over all ranks of variables that a step sets without an optimizer.

        Args:
            changes: by how much they have changed on this rank (moments of normalisation, say).
            share: see `gradients`.
            name: see `gradients`.
        """
        ...

    def after_step(self, variables: Variables, step: int, rows: int) -> bool:
        """Update the variables after a step.

        Not called where ranks meet in every step: all is done within it.

        Args:
            variables: those of this rank.
            step: how many steps of the run are done.
            rows: this rank's rows of the last one.

        Returns:
            Whether the ranks have met, equally on all.
        """
        ...

    def meet(self, variables: Variables) -> None:
        """Bring all ranks together, at an epoch's end; does nothing where they have just met."""
        ...

    def traffic(self) -> Traffic:
        """Return the traffic of this rank so far."""
        ...

    def capture(self, rank: int) -> dict[str, np.ndarray]:
        """Return the strategy's own state by name, for a checkpoint; ranks have met.

        Each rank's is kept for it. What is the same on all ranks (an outer optimizer) is to be
        returned on rank 0 only, and its names begin with ``shared/``. Terms of a sum over the ranks
        (what each has not sent) have names that begin with ``sum/``: another number of ranks goes
        on with their sum.
        """
        ...

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore this rank's state from `capture`, with the shared arrays.

        A rank that was not there when the checkpoint was taken gets what is shared only; after a
        change of the way of synchronising, none of it may be this one's.
        """
        ...


MODEL = "model/"
Arrays = dict[str, np.ndarray]


def read_values(
    variables: Variables, groups: tuple[str, ...], names: Iterable[str] | None = None
) -> Arrays:
    """Return copies of values by name: real numbers of at least single precision, whole numbers.

    Args:
        variables: of this rank.
        groups: how the names begin; learning rates are left out.
        names: which of them; by default all.
    """
    named = variables.named
    values: Arrays = {}
    for name in named if names is None else names:
        variable = named[name]
        if not name.startswith(groups) or variables.is_rate(variable):
            continue
        value = np.asarray(variables.view(variable))
        if _is_floating(value.dtype):
            values[name] = value.astype(np.result_type(np.float32, _numeric(value.dtype)))
        elif value.dtype.kind in "iub":
            values[name] = value.copy()
    return values


def base_of(before: np.ndarray) -> np.ndarray:
    """Return the base of changes: infinity less infinity would be no number."""
    return np.where(np.isfinite(before), before, before.dtype.type(0))


def change_of(now: np.ndarray, before: np.ndarray, rows: int) -> np.ndarray:
    """Return this rank's term of the mean change by rows: its change times its ``rows``."""
    if not rows:
        return np.zeros_like(now)
    return np.asarray(rows * (now - base_of(before)), now.dtype)


def _is_floating(dtype: np.dtype) -> bool:
    # bfloat16 and others are not NumPy's own types.
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name)


def _numeric(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.kind == "f" else np.dtype(np.float32)
