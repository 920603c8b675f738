"""Events at which callbacks are called; each engine calls those of its framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..checkpoint.files import PlainLogs
from ..storage.arrays import Arrays
from .logs import Logs


class Hooks:
    """The callbacks of a training on this rank; this one stands for none.

    They are called on all ranks, in the order of ``Model.fit``. A subclass overrides what its
    framework has.

    Attributes:
        watch_begin: whether one does something before a training step.
        watch_end: whether one does something after it.
        watch_test: whether one does something before or after a step of the evaluation.
        stop_training: true once one of this rank asks for the end of the training.
        stop_evaluating: true once one of this rank asks for the end of the evaluation.
        initial_epoch: whole epochs of what `train_begin` has restored; 0 if it has nothing.
    """

    watch_begin = False
    watch_end = False
    watch_test = False
    stop_training: bool = False
    stop_evaluating: bool = False
    initial_epoch: int = 0

    def train_begin(self) -> None:
        """Before the first step, of a resumed run as well."""

    def train_end(self, logs: Logs | None) -> None:
        """After the last step; the variables may be set here for the last time.

        Args:
            logs: those of the last epoch; ``None`` if no epoch was left to train.
        """

    def epoch_begin(self, epoch: int) -> None:
        """Before the first step of an epoch, counted from 0."""

    def epoch_end(self, epoch: int, logs: Logs) -> dict[str, object]:
        """After an epoch and its evaluation; return the logs with what callbacks have added."""
        return dict(logs)

    def train_step_begin(self, number: int) -> None:
        """Before a step, by its number in the epoch; only if `watch_begin`."""

    def train_step_end(self, number: int, logs: Logs | None) -> None:
        """After a step; only if `watch_end`, and ``logs`` are those of all ranks then."""

    def test_begin(self) -> None:
        """Before an evaluation."""

    def test_end(self, logs: Logs) -> None:
        """After an evaluation."""

    def test_step_begin(self, number: int) -> None:
        """Before a step of the evaluation; only if `watch_test`."""

    def test_step_end(self, number: int, logs: Logs | None) -> None:
        """After a step of the evaluation; only if `watch_test`."""

    # -- what of them is kept in checkpoints ---------------------------------------------------

    def remember(self) -> None:
        """Note what callbacks hold now, just after `train_begin`: only changes are state."""

    def restore_history(self, history: Sequence[PlainLogs]) -> None:
        """Take note of the epochs of earlier attempts."""

    def capture(self) -> tuple[dict[str, Any], Arrays]:
        """Return what callbacks remember, as JSON and the arrays it refers to."""
        return {}, {}

    def restore(self, state: dict[str, Any], arrays: Arrays) -> None:
        """Give callbacks what `capture` returned."""
