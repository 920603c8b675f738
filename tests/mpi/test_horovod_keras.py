"""Horovod's own Keras API in an ordinary Horovod program: against one process with all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import HorovodRunner, RankFailedError

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def run(names: tuple[str, ...], folder: str) -> dict[str, Any]:
    from tests.mpi import horovod_cases

    return horovod_cases.run(names, folder)


def run_cases(*names: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """Run cases on two ranks, in one world; each checks itself."""
    # Process sets are made while ranks run only if that is asked for.
    env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    runner = HorovodRunner(2, stream_logs=False, env=env)
    return list(runner.run(run, names, str(folder)).results)


def test_an_ordinary_program_trains_what_one_process_would(spark: Any, tmp_path: Path) -> None:
    run_cases(
        "script", "optimizers", "accumulation", "custom_loop", "callbacks", "load_model",
        "variables", folder=tmp_path,
    )  # fmt: skip


@pytest.mark.thorough
def test_what_else_programs_set(spark: Any, tmp_path: Path) -> None:
    run_cases(
        "mixed_precision", "local_layers", "process_sets", "batch_normalization", "refusals",
        "adasum", "elastic_state", folder=tmp_path,
    )  # fmt: skip


@pytest.mark.thorough
def test_metrics_that_only_some_ranks_log_are_named(spark: Any) -> None:
    with pytest.raises(RankFailedError, match="MetricAverageCallback.*val_loss"):
        run_cases("metrics_of_some_ranks")
