"""When the hooks of a module of Lightning's are called."""

from __future__ import annotations

from typing import Any

from ....storage.arrays import Arrays
from ...logs import Logs
from ...spec import TrainingSpec
from ..hooks import TorchHooks
from .attached import Attached
from .logged import TRAINING, VALIDATION


class LightningHooks(TorchHooks):
    """See `TorchHooks`; the module's own come first.

    Args:
        given: what those take.
        attached: the module.
        spec: the training.
    """

    def __init__(self, *given: Any, attached: Attached, spec: TrainingSpec) -> None:
        super().__init__(*given)
        self.attached = attached
        self._spec = spec

    def _asked(self) -> bool:
        return self.attached.trainer.should_stop or super()._asked()

    def _forget(self) -> None:
        self.attached.trainer.should_stop = False
        super()._forget()

    def train_begin(self) -> None:
        self.attached.call("on_train_start")
        super().train_begin()

    def train_end(self, logs: Logs | None) -> None:
        self.attached.call("on_train_end")
        super().train_end(logs)
        self.attached.call("on_fit_end")
        self.attached.call("teardown", "fit")

    def epoch_begin(self, epoch: int) -> None:
        self.attached.trainer.current_epoch = epoch
        self.attached.call("on_train_epoch_start")
        super().epoch_begin(epoch)

    def _set_mode(self) -> None:
        """Leave all parts as they are, as Lightning does."""

    def epoch_end(self, epoch: int, logs: Logs) -> dict[str, object]:
        found = self.attached.results(TRAINING, end="on_train_epoch_end")
        results = {**logs, **found}
        if self._spec.validation is None or self._spec.fit.validates(epoch):
            self.attached.check_metric(self._spec.checkpoints.best_metric, results)
        return super().epoch_end(epoch, results)

    def test_begin(self) -> None:
        trainer = self.attached.trainer
        trainer.training, trainer.validating = False, True
        self.attached.reset(VALIDATION)
        super().test_begin()
        self.attached.call("on_validation_start")
        self.attached.call("on_validation_epoch_start")

    def test_end(self, logs: Logs) -> None:
        self.attached.call("on_validation_end")
        trainer = self.attached.trainer
        trainer.training, trainer.validating = True, False
        super().test_end(logs)

    def capture(self) -> tuple[dict[str, Any], Arrays]:
        state, arrays = super().capture()
        return {**state, "global_step": self.attached.trainer.global_step}, arrays

    def restore(self, state: dict[str, Any], arrays: Arrays) -> None:
        super().restore(state, arrays)
        self.attached.trainer.global_step = state["global_step"]
