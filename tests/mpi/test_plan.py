"""Plans that are measured, and plans from what a run has left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import (
    DataError,
    InvalidInputError,
    ModelError,
    plan_training,
)
from horovod_spark_runner.commands.cli import main
from horovod_spark_runner.planning import call
from tests.trainings import digits_model, train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


@pytest.mark.thorough
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
        epochs=3,
        validation="held",
        networks=["1gbit"],
        ranks=[4, 64, 4096],
        ranks_per_host=2,
        cores_per_host=2,
        sample_rows=1000,
        plan_dir=tmp_path / "plan",
        stream_logs=False,
    )
    work, measured = plan.measurement.workload, plan.measurement
    assert (work.rows, measured.workers, measured.ranks_per_host) == (1617, 2, 2)
    assert 800 < measured.measured_rows < 1200
    assert set(work.steps) == {1, 2}
    for step in work.steps.values():
        assert 1e-5 < step.seconds < 1
        assert step.cpu_seconds > 1e-5
    dense = (64 * 16 + 16) + (16 + 16) + (16 * 10 + 10)
    assert work.gradient_bytes == 4 * dense
    assert set(measured.sums) == {4096, 65536, 1 << 20, 8 << 20, 4 * dense}
    assert measured.sums[8 << 20] > measured.sums[4096] > 0
    assert work.inside is not None
    assert work.inside.bandwidth > 1e7
    assert work.overhead > 0
    assert set(work.reader_rows) == {1, 2}
    assert min(work.reader_rows.values()) > 100
    assert work.launch[1] > 0
    assert work.materialize > 0
    assert work.build > 0
    (network,) = plan.networks
    assert [one.ranks for one in network.predictions] == [1, 2, 4, 64]
    assert not network.pays, "1,617 rows"
    left = sorted(path.name for path in (tmp_path / "plan").iterdir())
    assert left == ["logs", "plan.html", "plan.json"]


def test_a_run_tells_a_plan(
    digits_df: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(digits_df, tmp_path / "run", epochs=3)
    assert main(["plan", str(tmp_path / "run"), "--network", "1gbit", "--ranks", "2,8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("plan for run\n")
    assert "1gbit" in text
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
    # plan_training writes nothing into a run's directory.
    with pytest.raises(InvalidInputError, match=str(tmp_path / "run")):
        plan_training(digits_df, digits_model, plan_dir=tmp_path / "run")


@pytest.mark.thorough
def test_what_tells_nothing_is_refused(
    digits_df: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tmp_path)]) == 1
    assert "run directory" in capsys.readouterr().err
    few = digits_df.filter("id < 63")
    with pytest.raises(DataError, match="2 ranks.*64 rows.* 32 "):
        plan_training(
            few, digits_model, feature_cols=["image"], label_cols=["digit"], num_workers=2,
            plan_dir=tmp_path / "few", stream_logs=False,
        )  # fmt: skip
    with pytest.raises(DataError, match="no rows.*plan"):
        plan_training(
            few.limit(0), digits_model, feature_cols=["image"], label_cols=["digit"],
            plan_dir=tmp_path / "none", stream_logs=False,
        )  # fmt: skip
    with pytest.raises(DataError, match=r" \d\d .*sample_rows"):
        plan_training(
            digits_df, digits_model, feature_cols=["image"], label_cols=["digit"], num_workers=2,
            sample_rows=45, plan_dir=tmp_path / "sample", stream_logs=False,
        )  # fmt: skip
    # Nothing is left but what there is to read, and a folder that was there stays.
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="no rows"):
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
