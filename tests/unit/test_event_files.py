"""Event files: what TensorBoard reads of them, taken over by later attempts, and lost storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from horovod_spark_runner.checkpoint.files import PlainLogs
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.observe.event_files import EventFiles
from tests.runs import curves_in


def attempt(place: Path, epochs: range, by: float = 1.0, **arguments: Any) -> None:
    """Write the points of an attempt that ends without closing anything."""
    directory = RunDirectory(str(place))
    with directory.lease() as lease:
        files = EventFiles(RunDirectory(directory.location, lease.token), **arguments)
        for epoch in epochs:
            logs: PlainLogs = {
                "loss": by / (epoch + 1),
                "f1": [0.25, epoch],
                "val_loss": by * epoch,
            }
            files.epoch(epoch, logs, {"learning_rate": 0.5})


def loss(*values: float) -> list[tuple[int, np.float32]]:
    return [(n, np.float32(value)) for n, value in enumerate(values)]


def test_a_later_attempt_goes_on_in_the_same_curves(tmp_path: Path) -> None:
    attempt(tmp_path, range(3))
    train = tmp_path / "events" / "train"
    assert curves_in(train)["loss"] == loss(1, 1 / 2, 1 / 3)
    (torn,) = train.iterdir()
    torn.write_bytes(torn.read_bytes()[:-3])  # a writer that was killed
    attempt(tmp_path, range(1, 4), by=2.0)
    curves = curves_in(train)
    assert curves["loss"] == loss(1, 1, 2 / 3, 2 / 4)
    assert curves["f1/1"] == loss(0, 1, 2, 3)
    assert curves["learning_rate"] == loss(*[0.5] * 4)
    assert curves_in(tmp_path / "events" / "validation") == {"loss": loss(0, 2, 4, 6)}
    assert len(list(train.iterdir())) == 2
    attempt(tmp_path, range(1))
    assert curves_in(train)["loss"] == loss(1)


def test_logs_called_like_what_the_run_tells_have_curves_of_their_own(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    with directory.lease() as lease:
        files = EventFiles(RunDirectory(directory.location, lease.token))
        files.epoch(0, {"samples_per_second": 7.0, "loss": 1.0}, {"samples_per_second": 90.0})
    curves = curves_in(tmp_path / "events" / "train")
    assert curves["samples_per_second"] == loss(7)
    assert curves["run/samples_per_second"] == loss(90)


def test_what_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("in the way")
    told: list[str] = []
    attempt(tmp_path, range(3), say=told.append)
    assert len(told) == 1
    assert "event files" in told[0]
    assert "training" in told[0]


def test_a_run_that_lost_its_directory_writes_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    files = EventFiles(RunDirectory(directory.location, "another run's"))
    files.epoch(0, {"loss": 1.0}, {})
    files.close()
    assert not directory.events.exists()
