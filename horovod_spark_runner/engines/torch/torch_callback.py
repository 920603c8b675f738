"""Callbacks of PyTorch trainings. Loads no framework."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ...config.validators import check_choice, check_count, check_number
from ...errors import InvalidInputError, brief

if TYPE_CHECKING:
    from torch import nn


# What Keras and Lightning call their hooks.
_HOOK = re.compile(
    r"on_((fit|train|test|predict|validation)_?)?((batch|epoch)_?)?(begin|start|end)"
)


class TorchCallback:
    """Base class of callbacks, which a training calls on every rank; override the hooks you need.

    All ranks must do the same. The results of an epoch are the same on all of them.

    Attributes:
        stop_training: set it to true, on any rank, to end the training after this step or epoch.
    """

    stop_training: bool = False

    def on_train_begin(self, module: nn.Module) -> None:
        """Before the first step, of a resumed run as well; after `load_state_dict`.

        Args:
            module: the module that is trained.
        """

    def on_epoch_begin(self, epoch: int) -> None:
        """Before an epoch.

        Args:
            epoch: its number, from 0.
        """

    def on_step_end(self, step: int, logs: Mapping[str, Any]) -> None:
        """After a step.

        Args:
            step: its number in the epoch.
            logs: those of this rank so far.
        """

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """After an epoch and its validation.

        Args:
            epoch: its number, from 0.
            logs: the results over the rows of all ranks.
        """

    def on_train_end(self) -> None:
        """After the last step; weights may be set here for the last time."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints: JSON, and NumPy arrays as values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`; before `on_train_begin`, as in Lightning.

        Args:
            state: that of a checkpoint.
        """


@dataclass
class TorchEarlyStopping(TorchCallback):
    """Ends a training whose results get no better.

    Attributes:
        monitor: the result to look at (``"val_loss"``).
        patience: epochs in a row without an improvement after which the training ends, as in
            Keras; 0, the default, is as 1. It does not end with the first epoch.
        min_delta: the least change that counts as an improvement (0).
        mode: whether a result is better if it is smaller, ``"min"`` (default), or larger,
            ``"max"``.

    Raises:
        InvalidInputError: an option has a value that it cannot have.
    """

    monitor: str = "val_loss"
    patience: int = 0
    min_delta: float = 0.0
    mode: Literal["min", "max"] = "min"
    best: float | None = field(default=None, init=False)
    waited: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.monitor, str):
            raise InvalidInputError(
                "monitor must be the name of a result, such as 'val_loss', got "
                f"{brief(self.monitor)}"
            )
        check_count("patience", self.patience, 0)
        check_number("min_delta", self.min_delta)
        check_choice("mode", self.mode, ("min", "max"))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> None:
        if self.monitor not in logs:
            raise InvalidInputError(
                f"TorchEarlyStopping looks at {self.monitor!r}, but the epoch gave "
                f"{', '.join(map(repr, logs)) or 'nothing'}"
            )
        value = logs[self.monitor]
        if not isinstance(value, float):
            raise InvalidInputError(f"{self.monitor!r} is {brief(value)}, but must be a number")
        sign = 1.0 if self.mode == "min" else -1.0
        best = math.inf if self.best is None or math.isnan(self.best) else sign * self.best
        if sign * value < best - self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        self.stop_training = epoch > 0 and self.waited >= max(1, self.patience)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


def list_callbacks(callbacks: object) -> list[TorchCallback]:
    """Return callbacks, or a single one, as a list.

    Raises:
        InvalidInputError: something is no callback, or has a hook that is never called.
    """
    if isinstance(callbacks, TorchCallback):
        callbacks = [callbacks]
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise InvalidInputError(
            "callbacks must be a list of TorchCallback, or a function that returns one, got "
            f"{brief(callbacks)}"
        )
    for callback in callbacks:
        if not isinstance(callback, TorchCallback):
            raise InvalidInputError(
                f"callbacks holds {brief(callback)}: to train a PyTorch module, give objects of "
                "TorchCallback"
            )
        _check_hooks(callback)
    return list(callbacks)


def _check_hooks(callback: TorchCallback) -> None:
    """Check that a callback has no hooks that nobody would call.

    Raises:
        InvalidInputError: one is called as in Keras or Lightning.
    """
    hooks = [name for name in vars(TorchCallback) if name.startswith("on_")]
    for name in dir(type(callback)):
        if _HOOK.fullmatch(name) and name not in hooks:
            raise InvalidInputError(
                f"{type(callback).__name__} has a hook {name}, which is never called; those of "
                f"TorchCallback are {', '.join(hooks)}"
            )
