"""Ranks that step by themselves on weights that all share: `AsyncServer`, on one host."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    Allreduce,
    AsyncServer,
    CheckpointOptions,
    HorovodRunner,
    RestartOptions,
)
from tests import trainings
from tests.cluster.added_up import accumulates

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

# Of 12 global batches both ranks have rows, of the last one only one has.
ROWS, BATCH, PARTS = 193, 8, 25


def test_sums_of_what_ranks_add_are_exact(spark: Any) -> None:
    exact = {
        "wrong": {"int32": 0, "float32": 0},
        "counted": True,
        "accumulates": 100_000,
    }
    found = HorovodRunner(4, stream_logs=False).run(accumulates, 25_000).results
    assert list(found) == [exact] * 4


def counting_model() -> Any:
    """Return a model whose weights become larger by 1 in every step, whatever the rows."""
    import keras

    keras.utils.set_random_seed(1)
    inputs = keras.layers.Input((64,))
    ones = keras.layers.Rescaling(0.0, 1.0)(inputs)
    count = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(ones)
    model = keras.Model(inputs, count)

    def up(y_true: Any, y_pred: Any) -> Any:
        return -y_pred[:, 0]

    def label(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.cast(y_true, "float32")

    model.compile(keras.optimizers.SGD(1.0), up, metrics=[label])
    return model


def weight(run: Any) -> float:
    return float(run.getModel().get_weights()[0][0, 0])


@pytest.mark.thorough
def test_no_update_is_lost_or_counts_twice_and_every_row_is_read_once(
    digits_df: Any, tmp_path: Path
) -> None:
    frame = digits_df.filter(f"id < {ROWS}")
    run_dir, notes = tmp_path / "run", tmp_path / "notes"
    notes.mkdir()

    def fail() -> list[Any]:
        import keras
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()

        killed, ended = notes / "killed", notes / "ended"

        def kept() -> bool:
            return any(run_dir.glob("checkpoints/step-*/checkpoint.json"))

        def wait(until: Callable[[], bool]) -> None:
            end = time.monotonic() + 120
            while not until() and time.monotonic() < end:
                time.sleep(0.01)

        class Fails(keras.callbacks.Callback):
            steps = 0

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.steps += 1
                time.sleep(0.02 if rank else 0.005)  # rank 1 is slow
                if rank == 0:  # leaves rows to rank 1, so that it comes to its faults
                    if killed.exists():
                        wait(lambda: self.steps < 4 or ended.exists())
                    elif kept():
                        wait(killed.exists)
                elif not killed.exists():
                    if kept():
                        killed.touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                elif self.steps >= 4 and not ended.exists():  # as many as were saved, and one
                    ended.touch()
                    os.kill(os.getpid(), signal.SIGTERM)

        return [Fails()]

    given: dict[str, Any] = {"model_fn": counting_model, "batch_size": BATCH}
    run = trainings.train(
        frame,
        run_dir,
        sync=AsyncServer(),
        epochs=3,
        validation=digits_df.filter("id >= 1700"),
        callbacks=fail,
        checkpoints=CheckpointOptions(every_steps=4, keep=9),
        restarts=RestartOptions(max_restarts=2, backoff_seconds=0.1),
        **given,
    )
    attempts = run.summary.attempts
    assert [one.ending for one in attempts] == ["rank killed or lost", "preempted", "finished"]
    # It went on within an epoch: 13 steps are one.
    assert attempts[1].first_step % 13 or attempts[2].first_step % 13
    assert weight(run) == 3 * PARTS
    labels = [row.digit for row in frame.select("digit").collect()]
    held = [row.digit for row in digits_df.filter("id >= 1700").select("digit").collect()]
    for logs in run.summary.history:
        assert logs["label"] == pytest.approx(np.mean(labels), rel=1e-6)
        assert logs["val_label"] == pytest.approx(np.mean(held), rel=1e-6)
    late = run.summary.staleness
    assert 0 < sum(late) <= 3 * PARTS
    assert len(late) <= 8 + 1 + 1
    # Other ways, and other numbers of ranks, go on with the same weights.
    again = trainings.train(frame, run_dir, epochs=4, sync=Allreduce(), **given)
    assert weight(again) == 3 * PARTS + 13
    wider = trainings.train(
        frame, run_dir, epochs=5, sync=AsyncServer(servers=1), num_workers=3, **given
    )
    assert weight(wider) == 3 * PARTS + 13 + 25
    assert sum(wider.summary.staleness) == 25
