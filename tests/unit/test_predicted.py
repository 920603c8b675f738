"""A plan that lies in a run directory, against what the run did."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner.planning.asked import Asked
from horovod_spark_runner.planning.call import plan_of
from horovod_spark_runner.planning.model import StepTime
from horovod_spark_runner.report.runs.facts import RunFacts, read_facts
from horovod_spark_runner.report.runs.page import run_page
from horovod_spark_runner.report.runs.predicted import prediction_of
from horovod_spark_runner.rundir.directory import RunDirectory
from horovod_spark_runner.settings.sync import (
    Allreduce,
    AsyncServer,
    DiLoCo,
    LocalSGD,
    Sync,
    recorded_sync,
)
from horovod_spark_runner.training.accounting import Kind
from tests.report.runs import account, leave_run
from tests.unit.test_plan import measurement, workload


def planned(place: Path, ranks: int = 4, **changes: Any) -> RunFacts:
    """Return a run of four ranks whose plan is of so many."""
    directory = leave_run(place, 5)
    steps = {32: {1: StepTime(0.1, 0.1, 0.0)}}
    work = workload(rows=5000, epochs=5, batch_size=32, steps=steps, **changes)
    measured = replace(measurement(work), workers=ranks)
    plan_of("it", measured, Asked(["1gbit", "10gbit"], [1], ranks_per_host=2)).write(
        str(directory.plan)
    )
    return read_facts(directory, time.time())


def test_a_plan_is_compared_with_its_run(tmp_path: Path) -> None:
    run = planned(tmp_path / "run")
    assert run.plan is not None
    found = prediction_of(run)
    assert found is not None
    # On two hosts, whose network is not known: one of those that were named.
    assert [one.name for one in found.compared] == [
        "samples/s, 1gbit",
        "training of an epoch, 1gbit",
        "samples/s, 10gbit",
        "training of an epoch, 10gbit",
    ]
    (four,) = [one for one in run.plan["networks"][0]["predictions"] if one["ranks"] == 4]
    rate, epoch = found.compared[:2]
    assert rate.predicted == four["samples_per_second"]
    assert rate.measured == pytest.approx(1000, abs=10)
    assert rate.off == f"{rate.predicted / rate.measured - 1:+.1%}"
    assert epoch.predicted == four["epoch_seconds"]
    told = account(4, 2)["seconds"]
    steps = (Kind.DATA, Kind.COMPUTE, Kind.EXCHANGE, Kind.CALLBACKS)
    assert epoch.measured == pytest.approx(sum(sum(told[kind]) / 4 for kind in steps), abs=0.05)
    page = run_page(run)
    assert "Predicted and measured" in page
    assert f"({rate.off})" in page


def test_epochs_of_other_rows_are_not_compared(tmp_path: Path) -> None:
    """Samples per second are, whatever the rows."""
    place = tmp_path / "run"
    planned(place)
    directory = RunDirectory(str(place))

    def found(rows: int | None, steps: int | None) -> tuple[list[str], str]:
        fit = {"epochs": 5, "batch_size": 32, "steps_per_epoch": steps}
        directory.write_config({"fit": fit, "num_workers": 4, "rows": rows})
        prediction = prediction_of(read_facts(directory, time.time()))
        assert prediction is not None
        names = [one.name.partition(",")[0] for one in prediction.compared]
        return names, " ".join(prediction.notes)

    both = ["samples/s", "training of an epoch"] * 2
    assert found(5090, None)[0] == both
    assert found(100_000, 39)[0] == both, "4 ranks take 4,992 rows in 39 steps of 32"
    words = "The plan is of epochs of 5,000 rows, the run of {}: times are not compared."
    for rows, steps, told in ((5200, None, "5,200"), (4800, None, "4,800"), (5000, 10, "1,280")):
        names, notes = found(rows, steps)
        assert names == ["samples/s"] * 2
        assert words.format(told) in notes
    names, notes = found(None, None)
    assert names == ["samples/s"] * 2
    assert "those of the run are not known: times are not compared." in notes


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        (LocalSGD(every=8), "local_sgd (every=8, "),
        (DiLoCo(every=8), "diloco (every=8, "),
        (AsyncServer(), "async_server (staleness=8, "),
        (Allreduce(compression="fp16"), "allreduce (compression=fp16)."),
        (Allreduce(), None),
    ],
)
def test_only_plain_allreduce_is_compared(tmp_path: Path, sync: Sync, words: str | None) -> None:
    place = tmp_path / "run"
    planned(place)
    directory = RunDirectory(str(place))
    fit = {"epochs": 5, "batch_size": 32}
    directory.write_config({"fit": fit, "rows": 5000, "sync": recorded_sync(sync)})
    found = prediction_of(read_facts(directory, time.time()))
    assert found is not None
    page = run_page(read_facts(directory, time.time()))
    assert bool(found.compared) == (", predicted" in page) == (words is None)
    if words is not None:
        assert f"The plan is of plain allreduce, the run was trained by {words}" in found.notes[0]


def test_what_cannot_be_compared_says_why(tmp_path: Path) -> None:
    other = prediction_of(planned(tmp_path / "ranks", ranks=8))
    assert other is not None
    assert other.notes == ("The plan does not tell of 4 ranks, which the run has.",)
    place = tmp_path / "batch"
    planned(place)
    directory = RunDirectory(str(place))
    directory.write_config({"fit": {"epochs": 5, "batch_size": 64}, "num_workers": 4})
    wider = prediction_of(read_facts(directory, time.time()))
    assert wider is not None
    assert wider.notes == ("The plan is of batches of 32 rows, the run of 64.",)
    planned(tmp_path / "types")
    typed = RunDirectory(str(tmp_path / "types"))
    text = typed.plan.read_text()
    typed.plan.write_text(text.replace('"samples_per_second": ', '"samples_per_second": "", "x": '))
    assert "is not what this version" in run_page(read_facts(typed, time.time()))
    directory.plan.write_text("{}")
    assert "is not what this version" in run_page(read_facts(directory, time.time()))
    for nothing in ("{", "[]"):
        directory.plan.write_text(nothing)
        assert "Predicted" not in run_page(read_facts(directory, time.time()))
