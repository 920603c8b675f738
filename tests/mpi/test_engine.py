"""A second framework, and a second way of synchronising, through all that knows neither."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    CheckpointOptions,
    LocalSGD,
    RestartOptions,
    RunDirectoryError,
    TFTransformer,
)
from horovod_spark_runner.testing import Fault, Faults
from tests import trainings
from tests.numpy_engine import Line
from tests.runs import arrays_in, assert_same_weights

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]

SLOPES = np.array([1.0, -2.0, 0.5])


@pytest.fixture(scope="module")
def points(spark: Any) -> Any:
    x = np.random.default_rng(0).normal(size=(170, 3)).astype(np.float32)
    rows = [(row.tolist(), float(row @ SLOPES + 3)) for row in x]
    return spark.createDataFrame(rows, "x array<float>, y float").coalesce(2).cache()


train = functools.partial(
    trainings.train,
    model_fn=Line(),
    feature_cols=["x"],
    label_cols=["y"],
    batch_size=8,
    epochs=3,
    validation=0.2,
)


def die_once(run_dir: Path) -> Any:
    """Return a callback that kills rank 1 in the second epoch, once step 12 is kept."""
    notes = run_dir.parent / "faults"
    faults = Faults((Fault(14, rank=1),), str(notes))
    kept = run_dir / "checkpoints" / "step-00000012"
    seen: list[int] = []

    def callback(number: int, logs: Any) -> None:
        from mpi4py import MPI

        seen.append(number)
        while len(seen) == 14 and not (kept.exists() or notes.exists()):
            time.sleep(0.01)
        faults.after_step(len(seen), MPI.COMM_WORLD.Get_rank())

    return callback


def predictions(transformer: Any, points: Any) -> np.ndarray:
    rows = transformer.transform(points).orderBy("y").collect()
    return np.array([row.prediction for row in rows])


def test_another_engine_trains_resumes_and_predicts(points: Any, tmp_path: Path) -> None:
    whole = train(points, tmp_path / "whole")
    losses = [logs["val_loss"] for logs in whole.summary.history]
    assert losses[-1] < 0.2 * losses[0]
    errors = predictions(whole, points) - np.array([row.y for row in points.orderBy("y").collect()])
    assert whole.evaluate(points) == {"loss": pytest.approx(np.mean(errors**2), rel=1e-6)}
    run = train(
        points,
        tmp_path / "run",
        callbacks=[die_once(tmp_path / "run")],
        checkpoints=CheckpointOptions(every_steps=4),
        restarts=RestartOptions(max_restarts=1, backoff_seconds=0.1),
    )
    assert [(a.first_step, a.ending) for a in run.summary.attempts] == [
        (0, "rank killed or lost"),
        (12, "finished"),
    ]
    assert run.summary.history == whole.summary.history
    assert_same_weights(tmp_path / "run", tmp_path / "whole")

    weights = arrays_in(tmp_path / "run" / "model" / "weights.npz")["00000"]
    inputs = np.array([row.x for row in points.orderBy("y").collect()], np.float32)
    expected = inputs @ weights[:3] + weights[3]
    np.testing.assert_allclose(predictions(run, points), expected, atol=1e-9)
    place = str(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=r"engine 'tests\.numpy_engine'.*model_fn"):
        TFTransformer.from_run(place)
    again = TFTransformer.from_run(place, model_fn=Line())
    np.testing.assert_array_equal(predictions(again, points), predictions(run, points))

    with pytest.raises(RunDirectoryError, match=r"momentum.*0\.9.*0\.5"):
        train(points, tmp_path / "run", model_fn=Line(momentum=0.9), epochs=4)


def test_ranks_of_another_engine_equal_one_process(points: Any, tmp_path: Path) -> None:
    line = Line(noise=0.0)
    two = train(points, tmp_path / "two", model_fn=line, epochs=2)
    one = train(points, tmp_path / "one", model_fn=line, epochs=2, num_workers=1, batch_size=16)
    for ours, theirs in zip(two.summary.history, one.summary.history, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    assert_same_weights(tmp_path / "two", tmp_path / "one", atol=1e-9)


def test_ranks_that_train_alone_go_on_as_they_were(points: Any, tmp_path: Path) -> None:
    way = LocalSGD(every=3, warmup_steps=1)
    whole = train(points, tmp_path / "whole", sync=way)
    run = train(
        points,
        tmp_path / "run",
        sync=way,
        callbacks=[die_once(tmp_path / "run")],
        checkpoints=CheckpointOptions(every_steps=4, keep=9),
        restarts=RestartOptions(max_restarts=1, backoff_seconds=0.1),
    )
    # Asked for after step 4, 8 and 12; ranks meet after 1, 3, 6, at the epoch's end 9, after 12.
    assert [(a.first_step, a.ending) for a in run.summary.attempts] == [
        (0, "rank killed or lost"),
        (12, "finished"),
    ]
    assert run.summary.history == whole.summary.history
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    kept = arrays_in(tmp_path / "run" / "checkpoints" / "step-00000012" / "ranks.npz")
    assert [name for name in kept if "variable" in name] == ["00001/variable/optimizer/00000"]
