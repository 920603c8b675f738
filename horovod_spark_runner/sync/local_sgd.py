"""Rounds: ranks train alone for some steps, then take the mean of their changes.

The mean is that of the changes since ranks met last, by the rows that each has trained on, so what
has not changed stays as it is, to the bit. With ``every=1`` and plain SGD it is the step of
allreduce. Sources: see `LocalSGD` and `DiLoCo`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..config.sync import DiLoCo, LocalSGD
from ..errors import ModelError
from .synchroniser import (
    MODEL,
    Arrays,
    Collectives,
    Share,
    SyncedState,
    Tensor,
    Traffic,
    Variables,
    base_of,
    bytes_of_sum,
    change_of,
    read_values,
)

_VELOCITY = "shared/velocity/"


class LocalSGDSynchroniser:
    """Ranks hold the same weights after every so many steps, and at every epoch's end.

    Whole numbers (batches seen, say) may stand still on ranks without rows, which take them from
    ranks that had some in every step.

    Args:
        options: when ranks meet, and what is done then.
        collectives: sums of the framework's tensors.
    """

    meets_in_every_step = False
    in_step = True
    delays_gradients = False

    def __init__(self, options: LocalSGD | DiLoCo, collectives: Collectives) -> None:
        self._options = options
        self._collectives = collectives
        averaging = isinstance(options, LocalSGD) and options.average_optimizer
        self._groups = (MODEL, "optimizer") if averaging else (MODEL,)
        self.synced_state = SyncedState.EVERYTHING if averaging else SyncedState.WEIGHTS
        # Values at the beginning of the round, and this rank's steps since.
        self._met: Arrays = {}
        self._rows = self._steps = self._idle = 0
        self._velocity: Arrays = {}
        # Bytes that were sent, what allreduce would have sent, and of that in each step.
        self._sent = self._whole = self._gradients = 0.0

    def begin(self, variables: Variables) -> None:
        self._variables = variables
        self._rows = self._steps = self._idle = 0
        named = variables.named
        nbytes = sum(
            value.nbytes
            for name, value in read_values(variables, self._groups).items()
            if name.startswith(MODEL) and variables.is_trained(named[name])
        )
        self._gradients = bytes_of_sum(nbytes, self._collectives.size)

    def before_step(self, step: int) -> None:
        if not self._steps:  # callbacks may have set weights since ranks met
            self._met = read_values(self._variables, self._groups)

    def gradients(
        self,
        gradients: Sequence[Tensor | None],
        share: Share,
        name: str,
        place: str,
        along: Sequence[Tensor] = (),
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        return list(gradients), []

    def changes(self, changes: Sequence[Tensor], share: Share, name: str) -> list[Tensor]:
        return list(changes)

    def after_step(self, variables: Variables, step: int, rows: int) -> bool:
        self._rows += rows
        self._steps += 1
        self._idle += not rows
        self._whole += self._gradients
        warm = step > self._options.warmup_steps
        if warm and step % self._options.every:
            return False
        self._take_mean(variables, outer=warm)
        return True

    def meet(self, variables: Variables) -> None:
        if self._steps:
            self._take_mean(variables, outer=True)

    def _take_mean(self, variables: Variables, *, outer: bool) -> None:
        read = read_values(variables, self._groups)
        if self.synced_state is SyncedState.EVERYTHING:
            self._check_count(len(read))
        now = {name: value for name, value in read.items() if value.dtype.kind == "f"}
        met = self._met_of(now)
        rows = np.array([self._rows], np.float64)
        terms = [change_of(now[name], met[name], self._rows) for name in now]
        nbytes = sum(term.nbytes for term in terms) + rows.nbytes
        self._sent += bytes_of_sum(nbytes, self._collectives.size)
        *sums, total = map(np.asarray, self._collectives.sum([*terms, rows], "round"))
        named = variables.named
        for (name, before), summed in zip(met.items(), sums, strict=True):
            change = summed / np.asarray(total[0], summed.dtype)
            if outer and isinstance(self._options, DiLoCo) and variables.is_trained(named[name]):
                change = self._outer(self._options, name, change)
            value = (base_of(before) + change).astype(np.asarray(variables.view(named[name])).dtype)
            named[name].assign(value)
        self._count(variables, {n: value for n, value in read.items() if n not in now})
        self._rows = self._steps = self._idle = 0

    def _check_count(self, count: int) -> None:
        """Check that all ranks have as many variables to take the mean of.

        Raises:
            ModelError: they have not, on every rank.
        """
        counts = np.array([count, count * count], np.int64)
        (sums,) = map(np.asarray, self._collectives.sum([counts], "round.variables"))
        if self._collectives.size * sums[1] != sums[0] ** 2:
            raise ModelError(
                "optimizer states of different ranks cannot be averaged: they belong to different "
                "weights, because a rank's rows have not used all that is trained. Use "
                "sync=LocalSGD(…) without average_optimizer, which leaves each rank its own "
                "optimizer state, or sync=Allreduce()"
            )

    def _met_of(self, now: Arrays) -> Arrays:
        """Return the values of the last meeting; 0 where an optimizer has created them since."""
        return {name: self._met.get(name, np.zeros_like(value)) for name, value in now.items()}

    def _count(self, variables: Variables, now: Arrays) -> None:
        """Advance integers as on ranks that had rows in every step; one always has."""
        if not now:
            return
        busy = np.array([not self._idle], np.int64)
        met = {name: value.astype(np.int64) for name, value in self._met_of(now).items()}
        changes = [np.asarray(value.astype(np.int64) - met[name]) for name, value in now.items()]
        terms = [change if not self._idle else np.zeros_like(change) for change in changes]
        nbytes = sum(term.nbytes for term in terms) + busy.nbytes
        self._sent += bytes_of_sum(nbytes, self._collectives.size)
        *sums, ranks = map(np.asarray, self._collectives.sum([*terms, busy], "round.counts"))
        if not self._idle:
            return  # if ranks differ, the comparison of models finds it
        for (name, value), summed in zip(now.items(), sums, strict=True):
            counted = met[name] + summed // ranks[0]
            variables.named[name].assign(counted.astype(value.dtype))

    def _outer(self, options: DiLoCo, name: str, change: np.ndarray) -> np.ndarray:
        """Return the step of SGD with Nesterov momentum along ``change``."""
        momentum = np.asarray(options.outer_momentum, change.dtype)
        velocity = momentum * self._velocity.get(name, np.zeros_like(change)) + change
        self._velocity[name] = velocity
        rate = np.asarray(options.outer_lr, change.dtype)
        step: np.ndarray = rate * (change + momentum * velocity)
        return step

    def traffic(self) -> Traffic:
        return Traffic(self._sent, self._whole)

    def capture(self, rank: int) -> Arrays:
        if rank:
            return {}
        return {_VELOCITY + name: array.copy() for name, array in self._velocity.items()}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        if isinstance(self._options, DiLoCo):
            self._velocity = {
                name.removeprefix(_VELOCITY): np.array(array)
                for name, array in arrays.items()
                if name.startswith(_VELOCITY)
            }
