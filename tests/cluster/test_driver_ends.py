"""The driver or an executor goes away in the middle of a run; nothing stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.leftovers import await_nothing_left

pytestmark = [pytest.mark.cluster, pytest.mark.mpi, pytest.mark.spark]
JOB = str(Path(__file__).with_name("function_job.py"))


class Driver:
    """A driver in a process group of its own, whose ranks are in an endless loop."""

    def __init__(self, master: str, ranks: int) -> None:
        request = json.dumps({"what": "forever", "num_workers": ranks})
        self.process = subprocess.Popen(
            [sys.executable, JOB, master, request],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        )
        self._lines: list[str] = []
        self._looping = threading.Event()
        self._ranks = ranks
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)
            if sum("in the loop" in text for text in self._lines) >= self._ranks:
                self._looping.set()

    def await_loop(self) -> None:
        assert self._looping.wait(120), "".join(self._lines)

    def finish(self, timeout: float = 60) -> tuple[str, str]:
        assert self.process.stdout is not None
        self._reader.join(timeout)  # until the errors' end: it alone reads them
        self.process.wait(timeout)
        return self.process.stdout.read(), "".join(self._lines)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run(master: str, fault: Callable[[Driver], None]) -> tuple[Driver, str, str]:
    driver = Driver(master, 2)
    try:
        driver.await_loop()
        fault(driver)
        out, err = driver.finish()
    finally:
        driver.end()
    await_nothing_left(30, session_over=True)
    return driver, out, err


def interrupt(driver: Driver) -> None:
    """Press Ctrl-C: the signal goes to the whole foreground group."""
    os.killpg(driver.process.pid, signal.SIGINT)


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
def test_ctrl_c(master: str) -> None:
    driver, _, err = run(master, interrupt)
    assert driver.process.returncode != 0
    assert "KeyboardInterrupt" in err


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
def test_a_killed_driver(master: str) -> None:
    driver, _, _ = run(master, lambda driver: driver.process.kill())
    assert driver.process.returncode == -signal.SIGKILL


def kill_executor(driver: Driver) -> None:
    """Kill the Java process of one executor."""
    for process in psutil.Process(driver.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                process.kill()
                return
    raise AssertionError("there is no executor")


def test_a_lost_executor() -> None:
    began = time.time()
    _, out, err = run("local-cluster[2,1,1024]", kill_executor)
    assert out, err
    (answer,) = json.loads(out.splitlines()[-1])
    assert answer["error"] == "RankFailedError", answer
    assert "its Spark task was killed or lost" in answer["message"]
    assert "in the loop" in answer["message"]
    assert answer["ended"] - began < 120
