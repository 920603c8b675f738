"""The steps of a module of Lightning's, together with all other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...epochs import Step
from ..losses import LOSS
from ..step import Steps
from .attached import Attached


class LightningSteps(Steps):
    """See `Steps`; ``training_step`` and ``validation_step`` compute, and log what is reported.

    A rank without rows calls ``training_step`` on zeros, which count for nothing, so that all ranks
    do the same.
    """

    stepping = "training_step"
    changing = (
        "clip in on_before_optimizer_step, which has the gradients of all ranks, or give "
        "TorchModel(module, clip_norm=…)"
    )

    def __init__(self, *given: Any, attached: Attached) -> None:
        self.attached = attached
        super().__init__(*given)
        self.modes = attached.modes

    def _connect(self) -> None:
        if self.attached.automatic:
            self.exchange.overlap(self._module)
            return
        self._connect_own(kept=True)
        for optimizer in self._optimizers.values():
            optimizer.register_step_post_hook(self._after_own)

    def _given(self, step: Step, *, training: bool) -> Any:
        rows = step.batch.rows
        batch = self._batches.of(step.batch.arrays, training=training) if rows else None
        found = self._batches.nothing() if batch is None else batch
        target = self._batches.target(found)
        self.attached.counting(rows, step.number)
        return self.attached.batch(found, self._batches.feed.names, target)

    @contextlib.contextmanager
    def _counted(self, step: Step) -> Iterator[None]:
        """Let what is done without rows leave no trace but logs of no rows."""
        if step.batch.rows:
            yield
            return
        with self.attached.unnoticed():
            yield

    def _compute(self, step: Step) -> None:
        if self.attached.automatic:
            self._automatic(step)
        else:
            self._manual(step)

    def _automatic(self, step: Step) -> None:
        attached, optimizer = self.attached, next(iter(self._optimizers.values()))
        with self._counted(step):
            given = self._given(step, training=True)
            with self._autocast():
                loss, returned = attached.loss(given, step.number)
            assert loss is not None
            attached.call("on_before_zero_grad", optimizer)
            optimizer.zero_grad(set_to_none=True)
            attached.call("on_before_backward", loss)
            with self.exchange.backward():
                loss.backward()  # type: ignore[no-untyped-call]
            self.exchange.exchange()
            attached.call("on_after_backward")
            attached.call("on_before_optimizer_step", optimizer)
            self._clip(optimizer)
            optimizer.step()
            attached.trainer.global_step += 1
            attached.call("on_train_batch_end", returned, given, step.number)
        rows = step.batch.rows
        self._sums.add(LOSS, loss.detach().double() * rows if rows else 0.0, rows)

    def _manual(self, step: Step) -> None:
        attached = self.attached
        self._gradients.begin()
        with self._counted(step):
            given = self._given(step, training=True)
            with self._autocast():
                _, returned = attached.loss(given, step.number)
            self._gradients.end()
            self._agree_to_step(-1)
            attached.call("on_train_batch_end", returned, given, step.number)

    def _ready(self, optimizer: Optimizer) -> None:
        self.attached.call("on_before_optimizer_step", optimizer)

    def _after_own(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.attached.trainer.global_step += 1

    def test(self, step: Step) -> None:
        self.modes.evaluate()
        if not step.batch.rows:
            return
        with torch.no_grad():
            given = self._given(step, training=False)
            with self._autocast():
                self.attached.validate(given, step.number)

    def tried(self, step: Step) -> tuple[Any, Callable[..., Tensor | None]]:
        """Return a batch, and what gives the loss of a part of it without a trace."""
        self.modes.evaluate()

        def loss(given: Any, _: Any) -> Tensor | None:
            with self.attached.unnoticed(numbers=True), self._autocast():
                return self.attached.loss(given, step.number)[0]

        with self.attached.unnoticed(numbers=True):
            return self._given(step, training=False), loss
