"""Keras' own callbacks, cut short at an epoch's end or within, go on as if nothing had happened."""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_spark_runner.engines.keras.callbacks import Callbacks, _CallbackStates
from tests.runs import variables_of

EPOCHS, STEPS = 7, 3
LOSSES = (3.0, 1.0, 2.0, 1.5, 0.9, 1.2, 1.3)
Make = Callable[[Path], Any]


def make_model() -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


class Run:
    """Epochs of a small training, as the training loop runs them, with given losses."""

    def __init__(self, make: Make, folder: Path, *, resumed: bool = False) -> None:
        self.model = make_model()
        self.callback = make(folder)
        if resumed and isinstance(self.callback, keras.callbacks.CSVLogger):
            self.callback.append = True
        self.callbacks = keras.callbacks.CallbackList(
            [self.callback], add_history=False, model=self.model, epochs=EPOCHS
        )
        self.callbacks.set_params({"epochs": EPOCHS, "steps": STEPS, "verbose": 0})
        self.model.stop_training = False
        self.callbacks.on_train_begin()
        self.states = _CallbackStates({"0": self.callback})
        self.variables = variables_of(self.model)
        self.seen: list[Any] = []

    def saved(self) -> Any:
        values, arrays = self.states.capture()
        return json.loads(json.dumps(values)), dict(arrays), self.variables.capture()

    def restore(self, saved: Any) -> None:
        values, arrays, weights = saved
        self.variables.restore(weights)
        self.states.restore(values, arrays)

    def epoch(self, number: int) -> None:
        self.callbacks.on_epoch_begin(number)
        rng = np.random.default_rng(number)
        for step in range(STEPS):
            self.callbacks.on_train_batch_begin(step)
            x, y = rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
            self.model.train_on_batch(x, y)
            self.callbacks.on_train_batch_end(step, {"loss": LOSSES[number]})
        logs = {"loss": LOSSES[number], "val_loss": LOSSES[number] + 1}
        self.callbacks.on_epoch_end(number, logs)
        self.seen.append(
            [
                float(self.model.optimizer.learning_rate),
                self.model.stop_training,
                *(np.array(w).tobytes() for w in self.model.weights),
            ]
        )

    def end(self) -> None:
        self.callbacks.on_train_end()

    def kill(self) -> None:
        """Close what the end of a process closes."""
        if isinstance(self.callback, keras.callbacks.CSVLogger):
            self.callback.csv_file.close()


def files(folder: Path) -> dict[str, bytes]:
    """Return the text files as they are, of files of weights when they were written."""
    return {
        path.name: path.read_bytes() if path.suffix == ".csv" else b"" for path in folder.iterdir()
    }


CALLBACKS: dict[str, Make] = {
    "early stopping": lambda _: keras.callbacks.EarlyStopping(
        "loss", patience=3, min_delta=0.05, restore_best_weights=True, start_from_epoch=1
    ),
    "plateau": lambda _: keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.5, patience=1, cooldown=1
    ),
    "checkpoint": lambda folder: keras.callbacks.ModelCheckpoint(
        str(folder / "{epoch:02d}.weights.h5"),
        "val_loss",
        save_best_only=True,
        save_weights_only=True,
    ),
    "checkpoint by steps": lambda folder: keras.callbacks.ModelCheckpoint(
        str(folder / "{epoch:02d}.weights.h5"), "loss", save_weights_only=True, save_freq=4
    ),
    "nan": lambda _: keras.callbacks.TerminateOnNaN(),
    "average": lambda _: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    "schedule": lambda _: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    "csv": lambda folder: keras.callbacks.CSVLogger(str(folder / "log.csv")),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_callbacks_go_on_as_if_nothing_had_happened(name: str, cut: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "part").mkdir()
    whole = Run(CALLBACKS[name], tmp_path / "whole")
    first = Run(CALLBACKS[name], tmp_path / "part")
    for number in range(EPOCHS):
        whole.epoch(number)
    for number in range(cut):
        first.epoch(number)
    second = Run(CALLBACKS[name], tmp_path / "part", resumed=True)
    second.restore(first.saved())
    first.kill()
    for number in range(cut, EPOCHS):
        second.epoch(number)
    whole.end()
    second.end()
    assert second.seen == whole.seen[cut:]
    for ours, theirs in zip(second.model.weights, whole.model.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert files(tmp_path / "part") == files(tmp_path / "whole")


@pytest.mark.parametrize("saved_at", [0, 2])
def test_rows_that_are_written_again_are_taken_out(saved_at: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "part").mkdir()
    whole = Run(CALLBACKS["csv"], tmp_path / "whole")
    first = Run(CALLBACKS["csv"], tmp_path / "part")
    for number in range(saved_at):
        first.epoch(number)
    saved = first.saved()
    for number in range(saved_at, saved_at + 2):  # killed before the next checkpoint was written
        first.epoch(number)
    first.kill()
    second = Run(CALLBACKS["csv"], tmp_path / "part", resumed=True)
    second.restore(saved)
    for number in range(EPOCHS):
        whole.epoch(number)
        if number >= saved_at:
            second.epoch(number)
    whole.end()
    second.end()
    assert files(tmp_path / "part") == files(tmp_path / "whole")


class Phase(Enum):
    BEGUN = 1
    DONE = 2


class Collector(keras.callbacks.Callback):
    """Keeps what it is told in containers that it has made before."""

    def __init__(self) -> None:
        super().__init__()
        self.by_epoch: dict[Any, float] = {}
        self.pairs: list[Any] = []
        self.unchanged = Phase.BEGUN
        self.seen: set[str] = set()
        self.last: deque[float] = deque(maxlen=2)
        self.models: list[Any] = []
        self.phase = Phase.BEGUN
        self.several = [keras.Variable(0.0)]


def warned_of(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Return the attributes that warnings tell of."""
    found = (re.search(r"attribute (\w+)", record.getMessage()) for record in caplog.records)
    return {match[1] for match in found if match}


def test_containers_that_a_callback_has_made_before_are_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    callback = Collector()
    states = _CallbackStates({"0": callback})
    callback.by_epoch.update({2: 0.5, 10: np.float32(0.25)})
    callback.by_epoch["last", 3] = 1.0
    callback.pairs.append((1, {"a": [np.arange(3)]}))
    callback.models.append(object())
    callback.phase = Phase.DONE
    callback.several[0].assign(1.0)
    values, arrays = states.capture()
    states.capture()
    # What a checkpoint cannot hold is told by name, once.
    assert warned_of(caplog) == {"seen", "last", "models", "phase", "several"}
    assert len(caplog.records) == 5

    again = Collector()
    _CallbackStates({"0": again}).restore(json.loads(json.dumps(values)), arrays)
    assert again.by_epoch == {2: 0.5, 10: 0.25, ("last", 3): 1.0}
    ((one, inner),) = again.pairs
    assert (one, inner["a"][0].tolist()) == (1, [0, 1, 2])
    assert (again.models, again.phase) == ([], Phase.BEGUN)


def test_what_callbacks_of_keras_work_with_is_not_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(lambda folder: keras.callbacks.TensorBoard(str(folder)), tmp_path)
    run.epoch(0)
    run.saved()
    run.end()
    assert warned_of(caplog) == set()


class Annealing(keras.callbacks.Callback):
    """Holds variables that a loss reads."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.set_model(model)
        self.beta = keras.Variable(0.0)
        self.raw = tf.Variable([0.0, 0.0])
        self.of_model = model.weights[0]
        self.fresh = False
        self.rows = [1]


def test_variables_that_a_callback_holds_are_assigned_to() -> None:
    model = make_model()
    first, again = Annealing(model), Annealing(model)
    states = _CallbackStates({"0": first})
    first.beta.assign(0.3)
    first.raw.assign([1.0, 2.0])
    first.of_model.assign(first.of_model + 1.0)
    values, arrays = states.capture()

    beta, raw, weight = again.beta, again.raw, np.array(again.of_model)
    after = _CallbackStates({"0": again})
    # What the beginning of an epoch that is gone on with has changed.
    again.fresh, again.rows = True, [1, 2]
    again.raw.assign([9.0, 9.0])
    after.restore(json.loads(json.dumps(values)), arrays)
    assert (again.fresh, again.rows) == (False, [1])
    assert again.beta is beta
    assert float(beta) == pytest.approx(0.3)
    assert again.raw is raw
    assert raw.numpy().tolist() == [1.0, 2.0]
    np.testing.assert_array_equal(again.of_model, weight)


def test_a_rank_that_was_not_there_lacks_no_callback_of_rank_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def of_rank(rank: int) -> Callbacks:
        model = make_model()
        given = [keras.callbacks.CSVLogger(str(tmp_path / "log.csv")), Annealing(model)]
        return Callbacks(given, model, rank, {"epochs": 1}, resumed=False, retrace=lambda: None)

    first, second = of_rank(0), of_rank(1)
    for callbacks in (first, second):
        callbacks.train_begin()
        callbacks.snapshot()
    first.epoch_begin(0)
    first.epoch_end(0, {"loss": 1.0})
    with caplog.at_level(logging.WARNING):
        second.restore(*first.capture())
    first.train_end(None)
    assert caplog.text == ""


def test_weights_that_early_stopping_has_restored_are_told_until_they_change() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    stop = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    hooks = Callbacks(
        [stop], model, 0, {"verbose": 0, "epochs": 3}, resumed=False, retrace=lambda: None
    )
    hooks.train_begin()
    assert hooks.restored == ""
    for epoch, loss in enumerate((3.0, 1.0, 2.0)):
        model.set_weights([np.full((1, 1), epoch), np.zeros(1)])
        hooks.epoch_end(epoch, {"loss": loss})
    assert hooks.restored == ""
    hooks.train_end(None)
    assert float(model.get_weights()[0].item()) == 1
    assert hooks.restored == "epoch 2, restored by EarlyStopping (monitors loss)"
    model.set_weights([np.full((1, 1), 7.0), np.zeros(1)])
    assert hooks.restored == ""
