"""The stand-ins for users' own tests: one rank in this process, and faults."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mpi4py.MPI  # noqa: F401 - it listens from its import on, so before the tests
import pytest

from horovod_spark_runner import (
    CheckpointError,
    CheckpointOptions,
    HorovodRunner,
    InvalidInputError,
    ModelError,
    PreemptedError,
    RankFailedError,
    RestartOptions,
    report_progress,
)
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.testing import Fault, one_rank_here, with_faults
from horovod_spark_runner.training import loop
from horovod_spark_runner.training.traces import Traces
from tests.numpy_engine import Line
from tests.runs import assert_same_weights
from tests.trainings import train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def describe(given: list[int]) -> tuple[int, int, str | None, list[int]]:
    from mpi4py import MPI

    report_progress()
    given.append(1)
    world = MPI.COMM_WORLD
    return os.getpid(), world.Get_size(), os.environ.get("TOLD"), given


def test_a_function_runs_here_without_spark() -> None:
    given: list[int] = []
    with one_rank_here():
        run = HorovodRunner(env={"TOLD": "so"}).run(describe, given)
    # The rank had a copy.
    assert run.results == ((os.getpid(), 1, "so", [1]),)
    assert given == []
    assert [place.rank for place in run.placement] == [0]
    assert "TOLD" not in os.environ


COUNTS = """
from pathlib import Path
from horovod_spark_runner import HorovodRunner
from horovod_spark_runner.testing import one_rank_here

def rank():
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    return float(hvd.allreduce(tf.constant(3.0)))

with one_rank_here():
    print(HorovodRunner(1).run(rank).result)
# Open MPI maps the file of a process's shared memory, which nobody removes, until its end.
print([line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line])
"""


@pytest.mark.thorough
def test_no_files_of_mpi_are_left(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", COUNTS],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert found.returncode == 0
    assert found.stdout.splitlines() == ["3.0", "[]"]
    assert list(tmp_path.iterdir()) == []


def fail() -> None:
    raise KeyError("nosuch")


def leave() -> None:
    raise SystemExit(3)


def begin_another() -> None:
    HorovodRunner(1).run(fail)


def test_what_fails_fails_as_on_a_rank() -> None:
    with one_rank_here(), pytest.raises(RankFailedError, match=r"rank 0 .*KeyError") as caught:
        HorovodRunner(1).run(fail)
    assert isinstance(caught.value.__cause__, KeyError)
    assert ", in fail\n" in caught.value.remote_traceback
    with one_rank_here(), pytest.raises(RankFailedError, match="SystemExit: 3"):
        HorovodRunner(1).run(leave)
    with one_rank_here():
        assert HorovodRunner(1).run(sys.exit).result is None
    with one_rank_here(), pytest.raises(InvalidInputError, match="another run"):
        HorovodRunner(1).run(begin_another)


def test_what_cannot_run_here_is_refused() -> None:
    lock = threading.Lock()
    with one_rank_here():
        with pytest.raises(InvalidInputError, match="num_workers=2.* rank"):
            HorovodRunner(2).run(describe, [])
        with pytest.raises(InvalidInputError, match=r"\bworkers"):
            HorovodRunner(1).run(lambda: lock)
        caught: list[BaseException] = []
        launcher = HorovodRunner(1)

        def in_thread() -> None:
            with one_rank_here():
                try:
                    launcher.run(describe, [])
                except InvalidInputError as error:
                    caught.append(error)

        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
        assert "main thread" in str(caught[0])


@pytest.fixture(scope="module")
def points(spark: Any) -> Any:
    return spark.range(96).selectExpr("float(id / 96) as x", "float(id / 48) as y").coalesce(1)


XY: dict[str, Any] = {"feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8}


@pytest.mark.thorough
def test_a_training_here_is_the_training_there(
    points: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(run_dir: Path, **more: Any) -> Any:
        return train(points, run_dir, model_fn=Line(noise=0.0), num_workers=1, **XY, **more)

    there = run(tmp_path / "there")
    with one_rank_here():
        here = run(tmp_path / "here")
        # A timeline that takes its time to be whole is time of the rank, too.
        with monkeypatch.context() as patch:
            patch.setattr(Traces, "close", lambda self: time.sleep(1.0))
            longer = run(tmp_path / "here", epochs=3)
    timings = longer.summary.timings
    assert timings["save"] > 1.0
    (call,) = RunDirectory(str(tmp_path / "here")).read_calls()[1:]
    assert call["accounts"]["seconds"]["save"][0] > 1.0
    assert here.summary.history == there.summary.history == longer.summary.history[:2]
    assert len(longer.summary.history) == 3
    run(tmp_path / "there", epochs=3)
    assert_same_weights(tmp_path / "here", tmp_path / "there")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_loss_that_is_no_number_any_more_is_warned_of_once(
    points: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(loop, "notify", warned.append)
    with one_rank_here():
        given = train(points, tmp_path, model_fn=Line(rate=1e200), num_workers=1, epochs=3, **XY)
    assert math.isnan(given.summary.history[-1]["loss"])
    assert len(warned) == 1
    assert re.search("loss of epoch 1 .*step 12 .*TerminateOnNaN", warned[0])


def looking_up(eager: bool) -> Any:
    import keras

    layers = [keras.layers.Embedding(10, 1), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((1,), dtype="int32"), *layers])
    model.compile("sgd", "mse", run_eagerly=eager)
    return model


@pytest.mark.parametrize("eager", [False, True])
def test_ids_beyond_an_embedding_name_their_column(spark: Any, tmp_path: Path, eager: bool) -> None:
    frame = spark.range(24).selectExpr("id % 12 as word", "1.0 as y")
    columns = {"feature_cols": ["word"], "label_cols": ["y"]}
    message = r"= 1[01] is not in \[0, 10\).*integers hold word \d to 11;"
    with one_rank_here(), pytest.raises(ModelError, match=message):
        train(frame, tmp_path, model_fn=lambda: looking_up(eager), num_workers=1, **columns)


def small_model() -> Any:
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.thorough
def test_faults_happen_once_each(points: Any, tmp_path: Path) -> None:
    """Storage that fails, a rank killed, one asked to end; a run in this process is not killed."""
    checkpoints = CheckpointOptions(every_steps=2)

    def with_small_model(run_dir: Path, **more: Any) -> Any:
        given = {"epochs": 3, "checkpoints": checkpoints, **XY, **more}
        return train(points, run_dir, model_fn=small_model, **given)

    faults = [Fault(1, kind="storage"), Fault(5, 1), Fault(9, 0, "terminate")]
    run = with_small_model(
        tmp_path / "run",
        callbacks=with_faults(faults, tmp_path / "notes"),
        restarts=RestartOptions(max_restarts=2, backoff_seconds=0.1),
    )
    endings = [attempt.ending for attempt in run.summary.attempts]
    assert endings == ["rank killed or lost", "preempted", "finished"]
    assert (tmp_path / "notes" / "storage-0-1").exists()
    # The second try has written the checkpoint of step 2, for which that of step 4 has waited.
    assert run.summary.attempts[1].first_step >= 2
    assert len(run.summary.history) == 3

    def here(fault: Fault, notes: str) -> Any:
        callbacks = with_faults([fault], tmp_path / f"notes-{notes}")
        return with_small_model(tmp_path / notes, num_workers=1, callbacks=callbacks)

    with one_rank_here():
        with pytest.raises(InvalidInputError, match="process.*test"):
            here(Fault(1), "killed")
        with pytest.raises(RankFailedError, match="RuntimeError: Fault.step=14, rank=0"):
            here(Fault(14, kind="raise"), "raised")
        with pytest.raises(PreemptedError, match="checkpoint.*step 4 "):
            here(Fault(3, kind="terminate"), "ended")
        with pytest.raises(CheckpointError, match=r"step 2 .*\btest\b"):
            here(Fault(1, kind="storage", seconds=60), "full")
    whole = with_small_model(tmp_path / "whole")
    assert whole.summary.history == run.summary.history


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fault(0), r"step.*\b1\b.*\b0"),
        (lambda: Fault(1, -1), "rank"),
        (lambda: Fault(1, kind="sleep"), "kind.*kill, .*, storage"),  # type: ignore[arg-type]
        (lambda: Fault(1, seconds=3), "seconds=3.*'storage'.*kind='kill'"),
        (lambda: Fault(1, 1, "storage"), "rank=1.*'storage'.*rank 0"),
        (lambda: with_faults([3], "notes"), r"faults.*\bFault\b.*\b3"),  # type: ignore[list-item]
        (lambda: with_faults([], "notes", [3]), r"callbacks.*\b3"),
    ],
)
def test_faults_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make()
