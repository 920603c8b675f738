"""Calls that resume a run, or have nothing left to train, report it on the driver."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import CheckpointOptions, RunDirectoryError
from tests import trainings

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def other_loss() -> Any:
    model = trainings.digits_model()
    model.compile("adam", "mse")
    return model


def stop_early() -> list[Any]:
    import keras

    return [keras.callbacks.EarlyStopping("loss", min_delta=1e9, restore_best_weights=True)]


@pytest.fixture(scope="module")
def small(digits_df: Any) -> Any:
    return digits_df.filter("id < 192").coalesce(1)


def test_a_call_says_what_is_left_to_train(
    small: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def call(epochs: int, **arguments: Any) -> tuple[int, str, list[str]]:
        """Train; return how many epochs there are, what was printed and what was warned of."""
        caplog.clear()
        capfd.readouterr()
        with caplog.at_level(logging.WARNING, "horovod_spark_runner"):
            train = functools.partial(trainings.train, small, tmp_path / "run", stream_logs=True)
            history = train(epochs=epochs, **arguments).summary.history
        return len(history), capfd.readouterr().err, [one.getMessage() for one in caplog.records]

    best = CheckpointOptions(best_metric="loss")
    printed = call(1, validation=0.25, checkpoints=best)[1]
    assert "resuming" not in printed
    assert "3 passes over the rows" in printed
    assert re.search(r"best loss [\d.]+ in epoch 1 \(checkpoint=\d\)", printed)
    count, printed, _ = call(3, validation=0.25)
    assert count == 3
    match = re.search(r"step-0000000(\d): epochs 2 to 3 of 3", printed)
    assert match
    assert match.start() < printed.index("preparing the data"), "at once"
    assert re.search(
        r"^finished in .* epoch 3  .*loss .*weights: epoch 3, the last$", printed, re.M
    )
    assert re.search(r"^report: .*report.html.*tensorboard --logdir", printed, re.MULTILINE)
    # What changes has no effect where nothing is left, and nothing else is said of it.
    files = {file: file.stat() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    count, printed, warned = call(3, validation=0.25, batch_size=16, model_fn=other_loss)
    assert count == 3
    assert " from step-" not in printed
    (text,) = warned
    assert re.search(r"nothing is left.*\b3\b.*epochs=3", text)
    # No row was written and no rank started.
    assert "loaded the model of the finished run (weights: epoch 3, the last)" in printed
    assert "preparing the data" not in printed
    written = {file: file.stat() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert written.keys() == files.keys()
    changed = [file for file in files if files[file].st_mtime_ns != written[file].st_mtime_ns]
    assert not changed
    # Other rows, and another model, are refused as ever.
    with pytest.raises(RunDirectoryError, match="the rows have changed"):
        trainings.train(small.filter("id > 3"), tmp_path / "run", epochs=3, validation=0.25)


@pytest.mark.thorough
def test_a_run_that_a_callback_stopped_stays_so(
    small: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = functools.partial(trainings.train, small, tmp_path / "run", callbacks=stop_early)
    summary = train(epochs=9).summary
    first = summary.history
    assert len(first) == 2
    assert re.search(r"epoch 1\b.*EarlyStopping", summary.weights)
    for epochs in (9, 20):
        caplog.clear()
        assert train(epochs=epochs).summary.history == first
        (warned,) = [one.getMessage() for one in caplog.records if "nothing is" in one.getMessage()]
        assert re.search(r"callback.*epoch 2\b", warned)
        assert "this one" not in warned, "which may be given no callback"
