"""What follows from a measurement: links, the best number of ranks, verdicts, how it is shown."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import InvalidInputError, Link
from horovod_spark_runner.commands.cli import main
from horovod_spark_runner.machine import usable_cores
from horovod_spark_runner.planning.measurement import Measurement
from horovod_spark_runner.planning.model import (
    Cluster,
    StepTime,
    Workload,
    _step_time,
    fit_link,
    parse_link,
    predict,
    ring_seconds,
)
from horovod_spark_runner.planning.plan import PlanOptions, _advise, _left_out_lines, build_plan

RANKS = [2**n for n in range(13)]
FAST = Link(10e-6, 12e9)
SLOW = parse_link("100mbit")


def workload(**changes: Any) -> Workload:
    """Return a training of 0.2 s a step whose gradients are 10 MB."""
    given = Workload(
        rows=1_000_000,
        epochs=10,
        passes=10.0,
        batch_size=100,
        steps={1: StepTime(0.2, 0.2, 0.002)},
        gradient_bytes=10_000_000,
        reader_rows={1: 1e6},
        reader_cpu_seconds=0.0,
        overhead=0.001,
        overlap=0.0,
        cached=False,
        inside=Link(2e-6, 5e9),
        launch={1: 3.0},
        materialize=20.0,
        build=4.0,
    )
    return replace(given, **changes)


def measurement(work: Workload) -> Measurement:
    return Measurement(
        workload=work,
        cores=4,
        ranks_per_host=4,
        workers=2,
        between=None,
        sums={4096: 0.001},
        measured_rows=10_000,
        seconds=20.0,
    )


@pytest.mark.parametrize(
    ("given", "bandwidth"),
    [("10gbit", 1.175e9), ("100 Mbit/s", 11.75e6), ("2.5GBIT", 293.75e6)],
)
def test_a_speed_is_a_link(given: str, bandwidth: float) -> None:
    link = parse_link(given)
    assert link.latency == 50e-6
    assert link.bandwidth == pytest.approx(bandwidth)


@pytest.mark.parametrize("given", ["fast", "0gbit", "10", 10, None, ""])
def test_what_is_no_network_is_refused(given: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"network\b"):
        parse_link(given)


@pytest.mark.parametrize("numbers", [(-1e-6, 1e9), (0.0, 0.0), (0.0, float("inf")), ("1", 1e9)])
def test_a_link_of_impossible_numbers_is_refused(numbers: Any) -> None:
    with pytest.raises(InvalidInputError, match="Link"):
        Link(*numbers)


@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_bandwidth_is_found_again(ranks: int) -> None:
    random = np.random.default_rng(ranks)
    sizes = [1 << 20, 8 << 20, 40_000_000]
    noisy = {n: ring_seconds(ranks, n, FAST) * random.uniform(0.97, 1.03) for n in sizes}
    found = fit_link(noisy, ranks, FAST.latency)
    assert found.latency == FAST.latency
    assert found.bandwidth == pytest.approx(FAST.bandwidth, rel=0.1)


def test_noise_makes_no_impossible_link() -> None:
    found = fit_link({1 << 20: 2e-3, 8 << 20: 1e-3}, 2, 1.0)
    assert found.latency == pytest.approx(0.45e-3)
    assert 0 < found.bandwidth < float("inf")


def test_a_step_that_was_measured_is_predicted_as_measured() -> None:
    work = workload(steps={1: StepTime(0.1, 0.1, 0.0), 4: StepTime(0.2, 0.1, 0.0)}, batch_size=10)
    assert _step_time(work, 1).seconds == 0.1
    assert _step_time(work, 4).seconds == 0.2
    assert _step_time(work, 2).seconds == pytest.approx(0.1 + 0.1 / 3)
    assert _step_time(work, 64).seconds == 0.2, "beyond the most measured, as for these"


def test_a_reader_that_is_too_slow_limits() -> None:
    slow = predict(workload(reader_rows={1: 100.0}), Cluster(4, 4, FAST), 4)
    assert slow.limit == "reader"
    assert slow.samples_per_second == pytest.approx(4 * 100, rel=0.01)


def test_what_pays_is_distributed_and_a_slow_network_limits_it() -> None:
    fast = _advise("fast", workload(), Cluster(4, 4, FAST), RANKS)
    slow = _advise("slow", workload(), Cluster(4, 4, SLOW), RANKS)
    assert fast.pays
    assert fast.best.ranks >= 64
    assert fast.break_even == 2
    assert fast.best.total_seconds < 0.05 * fast.alone
    assert slow.best.total_seconds > 2 * fast.best.total_seconds
    assert slow.best.limit in ("bandwidth", "latency")
    assert slow.verdict.startswith(f"{slow.best.ranks:,} ranks")
    # More ranks than the rows fill a step of are not told of.
    assert fast.predictions[-1].ranks == 4096
    few = _advise("few", workload(rows=850), Cluster(4, 4, FAST), RANKS)
    assert [one.ranks for one in few.predictions] == [1, 2, 4, 8]
    assert few.left_out[:2] == (16, 32)
    assert "16, 32, 64, " in _left_out_lines(few, workload(rows=850))[0]
    assert fast.left_out == ()


def test_what_does_not_pay_is_not_to_be_distributed() -> None:
    tiny = workload(rows=20_000, steps={1: StepTime(0.0005, 0.0005, 0.0)})
    found = _advise("10gbit", tiny, Cluster(4, 4, parse_link("10gbit")), RANKS)
    assert not found.pays
    assert re.search(r"\b5 s\b", found.verdict)
    assert found.break_even is None
    # The figure that is told is where it turns.
    assert found.break_even_epochs is not None
    for part, pays in ((0.8, False), (1.2, True)):
        epochs = int(found.break_even_epochs * part)
        again = _advise("", replace(tiny, epochs=epochs, passes=epochs), found.cluster, RANKS)
        assert (again.break_even is not None) == pays
    hopeless = _advise("slow", tiny, Cluster(1, 1, Link(0.1, 1e6)), RANKS)
    assert hopeless.break_even_epochs is None
    assert "epochs" in hopeless.verdict
    single = _advise("rows", workload(rows=150), Cluster(4, 4, FAST), RANKS)
    assert re.search("rows.*two ranks", single.verdict)


def test_a_plan_is_a_table_json_and_a_page(tmp_path: Path) -> None:
    options = PlanOptions(["10gbit", SLOW], [4, 16], None, 8)
    plan = build_plan("digits", measurement(workload()), options)
    text = str(plan)
    assert re.search(r"10gbit.*50 µs, 9.4 Gbit/s.*\b4 ranks\b.*\b8 cores", text)
    assert "50 µs, 0.094 Gbit/s" in text
    rows = [line.split() for line in text.splitlines() if "ranks" not in line]
    rows = [row for row in rows if row[:1] in (["1"], ["4"], ["16"])]
    assert len(rows) == 6, "besides those of the 2 ranks that were measured"
    plan.write(tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [one["ranks"] for one in found["networks"][0]["predictions"]] == [1, 2, 4, 16]
    assert found["networks"][0]["best"] == plan.networks[0].best.ranks
    assert found["measured"]["workload"]["steps"]["1"]["seconds"] == 0.2
    plan.write(str(tmp_path / "plan.html"))
    page = (tmp_path / "plan.html").read_text()
    assert plan.networks[0].verdict in page
    assert page.count("<svg") == 1
    assert "1 rank " in page
    assert "1 ranks" not in page
    with pytest.raises(InvalidInputError, match=r"\.json.*\.html.*'plan\.txt'"):
        plan.write(tmp_path / "plan.txt")


def test_ranks_that_would_share_cores_are_refused() -> None:
    measured = measurement(workload())
    for options, words in (
        (PlanOptions(["10gbit"], [8], ranks_per_host=8), r"\b8 ranks.*\b4 cores"),
        (PlanOptions(["10gbit"], [8], cores_per_host=2), r"\b4 ranks.*\b2 cores"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            build_plan("it", measured, options)
        assert build_plan("it", replace(measured, on_gpus=True), options).networks
    assert build_plan("it", measured, PlanOptions(ranks_per_host=8, cores_per_host=8)).networks


def test_a_number_of_ranks_is_marked_as_best_only_where_it_pays(tmp_path: Path) -> None:
    tiny = workload(rows=20_000, steps={1: StepTime(0.0005, 0.0005, 0.0)})
    for work, pays in ((workload(), True), (tiny, False)):
        plan = build_plan("it", measurement(work), PlanOptions(["10gbit"], [4, 16]))
        (network,) = plan.networks
        assert network.pays == pays
        assert ("distribut" in network.verdict) != pays
        marked = [row.split()[0] for row in str(plan).splitlines() if row.endswith(", best")]
        assert marked == [str(network.best.ranks)] * pays
        plan.write(tmp_path / "plan.html")
        page = (tmp_path / "plan.html").read_text()
        assert ('<tr class="strong">' in page) == pays


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"networks": "10gbit"}, "networks.*list"),
        ({"networks": ["soon"]}, r"network\b"),
        ({"ranks": 4}, "ranks.*list"),
        ({"networks": []}, "networks.*empty"),
        ({"ranks": [1, 0]}, r"ranks\[1\].*\b1\b.*\b0"),
        ({"ranks_per_host": -4}, "ranks_per_host"),
        ({"cores_per_host": 0}, "cores_per_host"),
    ],
)
def test_impossible_questions_are_refused(changes: dict[str, Any], words: str) -> None:
    given = {"networks": ["10gbit"], "ranks": [1, 2], **changes}
    with pytest.raises(InvalidInputError, match=words):
        PlanOptions(**given)


@pytest.mark.parametrize(
    ("told", "cores"),
    [
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "30000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "max 100000\n", "cpuset.cpus.effective": "0-3,8,10-11\n"}, 7),
        ({"cpu.max": "300000 100000\n", "cpuset.cpus.effective": "4\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "50000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "50000\n"}, 64),
        ({"cpuset/cpuset.effective_cpus": "0-1\n"}, 2),
        ({}, 64),
    ],
)
def test_a_container_has_the_cores_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for name, text in told.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["{here}"], "{here}"),
        (["runs/x", "--ranks", "two"], "--ranks.*comma"),
        (["runs/x", "--ranks", ""], "--ranks.*comma"),
        (["runs/x", "--ranks", "0"], r"ranks\W?0\W.*\b1"),
        (["runs/x", "--network", "fast"], r"network\b"),
        (["runs/x", "--output", "plan.txt"], r"\.json.*\.html.*plan\.txt"),
    ],
)
def test_invalid_options_of_the_command_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    assert main(["plan", *(each.format(here=tmp_path) for each in given)]) == 1
    assert re.search(words.replace("{here}", str(tmp_path)), capsys.readouterr().err)


def test_the_command_prints_json_or_writes_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "runs/x", "--json", "--output", "plan.html"])
    assert "not allowed with argument --json" in capsys.readouterr().err


def test_an_interrupted_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("horovod_spark_runner.commands.plan.measure_from_run", interrupt)
    assert main(["plan", "runs/x"]) == 130
    assert capsys.readouterr().err == "horovod-spark-runner: interrupted\n"
