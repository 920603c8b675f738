"""Runs that are resumed by another call, and models with two optimizers."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    CheckpointOptions,
    InitialWeights,
    ModelError,
    RankFailedError,
    RestartOptions,
    RunDirectoryError,
)
from horovod_spark_runner.checkpoint import attachments
from horovod_spark_runner.checkpoint.files import read_info
from horovod_spark_runner.storage.filesystem import Location
from tests.faults.injection import Fault, callbacks_for
from tests.runs import assert_same_weights

from .test_resume import train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def network(rate: float = 0.02, activation: str = "relu", classes: int = 10) -> Any:
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Normalization(name="scale"),
            keras.layers.Dense(12, activation=activation, name="body"),
            keras.layers.Dense(classes, activation="softmax", name=f"head_{classes}"),
        ]
    )
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def pair() -> Any:
    """A model of two parts, each with an optimizer of its own that Keras builds when first used."""
    import keras
    import tensorflow as tf

    class Pair(keras.Model):
        def train_step(self, data: Any) -> Any:
            inputs, labels = data[:2]
            with tf.GradientTape(persistent=True) as tape:
                loss = self.compute_loss(x=inputs, y=labels, y_pred=self(inputs, training=True))
            for optimizer, name in [(self.optimizer, "one"), (self.other_optimizer, "two")]:
                weights = self.get_layer(name).trainable_variables
                optimizer.apply(tape.gradient(loss, weights), weights)
            self._loss_tracker.update_state(loss)
            return {"loss": self._loss_tracker.result()}

    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(12, activation="relu", name="one")(inputs)
    hidden = keras.layers.Dropout(0.2)(hidden)
    model = Pair(inputs, keras.layers.Dense(10, activation="softmax", name="two")(hidden))
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    model.other_optimizer = keras.optimizers.RMSprop(0.01, momentum=0.5)
    return model


@pytest.fixture(scope="module")
def small(digits_df: Any) -> Any:
    return digits_df.filter("id < 400").cache()


def newest(run_dir: Path) -> dict[str, Any]:
    folder = max((run_dir / "checkpoints").iterdir())
    return vars(read_info(Location(folder)))


def rate_of(run_dir: Path) -> float:
    folder = max((run_dir / "checkpoints").iterdir())
    names = {path: name for name, path, *_ in newest(run_dir)["variables"]}
    with np.load(folder / "variables.npz") as file:
        return float(file[next(n for p, n in names.items() if p.endswith("learning_rate"))])


@pytest.mark.thorough
def test_what_another_call_asks_for_otherwise(
    small: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = tmp_path / "run"
    network().save(tmp_path / "model.keras")
    # As if these were large: ranks find them in the run directory.
    attached: list[attachments.Attachable] = []
    attach = attachments.AttachmentWriter.__call__

    def noted(
        self: attachments.AttachmentWriter, carried: attachments.Attachable
    ) -> attachments.Attachable:
        attached.append(attach(self, carried))
        return attached[-1]

    monkeypatch.setattr(attachments, "SMALL_BYTES", 99)
    monkeypatch.setattr(attachments.AttachmentWriter, "__call__", noted)
    train(small, run_dir, model_fn=str(tmp_path / "model.keras"), epochs=1, validation=0.2)
    before = newest(run_dir)

    with caplog.at_level(logging.WARNING, logger="horovod_spark_runner"):
        longer = train(
            small,
            run_dir,
            model_fn=lambda: network(rate=0.5),
            epochs=2,
            validation=0.2,
            lr_scaling="linear",
            initial_weights=str(tmp_path / "model.keras"),
        )
    assert len(longer.summary.history) == 2
    assert rate_of(run_dir) == pytest.approx(0.02)
    for text in (
        "lr_scaling.*'linear'.*'none'",
        "model.keras'.*checkpoint",
        "learning_rate.*SGD.*0.5.*0.02",
    ):
        assert re.search(text, caplog.text)
    after = newest(run_dir)
    assert after["settings"]["fit"]["lr_scaling"] == "none"
    assert after["model"] == before["model"]

    with pytest.raises(RunDirectoryError, match="validation.*0.3.*0.2"):
        train(small, run_dir, model_fn=network, epochs=3, validation=0.3)
    with pytest.raises(RunDirectoryError, match=r"layer 3 \(Dense\).*activation.*'tanh'"):
        train(small, run_dir, model_fn=lambda: network(activation="tanh"), epochs=3, validation=0.2)

    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="horovod_spark_runner"):
        train(
            small,
            tmp_path / "warm",
            model_fn=lambda: network(classes=12),
            epochs=1,
            initial_weights=InitialWeights(run_dir, skip_mismatch=True),
        )
    assert "5 of 7 weights" in caplog.text
    assert "head_12/kernel' (12, 12)" in caplog.text
    assert [type(one) for one in attached] == [attachments.AttachedFile] * 2
    assert not list(tmp_path.glob("*/handed"))
    with pytest.raises(ModelError, match=r"InitialWeights\(…, skip_mismatch=True\)"):
        train(
            small,
            tmp_path / "other",
            model_fn=lambda: network(classes=12),
            initial_weights=str(run_dir),
        )


def test_two_optimizers_go_on_to_the_bit(small: Any, tmp_path: Path) -> None:
    whole = train(small, tmp_path / "whole", model_fn=pair)
    within = train(
        small,
        tmp_path / "within",
        model_fn=pair,
        callbacks=callbacks_for([Fault(11, 1, "sigkill")], str(tmp_path)),
        checkpoints=CheckpointOptions(every_steps=2),
        restarts=RestartOptions(max_restarts=1, backoff_seconds=0.1),
    )
    assert [attempt.first_step for attempt in within.summary.attempts] == [0, 10]
    train(small, tmp_path / "between", model_fn=pair, epochs=1)
    between = train(small, tmp_path / "between", model_fn=pair)
    for name, run in [("within", within), ("between", between)]:
        assert run.summary.history == whole.summary.history
        assert_same_weights(tmp_path / name, tmp_path / "whole")
    assert newest(tmp_path / "whole")["model"]["trained_by"] == [[0, 1], [2, 3]]


@pytest.mark.thorough
def test_rows_in_another_order_are_no_rest_of_an_epoch(
    small: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    cut = callbacks_for([Fault(5, 0, "sigkill")], str(tmp_path))
    often = CheckpointOptions(every_steps=2)
    with pytest.raises(RankFailedError):
        train(small, run_dir, model_fn=network, callbacks=cut, checkpoints=often)
    assert newest(run_dir)["epoch_step"] in (2, 4)
    shutil.rmtree(run_dir / "data")
    with pytest.raises(RunDirectoryError, match=r"rows.*\border"):
        train(small.orderBy("id", ascending=False), run_dir, model_fn=network)
    with caplog.at_level(logging.WARNING, logger="horovod_spark_runner"):
        train(small, run_dir, model_fn=network)  # written anew, in the order they had
        assert not re.search(r"\border", caplog.text)
        train(small.repartition(3), run_dir, model_fn=network, epochs=4)
        assert re.search(r"\border", caplog.text)
        train(small, run_dir, model_fn=network, epochs=1)
    assert re.search(r"\b4\b.*epochs=1\b", caplog.text)
