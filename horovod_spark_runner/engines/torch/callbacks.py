"""The callbacks and schedulers of a PyTorch training, called by the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ...storage.arrays import Arrays
from ...training.progress import Logs, plain
from ...training.trainee import Hooks
from .model import Modes
from .packing import pack_state, unpack_state
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
        capture: returns the other state as JSON, and adds its arrays to those given.
        restore: takes that over.
        after_epoch: receives the number and the results of an epoch.
    """

    restored_first = True

    def __init__(
        self,
        callbacks: Sequence[TorchCallback],
        module: nn.Module,
        modes: Modes,
        capture: Callable[[Arrays], dict[str, Any]],
        restore: Callable[[Mapping[str, Any], Arrays], None],
        after_epoch: Callable[[int, Mapping[str, object]], None],
    ) -> None:
        self._callbacks = callbacks
        self._module, self._modes = module, modes
        self._capture, self._restore = capture, restore
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
        arrays: Arrays = {}
        states = {
            name: pack_state(callback.state_dict(), name, arrays, type(callback).__name__)
            for name, callback in self._named()
        }
        return {"callbacks": states, "training": self._capture(arrays)}, arrays

    def restore(self, state: dict[str, Any], arrays: Arrays) -> None:
        self._restore(state["training"], arrays)
        for name, callback in self._named():
            if name in state["callbacks"]:
                callback.load_state_dict(unpack_state(state["callbacks"][name], arrays))

    def _named(self) -> list[tuple[str, TorchCallback]]:
        return [(f"{n:03d}.{type(each).__name__}", each) for n, each in enumerate(self._callbacks)]
