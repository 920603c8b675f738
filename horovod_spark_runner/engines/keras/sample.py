"""Calling a Keras model with sample rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import keras
import numpy as np

from ...storage.arrays import Arrays
from ...training.sample_rows import Call, repeat_rows
from .outputs import call_model, fixed_batch, output_leaves, to_numpy, unchanged
from .protocols import Nest

Bind = Callable[[Mapping[str, np.ndarray]], Nest]


def sample_inputs(model: keras.Model, bind: Bind, rows: Arrays) -> Nest:
    """Return the inputs that rows make, by turns as many as the model takes, or at least two.

    Args:
        model: the model.
        bind: makes its inputs of columns.
        rows: the columns.
    """
    count = fixed_batch(model) or max(2, len(next(iter(rows.values()))))
    return bind(repeat_rows(rows, count))


def calling(model: keras.Model, bind: Bind) -> Call:
    """Return the function from columns to a model's outputs, which leaves it as it is."""

    def call(rows: Arrays) -> list[np.ndarray]:
        with unchanged(model):
            outputs = call_model(model, sample_inputs(model, bind, rows))
        return [to_numpy(value) for _, value in output_leaves(outputs)]

    return call
