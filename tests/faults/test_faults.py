"""Runs that are hit by faults end as undisturbed ones. See `run.py` for longer series by hand."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner.checkpoint.files import verify_checkpoint
from horovod_spark_runner.checkpoint.retry_policy import FINISHED, PREEMPTED
from horovod_spark_runner.cluster.protocol.rendezvous import ORPHAN_GRACE
from horovod_spark_runner.storage.filesystem import Location
from tests.leftovers import await_nothing_left

from .injection import HARMLESS_KINDS, KINDS, SILENT_KINDS, Fault, choose_faults, go_file
from .phases import PhaseFault
from .training import EPOCHS, EVERY, STEPS, assert_nearly_same_end, assert_same_end, train

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]

ROOT = Path(__file__).parents[2]
STANDALONE = ROOT / "scripts" / "standalone"
SEED = 20
# Of the faults that are others each time; a seed that was printed repeats them.
SEED_VARIABLE = "HSR_FAULT_SEED"
FRESH_SEED = int(os.environ.get(SEED_VARIABLE) or secrets.randbelow(2**31))


def assert_nothing_is_left(run_dir: Path) -> None:
    # Ranks may save their state for a while after their driver was killed.
    await_nothing_left(ORPHAN_GRACE + 15)
    assert not (run_dir / "lock.json").exists()
    assert not any((run_dir / "data").glob("*"))


def assert_checkpoints_are_whole(run_dir: Path) -> None:
    folders = list((run_dir / "checkpoints").iterdir())
    assert len(folders) == 3
    for folder in folders:
        verify_checkpoint(Location(folder))


@pytest.mark.timeout(1800)
def test_sixteen_faults_in_one_call(frame: Any, undisturbed: Path, tmp_path: Path) -> None:
    """Every kind at a step that is always the same, and at one that is another each time."""
    half = STEPS // 2
    others = choose_faults(FRESH_SEED, len(KINDS), STEPS, KINDS, first=half + 2)
    print(f"{SEED_VARIABLE}={FRESH_SEED} repeats these faults: {others}")
    faults = [*choose_faults(SEED, len(KINDS), half, KINDS), *others]
    run_dir = tmp_path / "run"
    run = train(frame, run_dir, faults, str(tmp_path))
    assert_same_end(run_dir, undisturbed)
    assert len(list(tmp_path.glob("step-*"))) == len(faults)
    assert len(run.summary.attempts) == len(faults) + 1
    assert run.summary.attempts[-1].ending == FINISHED
    for fault, (hit, following) in zip(faults, pairwise(run.summary.attempts), strict=True):
        if hit.ending == PREEMPTED:
            at_epoch_end = fault.step % (STEPS // EPOCHS) == 0  # the ranks agree there, too
            assert following.first_step == fault.step + (not at_epoch_end)
        else:
            assert_little_is_lost(fault, following.first_step)
    assert_nothing_is_left(run_dir)
    assert_checkpoints_are_whole(run_dir)


def assert_little_is_lost(fault: Fault, next_step: int) -> None:
    """Check that what follows on a fault began again at one of the two newest checkpoints."""
    # A fault of a step comes before that step's checkpoint. What was taken last before may just be
    # being written; the one before that is never lost.
    assert (fault.step - 1) // EVERY * EVERY - EVERY <= next_step <= fault.step + 2


@pytest.mark.timeout(1200)
def test_faults_that_only_show_by_silence(frame: Any, undisturbed: Path, tmp_path: Path) -> None:
    kinds = [*SILENT_KINDS, *HARMLESS_KINDS]
    faults = [Fault(10 + 11 * n, n % 2, kind) for n, kind in enumerate(kinds)]
    run_dir = tmp_path / "run"
    silence = {"stall_timeout": 20, "heartbeat_timeout": 15}
    run = train(frame, run_dir, faults, str(tmp_path), launch=silence)
    assert_same_end(run_dir, undisturbed)
    assert len(list(tmp_path.glob("step-*"))) == len(faults)
    causes = [attempt.cause for attempt in run.summary.attempts]
    assert "progress" in causes[0]
    assert " 15 s" in causes[1]
    assert "progress" in causes[2]
    assert causes[3:] == [""]
    for fault, attempt in zip(
        faults, run.summary.attempts[1:], strict=False
    ):  # the last does no harm
        assert_little_is_lost(fault, attempt.first_step)
    assert_nothing_is_left(run_dir)


def job_command(
    master: str, run_dir: Path, folder: Path, faults: Sequence[Fault | PhaseFault], **options: Any
) -> list[str]:
    texts = [fault.text for fault in faults]
    arguments = [master, str(run_dir), str(folder), json.dumps(options), *texts]
    return [sys.executable, "-m", "tests.faults.job", *arguments]


def start_job(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )


def run_job(run_dir: Path, folder: Path, faults: list[Fault]) -> subprocess.CompletedProcess[str]:
    # What a user's exception ends is called again.
    command = job_command("local-cluster[2,1,1024]", run_dir, folder, faults, calls=2)
    job = start_job(command)
    out, err = job.communicate(timeout=800)
    return subprocess.CompletedProcess(command, job.returncode, out, err)


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_executors_and_drivers_killed_on_a_cluster(undisturbed: Path, tmp_path: Path) -> None:
    faults = [
        Fault(7, 1, "executor"),
        Fault(18, 0, "driver"),
        Fault(29, 0, "sigterm executor"),
        Fault(41, 1, "exception"),
        Fault(50, 0, "sigstop executor"),
    ]
    run_dir = tmp_path / "run"
    killed = run_job(run_dir, tmp_path, faults)
    assert killed.returncode == -9, killed.stderr[-3000:]
    finished = run_job(run_dir, tmp_path, faults)  # the dead driver's lock is taken over
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "ValueError: an injected fault" in finished.stderr
    assert len(list(tmp_path.glob("step-*"))) == len(faults)
    attempts = json.loads(finished.stdout.splitlines()[-1])
    assert [a["ending"] for a in attempts][1:] == [FINISHED], attempts
    lines = (run_dir / "attempts.jsonl").read_text().splitlines()
    starts = [json.loads(line)["first_step"] for line in lines]
    assert len(starts) == len(faults) + 1
    for fault, start in zip(faults, starts[1:], strict=True):
        assert_little_is_lost(fault, start)
    # The ranks of an executor that was asked to end have saved first.
    assert any(29 <= start < 40 for start in starts), starts
    assert_same_end(run_dir, undisturbed)
    assert_nothing_is_left(run_dir)
    assert_checkpoints_are_whole(run_dir)


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The folder and URL of a standalone cluster with two workers of one core."""
    place = str(tmp_path / "cluster")
    environment = {**os.environ, "HSR_VENV": sys.prefix}
    try:
        started = subprocess.run(
            [str(STANDALONE), "start", place, "2", "1", "1g"],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        yield place, started.stdout.strip()
    finally:
        subprocess.run([str(STANDALONE), "stop", place], check=True)


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_a_run_shrinks_with_its_cluster_and_grows_back(
    frame: Any, standalone: tuple[str, str], tmp_path: Path
) -> None:
    place, url = standalone
    train(frame, tmp_path / "whole", plain=True)
    run_dir = tmp_path / "run"
    faults = [Fault(14, 1, "worker"), Fault(33, 0, "sigkill later")]
    restarts, launch = {"min_workers": 1}, {"start_timeout": 15.0}
    command = job_command(
        url, run_dir, tmp_path, faults, plain=True, restarts=restarts, launch=launch
    )
    job = start_job(command)
    try:
        # The second fault waits, on the one rank that is left, for a new worker.
        waiting = tmp_path / "step-33-sigkill-later"
        deadline = time.monotonic() + 300
        while not waiting.exists() and job.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        if job.poll() is None:
            subprocess.run(
                [str(STANDALONE), "join", f"{place}/more", url, "1", "1", "1g"],
                check=True,
                env={**os.environ, "HSR_VENV": sys.prefix},
            )
            go_file(str(tmp_path), faults[1]).touch()
        out, err = job.communicate(timeout=600)
    finally:
        job.kill()
        subprocess.run([str(STANDALONE), "stop", f"{place}/more"], check=True)
    assert job.returncode == 0, err[-3000:]
    attempts = json.loads(out.splitlines()[-1])
    assert [attempt["workers"] for attempt in attempts] == [2, 1, 2]
    for fault, attempt in zip(faults, attempts[1:], strict=True):
        assert_little_is_lost(fault, attempt["first_step"])
    # The global batch stayed the same: every step had the rows that it always has.
    assert_nearly_same_end(run_dir, tmp_path / "whole")
    assert_nothing_is_left(run_dir)
