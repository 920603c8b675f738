"""Resuming from checkpoints: bit for bit on as many ranks, to rounding on others."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    CheckpointOptions,
    InvalidInputError,
    RestartOptions,
    RunDirectoryError,
)
from horovod_spark_runner.checkpoint.files import load_checkpoint
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from tests import trainings
from tests.faults.injection import Fault, callbacks_for
from tests.runs import assert_same_weights, curves_in

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def schedule() -> Any:
    import keras

    return keras.optimizers.schedules.ExponentialDecay(0.02, 10, 0.9)


def make_model() -> Any:
    """A model with all that has a state: moments, dropout, statistics, a decaying rate."""
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.GaussianNoise(0.05),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(schedule()), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def plain_model() -> Any:
    """A model in which it does not matter how a global batch is spread over ranks."""
    import keras

    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(0.02), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


class Callbacks:
    """Callbacks with a state, and the faults given."""

    def __init__(self, *faults: Fault, folder: Path) -> None:
        self.inject = callbacks_for(list(faults), str(folder))

    def __call__(self) -> list[Any]:
        import random

        import keras

        class Draws(keras.callbacks.Callback):
            """Keeps what it draws from the global generators."""

            def on_train_begin(self, logs: Any = None) -> None:
                self.drawn: list[float] = []

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.drawn += [random.random(), float(np.random.rand())]

            def on_epoch_end(self, epoch: int, logs: Any) -> None:
                logs["drawn"] = float(np.sum(self.drawn))

        stop = keras.callbacks.EarlyStopping(
            "val_loss", patience=1, min_delta=0.02, restore_best_weights=True
        )
        return [Draws(), stop, *self.inject()]


train = functools.partial(
    trainings.train, model_fn=make_model, batch_size=24, epochs=3, validation=0.2
)


def test_a_killed_run_ends_as_an_undisturbed_one(small: Any, tmp_path: Path) -> None:
    whole = train(
        small,
        tmp_path / "whole",
        callbacks=Callbacks(folder=tmp_path),
        checkpoints=CheckpointOptions(keep=9),
    )
    faults = Callbacks(Fault(13, 1, "sigkill"), Fault(20, 0, "sigterm"), folder=tmp_path)
    run = train(
        small,
        tmp_path / "run",
        callbacks=faults,
        checkpoints=CheckpointOptions(
            every_steps=5, keep=1, best_metric="val_accuracy", best_mode="max"
        ),
        restarts=RestartOptions(max_restarts=2, backoff_seconds=0.1),
    )
    assert run.summary.history == whole.summary.history
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    attempts = [(a.first_step, a.ending) for a in run.summary.attempts]
    assert attempts == [(0, "rank killed or lost"), (10, "preempted"), (21, "finished")]
    assert "signal 9" in run.summary.attempts[0].cause
    lines = (tmp_path / "run" / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["ending"] for line in lines] == [ending for _, ending in attempts]
    directory = RunDirectory(str(tmp_path / "run"))
    assert all(account is not None for account in directory.read_accounts(3))
    (call,) = directory.read_calls()
    assert call["seconds"]["attempts"] > 1
    assert sum(call["seconds"].values()) == pytest.approx(call["ended"] - call["began"], rel=0.02)
    assert "signal 9" in directory.report.read_text()
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    best = int(np.argmax([logs["val_accuracy"] for logs in whole.summary.history]))
    steps = sorted(int(p.name[5:]) for p in (tmp_path / "whole" / "checkpoints").iterdir())
    assert names == sorted({f"step-{steps[n]:08d}" for n in (best, len(steps) - 1)})
    assert not (tmp_path / "run" / "lock.json").exists()
    # The record says of which epoch the saved weights are.
    epoch = int(call["weights"].split()[1].rstrip(","))
    assert directory.report.read_text().count(f"<dd>{call['weights']}</dd>") == 1
    ends = RunDirectory(str(tmp_path / "whole")).checkpoint(steps[epoch - 1])
    arrays = load_checkpoint(ends)[1]["variables.npz"]
    with np.load(tmp_path / "whole" / "model" / "weights.npz") as saved:
        for name in filter(str.isdigit, saved.files):
            np.testing.assert_array_equal(arrays[f"model/{name}"], saved[name])
    for part, prefix in (("train", ""), ("validation", "val_")):
        curves = curves_in(tmp_path / "run" / "events" / part)
        for name in ("loss", "accuracy"):
            points = [
                (n, np.float32(logs[prefix + name])) for n, logs in enumerate(whole.summary.history)
            ]
            assert curves.pop(name) == points
        if part == "train":
            speeds = [rate for _, rate in curves.pop("samples_per_second")]
            assert len(speeds) == len(whole.summary.history)
            assert min(speeds) > 0
            rates = curves.pop("learning_rate")
            # Keras' schedule gives the rate of a step by the number of steps before it.
            used = [float(schedule()(n * steps[0] - 1)) for n in range(1, 1 + len(rates))]
            assert [value for _, value in rates] == pytest.approx(used, rel=1e-6)
            assert curves.pop("drawn")
        assert curves == {}


@pytest.fixture(scope="module")
def plain(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An undisturbed run of the plain model."""
    return train(small, tmp_path_factory.mktemp("plain") / "run", model_fn=plain_model, epochs=2)


@pytest.mark.thorough
def test_arrays_that_are_damaged_cost_one_checkpoint(
    small: Any, plain: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(plain.summary.run_dir, tmp_path / "run")
    (tmp_path / "run" / "finished.json").unlink()  # as of a run that was killed at its end
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    data = bytearray((newest / "variables.npz").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "variables.npz").write_bytes(data)
    caplog.clear()
    run = train(small, tmp_path / "run", model_fn=plain_model, epochs=2)
    assert run.summary.history == plain.summary.history
    (attempt,) = run.summary.attempts
    assert 0 < attempt.first_step < attempt.last_step == int(newest.name[5:])
    skipped = [text for text in caplog.messages if "skip" in text]
    assert len(skipped) == 1
    assert "variables.npz" in skipped[0]


def test_another_number_of_ranks_sees_the_same_batches(
    small: Any, plain: Any, tmp_path: Path
) -> None:
    faults = callbacks_for([Fault(5, 0, "exception")], str(tmp_path))
    with pytest.raises(Exception, match="an injected fault"):
        train(
            small,
            tmp_path / "run",
            model_fn=plain_model,
            epochs=2,
            callbacks=faults,
            checkpoints=CheckpointOptions(every_steps=4),
            restarts=RestartOptions(max_restarts=3),  # not for errors of one's own code
        )
    # Within the epoch, another global batch would leave out some rows and repeat others.
    with pytest.raises(RunDirectoryError, match="global_batch.* 48 .*24"):
        train(small, tmp_path / "run", model_fn=plain_model, epochs=2, num_workers=1)
    arguments = {"epochs": 2, "num_workers": 3, "batch_size": 16, "resume": "required"}
    run = train(small, tmp_path / "run", model_fn=plain_model, **arguments)
    assert [attempt.first_step for attempt in run.summary.attempts] == [4]
    assert run.summary.attempts[0].number == 2  # the refused call started no ranks
    for ours, theirs in zip(run.summary.history, plain.summary.history, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert_same_weights(tmp_path / "run", Path(plain.summary.run_dir), atol=1e-5)

    # Weights of that run to begin another with.
    start = train(
        small,
        tmp_path / "warm",
        model_fn=plain_model,
        epochs=1,
        initial_weights=str(tmp_path / "run"),
        checkpoints=CheckpointOptions(best_metric="val_loss", every_minutes=1e-4, keep=99),
    )
    assert len(list((tmp_path / "warm" / "checkpoints").iterdir())) > 1
    assert start.summary.history[0]["loss"] < plain.summary.history[0]["loss"] * 0.7
    with pytest.raises(InvalidInputError, match="best_metric='val_los'.* val_loss"):
        train(
            small,
            tmp_path / "other",
            model_fn=plain_model,
            checkpoints=CheckpointOptions(best_metric="val_los"),
        )


def eager_with_custom_logs() -> Any:
    """A model whose step returns logs under names that no metric has, as GANs do."""
    import keras

    class OwnLogs(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            return {"own": super().train_step(data)["loss"]}

    model = OwnLogs([keras.layers.Input((64,)), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, run_eagerly=True)
    return model


class EndInLastStep:
    """A callback that asks rank 0 to end just before the last step of the second epoch, once."""

    def __init__(self, marker: Path, last: int) -> None:
        self.marker, self.last = marker, last

    def __call__(self) -> list[Any]:
        import os
        import signal

        import keras
        from mpi4py import MPI

        def begin(batch: int, logs: Any = None) -> None:
            callback.steps = getattr(callback, "steps", 0) + 1
            due = callback.steps == 2 * (self.last + 1) and not self.marker.exists()
            if due and MPI.COMM_WORLD.Get_rank() == 0:
                self.marker.touch()
                os.kill(os.getpid(), signal.SIGTERM)

        callback = keras.callbacks.LambdaCallback(on_train_batch_begin=begin)
        return [callback]


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_that_is_to_end_in_the_last_step_of_an_epoch_keeps_its_logs(
    small: Any, tmp_path: Path, steps: int
) -> None:
    arguments: dict[str, Any] = {"steps_per_epoch": steps, "validation": None}
    whole = train(small, tmp_path / "whole", model_fn=eager_with_custom_logs, **arguments)
    callbacks = EndInLastStep(tmp_path / "asked", steps - 1)
    restarts = RestartOptions(max_restarts=1, backoff_seconds=0.1)
    run = train(
        small,
        tmp_path / "run",
        model_fn=eager_with_custom_logs,
        callbacks=callbacks,
        restarts=restarts,
        **arguments,
    )
    assert [attempt.first_step for attempt in run.summary.attempts] == [0, 2 * steps]
    assert all("own" in logs for logs in run.summary.history)
    assert run.summary.history == whole.summary.history
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
