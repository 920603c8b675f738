"""The callbacks and schedulers of a PyTorch training, called by the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ...storage.arrays import Arrays
from ...training.progress import Logs, plain
from ...training.trainee import Hooks
from .model import Modes
from .named_states import NamedStates
from .torch_callback import TorchCallback, list_callbacks


def check_callbacks(callbacks: Any) -> list[TorchCallback]:
    """Return the callbacks that are given, or that the function given returns.

    Raises:
        InvalidInputError: something is no callback.
    """
    if callable(callbacks) and not isinstance(callbacks, TorchCallback):
        callbacks = callbacks()
    return list_callbacks(callbacks)


class Callbacks(Hooks):
    """PyTorch implementation of `Hooks`.

    Args:
        callbacks: the callbacks, the same on all ranks.
        module: what they watch.
        modes: its modes.
        states: what is kept of the training, with the callbacks' own states.
        before_capture: is called before these are captured.
        after_epoch: receives the number and the results of an epoch.
    """

    restored_first = True

    def __init__(
        self,
        callbacks: Sequence[TorchCallback],
        module: nn.Module,
        modes: Modes,
        states: NamedStates,
        before_capture: Callable[[], None],
        after_epoch: Callable[[int, Mapping[str, object]], None],
    ) -> None:
        self._callbacks = callbacks
        self._module, self._modes = module, modes
        self._states, self._before_capture = states, before_capture
        self._after_epoch = after_epoch
        self._stop = False
        steps = TorchCallback.on_step_end
        self.watch_end = any(type(callback).on_step_end is not steps for callback in callbacks)

    @property
    def stop_training(self) -> bool:
        return self._stop or any(callback.stop_training for callback in self._callbacks)

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        self._stop = value
        if not value:
            for callback in self._callbacks:
                callback.stop_training = False

    def train_begin(self) -> None:
        for callback in self._callbacks:
            callback.on_train_begin(self._module)
        self.capture()  # what a checkpoint cannot hold is reported now

    def train_end(self, logs: Logs | None) -> None:
        for callback in self._callbacks:
            callback.on_train_end()

    def epoch_begin(self, epoch: int) -> None:
        self._module.train()  # as loops written by hand do; callbacks may change it
        for callback in self._callbacks:
            callback.on_epoch_begin(epoch)

    def epoch_end(self, epoch: int, logs: Logs) -> dict[str, object]:
        results = plain(logs)
        for callback in self._callbacks:
            callback.on_epoch_end(epoch, results)
        self._after_epoch(epoch, results)
        return dict(logs)

    def test_begin(self) -> None:
        self._modes.evaluate()

    def test_end(self, logs: Logs) -> None:
        self._modes.train()

    def train_step_end(self, number: int, logs: Logs | None) -> None:
        for callback in self._callbacks:
            callback.on_step_end(number, dict(logs or {}))

    def capture(self) -> tuple[dict[str, Any], Arrays]:
        self._before_capture()
        return self._states.capture()

    def restore(self, state: dict[str, Any], arrays: Arrays) -> None:
        self._states.restore(state, arrays)
