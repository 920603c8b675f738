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

pytestmark = [pytest.mark.thorough, pytest.mark.cluster, pytest.mark.mpi, pytest.mark.spark]
RANKS = 2
JOB = str(Path(__file__).with_name("function_job.py"))


class Driver:
    """A driver in a process group of its own, whose two ranks are in an endless loop.

    Args:
        master: Spark's.
        loops: how many runs of them it starts, one when the other has failed.
    """

    def __init__(self, master: str, loops: int) -> None:
        request = json.dumps({"what": "forever", "num_workers": RANKS})
        self.process = subprocess.Popen(
            [sys.executable, JOB, master, *loops * [request]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    def await_loop(self, number: int = 1) -> None:
        """Wait until the ranks of so many runs have come to the loop."""
        deadline = time.monotonic() + 120
        while sum("in the loop" in line for line in self._lines) < number * RANKS:
            assert time.monotonic() < deadline, "".join(self._lines)
            time.sleep(0.05)

    def finish(self, timeout: float = 60) -> tuple[str, str]:
        assert self.process.stdout is not None
        self._reader.join(timeout)  # until the errors' end: it alone reads them
        self.process.wait(timeout)
        return self.process.stdout.read(), "".join(self._lines)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run(master: str, fault: Callable[[Driver], None], loops: int = 1) -> tuple[Driver, str, str]:
    driver = Driver(master, loops)
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


def test_a_killed_driver() -> None:
    driver, _, _ = run("local[2]", lambda driver: driver.process.kill())
    assert driver.process.returncode == -signal.SIGKILL


def kill_executor(driver: Driver) -> None:
    """Kill the Java process of one executor."""
    for process in psutil.Process(driver.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                process.kill()
                return
    raise AssertionError("there is no executor")


def kill_executor_and_driver(driver: Driver) -> None:
    """Kill an executor under the driver's first run, and the driver under its second."""
    kill_executor(driver)
    driver.await_loop(2)
    driver.process.kill()


def test_a_lost_executor_and_then_a_killed_driver() -> None:
    began = time.time()
    driver, out, err = run("local-cluster[2,1,1024]", kill_executor_and_driver, loops=2)
    assert driver.process.returncode == -signal.SIGKILL
    assert out, err
    (answer,) = json.loads(out.splitlines()[-1])
    assert answer["error"] == "RankFailedError", answer
    assert "Spark task" in answer["message"]
    assert "in the loop" in answer["message"]
    assert answer["ended"] - began < 120
