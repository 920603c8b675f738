"""A module of Lightning's as the training loop knows it."""

from __future__ import annotations

from typing import Any, cast

from torch.optim import Optimizer

from ....errors import ModelError
from ....launch.worker.reporting import notify
from ....rundir.directory import RunDirectory
from ...epochs import Step
from ...logs import Logs
from ...rank_state import JOIN
from ...state import Variable
from ..build import check_module
from ..hooks import TorchHooks
from ..outputs import leaves
from ..probe import check_means
from ..saved import SavedModule
from ..schedulers import Planned
from ..step import Steps
from ..trainee import Later, TorchTrainee, random_kept
from .attached import Attached
from .hooks import LightningHooks
from .logged import TRAINING, VALIDATION
from .steps import LightningSteps


class LightningTrainee(TorchTrainee):
    """See `TorchTrainee`."""

    _attached: Attached

    def _configured(self) -> tuple[dict[str, Optimizer], dict[str, Planned]]:
        self._attached = Attached(self.module, self._spec, self._world)
        # What it has made in setup:
        self.module.to(self._device)
        check_module(self.module)
        self._check_weights()
        return self._attached.configured()

    def _made_steps(self, *given: Any) -> Steps:
        return LightningSteps(*given, attached=self._attached)

    @property
    def tells_all(self) -> bool:
        return False  # what is logged in a validation is known when there was one

    def of_validation(self, name: str) -> str:
        return name  # which the module has given

    def _logs(self, kind: str) -> Logs:
        return Later(lambda: {**self._means(kind), **self._attached.here()})

    def reset_metrics(self) -> None:
        if not self._attached.trainer.validating:  # the hooks have begun that
            super().reset_metrics()
            self._attached.reset(TRAINING)

    def results(self, kind: str, logs: Logs | None, fraction: float) -> dict[str, object]:
        if kind == "test":
            return self._attached.results(VALIDATION, end="on_validation_epoch_end")
        # What the module has logged follows when its epoch has ended, after the validation.
        return super().results(kind, logs, fraction)

    def hooks(self, *, steps: int, resumed: bool) -> TorchHooks:
        return LightningHooks(
            self._callbacks,
            self.module,
            self._steps.modes,
            self._capture,
            self._restore,
            self._schedulers.after_epoch,
            attached=self._attached,
            spec=self._spec,
        )

    def metric_variables(self) -> list[Variable]:
        return [*super().metric_variables(), *self._attached.metric_variables()]

    def metric_merges(self) -> list[str]:
        return [*super().metric_merges(), *(JOIN for _ in self._attached.metric_variables())]

    def probe(self, step: Step) -> None:
        if step.batch.rows < 2 or not self._attached.automatic:
            return
        with random_kept():
            given, loss = cast("LightningSteps", self._steps).tried(step)
            try:
                next(leaves(given))
            except (ModelError, StopIteration):  # of the user's own making: parts are not known
                return
            own = [("the loss of training_step", loss)]
            for text in check_means(own, given, (), vary=False):  # of the inputs, not the outputs
                notify(text)

    def save(self, directory: RunDirectory) -> SavedModule:
        self._attached.detach()
        return super().save(directory)
