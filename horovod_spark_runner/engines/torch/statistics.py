"""State that training changes besides weights, such as batch normalisation's moments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...errors import ModelError
from ...training.epochs import Step
from .exchange import GradientExchange
from .variables import as_array, saved_buffers, set_tensor

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
        # By what they are called where they are kept: constants that are not need not be sent.
        self._places = saved_buffers(module)
        self._buffers: dict[str, Tensor] = {}
        for name, (holder, key) in self._places.items():
            if holder[key] is not None:
                self._buffers[name] = holder[key]
        held = list(self._buffers.values())
        self._moments = [b for b in held if b.dtype.is_floating_point]
        self._counters = [b for b in held if not b.dtype.is_floating_point]

    @contextlib.contextmanager
    def averaged(self, step: Step) -> Iterator[None]:
        """Run a step, after which the buffers are the same on all ranks.

        Raises:
            ModelError: a buffer is set to what cannot be kept in its place.
        """
        if self._exchange.size == 1:
            yield
            self._take_set()
            return
        before = [moment.detach().clone() for moment in self._moments]
        yield
        self._take_set()
        if before:
            changes = [
                moment - _base(value) for moment, value in zip(self._moments, before, strict=True)
            ]
            self._assign(before, self._exchange.changes(changes))
        if step.rows < self._world.Get_size():
            self._share_counters(step)

    def _take_set(self) -> None:
        """Copy the values of replaced buffers into the original tensors."""
        replaced: dict[str, Tensor] = {}
        for name, (holder, key) in self._places.items():
            current, buffer = holder.get(key), self._buffers.get(name)
            if current is buffer:
                continue
            if current is None or buffer is None or _form(current) != _form(buffer):
                raise ModelError(
                    f"buffer {name!r} was {_form(buffer)} when the training began, and a step has "
                    f"set it to {_form(current)}: checkpoints and other ranks could not keep it. "
                    "Register it with the shape and type that it will have, or with "
                    "persistent=False if it need not be kept"
                )
            replaced[name] = current.detach().clone()  # it may be the tensor of another buffer
        with torch.no_grad():
            for name, value in replaced.items():
                holder, key = self._places[name]
                holder[key] = self._buffers[name].copy_(value)

    def _assign(self, before: list[Tensor], changes: list[Tensor]) -> None:
        with torch.no_grad():
            for moment, value, change in zip(self._moments, before, changes, strict=True):
                moment.copy_(_base(value) + change)

    def _share_counters(self, step: Step) -> None:
        """Copy the counters of a rank with rows to the ranks without."""
        from mpi4py import MPI

        candidate = self._world.Get_rank() if step.batch.rows else -1
        root = self._world.allreduce(candidate, op=MPI.MAX)
        values = [as_array(counter) for counter in self._counters]
        shared = self._world.bcast(values, root=root)
        if not step.batch.rows:
            for counter, value in zip(self._counters, shared, strict=True):
                set_tensor(counter, value)


def _base(value: Tensor) -> Tensor:
    """Return the base of changes: infinity less infinity would be no number."""
    return torch.where(value.isfinite(), value, 0)


def _form(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} of shape {tuple(tensor.shape)} on {tensor.device}"
