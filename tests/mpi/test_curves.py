"""The learning rates that event files tell: those that the last step of each epoch used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mpi4py.MPI  # noqa: F401 - it listens from its import on, so before the tests
import numpy as np
import pytest

from horovod_spark_runner.testing import one_rank_here
from tests.runs import curves_in
from tests.trainings import train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

STEPS = 5


def schedule() -> Any:
    import keras

    return keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.5)


def model_with(rate: Any) -> Any:
    import keras

    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy")
    return model


def rates_of(place: Path, frame: Any, **arguments: Any) -> list[np.float32]:
    with one_rank_here():
        train(frame, place, num_workers=1, steps_per_epoch=STEPS, **arguments)
    return [value for _, value in curves_in(place / "events" / "train")["learning_rate"]]


@pytest.mark.thorough
def test_a_schedule_is_told_as_it_was_used(digits_df: Any, tmp_path: Path) -> None:
    found = rates_of(tmp_path, digits_df, model_fn=lambda: model_with(schedule()))
    # Keras gives the rate of a step by the number of steps before it.
    assert found == pytest.approx([float(schedule()(n * STEPS - 1)) for n in (1, 2)], rel=1e-6)


def test_what_callbacks_set_afterwards_is_not_told(digits_df: Any, tmp_path: Path) -> None:
    import keras

    class Setting(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.5 ** (batch + 1)
            if self.epoch == 1 and batch == 2:
                self.model.stop_training = True

    found = rates_of(
        tmp_path, digits_df, model_fn=lambda: model_with(0.1), callbacks=[Setting()], epochs=3
    )
    assert found == [0.5**4, 0.5**2]
