"""Inputs and outputs of models, in the structure they were built with."""

from __future__ import annotations

import keras

from horovod_spark_runner.training.binding import input_structure
from horovod_spark_runner.training.build import call_outputs


def test_a_sequential_model_that_was_never_called_has_inputs_and_outputs() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert input_structure(model).shape == (None, 3)
    assert call_outputs(model, None).shape == (None, 2)
