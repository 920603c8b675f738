"""Background writer of checkpoints, on storage that fails in real ways."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner.checkpoint.files import CheckpointInfo, newest_checkpoint, save_checkpoint
from horovod_spark_runner.checkpoint.manager import _NICENESS, _CheckpointWriter
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.config.training import CheckpointOptions
from horovod_spark_runner.errors import CheckpointError, InvalidInputError, RunDirectoryError
from horovod_spark_runner.storage.arrays import write_arrays
from horovod_spark_runner.training.spec import Binding
from horovod_spark_runner.training.trained_model import ModelWriter, Signature


def info(step: int) -> CheckpointInfo:
    return CheckpointInfo(step, 1, [{"loss": 0.5}], "abc", [], "an.engine")


def files(size: int = 1000) -> dict[str, dict[str, np.ndarray]]:
    return {"variables.npz": {"a": np.random.default_rng(0).normal(size=size)}}


WriterMaker = Callable[..., tuple[_CheckpointWriter, list[float]]]


@pytest.fixture
def make_writer(directory: RunDirectory) -> Iterator[WriterMaker]:
    """Make writers into ``directory``, closed afterwards: their threads end with the test."""
    with contextlib.ExitStack() as writers:

        def make(**options: Any) -> tuple[_CheckpointWriter, list[float]]:
            directory.lock.write_text(json.dumps({"token": "ours"}))
            pauses: list[float] = []
            chosen = CheckpointOptions(**options)
            writer = _CheckpointWriter(directory, chosen, pauses.append)
            writers.callback(writer.close)
            return writer, pauses

        yield make


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(str(tmp_path / "run"), "ours")


def newest_step(directory: RunDirectory) -> int | None:
    newest = newest_checkpoint(directory)
    return None if newest is None else newest[1].step


def test_it_writes_one_after_the_other(directory: RunDirectory, make_writer: WriterMaker) -> None:
    directory.location.make_folder()
    writer, pauses = make_writer(keep=2)
    for step in (1, 2, 3):
        writer.submit(info(step), files())
    writer.wait()
    assert directory.checkpoint_steps() == [3, 2]
    assert pauses == []
    assert json.loads(directory.metrics.read_text()) == {"epoch": 0, "loss": 0.5}


def test_writing_gives_way_to_the_training(
    directory: RunDirectory, make_writer: WriterMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.location.make_folder()
    found = {}

    def noting(what: str, write: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            found[what] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            return write(*arguments)

        return noted

    # The second runs in the thread that a write to storage begins.
    save, write = noting("thread", save_checkpoint), noting("storage", write_arrays)
    monkeypatch.setattr("horovod_spark_runner.checkpoint.manager.save_checkpoint", save)
    monkeypatch.setattr("horovod_spark_runner.checkpoint.files.write_arrays", write)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    writer, _ = make_writer()
    writer.submit(info(1), files())
    writer.wait()
    assert set(found.values()) == {max(before, _NICENESS)}
    assert len(found) == 2
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def limit_file_size(size: int) -> int:
    """Make the kernel refuse files above ``size`` bytes (EFBIG, as ENOSPC comes: in mid-write)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    return before[0]


def test_storage_that_takes_no_more_stops_the_run_and_keeps_the_last(
    directory: RunDirectory,
    make_writer: WriterMaker,
) -> None:
    directory.location.make_folder()
    writer, pauses = make_writer()
    writer.submit(info(1), files())
    writer.wait()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = limit_file_size(100_000)
    try:
        writer.submit(info(2), files(100_000))
        with pytest.raises(CheckpointError, match=r"step 2\b"):
            writer.wait()
    finally:
        limit_file_size(before)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(pauses) == 2
    assert newest_step(directory) == 1
    assert [place.name for place in directory.checkpoints.list()] == ["step-00000001"]


SMALL_DISK = """
import json, logging, subprocess, sys, numpy as np
from collections.abc import Callable, Iterator
from pathlib import Path
logging.basicConfig(format="%(message)s")
from horovod_spark_runner.config.training import CheckpointOptions
from horovod_spark_runner.checkpoint.files import CheckpointInfo, newest_checkpoint
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.checkpoint.manager import _CheckpointWriter
place, ballast = sys.argv[1], Path(sys.argv[1], "ballast")
directory = RunDirectory(place, "ours")
directory.lock.write_text(json.dumps({"token": "ours"}))
options = CheckpointOptions(keep=3, on_error="warn")
writer = _CheckpointWriter(directory, options, lambda seconds: None)
happens = {
    3: lambda: ballast.write_bytes(bytes(1_000_000)),
    7: ballast.unlink,
    8: lambda: subprocess.run(["mount", "-o", "remount,ro", place], check=True),
    9: lambda: subprocess.run(["mount", "-o", "remount,rw", place], check=True),
}
for step in range(1, 10):
    happens.get(step, int)()
    values = {"a": np.full(50_000, step, np.float64)}
    writer.submit(CheckpointInfo(step, 1, [], "abc", [], "an.engine"), {"variables.npz": values})
    writer.wait()
    print(step, newest_checkpoint(directory)[1].step, flush=True)
"""


@pytest.mark.thorough
def test_a_step_that_is_saved_again_is_never_missing(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    values = {"variables.npz": {"a": np.zeros(1000)}}
    place = save_checkpoint(directory, info(7), values)
    over, missed = threading.Event(), []

    def look() -> None:
        while not over.is_set():
            if not os.path.exists(str(place.join("checkpoint.json"))):
                missed.append(time.monotonic())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for loss in range(300):
            again = replace(info(7), history=[{"loss": float(loss)}])
            save_checkpoint(directory, again, values)
    finally:
        over.set()
        looking.join()
    assert not missed
    newest = newest_checkpoint(directory)
    assert newest is not None
    assert newest[1].history == [{"loss": 299.0}]
    assert [folder.name for folder in directory.checkpoints.list()] == [place.name]


def test_a_full_disk_and_a_read_only_one_are_survived(tmp_path: Path) -> None:
    """On a file system of 2 MiB of its own: a mount in a namespace that only the test sees."""
    place = tmp_path / "small"
    place.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SMALL_DISK)
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare = ["unshare", "--mount", *root, "sh", "-c"]
    if subprocess.run([*unshare, "mount -t tmpfs none /mnt"], check=False).returncode:
        pytest.skip("mounting in a namespace is not allowed here")
    command = 'mount -t tmpfs -o size=2m none "$1" && exec "$2" "$3" "$1"'
    arguments = ["sh", str(place), sys.executable, str(script)]
    run = subprocess.run(
        [*unshare, command, *arguments], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    newest = {int(a): int(b) for a, b in (line.split() for line in run.stdout.splitlines())}
    assert newest[2] == 2
    assert 2 <= newest[6] < 6  # full
    assert newest[7] == 7  # room again
    assert newest[8] == 7  # read-only
    assert newest[9] == 9
    assert "No space left on device" in run.stderr
    assert "Read-only file system" in run.stderr
    assert "training" in run.stderr


def test_storage_that_is_away_for_a_moment(
    directory: RunDirectory, make_writer: WriterMaker
) -> None:
    directory.location.make_folder()
    writer, _ = make_writer()
    away = Path(str(directory.location)).with_name("away")
    place = Path(str(directory.location))
    place.rename(away)
    place.write_text("a file where the folder was")

    def back(seconds: float) -> None:
        place.unlink()
        away.rename(place)

    writer._pause = back
    writer.submit(info(1), files())
    writer.wait()
    assert newest_step(directory) == 1


def test_an_error_is_told_at_the_next_step(
    directory: RunDirectory, make_writer: WriterMaker
) -> None:
    directory.location.make_folder()
    (Path(str(directory.location)) / "checkpoints").write_text("in the way")
    writer, _ = make_writer()
    writer.submit(info(1), files())
    while writer.busy:
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="checkpoint.*step 1"):
        writer.poll()
    writer.poll()  # once


def test_with_warn_the_training_goes_on(
    directory: RunDirectory, make_writer: WriterMaker, caplog: pytest.LogCaptureFixture
) -> None:
    directory.location.make_folder()
    blocker = Path(str(directory.location)) / "checkpoints"
    blocker.write_text("in the way")
    writer, _ = make_writer(on_error="warn")
    with caplog.at_level(logging.WARNING):
        writer.submit(info(1), files())
        writer.wait()
        assert "training" in caplog.text
        blocker.unlink()
        writer.submit(info(2), files())
        writer.wait()
    assert newest_step(directory) == 2


def test_a_run_that_lost_its_lock_writes_no_more(
    directory: RunDirectory, make_writer: WriterMaker
) -> None:
    directory.location.make_folder()
    writer, _ = make_writer(on_error="warn")
    directory.lock.write_text(json.dumps({"token": "theirs"}))
    writer.submit(info(1), files())
    with pytest.raises(RunDirectoryError, match="another run"):
        writer.wait()
    assert directory.checkpoint_steps() == []


def test_a_lock_that_is_lost_while_arrays_are_written(
    directory: RunDirectory, make_writer: WriterMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.location.make_folder()
    writer, _ = make_writer()

    def slow(*arguments: Any) -> None:
        directory.lock.write_text(json.dumps({"token": "theirs"}))
        write_arrays(*arguments)

    monkeypatch.setattr("horovod_spark_runner.checkpoint.files.write_arrays", slow)
    writer.submit(info(1), files())
    with pytest.raises(RunDirectoryError, match="another run"):
        writer.wait()
    assert directory.checkpoint_steps() == []
    with pytest.raises(RunDirectoryError, match="another run"):
        ModelWriter(directory).finish(Signature(Binding(["x"]), (), None))
    assert not directory.signature.exists()


def test_a_run_directory_that_is_gone_is_not_taken_for_anothers(
    directory: RunDirectory, make_writer: WriterMaker
) -> None:
    directory.location.make_folder()
    writer, pauses = make_writer()
    directory.location.delete_folder()
    writer.submit(info(1), files())
    pattern = r"step 1\b.*run_dir \S+/run\b.*deleted"
    with pytest.raises(CheckpointError, match=rf"{pattern}.*lock\.json"):
        writer.wait()
    assert len(pauses) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"every_steps": 0}, "every_steps"),
        ({"every_minutes": 0}, r"every_minutes.*\b0"),
        ({"keep": 0}, "keep"),
        ({"best_mode": "auto"}, "best_mode.*'auto'"),
        ({"best_metric": 3}, r"best_metric.*\b3"),
        ({"on_error": "ignore"}, "on_error.*'ignore'"),
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    CheckpointOptions()
    with pytest.raises(InvalidInputError, match=message):
        CheckpointOptions(**wrong)
