"""The doctor on this environment, with real ranks."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from horovod_spark_runner.cluster.protocol.processes import find_mpirun
from horovod_spark_runner.commands import doctor
from horovod_spark_runner.commands.doctor_checks import PROBLEM
from tests.leftovers import await_nothing_left, marked_processes

pytestmark = [pytest.mark.thorough, pytest.mark.mpi]


def test_a_real_examination() -> None:
    """This environment, with the allreduce, through the installed command."""
    command = Path(sys.executable).with_name("horovod-spark-runner")
    run = subprocess.run(
        [str(command), "doctor"], capture_output=True, text=True, timeout=480, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search("ok       .*Horovod.*TensorFlow.*MPI", run.stdout)
    assert re.search("ok       .*allreduce.*2 ranks.*mpirun", run.stdout)
    assert not re.search(r"^problem", run.stdout, re.M)


def test_ranks_that_do_not_find_each_other_are_a_problem(tmp_path: Path) -> None:
    """As when mpirun and mpi4py are of different MPIs: every rank is a world of its own."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        f"#!/bin/sh\nexec {sys.executable} -m {doctor.__package__}.doctor_probe allreduce\n"
    )
    mpirun.chmod(0o755)
    finding = doctor._allreduce(str(mpirun))
    assert finding.level == PROBLEM
    assert "'size': 1" in finding.text


def segments_of(pid: int) -> list[str]:
    """Return the segments of an examination that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return []
    return [line for line in maps.splitlines() if "/dev/shm/hsr-doctor-" in line]


def test_ranks_that_are_killed_leave_nothing_in_shared_memory() -> None:
    killed: list[str] = []

    def kill_all() -> None:
        """Kill what has a segment of its own; others examine this machine at the same time."""
        deadline = time.monotonic() + 120
        while not killed and time.monotonic() < deadline:
            time.sleep(0.01)
            if not any(segments_of(process.pid) for process in marked_processes()):
                continue
            for process in marked_processes():
                if process.name() in ("mpirun", "prterun") or "allreduce" in process.cmdline():
                    killed.append(process.name())
                    process.kill()

    before = {*Path("/dev/shm").glob("hsr-doctor-*")}
    killer = threading.Thread(target=kill_all)
    killer.start()
    finding = doctor._allreduce(find_mpirun())
    killer.join()
    assert killed
    assert finding.level == PROBLEM
    assert "SIGKILL" in finding.text
    assert {*Path("/dev/shm").glob("hsr-doctor-*")} == before
    await_nothing_left()
