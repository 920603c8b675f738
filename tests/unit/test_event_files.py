"""Event files: what TensorBoard reads of them, taken over by later attempts, and lost storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner.rundir.checkpoint import PlainLogs
from horovod_spark_runner.rundir.directory import RunDirectory
from horovod_spark_runner.rundir.lock import RunLock
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.training.event_files import EventFiles
from tests.runs import curves_in


def attempt(place: Path, epochs: range, by: float = 1.0, **arguments: Any) -> None:
    """Write the points of an attempt that ends without closing anything."""
    directory = RunDirectory(str(place))
    with RunLock(directory) as lock:
        files = EventFiles(directory, lock.token, **arguments)
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
    assert len(list(train.iterdir())) == 1
    attempt(tmp_path, range(1))
    assert curves_in(train)["loss"] == loss(1)


def test_logs_called_like_what_the_run_tells_have_curves_of_their_own(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    with RunLock(directory) as lock:
        files = EventFiles(directory, lock.token)
        files.epoch(0, {"samples_per_second": 7.0, "loss": 1.0}, {"samples_per_second": 90.0})
    curves = curves_in(tmp_path / "events" / "train")
    assert curves["samples_per_second"] == loss(7)
    assert curves["run/samples_per_second"] == loss(90)


def test_files_of_others_stay(tmp_path: Path) -> None:
    attempt(tmp_path, range(2))
    train = tmp_path / "events" / "train"
    # As Keras' TensorBoard callback calls them, and PyTorch's SummaryWriter.
    others = [train / f"events.out.tfevents.1790000000.host.123.0{end}" for end in (".v2", "")]
    for other in others:
        other.write_bytes(b"points")
    attempt(tmp_path, range(1, 2), by=4.0)
    assert len(list(train.iterdir())) == 1 + len(others)
    for other in others:
        assert other.read_bytes() == b"points"
        other.unlink()
    assert curves_in(train)["loss"] == loss(1, 2)


def test_an_attempt_killed_while_it_took_a_file_over_leaves_no_second_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(tmp_path, range(2))
    delete = Location.delete_file

    def all_but_events(place: Location) -> None:
        if "tfevents" not in place.name:
            delete(place)

    with monkeypatch.context() as patch:
        patch.setattr(Location, "delete_file", all_but_events)
        attempt(tmp_path, range(1, 3))
    assert len(list((tmp_path / "events" / "train").iterdir())) == 2
    attempt(tmp_path, range(2, 3))
    assert curves_in(tmp_path / "events" / "train")["loss"] == loss(1, 1 / 2, 1 / 3)


def test_what_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("in the way")
    told: list[str] = []
    attempt(tmp_path, range(3), say=told.append)
    assert len(told) == 1
    assert "event files could not be written to" in told[0]
    assert "The training goes on" in told[0]


def test_a_run_that_lost_its_directory_writes_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    files = EventFiles(directory, "another run's")
    files.epoch(0, {"loss": 1.0}, {})
    files.close()
    assert not directory.events.exists()
