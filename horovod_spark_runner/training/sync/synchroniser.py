"""What a way of synchronising is, and what it needs of a framework.

A way (allreduce, say) knows no framework, and a framework knows no way: gradients are whatever
tensors the framework computes with, and are summed by its `Collectives`. To add a way, write a
`Synchroniser` in a module of its own beside this one. To train with another framework, write a
`Collectives` and a `Share` for its tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

# A tensor of the framework that trains.
Tensor = Any


class Equality(enum.Enum):
    """When all ranks hold the same model; what is kept of it depends on this."""

    EVERY_STEP = "after every step"
    AT_MEETINGS = "after the steps at which they meet"
    NEVER = "never before the end"


class Share(Protocol):
    """A rank's part of the rows of a step, in a mean over the rows of all ranks."""

    def term(self, tensor: Tensor) -> Tensor:
        """Return this rank's term of the mean: what the ranks add up."""
        ...

    def total(self, summed: Tensor) -> Tensor:
        """Return the mean, given the sum of all ranks' terms."""
        ...


class Compression(Protocol):
    """How tensors are made smaller for the way between ranks."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, object]:
        """Return what is sent, and what `decompress` has to know."""
        ...

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Return a sum of what was sent as a tensor of the original type."""
        ...


class Collectives(Protocol):
    """Sums over all ranks of a framework's tensors; may be called while a step is traced."""

    def sum(self, tensors: Sequence[Tensor], name: str) -> list[Tensor]:
        """Return each tensor's sum over all ranks.

        Args:
            tensors: the same shapes and types on all ranks.
            name: the same on all ranks, and different for every call within one step.
        """
        ...

    def compression(self, name: str) -> Compression:
        """Return a way of compressing: ``"none"`` or ``"fp16"``."""
        ...


class Variables(Protocol):
    """The variables of a model and its optimizers on this rank, by name."""

    def capture(self) -> dict[str, np.ndarray]:
        """Return a copy of the values."""
        ...

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over what `capture` returned."""
        ...


class Synchroniser(Protocol):
    """One way of synchronising, on one rank.

    The engine calls `gradients` and `changes` inside its step, `gradients` wherever an optimizer is
    about to be given some; the loop calls everything else, outside it. All ranks call the same in
    the same order.

    Attributes:
        equality: when all ranks hold the same model. With ``EVERY_STEP``, ranks meet in every step,
            and `gradients` carries what is put along. Otherwise it may do without a collective, and
            ranks agree on what they do next at meetings only.
    """

    @property
    def equality(self) -> Equality: ...

    def meets_after(self, step: int) -> bool:
        """Tell, equally on all ranks, whether they have met once ``step`` steps are done."""
        ...

    def gradients(
        self,
        gradients: Sequence[Tensor | None],
        share: Share,
        name: str,
        along: Sequence[Tensor] = (),
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Return what the optimizer is given, and the sums over the ranks of what goes along.

        Args:
            gradients: this rank's, of a mean over its own rows; ``None`` entries stay.
            share: this rank's part of the rows.
            name: for collectives; the same on all ranks, different for every call within a step.
            along: small tensors whose sums are wanted as well; sums are empty where nothing is
                carried.
        """
        ...

    def changes(self, changes: Sequence[Tensor], share: Share, name: str) -> list[Tensor]:
        """Return by what variables change that a step sets without an optimizer.

        Args:
            changes: by how much they have changed on this rank (moments of normalisation, say).
            share: see `gradients`.
            name: see `gradients`.
        """
        ...

    def after_step(self, variables: Variables, step: int) -> None:
        """Do what is to be done to the variables once ``step`` steps of the run are done.

        Not called where ranks meet in every step: all is done within it.
        """
        ...

    def finish(self, variables: Variables) -> None:
        """Bring all ranks to the same model, after the last step."""
        ...

    def capture(self, rank: int) -> dict[str, np.ndarray]:
        """Return what the way itself keeps, by name, for a checkpoint.

        Each rank's is kept for it: residuals of its own, say. What is the same on all ranks (an
        outer optimizer, the weights at the last meeting) is to be returned on rank 0 only, and its
        names begin with ``shared/``.
        """
        ...

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over what `capture` returned on this rank, with what is shared.

        A rank that was not there when the checkpoint was taken gets what is shared only.
        """
        ...


def equal_after(synchroniser: Synchroniser, step: int) -> bool:
    """Tell whether all ranks hold the same model once ``step`` steps of the run are done."""
    equality = synchroniser.equality
    return equality is Equality.EVERY_STEP or (
        equality is Equality.AT_MEETINGS and synchroniser.meets_after(step)
    )
