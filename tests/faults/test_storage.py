"""Storage that is full, or hangs, under a training."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import HorovodRunner
from horovod_spark_runner.errors import (
    CheckpointError,
    DataError,
    HorovodSparkError,
    StorageError,
)
from horovod_spark_runner.storage.retries import TIMEOUT_VARIABLE
from horovod_spark_runner.tune import loguniform, tune
from tests.leftovers import await_nothing_left
from tests.mpi import tune_cases

from .disks import freezable_disk, memory_disk, thaw
from .injection import AT_THE_END, BALLAST, DISK, Fault, fill, freeze
from .training import STEPS, assert_same_end, train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]
NONE = {"max_restarts": 0}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with memory_disk(tmp_path / DISK, "2m") as disk:
        yield disk


@pytest.fixture
def freezable(tmp_path: Path) -> Iterator[Path]:
    with freezable_disk(tmp_path / DISK) as disk:
        yield disk


@pytest.mark.parametrize(
    "step",
    [41, *(pytest.param(step, marks=pytest.mark.thorough) for step in (6, STEPS, AT_THE_END))],
)
def test_a_disk_that_is_full_at_any_step(
    step: int, frame: Any, undisturbed: Path, small: Path, tmp_path: Path
) -> None:
    """From before the data to the final model: a clear error, and nothing of it is lost."""
    fill(small)
    with pytest.raises(HorovodSparkError, match="No space left on device"):
        train(frame, small / "run")
    (small / BALLAST).unlink()
    faults = [Fault(step, 0, "full disk")]
    run_dir = small / "filled"
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(frame, run_dir, faults, str(tmp_path), restarts=NONE)
    assert (small / BALLAST).exists()
    (small / BALLAST).unlink()
    again = train(frame, run_dir, faults, str(tmp_path), restarts=NONE)
    assert again.summary.attempts[-1].first_step >= min(step, STEPS) - 8
    assert_same_end(run_dir, undisturbed)
    await_nothing_left()


@pytest.mark.thorough
def test_a_search_whose_disk_is_full_goes_on_with_the_same_trial(
    spark: Any, tmp_path: Path
) -> None:
    rows = spark.createDataFrame(tune_cases.ROWS, tune_cases.SCHEMA)
    with memory_disk(tmp_path / DISK, "8m") as disk:

        def build(params: dict[str, Any]) -> Any:
            if not (tmp_path / "filled").exists():
                (tmp_path / "filled").touch()
                fill(disk)
            return tune_cases.slow_when_long(params)

        space = {"lr": loguniform(1e-3, 1e-1)}
        options: dict[str, Any] = {
            "validation": "held_out",
            "epochs": 1,
            "stream_logs": False,
            "max_trials": 2,
        }
        search = partial(tune, rows, build, space, study_dir=disk / "study", **options)
        with pytest.raises(StorageError, match="No trial"):
            search()
        (disk / BALLAST).unlink()
        assert list(search().trials["state"]) == ["finished"] * 2
    await_nothing_left()


@pytest.mark.thorough
@pytest.mark.parametrize("materializer", ["petastorm", "spark"])
def test_a_disk_that_is_full_while_rows_are_written(
    spark: Any, small: Path, materializer: str
) -> None:
    numbers = ", ".join(f"rand({seed})" for seed in range(8))
    rows = spark.range(400_000).selectExpr(f"array({numbers}) as image", "id % 10 as digit")
    with pytest.raises(DataError, match="run/data.*No space left on device"):
        train(rows, small / "run", data={"materializer": materializer})


@pytest.mark.thorough
def test_checkpoint_storage_that_hangs(
    frame: Any,
    undisturbed: Path,
    freezable: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, "3")
    run_dir = freezable / "run"
    faults = [Fault(26, 0, "frozen disk")]
    patient = {"env": {TIMEOUT_VARIABLE: "3"}}
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="storage.* 3 s"):
        train(frame, run_dir, faults, str(tmp_path), restarts=NONE, launch=patient)
    assert time.monotonic() - began < 300  # it ends, however slow the machine
    thaw(freezable)
    again = train(frame, run_dir, faults, str(tmp_path), restarts=NONE)
    assert again.summary.attempts[-1].first_step >= 20
    assert_same_end(run_dir, undisturbed)
    await_nothing_left()


def speak() -> str:
    for number in range(100):
        print(f"line {number}")
    return "done"


@pytest.mark.thorough
def test_log_storage_that_hangs(
    spark: Any, freezable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    freeze(freezable)
    runner = HorovodRunner(2, log_dir=str(freezable / "logs"), stream_logs=False)
    with caplog.at_level(logging.WARNING):
        assert runner.run(speak).results == ("done", "done")
    assert str(freezable / "logs") in caplog.text
    thaw(freezable)
    await_nothing_left()
