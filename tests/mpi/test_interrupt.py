"""Ctrl-C ends a training with what it has reported saved, and the next call resumes there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod_spark_runner.checkpoint.files import newest_checkpoint
from horovod_spark_runner.checkpoint.run_directory import RunDirectory

pytestmark = [pytest.mark.mpi, pytest.mark.spark]
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


class Example:
    """The example as a user starts it, in a process group of its own as in a terminal."""

    def __init__(self, run_dir: Path) -> None:
        command = [sys.executable, str(EXAMPLE), "--epochs", "60", "--run-dir", str(run_dir)]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)

    def interrupt_at(self, text: str) -> None:
        """Press Ctrl-C once a line says so: the signal goes to the whole foreground group."""
        deadline = time.monotonic() + 240
        while not any(text in line for line in self.lines):
            assert self._process.poll() is None, self.told
            assert time.monotonic() < deadline, self.told
            time.sleep(0.01)
        os.killpg(self._process.pid, signal.SIGINT)

    def finish(self) -> int:
        code = self._process.wait(120)
        self._reader.join(30)
        return code

    @property
    def told(self) -> str:
        return "".join(self.lines)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(30)
        assert self._process.stderr is not None
        self._process.stderr.close()


@contextlib.contextmanager
def example(run_dir: Path) -> Iterator[Example]:
    started = Example(run_dir)
    try:
        yield started
    finally:
        started.end()


def check_saved(told: str, run_dir: Path) -> str:
    """Check that the last line tells what is saved, all that was reported; return its name."""
    directory = RunDirectory(str(run_dir))
    newest = newest_checkpoint(directory, directory.run_id())
    assert newest is not None, told
    folder, info = newest
    last = told.splitlines()[-1]
    assert folder.name in last, told
    assert str(run_dir) in last, told
    reported = [int(one) for one in re.findall(r"epoch (\d+)/60  \d+ steps  loss", told)]
    assert info.epoch >= max(reported, default=0), told
    assert len(directory.read_metrics()) == info.epoch == len(info.history)
    assert "Traceback" not in told
    return folder.name


def test_an_epoch_that_was_reported_is_saved(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with example(run_dir) as first:
        first.interrupt_at("epoch 1/60  ")
        assert first.finish() == 130, first.told
    check_saved(first.told, run_dir)


@pytest.mark.thorough
def test_a_training_is_resumed_from_whenever_it_was_interrupted(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with example(run_dir) as early:
        early.interrupt_at("checking the configuration")
        assert early.finish() == 130, early.told
    assert re.search(r"interrupted", early.told.splitlines()[-1])
    assert "Traceback" not in early.told
    with example(run_dir) as building:
        building.interrupt_at("building the model")
        assert building.finish() == 130, building.told
    # Its first step is saved, unless the ranks were not as far as to notice.
    saved = None
    if "before a checkpoint" not in building.told.splitlines()[-1]:
        saved = check_saved(building.told, run_dir)
    with example(run_dir) as middle:
        middle.interrupt_at("epoch 2/60  ")
        assert middle.finish() == 130, middle.told
    resumed = f" from {saved}: epochs 1 to 60 of 60" in middle.told
    assert resumed == (saved is not None), middle.told
    saved = check_saved(middle.told, run_dir)
    with example(run_dir) as twice:
        twice.interrupt_at("epoch 4/60  ")
        twice.interrupt_at("once more")
        assert twice.finish() == 130, twice.told
    assert f" from {saved}: " in twice.told
    check_saved(twice.told, run_dir)
