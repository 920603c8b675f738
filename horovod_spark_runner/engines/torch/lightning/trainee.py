"""A ``LightningModule`` as the training loop knows it: its steps, its hooks, its results."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ....checkpoint.model_state import Variable
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
from ..metrics import Results
from ..model import check_module
from ..optimizers import Schedule
from ..step import Steps
from ..trainee import TorchTrainee
from ..trial import Recorder
from .adapter import TRAINING, VALIDATION, LightningAdapter, configure_optimizers

# Among the sums, where a module may log a "loss" of its own.
_STEP_LOSS = "loss of training_step"


class LightningTrainee(TorchTrainee):
    """Lightning implementation of `TorchTrainee`."""

    _adapter: LightningAdapter

    def _configure(self) -> tuple[dict[str, Optimizer], dict[str, Schedule]]:
        self._adapter = LightningAdapter(self.module, self._spec, self._world)
        # Parts that were made in setup:
        self.module.to(self._device)
        check_module(self.module)
        self._check_weights()
        optimizer, schedules = configure_optimizers(self.module)
        return {"": optimizer}, schedules

    def _make_results(self) -> Results:
        results = _LightningResults(None, [], self._device)
        self._adapter.sums = results.sums
        return results

    def _make_steps(self, *args: Any) -> Steps:
        return _LightningSteps(*args, adapter=self._adapter)

    def _make_hooks(self, *args: Any) -> Callbacks:
        return _LightningCallbacks(*args, adapter=self._adapter, spec=self._spec)

    @property
    def has_complete_logs(self) -> bool:
        return False  # what is logged in a validation is known when there was one

    def of_validation(self, name: str) -> str:
        return name  # the module has given it

    def results(self, kind: str, logs: Logs | None, fraction: float) -> dict[str, object]:
        means = super().results(kind, logs, fraction)
        self._adapter.trainer.report(means)
        # A training's epoch ends after its validation, and what is logged then follows.
        return {**means, **self._adapter.end(VALIDATION)} if kind == "test" else means

    def metric_variables(self) -> list[Variable]:
        return [*super().metric_variables(), self._adapter.states]

    @property
    def trained_by(self) -> str:
        return "the loss of training_step"

    def save(self, directory: RunDirectory) -> SavedModel:
        self._adapter.detach()
        return super().save(directory)


class _LightningResults(Results):
    """Means of what a module logs; the loss is that of ``training_step`` unless it is logged."""

    def means(self, *, required: bool = True) -> dict[str, float]:
        means = super().means(required=required)
        step_loss = {LOSS: means.pop(_STEP_LOSS)} if _STEP_LOSS in means else {}
        return {**step_loss, **means}


class _LightningSteps(Steps):
    """Lightning implementation of `Steps`, by ``training_step`` and ``validation_step``.

    A rank without rows calls ``training_step`` on rows which count for nothing, so that all ranks
    do the same.
    """

    def __init__(self, *args: Any, adapter: LightningAdapter) -> None:
        super().__init__(*args)
        self._adapter = adapter

    def step_functions(self) -> list[object]:
        return [self._adapter.module.training_step]

    def _train_batch(self, step: Step) -> None:
        rows, (optimizer,) = step.batch.rows, self._optimizers.values()
        arranged = self._arranged(step)
        with self._autocast():
            loss = self._adapter.loss(arranged, step.number, rows)
        optimizer.zero_grad(set_to_none=True)
        with self.exchange.backward():
            loss.backward()  # type: ignore[no-untyped-call]
        self.exchange.exchange()
        self._clip(optimizer)
        optimizer.step()
        self._adapter.trainer.global_step += 1
        self._results.sums.add(_STEP_LOSS, loss.detach().double() * rows if rows else 0.0, rows)

    def test(self, step: Step) -> None:
        self.modes.evaluate()
        if step.batch.rows:
            with torch.no_grad(), self._autocast():
                rows = step.batch.rows
                self._adapter.step("validation_step", self._arranged(step), step.number, rows)

    def try_step(self, step: Step, recorder: Recorder) -> Values:
        arranged = self._arranged(step)
        with self._adapter.unnoticed(), self._autocast():
            loss = self._adapter.loss(arranged, step.number, step.batch.rows)
        loss.backward()  # type: ignore[no-untyped-call]
        recorder.record(*self._optimizers.values())
        return {}

    def _arranged(self, step: Step) -> Any:
        return self._batches.arrange(self._batch_of(step) or self._batches.nothing())


class _LightningCallbacks(Callbacks):
    """Lightning implementation of `Callbacks`; the module's own hooks come first.

    Args:
        args: those of `Callbacks`.
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
        complete = self._spec.has_all_results(epoch)
        if best is not None and complete and best not in results:
            raise InvalidInputError(
                f"best_metric={best!r} is no metric of this training; it has "
                f"{', '.join(sorted(results))}"
            )
        return super().epoch_end(epoch, results)

    def test_begin(self) -> None:
        self._adapter.trainer.validate(True)
        super().test_begin()
        self._adapter.call("on_validation_epoch_start")

    def test_end(self, logs: Logs) -> None:
        self._adapter.trainer.validate(False)
        super().test_end(logs)

    def capture(self) -> tuple[dict[str, Any], Arrays]:
        state, arrays = super().capture()
        logged = dict(self._adapter.metrics[TRAINING])
        return {**state, "global_step": self._adapter.trainer.global_step, "logged": logged}, arrays

    def restore(self, state: dict[str, Any], arrays: Arrays) -> None:
        super().restore(state, arrays)
        self._adapter.trainer.global_step = state["global_step"]
        self._adapter.metrics[TRAINING] = dict(state["logged"])
