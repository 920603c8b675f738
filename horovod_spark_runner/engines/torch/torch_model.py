"""`TorchModel`: a module with its loss and its optimizer. Loads no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from ...config.keywords import check_keywords
from ...config.validators import check_choice
from ...errors import InvalidInputError, ModelError, brief
from ...frameworks import TORCH
from ...training.engine import LIGHTNING_MODULES

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from .custom_step import TorchStep


# A class of torch.nn by its name, a module of one, or a function of outputs and labels.
_Loss: TypeAlias = "str | nn.Module | Callable[..., Tensor]"
# A class of torch.optim by its name, what makes one of parameters, or one that is made already.
_OptimizerLike: TypeAlias = "str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]"
_SchedulerLike: TypeAlias = "LRScheduler | Callable[[Optimizer], LRScheduler]"
# A name, a torchmetrics.Metric, or a function of outputs and labels.
MetricLike: TypeAlias = str | Callable[..., Any]
Logs: TypeAlias = "Mapping[str, Tensor | float]"


@dataclass(frozen=True)
class TorchModel:
    """A PyTorch module and its training settings: the result of ``model_fn``.

    ``run_training`` takes a function without arguments that returns one, and calls it on every
    rank; its code or its annotation (``def model_fn() -> TorchModel``) says so. It also takes a
    `TorchModel` itself, which is sent to the ranks. Rank 0's weights are those of all.

    Attributes:
        module: the network, or a function or class that makes it without arguments.
        loss: name of a class of ``torch.nn`` (``"CrossEntropyLoss"``), a module of one, or a
            function of outputs and labels that returns the mean over the rows, or one value per
            row; of one argument, it gets the outputs alone. Without label columns, a function of
            two gets the inputs as its labels. For several outputs a dictionary by the names of
            ``label_cols``, or a list in their order, whose losses are added up; or one function of
            all outputs and all labels. An epoch's ``loss`` is the sum over its rows, divided once
            by all rows, or by the weights of all labels that count; of sums over a batch it is the
            mean. ``None`` (default) only with a ``train_step``.
        optimizer: name of a class of ``torch.optim`` (``"Adam"``), which is made with its defaults;
            a function that makes one of the module's parameters
            (``functools.partial(torch.optim.SGD, lr=0.1)``); or an optimizer over them. For a
            ``train_step``, a dictionary of several optimizers by name, already made.
        scheduler: function that makes a learning rate scheduler of the optimizer, or a scheduler
            of it; of several optimizers a dictionary by their names. ``None`` (default) for none.
            ``training_steps()`` gives it the number of steps.
        schedule: when the scheduler steps: after every ``"epoch"`` (default) or every ``"step"``.
            ``ReduceLROnPlateau`` gets the validation's loss, in epochs that have one; in a run
            without validation the training's.
        metrics: what is reported besides the loss, by name: functions of outputs and labels that
            return one value per row, the mean over the rows, or a pair of a sum and what it is
            divided by; ``"accuracy"``, ``"mae"`` or ``"mse"``; or metrics of ``torchmetrics``
            (extra), whose states are merged over the ranks. A list takes the names of what is in
            it.
        train_step: function that trains on one batch in place of the usual step: it gets a
            `TorchStep`, calls ``backward()`` and the optimizers' ``step()`` itself, and returns
            what to report, means over the batch's rows by name. All optimizers step with the
            gradients of all ranks; to change gradients before, call `TorchStep.synchronize`. To add
            up gradients, cut the batch into parts within one call.
        autocast: ``"bfloat16"`` computes outputs and loss under ``torch.autocast``; ``None``
            (default) does not. Weights and gradients stay as they are.
        clip_norm: largest norm of all of an optimizer's gradients together, those of all ranks;
            ``None`` (default) for no limit.
        clip_value: largest absolute value of a gradient's element; ``None`` (default) for none.
        sync_batch_norm: whether batch normalisation takes the moments of the global batch, and not
            of each rank's own rows (default).
        state: objects beside the module that a ``train_step`` changes, by name: averaged models,
            scalers, counters, whatever has ``state_dict`` and ``load_state_dict``. Checkpoints hold
            their state, for each rank its own; tensors above 64 KiB are rank 0's.

    Raises:
        ModelError: something of it cannot be used for a training.
        InvalidInputError: an option has a value that it cannot have.
    """

    module: nn.Module | Callable[[], nn.Module]
    loss: _Loss | Mapping[str, _Loss] | Sequence[_Loss] | None = None
    optimizer: _OptimizerLike | Mapping[str, Optimizer] | None = None
    scheduler: _SchedulerLike | Mapping[str, _SchedulerLike] | None = None
    schedule: Literal["epoch", "step"] = "epoch"
    metrics: Mapping[str, MetricLike] | Sequence[MetricLike] | None = None
    train_step: Callable[[TorchStep], Logs | None] | None = None
    autocast: Literal["bfloat16"] | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    sync_batch_norm: bool = False
    state: Mapping[str, Any] | None = None

    # How `run_training` finds what trains it.
    horovod_engine: ClassVar[str] = TORCH

    def __post_init__(self) -> None:
        if not callable(self.module):
            raise ModelError(
                "module must be a torch.nn.Module, or a function that returns one, got "
                f"{brief(self.module)}"
            )
        if self.train_step is not None and not callable(self.train_step):
            raise ModelError(
                f"train_step must be a function of a TorchStep, got {brief(self.train_step)}"
            )
        refuse_lightning(self.module)
        if self.loss is None and self.train_step is None:
            raise ModelError(
                "a TorchModel needs a loss: the name of a class of torch.nn such as "
                "loss='CrossEntropyLoss', a module or a function; or a train_step of its own"
            )
        if self.optimizer is None:
            raise ModelError(
                "a TorchModel needs an optimizer: the name of a class of torch.optim such as "
                "optimizer='Adam', or functools.partial(torch.optim.SGD, lr=…)"
            )
        self._check_order()
        self._check_options()

    def _check_order(self) -> None:
        # Told by their attributes, as PyTorch is not loaded here.
        if hasattr(self.loss, "param_groups") or hasattr(self.optimizer, "named_modules"):
            raise ModelError(
                "the order is TorchModel(module, loss, optimizer), got the loss "
                f"{brief(self.loss)} and the optimizer {brief(self.optimizer)}"
            )

    def _check_options(self) -> None:
        for name, each in (self.state or {}).items():
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(each, method, None)):
                    raise ModelError(f"state {name!r} is a {type(each).__name__} without {method}")
        check_choice("schedule", self.schedule, ("epoch", "step"))
        if self.autocast is not None:
            check_choice("autocast", self.autocast, ("bfloat16",))
        for name in ("clip_norm", "clip_value"):
            limit = getattr(self, name)
            if limit is None:
                continue
            number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
            if not number or not limit > 0:
                raise InvalidInputError(f"{name} must be a positive number, got {brief(limit)}")


_PARTIAL = {"learning_rate": "optimizer=functools.partial(torch.optim.Adam, lr=…)"}
_check = check_keywords("TorchModel", lambda: _PARTIAL)
setattr(TorchModel, "__init__", _check(TorchModel.__init__))  # noqa: B010


def refuse_lightning(model: object) -> None:
    """Check that a model is not Lightning's, which its own Trainer trains.

    Raises:
        ModelError: it is a ``LightningModule``, or a class of one.
    """
    cls = model if isinstance(model, type) else type(model)
    if any(f"{base.__module__}.{base.__name__}" in LIGHTNING_MODULES for base in cls.__mro__):
        raise ModelError(
            f"{cls.__name__} is a LightningModule, which Lightning's own Trainer trains: call it "
            "in HorovodRunner(…).run(…) on rows of Dataset.torch_dataset(…), as docs/torch.md shows"
        )
