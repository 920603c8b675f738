"""A ``LightningModule`` as the training loop knows it: its steps, its hooks, its results."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ....checkpoint.model_state import Variable
from ....checkpoint.rank_state import JOIN
from ....checkpoint.run_directory import RunDirectory
from ....errors import InvalidInputError
from ....storage.arrays import Arrays
from ....training.epochs import Step
from ....training.part_comparison import Values
from ....training.progress import Logs
from ....training.spec import TrainingSpec
from ..callbacks import Callbacks
from ..engine import SavedModel
from ..losses import LOSS
from ..model import check_module
from ..optimizers import Planned
from ..probe import Recorder, forgetting
from ..step import Steps
from ..trainee import TorchTrainee
from .adapter import TRAINING, VALIDATION, LightningAdapter, configure_optimizers

# Among the sums, where a module may log a "loss" of its own.
_STEP_LOSS = "loss of training_step"


class _LightningSteps(Steps):
    """Lightning implementation of `Steps`, by ``training_step`` and ``validation_step``.

    A rank without rows calls ``training_step`` on rows which count for nothing, so that all ranks
    do the same.
    """

    def __init__(self, *args: Any, adapter: LightningAdapter) -> None:
        super().__init__(*args)
        self._adapter = adapter
        adapter.sums = self._sums

    def _batch_of(self, step: Step, *, training: bool) -> Any:
        rows = step.batch.rows
        batch = self._batches.of(step.batch.arrays, training=training) if rows else None
        torch_batch = self._batches.nothing() if batch is None else batch
        target = self._batches.target(torch_batch)
        return self._adapter.arrange(torch_batch, self._batches.feed.names, target)

    def _compute(self, step: Step) -> None:
        rows, optimizer = step.batch.rows, next(iter(self._optimizers.values()))
        batch = self._batch_of(step, training=True)
        with self._autocast():
            loss = self._adapter.loss(batch, step.number, rows)
        optimizer.zero_grad(set_to_none=True)
        with self.exchange.backward():
            loss.backward()  # type: ignore[no-untyped-call]
        self.exchange.exchange()
        self._clip(optimizer)
        optimizer.step()
        self._adapter.trainer.global_step += 1
        self._sums.add(_STEP_LOSS, loss.detach().double() * rows if rows else 0.0, rows)

    def test(self, step: Step) -> None:
        self.modes.evaluate()
        if not step.batch.rows:
            return
        with torch.no_grad():
            batch = self._batch_of(step, training=False)
            with self._autocast():
                self._adapter.step("validation_step", batch, step.number, step.batch.rows)

    def try_step(self, step: Step, recorder: Recorder) -> Values:
        batch = self._batch_of(step, training=True)
        called = forgetting(self._adapter.module.training_step)
        with self._adapter.unnoticed(), called, self._autocast():
            loss = self._adapter.loss(batch, step.number, step.batch.rows)
        loss.backward()  # type: ignore[no-untyped-call]
        self._record(recorder, None)
        return {}


class _LightningHooks(Callbacks):
    """Lightning implementation of `Callbacks`; the module's own hooks come first.

    Args:
        given: what those take.
        adapter: the module.
        spec: the training.
    """

    def __init__(self, *args: Any, adapter: LightningAdapter, spec: TrainingSpec) -> None:
        super().__init__(*args)
        self._adapter = adapter
        self._spec = spec

    def _stop_requested(self) -> bool:
        return self._adapter.trainer.should_stop or super()._stop_requested()

    def _forget(self) -> None:
        self._adapter.trainer.should_stop = False
        super()._forget()

    def train_begin(self) -> None:
        self._adapter.call("on_train_start")
        super().train_begin()

    def train_end(self, logs: Logs | None) -> None:
        super().train_end(logs)
        self._adapter.call("teardown", "fit")

    def epoch_begin(self, epoch: int) -> None:
        self._adapter.trainer.current_epoch = epoch
        self._adapter.call("on_train_epoch_start")
        super().epoch_begin(epoch)

    def _set_mode(self) -> None:
        """Leave all parts as they are, as Lightning does."""

    def epoch_end(self, epoch: int, logs: Logs) -> dict[str, object]:
        results = {**logs, **self._adapter.end(TRAINING)}
        best = self._spec.config.checkpoints.best_metric
        complete = self._spec.validation is None or self._spec.fit.validates(epoch)
        if best is not None and complete and best not in results:
            raise InvalidInputError(
                f"best_metric={best!r} is no metric of this training; it has "
                f"{', '.join(sorted(results))}"
            )
        return super().epoch_end(epoch, results)

    def test_begin(self) -> None:
        trainer = self._adapter.trainer
        trainer.training, trainer.validating = False, True
        super().test_begin()
        self._adapter.call("on_validation_epoch_start")

    def test_end(self, logs: Logs) -> None:
        trainer = self._adapter.trainer
        trainer.training, trainer.validating = True, False
        super().test_end(logs)

    def capture(self) -> tuple[dict[str, Any], Arrays]:
        state, arrays = super().capture()
        logged = dict(self._adapter.metrics[TRAINING])
        return {**state, "global_step": self._adapter.trainer.global_step, "logged": logged}, arrays

    def restore(self, state: dict[str, Any], arrays: Arrays) -> None:
        super().restore(state, arrays)
        self._adapter.trainer.global_step = state["global_step"]
        self._adapter.metrics[TRAINING] = dict(state["logged"])


class LightningTrainee(TorchTrainee):
    """Lightning implementation of `TorchTrainee`."""

    _adapter: LightningAdapter

    def _configured(self) -> tuple[dict[str, Optimizer], dict[str, Planned]]:
        self._adapter = LightningAdapter(self.module, self._spec, self._world)
        # What it has made in setup:
        self.module.to(self._device)
        check_module(self.module)
        self._check_weights()
        optimizer, planned = configure_optimizers(self.module)
        return {"": optimizer}, planned

    def _made_steps(self, *args: Any) -> Steps:
        return _LightningSteps(*args, adapter=self._adapter)

    @property
    def has_complete_logs(self) -> bool:
        return False  # what is logged in a validation is known when there was one

    def of_validation(self, name: str) -> str:
        return name  # which the module has given

    def _means(self, kind: str) -> dict[str, float]:
        means = super()._means(kind)
        step_loss = {LOSS: means.pop(_STEP_LOSS)} if _STEP_LOSS in means else {}
        return {**step_loss, **means}

    def results(self, kind: str, logs: Logs | None, fraction: float) -> dict[str, object]:
        means = super().results(kind, logs, fraction)
        self._adapter.trainer.report(means)
        if kind == "test":
            return {**means, **self._adapter.end(VALIDATION)}
        return means  # an epoch ends after its validation, and what is logged then follows

    def _made_hooks(self, *args: Any) -> Callbacks:
        return _LightningHooks(*args, adapter=self._adapter, spec=self._spec)

    def metric_variables(self) -> list[Variable]:
        return [*super().metric_variables(), self._adapter.states]

    def metric_merges(self) -> list[str]:
        return [*super().metric_merges(), JOIN]

    @property
    def _trained_by(self) -> str:
        return "the loss of training_step"

    def save(self, directory: RunDirectory) -> SavedModel:
        self._adapter.detach()
        return super().save(directory)
