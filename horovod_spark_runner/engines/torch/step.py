"""The steps of a training of a PyTorch module, together with all other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import ModelError, brief
from ...sync.synchroniser import Synchroniser
from ...training.epochs import Step
from ...training.part_comparison import Values
from .batch_norm import synchronise_norms
from .binding import BatchBinding, TorchBatch, plain_label
from .custom_step import CustomStepGradients, TorchStep, clip
from .exchange import GradientExchange
from .losses import LABELS, ROWS, SUM, Losses, Term
from .metrics import Metrics, Sums, add_terms
from .model import Modes, one_number, output_leaves
from .optimizers import parameters_of
from .probe import Recorder, forgetting
from .state import Statistics
from .torch_model import TorchModel

if TYPE_CHECKING:
    from mpi4py import MPI


class Steps:
    """Trains and evaluates on batches.

    A subclass is for modules that say themselves how they are trained.

    Args:
        model: what is trained.
        module: its module.
        optimizers: its optimizers, by name.
        batches: makes tensors of columns.
        losses: its losses; ``None`` with a ``train_step`` and no loss.
        metrics: its metrics.
        sums: what results are added up in.
        synchroniser: what becomes of gradients.
        world: communicator of all ranks.
        device: where tensors are.
    """

    def __init__(
        self,
        model: TorchModel,
        module: nn.Module,
        optimizers: Mapping[str, Optimizer],
        batches: BatchBinding,
        losses: Losses | None,
        metrics: Metrics,
        sums: Sums,
        synchroniser: Synchroniser,
        world: MPI.Comm,
        device: torch.device,
    ) -> None:
        self._model, self._module = model, module
        self._optimizers = optimizers
        self._batches, self._losses, self._metrics = batches, losses, metrics
        self._sums = sums
        self._world = world
        self._in_step = synchroniser.in_step
        # 1 if this rank counts global batches: the last one always has rows.
        self._counts_batches = float(world.Get_rank() == world.Get_size() - 1)
        self._device = device
        every = list(optimizers.values())
        self.exchange = GradientExchange(every, synchroniser, world.Get_size(), device)
        self._size = self.exchange.size
        self._statistics = Statistics(module, self.exchange, world)
        self.modes = Modes(module)
        if model.sync_batch_norm and not synchroniser.meets_in_every_step:
            raise ModelError(
                "sync_batch_norm takes the moments of all ranks in every step, but sync lets each "
                "rank step by itself; give sync=Allreduce()"
            )
        if model.sync_batch_norm and self._size > 1:
            synchronise_norms(module, lambda: self.exchange.fraction, self.exchange.waiting)
        self._connect()

    def _connect(self) -> None:
        """Connect the gradient exchange to the backward pass, or to a custom step's optimizers."""
        if self._model.train_step is None:
            self.exchange.overlap(self._module)
            return
        self._gradients = CustomStepGradients(self._optimizers, self._size)
        for optimizer in self._optimizers.values():
            optimizer.register_step_pre_hook(self._before_step)

    def train(self, step: Step, requests: Sequence[bool]) -> list[float] | None:
        """Train on this rank's part of a global batch; return the number of ranks per request."""
        self.modes.train()
        fraction = None if step.equal else step.fraction
        with self.exchange.step(fraction, requests), self._statistics.averaged(step):
            if self._size == 1 and not step.batch.rows:
                return self.exchange.counts  # a step of this rank alone, which has nothing to do
            self._compute(step)
        return self.exchange.counts

    def _compute(self, step: Step) -> None:
        if self._model.train_step is None:
            self._usual(step)
        else:
            self._run_custom_step(step)

    def try_step(self, step: Step, recorder: Recorder) -> Values:
        """Compute the gradients of some rows, on this rank alone, without an optimizer step.

        Args:
            step: the rows.
            recorder: takes the gradients, also where optimizers are about to step.

        Returns:
            What metrics give that are functions of a batch.
        """
        batch = self._batches.of(step.batch.arrays, training=True)
        if self._model.train_step is not None:
            with forgetting(self._model.train_step):
                self._call_train_step(batch, lambda optimizer: self._record(recorder, optimizer))
            return {}
        functions = [] if self._losses is None else self._losses.functions()
        with forgetting(*(function for _, function in functions)):
            outputs, terms = self._forward(batch)
        # What a known loss is divided by is exchanged; so this is a mean over rows of any.
        loss = torch.stack([(term.summed / batch.rows).reshape(()) for term in terms]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self._record(recorder, None)
        target, values = self._batches.target(batch), {}
        for name, function in self._metrics.functions():
            with contextlib.suppress(Exception), torch.no_grad():  # the user's own
                if (value := one_number(function(outputs, target))) is not None:
                    values[f"metric {name!r}", ""] = float(value)
        return values

    def _record(self, recorder: Recorder, optimizer: Optimizer | None) -> None:
        for each in self._optimizers.values() if optimizer is None else (optimizer,):
            recorder.record(each)

    def test(self, step: Step) -> None:
        """Add this rank's part of a global batch to the sums."""
        self.modes.evaluate()
        if not step.batch.rows:
            return
        with torch.no_grad():
            batch = self._batches.of(step.batch.arrays, training=False)
            outputs, terms = self._forward(batch)
            self._report(batch, outputs, terms, self._counts_batches)

    # -- the usual step ------------------------------------------------------------------------

    def _usual(self, step: Step) -> None:
        optimizer = next(iter(self._optimizers.values()))
        optimizer.zero_grad(set_to_none=True)
        outputs, terms = None, self._no_terms()
        batch = None
        if step.batch.rows:  # else there is nothing to compute, and zeros are sent
            batch = self._batches.of(step.batch.arrays, training=True)
            outputs, terms = self._forward(batch)
        loss = self._scalar(terms, step)
        if loss is None and self._model.sync_batch_norm:
            loss = self._of_no_rows(step)
        with self.exchange.backward():
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
        self.exchange.exchange()
        self._divide(terms, step, optimizer)
        self._clip(optimizer)
        optimizer.step()
        if batch is not None:
            with torch.no_grad():
                # Unless ranks take parts of global batches as they come, one counts them.
                whole = self._counts_batches if self._in_step else step.fraction
                self._report(batch, outputs, terms, whole)

    def _forward(self, batch: TorchBatch) -> tuple[Any, list[Term]]:
        with self._autocast():
            outputs = self._batches.call(self._module, batch)
            if self._losses is None:
                return outputs, []
            return outputs, self._losses.terms(outputs, batch.labels, batch.inputs, batch.weights)

    def _of_no_rows(self, step: Step) -> Tensor:
        """Return 0, computed by the module, whose layers need all ranks."""
        batch = self._batches.of(step.batch.arrays, training=False)
        with self._autocast():
            outputs = self._batches.call(self._module, batch)
        return torch.stack([tensor.sum() for _, tensor in output_leaves(outputs)]).sum() * 0.0

    def _no_terms(self) -> list[Term]:
        """Return the terms of no rows."""
        assert self._losses is not None
        return self._losses.nothing(self._device)

    def _scalar(self, terms: Sequence[Term], step: Step) -> Tensor | None:
        """Return the scalar to differentiate: this rank's mean over its rows.

        What divides a single loss otherwise is made good afterwards, by what went along with the
        gradients; several losses need to know it before, and so does one whose gradients may come
        in a later step.
        """
        rows = step.batch.rows
        whole = self._whole(step)
        counts = [float(term.count) for term in terms]
        if self._divided_after(terms):
            self.exchange.count(counts[0])
            return terms[0].summed / rows if rows else None
        if self._size > 1 and LABELS in [term.kind for term in terms]:
            with self.exchange.waiting():
                counts = self._world.allreduce(np.array(counts)).tolist()
        if not rows:
            return None
        parts = [
            term.summed / rows * _factor(term, whole, count)
            for term, count in zip(terms, counts, strict=True)
        ]
        return torch.stack([part.reshape(()) for part in parts]).sum()

    def _whole(self, step: Step) -> int:
        """Return the rows of all ranks that make the step together."""
        return step.rows if self._size > 1 else step.batch.rows

    def _divided_after(self, terms: Sequence[Term]) -> bool:
        return len(terms) == 1 and not self.exchange.lasting

    def _divide(self, terms: Sequence[Term], step: Step, optimizer: Optimizer) -> None:
        """Scale the gradients to the loss's divisor, where it is not the number of rows."""
        if not self._divided_after(terms) or terms[0].kind == ROWS:
            return
        total = self.exchange.total_count if self._size > 1 else float(terms[0].count)
        factor = _factor(terms[0], self._whole(step), total)
        if factor != 1.0:
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _clip(self, optimizer: Optimizer) -> None:
        norm, value = self._model.clip_norm, self._model.clip_value
        if norm is not None or value is not None:
            clip(parameters_of(optimizer), norm, value)

    # -- a step of the user's own --------------------------------------------------------------

    def _run_custom_step(self, step: Step) -> None:
        self._gradients.begin()
        batch = self._batches.nothing()
        if step.batch.rows:
            batch = self._batches.of(step.batch.arrays, training=True)
        logs = self._call_train_step(batch, self._synchronize)
        self._gradients.end()
        self._agree_to_step(-1)
        if logs is None:
            return
        if not isinstance(logs, Mapping):
            raise ModelError(
                "train_step must return what to report, numbers by name, or None, but returned "
                f"{brief(logs)}"
            )
        rows = step.batch.rows
        for name, value in logs.items():
            number = one_number(value)
            if number is None:
                shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else brief(value)
                raise ModelError(
                    f"train_step reports {name!r} with {shown}; report one number, the mean over "
                    "the rows of the batch"
                )
            self._sums.add(str(name), number * rows if rows else 0.0, rows)

    def _call_train_step(
        self, batch: TorchBatch, synchronize: Callable[[Optimizer | None], None]
    ) -> object:
        """Call the user's ``train_step`` on a batch."""
        assert self._model.train_step is not None
        torch_step = TorchStep(
            self._module,
            batch.inputs,
            [plain_label(label) for label in batch.labels],
            batch.weights,
            self._optimizers,
            lambda: self._batches.call(self._module, batch),
            synchronize,
        )
        with self._autocast():
            return self._model.train_step(torch_step)

    def _number_of(self, optimizer: Optimizer) -> int:
        every = self._optimizers.values()
        return next(number for number, each in enumerate(every) if each is optimizer)

    def _synchronize(self, optimizer: Optimizer | None) -> None:
        """Exchange gradients; see `TorchStep.synchronize`."""
        for each in self._optimizers.values() if optimizer is None else (optimizer,):
            if self._size > 1:
                self._gradients.exchanged(each)
                self._agree_to_step(self._number_of(each))
                self.exchange.of(each)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._check_closure(args[1] if len(args) > 1 else kwargs.get("closure"))
        if self._gradients.stepping(optimizer):
            self._agree_to_step(self._number_of(optimizer))
            self.exchange.of(optimizer)
        self._clip(optimizer)

    def _check_closure(self, closure: object) -> None:
        """Check that gradients are there before an optimizer steps, where they are to be changed.

        Raises:
            ModelError: the step is to compute them itself.
        """
        clips = self._model.clip_norm is not None or self._model.clip_value is not None
        if closure is not None and (self._size > 1 or self.exchange.lasting or clips):
            raise ModelError(
                "an optimizer's step() is given a closure, which computes gradients after those of "
                "all ranks were exchanged and clipped: call backward() before step(), and step() "
                "without a closure"
            )

    def _agree_to_step(self, number: int) -> None:
        """Check that all ranks are about to step with the same optimizer, or none is (-1)."""
        if self._size == 1:
            return
        with self.exchange.waiting():
            numbers = self._world.allgather(number)
        if len(set(numbers)) > 1:
            names = [*self._optimizers, "none"]
            shown = ", ".join(
                f"rank {rank} {names[each]!r}" for rank, each in enumerate(numbers[:8])
            )
            raise ModelError(
                "train_step let the ranks step with other optimizers, or not as often: next "
                f"are {shown}. Call step() of each optimizer equally often in every step (multiply "
                "a loss by 0 where it is not to count)"
            )

    # -- both ----------------------------------------------------------------------------------

    def _report(
        self, batch: TorchBatch, outputs: Any, terms: Sequence[Term], batches: float
    ) -> None:
        add_terms(self._sums, terms, batches)
        if self._metrics:
            target = self._batches.target(batch)
            self._metrics.update(self._sums, outputs, target)

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        if self._model.autocast is None:
            yield
            return
        dtype = getattr(torch, self._model.autocast)
        with torch.autocast(self._device.type, dtype=dtype):
            yield


def _factor(term: Term, rows: int, count: float) -> float:
    """Return the factor from a mean over ``rows`` to the loss.

    Where nothing counts that is 0: the value of PyTorch's loss is no number then, but its gradient
    is 0, and so are the sums it is made of.
    """
    if term.kind == ROWS:
        return 1.0
    if term.kind == SUM:
        return float(rows)
    return rows / count if count else 0.0
