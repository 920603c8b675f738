"""What training changes besides weights, such as batch normalisation's moments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..epochs import Step
from .exchange import GradientExchange
from .variables import as_array, set_tensor, weights_of

if TYPE_CHECKING:
    from mpi4py import MPI


class Statistics:
    """Keeps the buffers of a module the same on all ranks.

    The changes of real numbers are averaged, not their values: what did not change stays as it is,
    to the bit. Counters change alike on all ranks that have rows.

    Args:
        module: the module.
        exchange: connects the ranks' tensors.
        world: communicator of all ranks.
    """

    def __init__(self, module: nn.Module, exchange: GradientExchange, world: MPI.Comm) -> None:
        self._exchange = exchange
        self._world = world
        parameters = {id(parameter) for parameter in module.parameters()}
        # By what they are called where they are kept: constants that are not need not be sent.
        held = {
            name: buffer
            for (name, buffer), (_, whole) in zip(
                weights_of(module).items(), module.state_dict(keep_vars=True).items(), strict=True
            )
            if id(whole) not in parameters
        }
        self._moments = [b for b in held.values() if b.dtype.is_floating_point]
        self._counters = [b for b in held.values() if not b.dtype.is_floating_point]

    @contextlib.contextmanager
    def averaged(self, step: Step) -> Iterator[None]:
        """Be within a step, after which the buffers are the same on all ranks."""
        if self._exchange.size == 1:
            yield
            return
        before = [moment.clone() for moment in self._moments]
        yield
        if before:
            own = [moment - value for moment, value in zip(self._moments, before, strict=True)]
            self._assign(before, self._exchange.changes(own))
        if step.rows < self._world.Get_size():
            self._share_counters(step)

    def _assign(self, before: list[Tensor], changes: list[Tensor]) -> None:
        with torch.no_grad():
            for moment, value, change in zip(self._moments, before, changes, strict=True):
                moment.copy_(value + change)

    def _share_counters(self, step: Step) -> None:
        """Give ranks without rows the counters of one that has some."""
        from mpi4py import MPI

        own = self._world.Get_rank() if step.batch.rows else -1
        root = self._world.allreduce(own, op=MPI.MAX)
        values = [as_array(counter) for counter in self._counters]
        shared = self._world.bcast(values, root=root)
        if not step.batch.rows:
            for counter, value in zip(self._counters, shared, strict=True):
                set_tensor(counter, value)
