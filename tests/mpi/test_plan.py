"""Plans that are measured, and plans from what a run has left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    DataError,
    InvalidInputError,
    ModelError,
    TorchModel,
    plan_training,
)
from horovod_spark_runner.commands.cli import main
from horovod_spark_runner.planning import call
from tests.trainings import digits_model, train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def test_a_plan_is_measured_on_the_slots(
    digits_df: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "_SECONDS", 0.4)
    plan = plan_training(
        digits_df.withColumn("held", digits_df.id % 10 == 0),
        digits_model,
        feature_cols=["image"],
        label_cols=["digit"],
        num_workers=2,
        batch_size=16,
        batch_sizes=[64, 1000],
        epochs=3,
        validation="held",
        networks=["1gbit"],
        ranks=[4, 64, 4096],
        ranks_per_host=4096,  # more than there are cores for
        sample_rows=1000,
        plan_dir=tmp_path / "plan",
        stream_logs=False,
    )
    work, measured = plan.measurement.workload, plan.measurement
    assert (work.rows, measured.workers, measured.ranks_per_host) == (1617, 2, 2)
    assert 800 < measured.measured_rows < 1200
    # 1,000 rows fill a step of one rank, if the sample has them, and none of two.
    assert {16, 64} <= set(work.steps) <= {16, 64, 1000}
    for size in (16, 64):
        assert set(work.steps[size]) == {1, 2}
        for time in work.steps[size].values():
            assert 1e-5 < time.seconds < 1
            assert time.cpu_seconds > 1e-5
    dense = (64 * 16 + 16) + (16 + 16) + (16 * 10 + 10)
    assert (work.gradient_bytes, work.model_bytes) == (4 * dense, 4 * (dense + 32))
    assert set(measured.sums) == {4096, 65536, 1 << 20, 8 << 20, 4 * dense, 4 * (dense + 32)}
    assert measured.sums[8 << 20] > measured.sums[4096] > 0
    assert work.inside is not None
    assert work.inside.bandwidth > 1e7
    assert work.overhead > 0
    # Two and four on one core, where a step takes longer, unless the machine is busy now and then.
    if measured.cores > 1:
        assert set(work.sharing) == {2.0, 4.0}
        assert 0 <= work.sharing[2.0] < 1
        assert work.steps[16][1].seconds < work.sharing[4.0] < 2
        assert "a step takes longer where ranks share a core: " in str(plan)
    assert set(work.reader_rows) == {1, 2}
    assert min(work.reader_rows.values()) > 100
    assert work.launch[1] > 0
    assert work.materialize > 0
    assert work.build > 0
    (network,) = plan.networks
    assert [one.ranks for one in network.predictions] == [1, 2, 4, 64]
    assert network.verdict.startswith("do not distribute this"), "1,617 rows"
    left = sorted(path.name for path in (tmp_path / "plan").iterdir())
    assert left == ["logs", "plan.html", "plan.json"]


SCRIPT = """
import argparse

from pyspark.sql import SparkSession

from horovod_spark_runner import TorchCallback, run_training
from tests.torch.models import digits_model

parser = argparse.ArgumentParser()
parser.add_argument("rows")
parser.add_argument("--run-dir")
given = parser.parse_args()


class Never(TorchCallback):
    def on_train_begin(self, module):
        raise AssertionError("this trains")


SparkSession.builder.getOrCreate()
print("the script's own words")
try:
    run_training(
        given.rows, digits_model, feature_cols=["image"], label_cols=["digit"], num_workers=2,
        epochs=3, callbacks=[Never()], run_dir=given.run_dir, stream_logs=False,
    )
    raise AssertionError("run_training has returned")
finally:
    print("the script has cleared up")
"""


def test_a_script_of_pytorch_on_files_is_planned(
    digits_df: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Which a training reads where they lie, so that nothing is written, nor sampled."""
    pytest.importorskip("torch")
    monkeypatch.setattr(call, "_SECONDS", 0.2)
    digits_df.write.parquet(str(tmp_path / "digits"))
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    given = ["plan", str(script), "--json", "--network", "10gbit", "--ranks", "8"]
    given += ["--sample-rows", "1000", "--", str(tmp_path / "digits"), "--run-dir", str(run_dir)]
    assert main(given) == 0
    told = capsys.readouterr()
    assert "the script's own words\nthe script has cleared up" in told.err
    plan = json.loads(told.out)
    work = plan["measured"]["workload"]
    assert (work["materialize"], plan["measured"]["measured_rows"]) == (0.0, 1797)
    assert (work["rows"], work["epochs"], work["batch_size"]) == (1797, 3, 32)
    assert work["kept"]
    assert set(work["steps"]) == {"32", "8", "64"}
    assert 0 <= work["overlap"] <= 1
    assert work["gradient_bytes"] > 0
    assert [one["ranks"] for one in plan["networks"][0]["predictions"]] == [1, 2, 8]
    # In the directory of the run to come, which holds no run.
    left = sorted(path.name for path in run_dir.iterdir())
    assert left == ["logs", "plan.html", "plan.json"]


def test_a_run_tells_a_plan(
    digits_df: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(digits_df, tmp_path / "run", epochs=3)
    assert main(["plan", str(tmp_path / "run"), "--network", "1gbit", "--ranks", "2,8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("plan for run\ntold by ")
    assert "1gbit between hosts" in text
    told = ["plan", str(tmp_path / "run"), "--ranks", "2", "--json"]
    assert main(told) == 0
    found = json.loads(capsys.readouterr().out)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1:]
    rates = [json.loads(line)["accounting"]["samples_per_second"] for line in lines]
    (two,) = [one for one in found["networks"][0]["predictions"] if one["ranks"] == 2]
    # Of two ranks it tells what they did, but for the last, smaller batch.
    assert min(rates) * 0.7 < two["samples_per_second"] < max(rates) * 1.3
    assert main(["plan", str(tmp_path / "run"), "--output", str(tmp_path / "plan.html")]) == 0
    assert "<svg" in (tmp_path / "plan.html").read_text()
    # A plan in its directory, as one that was made before it would be, is compared with it.
    assert main(["plan", str(tmp_path / "run"), "--output", str(tmp_path / "run/plan.json")]) == 0
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Predicted and measured" in page
    assert "the whole call" in page
    # What plan_training would write is not put into a run's directory.
    with pytest.raises(InvalidInputError, match="is the directory of a run"):
        plan_training(digits_df, digits_model, plan_dir=tmp_path / "run")


def test_what_tells_nothing_is_refused(
    digits_df: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tmp_path)]) == 1
    assert "is no run directory" in capsys.readouterr().err
    few = digits_df.filter("id < 63")
    with pytest.raises(DataError, match="a step of 2 ranks takes 64 rows, 32 of each, but there"):
        plan_training(
            few, digits_model, feature_cols=["image"], label_cols=["digit"], num_workers=2,
            plan_dir=tmp_path / "few", stream_logs=False,
        )  # fmt: skip
    with pytest.raises(DataError, match="there are no rows, so nothing to plan for"):
        plan_training(
            few.limit(0), digits_model, feature_cols=["image"], label_cols=["digit"],
            plan_dir=tmp_path / "none", stream_logs=False,
        )  # fmt: skip
    with pytest.raises(DataError, match=r"are \d\d to measure with.*or a larger sample_rows"):
        plan_training(
            digits_df, digits_model, feature_cols=["image"], label_cols=["digit"], num_workers=2,
            sample_rows=45, plan_dir=tmp_path / "sample", stream_logs=False,
        )  # fmt: skip
    # Nothing is left but what there is to read, and a folder that was there stays.
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="there are no rows"):
        plan_training(
            few.limit(0), digits_model, feature_cols=["image"], label_cols=["digit"],
            plan_dir=tmp_path / "mine", stream_logs=False,
        )  # fmt: skip
    assert [place.name for place in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(ModelError):
        plan_training(
            digits_df, lambda: None, feature_cols=["image"], label_cols=["digit"], num_workers=1,
            plan_dir=tmp_path / "plan", stream_logs=False,
        )  # fmt: skip
    assert [place.name for place in (tmp_path / "plan").iterdir()] == ["logs"]


@pytest.mark.parametrize("framework", ["keras", "torch"])
def test_the_noise_scale_is_that_of_the_rows(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    """Weights that stay 0, so that the gradients of all rows are known."""
    monkeypatch.setattr(call, "_SECONDS", 1.0)
    random = np.random.default_rng(0)
    x = random.normal(size=(4000, 3))
    y = x @ [1.0, -2.0, 0.5] + random.normal(0, 2.0, 4000)
    frame = spark.createDataFrame(
        [(row.tolist(), float(label)) for row, label in zip(x, y, strict=True)],
        "x array<float>, y float",
    )
    gradients = -2 * y[:, None] * x
    mean = gradients.mean(axis=0)
    expected = gradients.var(axis=0).sum() / (mean @ mean)

    def keras_model() -> Any:
        import keras

        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.layers.Input((3,)), layer])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    def torch_model() -> TorchModel:
        import torch

        linear = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(linear.weight)
        module = torch.nn.Sequential(linear, torch.nn.Flatten(0))
        optimizer = torch.optim.SGD(module.parameters(), 0.0)
        return TorchModel(module, loss="MSELoss", optimizer=optimizer)

    plan = plan_training(
        frame,
        keras_model if framework == "keras" else torch_model,
        feature_cols=["x"],
        label_cols=["y"],
        num_workers=2,
        batch_size=4,
        batch_sizes=[],
        noise_scale=True,
        plan_dir=tmp_path / "plan",
        stream_logs=False,
    )
    found = plan.measurement.noise_scale
    assert found == pytest.approx(expected, rel=0.25)
    assert "gradient noise scale: " in str(plan)
    with pytest.raises(InvalidInputError, match="noise_scale=True compares"):
        plan_training(
            frame, keras_model, feature_cols=["x"], num_workers=1, noise_scale=True,
            plan_dir=tmp_path / "one",
        )  # fmt: skip
