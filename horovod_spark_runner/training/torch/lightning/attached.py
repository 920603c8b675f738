"""A module of Lightning, as a training calls it in place of Lightning's Trainer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ....errors import InvalidInputError, ModelError, brief
from ....launch.worker.reporting import notify
from ...spec import TrainingSpec
from ..batches import TorchBatch
from ..losses import LOSS
from ..metric_states import MetricStates, is_torchmetrics
from ..modes import Modes
from ..schedulers import Planned
from .configured import configured
from .forgetting import forgetting
from .logged import TRAINING, VALIDATION, Logged, merged, parts_of, results_of
from .recognise import check_module, is_lightning, overrides
from .stand_in import StandIn

if TYPE_CHECKING:
    from mpi4py import MPI


class Attached:
    """Connects a module with the training; nothing of Lightning is imported for it.

    Args:
        module: the module.
        spec: the training.
        world: communicator of all ranks.

    Raises:
        ModelError: it asks for what only Lightning's Trainer does; the message names it.
    """

    def __init__(self, module: Any, spec: TrainingSpec, world: MPI.Comm) -> None:
        check_module(module)
        self.module = module
        self._world = world
        self._check(spec)
        self._metrics: list[Any] = []
        self.states = MetricStates(self._metrics)
        self.logged = Logged(self._metrics, world.Get_rank())
        self.trainer = StandIn(spec, world, self._backward)
        self._hook = ""
        self._rows, self._step = 0.0, 0
        self._silent = False
        self.modes = Modes(module)
        self._told: dict[str, set[str]] = {TRAINING: {LOSS}, VALIDATION: set()}
        module.trainer = self.trainer
        self._take_log()
        self.call("setup", "fit")
        self.call("configure_model")
        self._take_log()
        self._take_metrics()
        if overrides(module, "predict_step"):
            notify(
                f"{type(module).__name__}.predict_step is not called: the transformer predicts "
                "what forward gives"
            )
        kind = type(module).__name__
        still = [name or kind for name, each in module.named_modules() if not each.training]
        if still:
            notify(
                f"{len(still)} of the modules in {kind} ({still[0]!r} is the first) are in "
                "evaluation mode, and stay so in the training, as by Lightning; call train() of "
                "those that are to be trained"
            )
        self.call("on_fit_start")

    def _take_log(self) -> None:
        for each in self.module.modules():
            if is_lightning(each):
                object.__setattr__(each, "log", self._log)

    def _take_metrics(self) -> None:
        # Members of a collection share states where they are alike; each has its own here.
        for each in self.module.modules():
            if is_torchmetrics(each) and hasattr(each, "add_metrics"):
                each._enable_compute_groups = each._groups_checked = False
                each._groups = {n: [str(k)] for n, k in enumerate(each.keys(keep_base=True))}
        metrics = [
            each
            for each in self.module.modules()
            if is_torchmetrics(each) and getattr(each, "_defaults", None)
        ]
        for each in metrics:
            if any(each._persistent.values()):
                raise ModelError(
                    f"metric {type(each).__name__} of {type(self.module).__name__} is persistent, "
                    "so that its states are weights; leave persistent out"
                )
        self._metrics += metrics
        self.states.follow()

    def _check(self, spec: TrainingSpec) -> None:
        kind = type(self.module).__name__
        if spec.fit.class_weight is not None:
            raise ModelError(
                f"class_weight is for losses that are known here, but {kind}.training_step "
                "computes its own; weigh classes there"
            )
        if spec.validation is not None and not overrides(self.module, "validation_step"):
            raise ModelError(f"validation needs a validation_step, which {kind} does not have")

    def configured(self) -> tuple[dict[str, Optimizer], dict[str, Planned]]:
        """Return the optimizers and schedulers, which the module is told of.

        Raises:
            ModelError: some cannot be used.
        """
        optimizers, planned = configured(self.module)
        self.trainer.optimizers = list(optimizers.values())
        self.trainer.strategy._lightning_optimizers = list(optimizers.values())
        self.trainer.lr_scheduler_configs = [
            SimpleNamespace(scheduler=plan.scheduler) for plan in planned.values()
        ]
        return optimizers, planned

    @property
    def automatic(self) -> bool:
        """Whether the training steps with the optimizer, and not ``training_step``."""
        return bool(self.module.automatic_optimization)

    def detach(self) -> None:
        """Leave the module as it was, after the training."""
        self.module.trainer = None
        self.states.leave()
        for each in self.module.modules():
            if is_lightning(each):
                vars(each).pop("log", None)

    # -- what is called ------------------------------------------------------------------------

    def call(self, hook: str, *arguments: Any) -> Any:
        """Call a method, if it is the user's."""
        if not overrides(self.module, hook):
            return None
        before, self._hook = self._hook, hook
        try:
            return getattr(self.module, hook)(*arguments)
        finally:
            self._hook = before

    def loss(self, given: Any, number: int) -> tuple[Tensor | None, Any]:
        """Return the loss of a batch, ``None`` where the module steps itself, and what it gave.

        Raises:
            ModelError: it gives none.
        """
        if self.call("on_train_batch_start", given, number) is not None:
            raise ModelError("on_train_batch_start cannot end an epoch here: let it return None")
        returned = self.call("training_step", *self._arguments("training_step", given, number))
        if not self.automatic:
            return None, returned
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ModelError(
                "training_step must return the loss, a tensor of one number, or a dictionary with "
                f"it as 'loss', but returned {brief(returned)}; no rank can leave a step out"
            )
        return loss.reshape(()), returned

    def validate(self, given: Any, number: int) -> None:
        """Let the module validate on a batch."""
        self.call("on_validation_batch_start", given, number)
        returned = self.call("validation_step", *self._arguments("validation_step", given, number))
        self.call("on_validation_batch_end", returned, given, number)

    def _arguments(self, name: str, given: Any, number: int) -> tuple[Any, ...]:
        taken = inspect.signature(getattr(self.module, name)).parameters
        for wanted in ("dataloader_iter", "optimizer_idx"):
            if wanted in taken:
                raise ModelError(
                    f"{name} takes {wanted}, but is called with a batch and its number"
                )
        if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in taken.values()):
            return given, number
        return (given, number)[: len(taken)]

    def batch(self, batch: TorchBatch, names: Sequence[str] | None, target: Any) -> Any:
        """Return a batch as ``training_step`` gets it.

        Args:
            batch: the rows.
            names: parameters of ``forward`` that the inputs are for, if they go by names.
            target: the labels.

        Returns:
            The inputs and the labels, and the weights of the rows where there are some; without
            labels the inputs alone. Several inputs or labels are a dictionary by their names, or a
            tuple.
        """
        inputs: Any = batch.inputs[0]
        if len(batch.inputs) > 1:
            inputs = tuple(batch.inputs)
            if names is not None:
                inputs = dict(zip(names, batch.inputs, strict=True))
        parts = [inputs]
        if batch.labels:
            parts.append(target)
        if batch.weights is not None:
            parts.append(batch.weights)
        given = parts[0] if len(parts) == 1 else tuple(parts)
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            if overrides(self.module, hook):
                given = self.call(hook, given, 0)
        return given

    def counting(self, rows: int, step: int) -> None:
        """Let what is logged from here on count by so many rows, of a step of that number."""
        self._rows, self._step = float(rows), step

    @contextlib.contextmanager
    def unnoticed(self, *, numbers: bool = False) -> Iterator[None]:
        """Let the module forget what it notes meanwhile: logs, metrics, lists of its own.

        Args:
            numbers: whether numbers and tensors, which it may count steps by, are forgotten, too.
        """
        states = self.states.numpy()
        silent, self._silent = self._silent, True
        try:
            with forgetting(self.module, numbers=numbers):
                yield
        finally:
            self._silent = silent
            self.states.assign(states)

    def _backward(self, loss: Tensor, *given: Any, **named: Any) -> None:
        self.call("on_before_backward", loss)
        loss.backward(*given, **named)  # type: ignore[no-untyped-call]
        self.call("on_after_backward")

    # -- what is logged ------------------------------------------------------------------------

    def _log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Stand in for ``LightningModule.log``, with its arguments."""
        if reduce_fx not in ("mean", torch.mean):
            raise ModelError(
                f"{name!r} is logged with reduce_fx={reduce_fx!r}; means are merged here"
            )
        if sync_dist_group is not None or rank_zero_only:
            raise ModelError(
                f"{name!r} is logged for some ranks only; leave sync_dist_group and rank_zero_only "
                "out: results are those of the rows of all ranks"
            )
        if self._silent:
            return
        rows = self._rows if batch_size is None else float(batch_size)
        self.logged.log(name, value, self._hook, rows, self._step, on_step, on_epoch)

    def reset(self, stage: str) -> None:
        """Begin a stage anew, and the metrics that it has logged."""
        for number in self.logged.metrics_of(stage):
            self.states.forget(number)
        self.logged.reset(stage)

    def metric_variables(self) -> list[Any]:
        """Return what checkpoints within an epoch hold; each may be joined."""
        return [self.logged, self.states]

    def here(self) -> dict[str, float]:
        """Return what this rank has logged so far."""
        return results_of(merged(parts_of([self.logged.numpy()])), TRAINING)

    def results(self, stage: str, *, end: str) -> dict[str, Any]:
        """Return the results of a stage over the rows of all ranks.

        Args:
            stage: the stage.
            end: a hook that is called before, in which metrics compute for all ranks.

        Raises:
            ModelError: they cannot be merged, or are called as those of the other stage.
        """
        states = self._world.allgather(self.states.numpy())
        computed: dict[str, Any] = {}
        with self.states.merged(states):
            before = [metric._update_count for metric in self._metrics]
            self.call(end)
            self._check_updates(end, before)
            entries = merged(parts_of(self._world.allgather(self.logged.numpy())))
            for name, one in entries.items():
                if one.stage == stage and one.metric >= 0:
                    metric = self._metrics[one.metric]
                    if metric._update_count:
                        computed[name] = _plain(name, metric.compute())
        found = {**results_of(entries, stage), **computed}
        self._told[stage] |= set(found)
        both = self._told[TRAINING] & self._told[VALIDATION]
        if both:
            raise ModelError(
                f"{sorted(both)[0]!r} is logged in training and in validation; give it a name for "
                "each, such as 'train_loss' and 'val_loss'"
            )
        self.trainer.tell(found)
        return found

    def _check_updates(self, hook: str, before: Sequence[int]) -> None:
        """Check that no metric was given a rank's own rows when those of all had been merged."""
        for metric, count in zip(self._metrics, before, strict=True):
            if self._world.Get_size() > 1 and metric._update_count > count:
                raise ModelError(
                    f"{hook} updates a {type(metric).__name__} with this rank's rows, when those "
                    "of all ranks have been merged; update it in the step"
                )

    def check_metric(self, wanted: str | None, results: Mapping[str, object]) -> None:
        """Check that there is a result to tell the best checkpoint by.

        Raises:
            InvalidInputError: there is none.
        """
        if wanted is not None and wanted not in results:
            raise InvalidInputError(
                f"best_metric={wanted!r} is no metric of this training; it has "
                + ", ".join(sorted(results))
            )


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, Tensor):
        return np.asarray(value.detach().cpu().double()).tolist()
    raise ModelError(f"the metric {name!r} computes {brief(value)}, which is no number")
