"""Runs that are hit by faults end as undisturbed ones. See `run.py` for longer series by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from horovod_spark_runner.launch.restart import FINISHED, PREEMPTED
from horovod_spark_runner.storage.checkpoint import verify_checkpoint
from horovod_spark_runner.storage.filesystem import Location

from .injection import KINDS, Fault, choose_faults
from .training import EVERY, MARK, STEPS, assert_same_end, make_frame, train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

ROOT = Path(__file__).parents[2]
SEED = 20


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    return make_frame(spark).cache()


@pytest.fixture(scope="module")
def undisturbed(frame: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(frame, run_dir)
    return run_dir


def left_over(run_dir: Path) -> Iterator[str]:
    """Yield the processes of the run's ranks that are still there."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(run_dir):
                yield f"{process.pid}: {process.cmdline()}"
        except psutil.Error:
            continue


def assert_nothing_is_left(run_dir: Path) -> None:
    deadline = time.monotonic() + 15  # what a killed driver leaves ends a little later
    while found := list(left_over(run_dir)):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    daemons = [p.name() for p in psutil.Process().children(recursive=True) if p.name() in MPI_NAMES]
    assert daemons == []
    assert not (run_dir / "lock.json").exists()
    assert not any((run_dir / "data").glob("*"))


MPI_NAMES = {"mpirun", "prterun", "prted"}


def assert_checkpoints_are_whole(run_dir: Path) -> None:
    folders = list((run_dir / "checkpoints").iterdir())
    assert len(folders) == 3
    for folder in folders:
        verify_checkpoint(Location(folder))


@pytest.mark.timeout(900)
def test_sixteen_faults_in_one_call(frame: Any, undisturbed: Path, tmp_path: Path) -> None:
    faults = choose_faults(SEED, 16, STEPS, KINDS)
    run_dir = tmp_path / "run"
    run = train(frame, run_dir, faults, str(tmp_path))
    assert_same_end(run_dir, undisturbed)
    assert len(list(tmp_path.glob("step-*"))) == len(faults)
    assert len(run.attempts) == len(faults) + 1
    assert run.attempts[-1].ending == FINISHED
    for fault, (hit, following) in zip(faults, pairwise(run.attempts), strict=True):
        if hit.ending == PREEMPTED:
            assert following.first_step == fault.step + 1
        else:
            # What was taken last may just be being written; the one before is never lost.
            assert following.first_step >= fault.step // EVERY * EVERY - EVERY
    assert_nothing_is_left(run_dir)
    assert_checkpoints_are_whole(run_dir)


def run_job(run_dir: Path, folder: Path, faults: list[Fault]) -> subprocess.CompletedProcess[str]:
    texts = [f"{fault.step}:{fault.rank}:{fault.kind}" for fault in faults]
    arguments = ["local-cluster[2,1,1024]", str(run_dir), str(folder), *texts]
    return subprocess.run(
        [sys.executable, "-m", "tests.faults.job", *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_executors_and_drivers_killed_on_a_cluster(undisturbed: Path, tmp_path: Path) -> None:
    faults = [
        Fault(7, 1, "executor"),
        Fault(18, 0, "driver"),
        Fault(29, 0, "executor"),
        Fault(41, 1, "exception"),
    ]
    run_dir = tmp_path / "run"
    killed = run_job(run_dir, tmp_path, faults)
    assert killed.returncode == -9, killed.stderr[-3000:]
    failed = run_job(run_dir, tmp_path, faults)  # the dead driver's lock is taken over
    assert failed.returncode == 1, failed.stderr[-3000:]
    assert "ValueError: an injected fault" in failed.stderr
    finished = run_job(run_dir, tmp_path, faults)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert len(list(tmp_path.glob("step-*"))) == len(faults)
    assert [a["ending"] for a in json.loads(finished.stdout.splitlines()[-1])] == [FINISHED]
    lines = (run_dir / "attempts.jsonl").read_text().splitlines()
    starts = [json.loads(line)["first_step"] for line in lines]
    assert len(starts) == 5
    assert starts == sorted(starts)
    assert_same_end(run_dir, undisturbed)
    assert_nothing_is_left(run_dir)
    assert_checkpoints_are_whole(run_dir)
