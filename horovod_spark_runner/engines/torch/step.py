"""Training and validation steps of a PyTorch module, together with all other ranks.

A rank differentiates the mean of the loss over its own rows. The exchange averages gradients by
the ranks' numbers of rows, so that optimizers see the gradient of the mean over the global batch.
A loss with another divisor than rows (weights of classes, labels that are not ignored) needs the
sum of all ranks' divisors: that of a single loss travels with the gradients, which are scaled on
arrival.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import ModelError
from ...sync.synchroniser import Synchroniser
from ...training.epochs import Step
from ...training.part_comparison import Values
from .batch_norm import synchronise_norms
from .binding import BatchBinding, TorchBatch
from .exchange import GradientExchange
from .losses import LABELS, Term
from .metrics import Results
from .model import Modes, one_number, output_leaves
from .optimizers import parameters_of
from .state import Statistics
from .torch_model import TorchModel
from .trial import Recorder

if TYPE_CHECKING:
    from mpi4py import MPI


class Steps:
    """Training and validation on this rank's part of each global batch.

    A subclass trains by a ``train_step``.

    Args:
        model: the settings of the training.
        module: its module.
        optimizers: its optimizers by name; the usual step has one.
        batches: makes tensors of columns.
        results: losses and metrics, which steps add to.
        synchroniser: what becomes of gradients.
        world: communicator of all ranks.
        device: where tensors are.

    Attributes:
        exchange: the exchange of gradients.
        modes: the module's training and evaluation mode.
    """

    def __init__(
        self,
        model: TorchModel,
        module: nn.Module,
        optimizers: Mapping[str, Optimizer],
        batches: BatchBinding,
        results: Results,
        synchroniser: Synchroniser,
        world: MPI.Comm,
        device: torch.device,
    ) -> None:
        self._model, self._module, self._optimizers = model, module, optimizers
        self._batches, self._results = batches, results
        self._world, self._device = world, device
        self._in_step = synchroniser.in_step
        # The last rank always has rows, so it counts global batches.
        self._counts_batches = float(world.Get_rank() == world.Get_size() - 1)
        every = list(optimizers.values())
        self.exchange = GradientExchange(every, synchroniser, world.Get_size(), device)
        self._ranks = self.exchange.size
        self._statistics = Statistics(module, self.exchange, world)
        self.modes = Modes(module)
        if model.sync_batch_norm and not synchroniser.meets_in_every_step:
            raise ModelError(
                "sync_batch_norm takes the moments of all ranks in every step, but sync lets each "
                "rank step by itself; give sync=Allreduce()"
            )
        if model.sync_batch_norm and self._ranks > 1:
            synchronise_norms(module, self.exchange)
        self._connect()

    def _connect(self) -> None:
        """Connect the exchange to the backward pass."""
        self.exchange.overlap(self._module)

    def train(self, step: Step, requests: Sequence[bool]) -> list[float] | None:
        """Train on this rank's part of a global batch; return the number of ranks per request."""
        self.modes.train()
        fraction = None if step.equal else step.fraction
        with self.exchange.step(fraction, requests), self._statistics.averaged(step):
            # A rank without rows sends zeros, if there is another one.
            if step.batch.rows or self._ranks > 1:
                self._train_batch(step)
        return self.exchange.counts

    def _train_batch(self, step: Step) -> None:
        """Compute gradients, exchange them, and let the optimizer step."""
        (optimizer,) = self._optimizers.values()
        optimizer.zero_grad(set_to_none=True)
        batch = self._batch_of(step)
        outputs, terms = self._forward(batch)
        loss = self._loss(terms, step)
        with self.exchange.backward():
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
        self.exchange.exchange()
        self._rescale(optimizer, terms, step)
        self._clip(optimizer)
        optimizer.step()
        if batch is not None:
            # Ranks that take parts of global batches as they come count those parts.
            batches = self._counts_batches if self._in_step else step.fraction
            self._add_results(batch, outputs, terms, batches)

    def test(self, step: Step) -> None:
        """Add this rank's part of a global batch to the results."""
        self.modes.evaluate()
        if step.batch.rows:
            with torch.no_grad():
                batch = self._batches.of(step.batch.arrays, training=False)
                self._add_results(batch, *self._forward(batch), self._counts_batches)

    def step_functions(self) -> list[object]:
        """Return the user's own functions that a training step calls besides the module."""
        return [function for _, function in self._results.loss_functions()]

    def try_step(self, step: Step, recorder: Recorder) -> Values:
        """Compute the gradients of some rows, on this rank alone, without an optimizer step.

        Args:
            step: the rows.
            recorder: takes the gradients, also where optimizers are about to step.

        Returns:
            What metrics give that are functions of a batch.
        """
        batch = self._batches.of(step.batch.arrays, training=True)
        outputs, terms = self._forward(batch)
        # Divisors are exchanged, so any known loss becomes a mean over rows.
        loss = torch.stack([(term.summed / batch.rows).reshape(()) for term in terms]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        recorder.record(*self._optimizers.values())
        target, values = self._batches.target(batch), {}
        for name, function in self._results.metric_functions():
            with contextlib.suppress(Exception), torch.no_grad():  # the user's own
                if (value := one_number(function(outputs, target))) is not None:
                    values[f"metric {name!r}", ""] = float(value)
        return values

    # -- parts of a step -----------------------------------------------------------------------

    def _batch_of(self, step: Step) -> TorchBatch | None:
        """Return this rank's rows as tensors; ``None`` if it has none."""
        if not step.batch.rows:
            return None
        if self._results.losses is not None:
            self._results.losses.check_labels(step.batch.arrays)
        return self._batches.of(step.batch.arrays, training=True)

    def _forward(self, batch: TorchBatch | None) -> tuple[Any, list[Term]]:
        """Return the module's outputs and the losses, those of no rows without a batch."""
        losses = self._results.losses
        if batch is None:
            assert losses is not None
            return None, losses.nothing(self._device)
        with self._autocast():
            outputs = self._batches.call(self._module, batch)
            if losses is None:
                return outputs, []
            return outputs, losses.terms(outputs, batch.labels, batch.inputs, batch.weights)

    def _loss(self, terms: Sequence[Term], step: Step) -> Tensor | None:
        """Return what to differentiate; ``None`` if nothing is."""
        factors = [1.0]
        if self._is_scaled_later(terms):
            self.exchange.count(float(terms[0].count))
        else:
            factors = self._factors(terms, step)
        rows = step.batch.rows
        if not rows:
            return self._zero(step) if self._model.sync_batch_norm else None
        parts = [term.summed / rows * factor for term, factor in zip(terms, factors, strict=True)]
        return torch.stack([part.reshape(()) for part in parts]).sum()

    def _is_scaled_later(self, terms: Sequence[Term]) -> bool:
        """Return whether the divisor of the loss travels with its gradients."""
        # Where updates hold parts of earlier gradients, these had other divisors.
        alone = len(terms) == 1 and not self.exchange.delays_gradients
        return alone and self._ranks > 1 and terms[0].kind == LABELS

    def _factors(self, terms: Sequence[Term], step: Step) -> list[float]:
        """Return the factors from means over rows to the losses."""
        rows = step.rows if self._ranks > 1 else step.batch.rows
        # Only some terms need theirs, for which a GPU is waited for.
        counts = [float(term.count) if term.kind == LABELS else 0.0 for term in terms]
        if self._ranks > 1 and any(term.kind == LABELS for term in terms):
            with self.exchange.waiting():
                counts = self._world.allreduce(np.array(counts)).tolist()
        return [term.factor(rows, count) for term, count in zip(terms, counts, strict=True)]

    def _rescale(self, optimizer: Optimizer, terms: Sequence[Term], step: Step) -> None:
        """Scale gradients by the divisor that came with them."""
        if not self._is_scaled_later(terms):
            return
        factor = terms[0].factor(step.rows, self.exchange.total_count)
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None and factor != 1.0:
                parameter.grad.mul_(factor)

    def _zero(self, step: Step) -> Tensor:
        """Return 0, computed by the module, whose layers need all ranks."""
        batch = self._batches.of(step.batch.arrays, training=False)
        with self._autocast():
            outputs = self._batches.call(self._module, batch)
        return torch.stack([tensor.sum() for _, tensor in output_leaves(outputs)]).sum() * 0.0

    def _clip(self, optimizer: Optimizer) -> None:
        """Limit gradients, as `TorchModel.clip_norm` and ``clip_value`` say."""
        norm, value = self._model.clip_norm, self._model.clip_value
        there = [p for p in parameters_of(optimizer) if p.grad is not None]
        if norm is not None and there:
            nn.utils.clip_grad_norm_(there, norm)
        if value is not None and there:
            nn.utils.clip_grad_value_(there, value)

    def _add_results(
        self, batch: TorchBatch, outputs: Any, terms: Sequence[Term], batches: float
    ) -> None:
        with torch.no_grad():
            self._results.add(outputs, self._batches.target(batch), terms, batches)

    def _autocast(self) -> AbstractContextManager[None]:
        kind = self._model.autocast
        if kind is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=getattr(torch, kind))
