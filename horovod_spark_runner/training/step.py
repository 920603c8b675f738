"""One step of the training on this rank, as TensorFlow runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from .exchange import GradientExchange

# What a rank may ask of all ranks at a step, by place.
STOP, SAVE, PREEMPT = range(3)
NOTHING = (False, False, False)


class TrainStep:
    """Runs a model's ``train_step`` together with all other ranks.

    Nearly all steps have a full batch on every rank. Their graph knows that all ranks count the
    same, and is called as it is: that ``tf.function`` looks through the arguments for the graph
    that fits them takes about as long as a small layer.

    Args:
        exchange: connects the model to the other ranks.
        batch_size: rows of a full batch of one rank.
        eager: whether the model is not to be compiled.
    """

    def __init__(self, exchange: GradientExchange, batch_size: int, *, eager: bool) -> None:
        self._batch_size = batch_size
        self._full: Callable[..., Any] = exchange.equal_step
        self._any: Callable[..., Any] = exchange.step
        if not eager:
            self._compiled = tf.function(exchange.equal_step)
            self._full = self._first
            self._any = tf.function(exchange.step, reduce_retracing=True)
        self._nothing_asked = _control(1.0, NOTHING)

    def full(self, data: Any, asked: Sequence[bool]) -> tuple[Any, Any]:
        """Run a step where every rank has a full batch and its rows count the same.

        Args:
            data: what ``train_step`` takes.
            asked: what this rank asks of all, by place.

        Returns:
            The step's logs, and how many ranks asked for each.
        """
        control = _control(1.0, asked) if any(asked) else self._nothing_asked
        result: tuple[Any, Any] = self._full(data, control)
        return result

    def weighted(self, data: Any, weight: float, asked: Sequence[bool]) -> tuple[Any, Any]:
        """Run a step where this rank's part stands for ``weight`` rows, or sum of weights."""
        result: tuple[Any, Any] = self._any(data, _control(weight / self._batch_size, asked))
        return result

    def _first(self, data: Any, control: Any) -> Any:
        result = self._compiled(data, control)  # makes what variables are still missing
        self._full = self._compiled.get_concrete_function(data, control)
        return result


def _control(weight: float, asked: Sequence[bool]) -> Any:
    return tf.constant([weight, *(float(request) for request in asked)])
