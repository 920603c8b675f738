"""Calls to a ``LightningModule`` in place of Lightning's Trainer, of which nothing is imported."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ....cluster.worker.reporting import notify
from ....errors import ModelError, brief
from ....training.spec import TrainingSpec
from ..losses import LOSS
from ..metrics import MetricStates, Sums, is_torchmetrics
from ..model import one_number
from ..optimizers import Schedule, check_optimizers, make_scheduler
from ..torch_model import is_lightning

if TYPE_CHECKING:
    from mpi4py import MPI


TRAINING, VALIDATION = "training", "validation"
# Methods that may log, and the stage that the result is of.
_STAGES = {
    **dict.fromkeys(("on_train_epoch_start", "training_step", "on_train_epoch_end"), TRAINING),
    **dict.fromkeys(
        ("on_validation_epoch_start", "validation_step", "on_validation_epoch_end"), VALIDATION
    ),
}
# Methods that are called as Lightning's Trainer calls them.
_CALLED = ("setup", "configure_optimizers", "on_train_start", "teardown", *_STAGES)
# Arguments of ``log`` that are honoured at their defaults only.
_LOGGED_AS = {"reduce_fx": "mean", "sync_dist_group": None, "rank_zero_only": False}
_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
# Methods that no fit calls, or that only the module itself and its user call.
_LEFT_ALONE = re.compile(
    "forward|print|freeze|unfreeze|log_dict|load_from_checkpoint|cpu|cuda|to|type|double|float|half"
    "|save_hyperparameters|remove_ignored_hparams|(on_)?(test|predict)_.*|to_.*"
)
_CUSTOM_STEP_ADVICE = (
    "give the networks as an nn.Module, TorchModel(module, optimizer=…, train_step=…), whose "
    "train_step computes gradients and steps"
)
# Methods that Lightning's Trainer calls, or has called before version 2, and what to do instead.
_INSTEAD = {
    "(train|val)_dataloader|prepare_data|transfer_batch_to_device": (
        "batches are made of the DataFrame's rows, and of those of validation=…"
    ),
    "on_(before|after)_batch_transfer|on_((train|validation)_)?batch_(start|end)"
    "|(training|validation)_step_end": (
        "write it into training_step or validation_step; what follows a step of all ranks, into "
        "on_step_end of a TorchCallback"
    ),
    "on_validation_(start|end|model_.*)|(training|validation)_epoch_end|on_epoch_(start|end)": (
        "use on_train_epoch_start or …_end, or on_validation_epoch_start or …_end"
    ),
    "configure_callbacks|on_fit_(start|end)|on_train_end": (
        "give callbacks=[…] of TorchCallback, which has on_train_begin and on_train_end"
    ),
    "configure_(sharded_)?model": "build the whole module in __init__ or setup",
    "configure_gradient_clipping|clip_gradients": "give TorchModel(module, clip_norm=…)",
    "lr_scheduler_step": "let configure_optimizers return a scheduler with its 'interval'",
    "on_(save|load)_checkpoint": "checkpoints are arrays and JSON; keep tensors as buffers",
    "on_before_(zero_grad|backward|optimizer_step)|on_after_backward|(manual_)?backward"
    "|optimizer_(step|zero_grad)": _CUSTOM_STEP_ADVICE,
}


class TrainerFacts:
    """The facts that a module finds as its ``trainer``; anything else is refused by name.

    Args:
        spec: the training.
        world: communicator of all ranks.
    """

    def __init__(self, spec: TrainingSpec, world: MPI.Comm) -> None:
        self.max_epochs = spec.fit.epochs
        self.num_training_batches = spec.steps.per_epoch
        self.estimated_stepping_batches = spec.steps.total
        self.accumulate_grad_batches = 1
        self.world_size = world.Get_size()
        self.global_rank = world.Get_rank()
        self.is_global_zero = self.global_rank == 0
        self.current_epoch = 0
        self.global_step = 0
        self.validate(False)
        self.sanity_checking = self.testing = self.predicting = False
        self.should_stop = False
        self.callback_metrics: dict[str, Tensor] = {}
        self.logger, self.loggers = None, list[Any]()
        self.progress_bar_callback = None  # print() of a module asks for it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        raise ModelError(
            f"the module asks for trainer.{name}, but is trained without Lightning's Trainer; its "
            f"trainer has {', '.join(vars(self))}"
        )

    def validate(self, validating: bool) -> None:
        """Set whether a validation goes on, and else a training."""
        self.training, self.validating = not validating, validating

    def report(self, results: Mapping[str, Any]) -> None:
        """Show results to the module."""
        self.callback_metrics.update(
            {n: torch.tensor(v) for n, v in results.items() if isinstance(v, float)}
        )


class LightningAdapter:
    """Calls of a module's methods, and its logs.

    Args:
        module: the module.
        spec: the training.
        world: communicator of all ranks.

    Attributes:
        trainer: the facts that the module finds as its ``trainer``.
        states: the states of the module's metrics of torchmetrics.
        metrics: by stage, the numbers of those that are logged as objects, by their names.
        sums: takes means over rows.

    Raises:
        ModelError: the module has a method that only Lightning's Trainer calls.
    """

    sums: Sums

    def __init__(self, module: Any, spec: TrainingSpec, world: MPI.Comm) -> None:
        check_module(module)
        _check_training(module, spec)
        self.module, self._world = module, world
        self._hook, self._rows, self._silent = "", 0, False
        self.metrics: dict[str, dict[str, int]] = {TRAINING: {}, VALIDATION: {}}
        # Values that are logged once in an epoch, by stage.
        self._values: dict[str, dict[str, float]] = {TRAINING: {}, VALIDATION: {}}
        # The method and the metric that each name is logged by.
        self._sources: dict[str, tuple[str, int | None]] = {LOSS: ("training_step", None)}
        self._stage_of: dict[int, str] = {}
        self.trainer = module.trainer = TrainerFacts(spec, world)
        self._log_signature = inspect.signature(module.log)
        self._replace_log()
        self.call("setup", "fit")
        self._replace_log()  # of modules made there
        self._metrics = _find_metrics(module)
        self.states = MetricStates(self._metrics)

    def _replace_log(self) -> None:
        for each in self.module.modules():
            if is_lightning(each):
                object.__setattr__(each, "log", self._log)

    def detach(self) -> None:
        """Leave the module as it was, after the training."""
        self.module.trainer = None
        for each in self.module.modules():
            if is_lightning(each):
                vars(each).pop("log", None)

    # -- methods of the module -----------------------------------------------------------------

    def call(self, hook: str, *arguments: Any) -> Any:
        """Call a method, if it is the user's."""
        if not _overrides(self.module, hook):
            return None
        self._hook = hook
        try:
            return getattr(self.module, hook)(*arguments)
        finally:
            self._hook = ""

    def step(self, name: str, batch: Any, number: int, rows: int) -> Any:
        """Return the result of ``training_step`` or ``validation_step`` for a batch.

        Args:
            name: which of them.
            batch: see `BatchBinding.arrange`.
            number: the step's number in its epoch.
            rows: rows that count; without any, logs and metrics' states are left as they are.
        """
        arguments = [batch, number]
        try:
            inspect.signature(getattr(self.module, name)).bind(*arguments)
        except TypeError:  # it takes no number
            arguments = [batch]
        self._rows = rows
        with contextlib.nullcontext() if rows else self.unnoticed():
            return self.call(name, *arguments)

    def loss(self, batch: Any, number: int, rows: int) -> Tensor:
        """Return the loss of a batch; see `step`.

        Raises:
            ModelError: ``training_step`` returns none.
        """
        returned = self.step("training_step", batch, number, rows)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ModelError(
                "training_step must return the loss, a tensor of one number, or a dictionary with "
                f"it as 'loss', but returned {brief(returned)}; no rank can leave a step out"
            )
        return loss.reshape(())

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Ignore logs, and restore metrics and the trainer's facts afterwards."""
        states, facts = self.states.numpy(), dict(vars(self.trainer))
        callback_metrics = dict(self.trainer.callback_metrics)
        self._silent = True
        try:
            yield
        finally:
            self._silent = False
            self.states.assign(states)
            vars(self.trainer).update(facts, callback_metrics=callback_metrics)

    # -- results -------------------------------------------------------------------------------

    def _log(self, *args: Any, **kwargs: Any) -> None:
        """Replace ``LightningModule.log``, with its arguments."""
        arguments = self._log_signature.bind(*args, **kwargs).arguments
        name, value = arguments["name"], arguments["value"]
        for key, default in _LOGGED_AS.items():
            if (argument := arguments.get(key, default)) != default:
                raise ModelError(
                    f"{name!r} is logged with {key}={brief(argument)}, but a result is the mean "
                    f"over the rows of all ranks: leave {key} out, or let a metric of torchmetrics "
                    "compute it"
                )
        if self._silent:
            return
        hook = self._hook
        if hook not in _STAGES:
            raise ModelError(
                f"{hook or 'a call'} logs {name!r}, which is of no step and no epoch there; "
                f"{', '.join(_STAGES)} can log"
            )
        stage = _STAGES[hook]
        metric = self._number_of(name, value, stage) if is_torchmetrics(value) else None
        source = self._sources.setdefault(name, (hook, metric))
        if source != (hook, metric):
            raise ModelError(
                f"{name!r} is logged by {source[0]} and by {hook}, or as two metrics; give each "
                "result a name of its own, such as 'train_loss' and 'val_loss'"
            )
        number = one_number(value)
        if metric is not None:
            self.metrics[stage][name] = metric
        elif number is None:
            raise ModelError(
                f"{name!r} is logged as {brief(value)}, which is neither one number nor a metric"
            )
        elif hook.endswith("_step"):
            rows = arguments.get("batch_size") or self._rows
            self.sums.add(name, number * rows, rows)
        else:
            self._values[stage][name] = float(number)

    def _number_of(self, name: str, value: Any, stage: str) -> int:
        """Return which metric is logged."""
        number = next((n for n, metric in enumerate(self._metrics) if metric is value), None)
        if number is None:
            raise ModelError(
                f"{name!r} is logged as a {type(value).__name__} that keeps its states in other "
                "metrics, or is no attribute of the module; log those that are, each by a name"
            )
        if (other := self._stage_of.setdefault(number, stage)) != stage:
            raise ModelError(
                f"the metric {name!r} is logged in {stage}, and in {other}: it would be of the "
                "rows of both. Give each a metric of its own"
            )
        return number

    def end(self, stage: str) -> dict[str, Any]:
        """Return a stage's logs besides means over rows, the same on all ranks.

        The hook that ends it is called with metrics that have seen the rows of all ranks. Those
        that were logged are reset then.

        Raises:
            ModelError: a result is not the same on all ranks.
        """
        states = self._world.allgather(self.states.numpy())
        with self.states.merged(states):
            self.call("on_train_epoch_end" if stage == TRAINING else "on_validation_epoch_end")
            results: dict[str, Any] = dict(self._values[stage])
            # A rank without rows has logged none, and computes what the others have.
            for logged in self._world.allgather(self.metrics[stage]):
                for name, number in logged.items():
                    if name not in results and self._metrics[number]._update_count:
                        results[name] = _plain(name, self._metrics[number].compute())
        _check_equal(self._world.allgather(results))
        for number in self.metrics[stage].values():
            self.states.forget(number)
        self.metrics[stage], self._values[stage] = {}, {}
        self.trainer.report(results)
        return results


def _check_training(module: Any, spec: TrainingSpec) -> None:
    kind = type(module).__name__
    if spec.fit.class_weight is not None:
        raise ModelError(
            f"class_weight is for losses that are known here, but {kind}.training_step "
            "computes its own; weigh classes there"
        )
    if spec.validation is not None and not _overrides(module, "validation_step"):
        raise ModelError(f"validation needs a validation_step, which {kind} does not have")
    if _overrides(module, "predict_step"):
        notify(f"{kind}.predict_step is not called: the transformer predicts what forward gives")


def _find_metrics(module: Any) -> list[Any]:
    """Return the metrics of torchmetrics in a module that have states of their own."""
    metrics = [each for each in module.modules() if is_torchmetrics(each)]
    for each in metrics:
        # Members of a collection share states where they are alike; each has its own here.
        if hasattr(each, "add_metrics"):
            each._enable_compute_groups = each._groups_checked = False
            each._groups = {n: [str(k)] for n, k in enumerate(each.keys(keep_base=True))}
    metrics = [each for each in metrics if getattr(each, "_defaults", None)]
    for each in metrics:
        if any(each._persistent.values()):
            raise ModelError(
                f"metric {type(each).__name__} of {type(module).__name__} is persistent, "
                "so that its states are weights; leave persistent out"
            )
    return metrics


def _check_equal(every: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ranks' results are the same."""
    for rank, other in enumerate(every):
        for name in {**every[0], **other}:
            first: Any = every[0].get(name)
            value: Any = other.get(name)
            same = first is not None and value is not None and np.shape(first) == np.shape(value)
            if not same or not np.allclose(first, value, rtol=1e-6, equal_nan=True):
                raise ModelError(
                    f"{name!r} is {first} on rank 0 and {value} on rank {rank}: it is of each "
                    "rank's own rows. Log it in the step, which is merged over the rows of all "
                    "ranks, or let a metric of torchmetrics that is updated in the step compute it"
                )


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else value.detach().cpu().double().tolist()
    raise ModelError(f"the metric {name!r} computes {brief(value)}, which is no number")


def check_module(module: Any) -> None:
    """Check that a module defines its training, and no hook that only Lightning's Trainer calls.

    Raises:
        ModelError: it has not; the message names the method and what to write instead.
    """
    cls = type(module)
    for name in ("training_step", "configure_optimizers"):
        if not _overrides(module, name):
            raise ModelError(f"{cls.__name__} has no {name} to train it by")
    leave_out = f"leave it out; {', '.join(_CALLED)} are called"
    bases = [base for base in cls.__mro__ if base.__module__.startswith(_LIBRARIES)]
    for name in dir(cls):
        if name.startswith("_") or name in _CALLED or not _overrides(module, name):
            continue
        instead = next((text for names, text in _INSTEAD.items() if re.fullmatch(names, name)), "")
        of_lightning = any(name in vars(base) for base in bases) and callable(getattr(cls, name))
        if (instead or of_lightning) and not _LEFT_ALONE.fullmatch(name):
            raise ModelError(
                f"{cls.__name__}.{name} is not called here, where Lightning's Trainer does not "
                f"train: {instead or leave_out}"
            )
    _check_automatic(module)


def _overrides(module: object, name: str) -> bool:
    """Return whether a user's class overrides a method."""
    owner = next((cls for cls in type(module).__mro__ if name in vars(cls)), None)
    return owner is not None and not f"{owner.__module__}.".startswith((*_LIBRARIES, "torch."))


def _check_automatic(module: Any) -> None:
    """Check that a module leaves the steps of its optimizer to the training.

    Raises:
        ModelError: it steps itself.
    """
    if not module.automatic_optimization:
        raise ModelError(
            f"{type(module).__name__} sets automatic_optimization = False, but its training_step "
            f"is not to step here: {_CUSTOM_STEP_ADVICE}"
        )


def configure_optimizers(module: Any) -> tuple[Optimizer, dict[str, Schedule]]:
    """Return a module's optimizer, and its schedulers by number.

    Raises:
        ModelError: they are given in no form that is known here, or cannot be used.
    """
    returned = module.configure_optimizers()
    _check_automatic(module)
    optimizers, settings = _parse(returned)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise ModelError(
            "configure_optimizers must return one optimizer, ([optimizer], [scheduler]), or a "
            "dictionary with 'optimizer' and 'lr_scheduler', but returned "
            f"{brief(returned)}. To train with several, {_CUSTOM_STEP_ADVICE}"
        )
    (optimizer,) = optimizers
    check_optimizers({"": optimizer}, module)
    return optimizer, {str(n): _schedule(one, optimizer) for n, one in enumerate(settings)}


def _parse(returned: Any) -> tuple[Sequence[Any], list[dict[str, Any]]]:
    """Return the optimizers, and the schedulers as dictionaries."""
    several = isinstance(returned, (list, tuple))
    if several and len(returned) == 1:
        return _parse(returned[0])
    optimizers, schedulers, common = returned if several else [returned], [], {}
    if isinstance(returned, Mapping):
        _check_keys(returned, ("optimizer", "lr_scheduler", "monitor"), {})
        optimizers, common = [returned.get("optimizer")], {"monitor": returned.get("monitor")}
        schedulers = [one for one in [returned.get("lr_scheduler")] if one is not None]
    elif several and len(returned) == 2 and isinstance(returned[0], (list, tuple)):
        optimizers, schedulers = returned
        if not isinstance(schedulers, (list, tuple)):
            schedulers = [schedulers]
    return optimizers, [
        {**common, **(one if isinstance(one, Mapping) else {"scheduler": one})}
        for one in schedulers
    ]


def _schedule(settings: Mapping[str, Any], optimizer: Optimizer) -> Schedule:
    interval = settings.get("interval", "epoch")
    if interval not in ("step", "epoch"):
        raise ModelError(
            f"a scheduler of configure_optimizers has interval 'step' or 'epoch', got {interval!r}"
        )
    schedule = Schedule(make_scheduler(settings.get("scheduler"), optimizer), interval)
    # A name is for Lightning's LearningRateMonitor only.
    defaults = {"frequency": 1, "strict": True, "reduce_on_plateau": schedule.watches}
    _check_keys(settings, ("scheduler", "interval", "monitor", "name"), defaults)
    return replace(schedule, monitor=settings.get("monitor")) if schedule.watches else schedule


def _check_keys(
    config: Mapping[str, Any], supported: Sequence[str], defaults: Mapping[str, object]
) -> None:
    """Check that a dictionary has supported keys, and others at Lightning's defaults only."""
    for key, value in config.items():
        if key not in supported and (key not in defaults or value != defaults[key]):
            raise ModelError(
                f"configure_optimizers returns {key!r} ({brief(value)}), which is not honoured "
                f"here; known are {', '.join(map(repr, supported))}"
            )
