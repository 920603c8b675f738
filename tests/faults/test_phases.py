"""Faults while something else is done than steps, and two at once; see `phases`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from horovod_spark_runner.checkpoint.retry_policy import FINISHED
from horovod_spark_runner.cluster.protocol.outcome import STACKS_FILE
from tests.leftovers import marked_processes, task_of

from .phases import (
    CHECKPOINT_FILE,
    CHECKPOINT_FOLDER,
    MODEL_FILE,
    RESTORE,
    ROWS,
    SIGNATURE,
    STEP,
    VALIDATION,
    PhaseFault,
)
from .test_faults import (
    assert_checkpoints_are_whole,
    assert_nothing_is_left,
    job_command,
    start_job,
)
from .training import EVERY, RANKS, STEPS, assert_same_end, train

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]

# A fault, and the step that the attempt after it goes on from.
Planned = tuple[PhaseFault, int]


def fault(phase: str, *victims: tuple[int, str]) -> PhaseFault:
    return PhaseFault(phase, victims)


PLANNED: list[Planned] = [
    # While checkpoints are written and read.
    (fault(CHECKPOINT_FILE, (0, "sigkill")), EVERY),
    (fault(CHECKPOINT_FOLDER, (0, "sigkill")), 2 * EVERY),
    (fault(CHECKPOINT_FILE, (1, "sigkill")), 3 * EVERY),
    (fault(CHECKPOINT_FILE, (1, "mpirun")), 4 * EVERY),
    (fault(CHECKPOINT_FOLDER, (0, "spark worker")), 5 * EVERY),
    (fault(RESTORE, (0, "sigkill")), 5 * EVERY),
    (fault(RESTORE, (1, "sigkill")), 5 * EVERY),
    (fault(RESTORE, (0, "mpirun")), 5 * EVERY),
    (fault(RESTORE, (1, "spark worker")), 5 * EVERY),
    # The checkpoint of an epoch's end, here of the second's, is taken after its validation.
    (fault(VALIDATION, (1, "sigkill")), 36),
    (fault(VALIDATION, (0, "mpirun")), 36),
    (fault(VALIDATION, (0, "spark worker"), (1, "spark worker")), 36),
    # Two at once.
    (fault(STEP, (0, "sigkill"), (1, "sigkill")), 40),
    (fault(STEP, (0, "sigkill"), (1, "mpirun")), 44),
    (fault(STEP, (0, "spark worker"), (1, "sigkill")), 48),
    # While the model is saved.
    (fault(MODEL_FILE, (0, "sigkill")), STEPS),
    (fault(MODEL_FILE, (1, "sigkill")), STEPS),
    (fault(SIGNATURE, (1, "mpirun")), STEPS),
    (fault(SIGNATURE, (0, "spark worker"), (1, "sigkill")), STEPS),
]


@pytest.fixture(scope="module")
def undisturbed(frame: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(frame, run_dir, validate=True)
    return run_dir


def assert_all_is_well(run_dir: Path, undisturbed: Path) -> None:
    assert_same_end(run_dir, undisturbed)
    assert_nothing_is_left(run_dir)
    assert_checkpoints_are_whole(run_dir)
    assert files_of(run_dir) == files_of(undisturbed)


def files_of(run_dir: Path) -> list[str]:
    """Return all that lies in a run directory: nothing that was half written stays there."""
    # Each attempt has an event file, called after the time, the host and the process.
    names = (str(path.relative_to(run_dir)) for path in run_dir.rglob("*"))
    return sorted({name.partition("tfevents")[0] for name in names})


@pytest.mark.timeout(1800)
def test_faults_while_something_else_is_done_than_steps(
    frame: Any, undisturbed: Path, tmp_path: Path
) -> None:
    """One run, each of whose attempts but the last is hit in the midst of something."""
    faults = [fault for fault, _ in PLANNED]
    run_dir = tmp_path / "run"
    run = train(frame, run_dir, faults, str(tmp_path), validate=True)
    # Every attempt was hit, and nothing was lost that had been saved.
    assert len(list(tmp_path.glob("attempt-*-reached"))) == len(faults)
    assert [attempt.first_step for attempt in run.summary.attempts] == [
        0,
        *(step for _, step in PLANNED),
    ]
    assert run.summary.attempts[-1].ending == FINISHED
    assert_all_is_well(run_dir, undisturbed)


class Gate:
    """Keeps ranks in MPI_Init, where they read a file of settings: this one is a pipe.

    Args:
        path: of the pipe.
        kinds: of faults, each of which hits one attempt in there.
    """

    def __init__(self, path: Path, kinds: Sequence[str]) -> None:
        os.mkfifo(path)
        self.env = {"OMPI_MCA_mca_base_param_files": str(path)}
        self.killed: list[str] = []
        self._path = path
        self._thread = threading.Thread(target=self._hit, args=(kinds,), daemon=True)
        self._thread.start()

    def _hit(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            held = self._await_reader()
            if kind == kinds[-1]:  # the next attempt finds it open
                settings = self._path.with_suffix(".settings")
                settings.touch()
                settings.rename(self._path)
            ranks = self._await_ranks()
            victims: dict[str, Callable[[list[psutil.Process]], int]] = {
                "rank": lambda ranks: ranks[0].pid,
                "mpirun": lambda ranks: _mpirun_of(ranks).pid,
                "slot": lambda ranks: task_of(_directory_of(ranks[0])),
            }
            os.kill(victims[kind](ranks), signal.SIGKILL)
            self.killed.append(kind)
            psutil.wait_procs(ranks, timeout=240)
            os.close(held)

    def _await_ranks(self) -> list[psutil.Process]:
        """Return all ranks of the attempt: one that came later would pass for the next's."""
        deadline = time.monotonic() + 120
        while len(ranks := _processes("horovod-rank")) < RANKS and time.monotonic() < deadline:
            time.sleep(0.02)
        return ranks

    def _await_reader(self) -> int:
        """Return the pipe's other end, which keeps ranks waiting while it is open."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # nobody reads it yet
                return os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
            time.sleep(0.02)
        raise TimeoutError("no rank has come to MPI_Init")


def _processes(*names: str) -> list[psutil.Process]:
    return [process for process in marked_processes() if process.name() in names]


def _mpirun_of(ranks: Sequence[psutil.Process]) -> psutil.Process:
    """Return that of their own attempt: one of the attempt before may still be ending."""
    directories = {_directory_of(rank) for rank in ranks}
    found = _processes("mpirun", "prterun")
    return next(process for process in found if Path(process.cwd()) in directories)


def _directory_of(rank: psutil.Process) -> Path:
    """Return its slot's directory, in which it keeps a file open for its stacks."""
    return next(
        Path(file.path).parents[1] for file in rank.open_files() if file.path.endswith(STACKS_FILE)
    )


@pytest.mark.timeout(1200)
def test_faults_while_ranks_are_launched(frame: Any, undisturbed: Path, tmp_path: Path) -> None:
    kinds = ["rank", "mpirun", "slot"]
    gate = Gate(tmp_path / "gate", kinds)
    run_dir = tmp_path / "run"
    run = train(
        frame,
        run_dir,
        launch={"env": gate.env},
        restarts={"max_restarts": len(kinds)},
        validate=True,
    )
    assert gate.killed == kinds
    assert len(run.summary.attempts) == len(kinds) + 1
    assert_all_is_well(run_dir, undisturbed)


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_a_driver_that_is_killed_in_every_phase(undisturbed: Path, tmp_path: Path) -> None:
    """Also what writes the rows, which Spark starts again by itself."""
    rows = [fault(ROWS, (0, kind)) for kind in ("executor", "sigkill", "driver")]
    phases = [CHECKPOINT_FILE, RESTORE, MODEL_FILE]
    faults = [*rows, *(fault(phase, (1, "driver")) for phase in phases)]
    run_dir = tmp_path / "run"
    options: dict[str, Any] = {"validate": True, "restarts": {"max_restarts": 0}}
    codes = []
    # Rows need an executor to be killed; the others are quicker without.
    for master in ("local-cluster[1,2,1024]", *4 * ["local[2]"]):
        job = start_job(job_command(master, run_dir, tmp_path, faults, **options))
        _, err = job.communicate(timeout=800)
        codes.append(job.returncode)
    assert codes == [-9, -9, -9, -9, 0], err[-3000:]
    assert len(list(tmp_path.glob("rows-*"))) == len(rows)
    assert len(list(tmp_path.glob("attempt-*-reached"))) == len(phases)
    lines = (run_dir / "attempts.jsonl").read_text().splitlines()
    starts = [json.loads(line)["first_step"] for line in lines]
    assert starts == [0, EVERY, EVERY, STEPS]
    assert_all_is_well(run_dir, undisturbed)
