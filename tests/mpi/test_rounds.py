"""Ranks that train alone between meetings: `LocalSGD` and `DiLoCo`, against plain Keras."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    CheckpointOptions,
    DataOptions,
    DiLoCo,
    LocalSGD,
    ModelError,
    RestartOptions,
)
from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.read.reader import DatasetReader
from horovod_spark_runner.data.read.sharding import plan_epoch
from horovod_spark_runner.testing import Fault, Faults
from tests import trainings
from tests.runs import assert_same_weights

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

# 12 global batches of 16 rows and one row more: in each epoch's last step, rank 1 has none.
ROWS, BATCH, EPOCHS = 193, 8, 2
STEPS = 13

Weights = list[np.ndarray]


def make_model(*, normal: bool = True, optimizer: str = "momentum") -> Any:
    import keras

    keras.utils.set_random_seed(3)
    layers = [keras.layers.Input((64,)), keras.layers.Dense(12, activation="tanh")]
    if normal:
        layers.append(keras.layers.BatchNormalization())
    model = keras.Sequential([*layers, keras.layers.Dense(10, activation="softmax")])
    chosen = {
        "sgd": lambda: keras.optimizers.SGD(0.1),
        "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.01),
        "average": lambda: keras.optimizers.Adam(0.01, use_ema=True),
    }[optimizer]()
    model.compile(chosen, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def model_fn(**given: Any) -> Callable[[], Any]:
    return lambda: make_model(**given)


@pytest.fixture(scope="module")
def frame(digits_df: Any) -> Any:
    return digits_df.filter(f"id < {ROWS}")


@pytest.fixture(scope="module")
def held_out(digits_df: Any) -> Any:
    return digits_df.filter("id >= 1750")


def train(frame: Any, place: Path, **given: Any) -> Any:
    arguments = {"batch_size": BATCH, "epochs": EPOCHS, "data": DataOptions(keep_data=True)}
    return trainings.train(frame, place, **{**arguments, **given})


def two_models(run: Path, meet_after: Callable[[int], bool], meeting: Any) -> Weights:
    """Train two models of plain Keras on what the ranks of a run saw; return rank 0's weights.

    Args:
        run: the run's directory.
        meet_after: whether they meet after so many steps of the run.
        meeting: the weights they go on with, given those they had, the mean of theirs, and which
            are trained.
    """
    manifest = Manifest.from_json(next(run.glob("data/data-*/manifest.json")).read_text())
    models = [make_model(), make_model()]
    trained = [bool(weight.trainable) for weight in models[0].weights]
    before: Weights = models[0].get_weights()
    for epoch in range(EPOCHS):
        plan = plan_epoch(
            [(group.rows, group.size) for group in manifest.row_groups],
            global_batch=2 * BATCH,
            seed=0,
            epoch=epoch,
            window_bytes=256 * 1024 * 1024,
        )
        parts = [DatasetReader(manifest).epoch(plan, rank, 2) for rank in range(2)]
        seen = [0, 0]
        for number, batches in enumerate(zip(*parts, strict=True)):
            for rank, batch in enumerate(batches):
                if batch.rows:
                    models[rank].train_on_batch(batch.arrays["image"], batch.arrays["digit"])
                    seen[rank] += batch.rows
            if not meet_after(epoch * STEPS + number + 1) and number + 1 < STEPS:
                continue
            share = np.array(seen) / sum(seen)
            both = zip(*(model.get_weights() for model in models), strict=True)
            mean = [share[0] * one + share[1] * other for one, other in both]
            before = meeting(before, mean, trained)
            for model in models:
                model.set_weights(before)
            seen = [0, 0]
    assert number + 1 == STEPS
    return before


def assert_close(ours: Weights, theirs: Weights) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


@pytest.mark.thorough
def test_meeting_after_every_step_of_sgd_is_allreduce(frame: Any, tmp_path: Path) -> None:
    # Moments of batch normalisation are set from each rank's own batch, so without it.
    plain = model_fn(normal=False, optimizer="sgd")
    one = train(frame, tmp_path / "allreduce", model_fn=plain)
    other = train(frame, tmp_path / "rounds", model_fn=plain, sync=LocalSGD(every=1))
    assert_same_weights(tmp_path / "rounds", tmp_path / "allreduce", atol=1e-6)
    for ours, theirs in zip(other.summary.history, one.summary.history, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    # The same rows, in rounds of one step and of thirteen: something else is trained.
    apart = train(frame, tmp_path / "apart", model_fn=plain, sync=LocalSGD(every=100))
    ours, theirs = apart.getModel().get_weights(), one.getModel().get_weights()
    assert max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) > 1e-3


def test_local_sgd_is_two_processes_that_take_their_mean(frame: Any, tmp_path: Path) -> None:
    way = LocalSGD(every=5, warmup_steps=3)
    trained = train(frame, tmp_path, model_fn=make_model, sync=way)
    expected = two_models(
        tmp_path, lambda step: step <= 3 or step % 5 == 0, lambda before, mean, trained: mean
    )
    assert_close(trained.getModel().get_weights(), expected)


def test_diloco_is_two_processes_and_an_outer_step(frame: Any, tmp_path: Path) -> None:
    velocity: Weights = []

    def outer(before: Weights, mean: Weights, trained: list[bool]) -> Weights:
        velocity[:] = velocity or [np.zeros_like(weight) for weight in before]
        after = []
        for number, (old, new) in enumerate(zip(before, mean, strict=True)):
            change = new - old
            velocity[number] = 0.8 * velocity[number] + change
            step = 0.5 * (change + 0.8 * velocity[number])
            after.append(old + step if trained[number] else new)
        return after

    way = DiLoCo(every=4, outer_lr=0.5, outer_momentum=0.8)
    run = train(frame, tmp_path, model_fn=make_model, sync=way)
    expected = two_models(tmp_path, lambda step: step % 4 == 0, outer)
    assert_close(run.getModel().get_weights(), expected)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "way", [DiLoCo(every=4), LocalSGD(every=4, average_optimizer=True)], ids=["diloco", "average"]
)
def test_a_run_that_was_killed_in_a_round_ends_as_it_would_have(
    frame: Any, held_out: Any, tmp_path: Path, way: Any
) -> None:
    kept = tmp_path / "run" / "checkpoints" / "step-00000008"
    notes = tmp_path / "faults"

    def die_once() -> list[Any]:
        import keras
        from mpi4py import MPI

        faults = Faults((Fault(10, rank=1),), str(notes))

        class Dies(keras.callbacks.Callback):
            steps = 0

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.steps += 1
                while self.steps == 10 and not (kept.exists() or notes.exists()):
                    time.sleep(0.01)
                faults.after_step(self.steps, MPI.COMM_WORLD.Get_rank())

        return [Dies()]

    given = {
        "model_fn": trainings.digits_model,
        "checkpoints": CheckpointOptions(every_steps=3, keep=9),
        "validation": held_out,
        "sync": way,
    }
    run = train(
        frame,
        tmp_path / "run",
        callbacks=die_once,
        restarts=RestartOptions(max_restarts=1, backoff_seconds=0.1),
        **given,
    )
    whole = train(frame, tmp_path / "whole", **given)
    # Asked for after every third step, they are taken where ranks meet next.
    assert [attempt.first_step for attempt in run.summary.attempts] == [0, 8]
    assert run.summary.history == whole.summary.history
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    # What is validated is the model that is kept, not each rank's own.
    last = {name: whole.summary.history[-1][f"val_{name}"] for name in ("loss", "accuracy")}
    assert whole.evaluate(held_out) == pytest.approx(last, rel=1e-5)


@pytest.mark.thorough
def test_a_run_goes_on_with_other_ranks_and_another_way(frame: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"model_fn": model_fn(optimizer="adam")}
    train(frame, tmp_path, epochs=1, sync=DiLoCo(every=4), **given)
    train(frame, tmp_path, epochs=2, sync=LocalSGD(every=4), num_workers=1, **given)
    again = train(frame, tmp_path, epochs=3, **given)
    losses = [logs["loss"] for logs in again.summary.history]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]


def synchronized_model() -> Any:
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.BatchNormalization(synchronized=True, name="shared"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (synchronized_model, r"layer 'shared'.*synchronized=True.*Allreduce\(\)"),
        (model_fn(optimizer="average"), r"use_ema=True.*average_optimizer=True"),
    ],
    ids=["synchronized", "use_ema"],
)
def test_what_ranks_cannot_do_alone_is_refused(
    frame: Any, tmp_path: Path, model: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        train(frame, tmp_path, model_fn=model, sync=LocalSGD(every=4))
