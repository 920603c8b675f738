"""The report of a run: what it tells, of any run, and that it opens at once."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.commands.cli import main
from horovod_spark_runner.errors import InvalidInputError
from horovod_spark_runner.observe.report.facts import read_facts
from horovod_spark_runner.observe.report.run_page import comparison_page, run_page, write_report

from .browser import PHONE, Browser
from .runs import account, leave_run

SECTIONS = [
    "Metrics",
    "Pace",
    "Where the time went",
    "Attempts",
    "Ranks",
    "Settings",
    "Versions",
]
MEGABYTE = 10**6


@pytest.mark.thorough
def test_a_report_tells_what_there_is_to_know(tmp_path: Path, browser: Browser) -> None:
    directory = leave_run(tmp_path / "run <b>1", 40)
    write_report(directory)
    page = directory.report.read_text()
    assert "What is missing here" not in page
    held = [logs["val_accuracy"] for logs in directory.read_metrics()]
    light = browser.look(page)
    light.check()
    assert light.headings == SECTIONS
    assert light.charts == 7
    for told in (
        "Run run <b>1",
        "finished",
        "killed by signal 9 <script>",
        "10 steps trained again",
        "val_loss: last 0.3001, lowest 0.2742 in epoch 29",
        f", highest {max(held):.4g} in epoch {1 + held.index(max(held))}",
        "node-b",
        "Each rank waited at least 9 s for slower ones",
        "40 of 40",
        "3.15.1",
        "spark://master:7077",
        "last call ended",
    ):
        assert told in light.text, told
    assert "secret" not in page
    assert light.told.startswith("at ")
    browser.look(page, dark=True).check()
    browser.look(page, width=PHONE).check()


@pytest.mark.thorough
def test_two_runs_are_laid_over_each_other(
    tmp_path: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_run(tmp_path / "first", 30, seed=1, weights="s3://key:word@bucket/run?token=1")
    (tmp_path / "other").mkdir()
    leave_run(tmp_path / "other" / "first", 50, ranks=8, seed=2)
    output = tmp_path / "both.html"
    places = [str(tmp_path / "first"), str(tmp_path / "other" / "first")]
    assert main(["report", *places, "--output", str(output)]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    page = output.read_text()
    seen = browser.look(page)
    seen.check()
    assert seen.headings[:3] == ["In short", "Metrics", "Pace"]
    assert "1 first train" in seen.text
    assert "2 first val" in seen.text
    assert "seed\t1\t2" in seen.text
    assert "s3://bucket/run" in seen.text
    assert "word" not in page
    browser.look(page, width=PHONE).check()


def test_the_report_of_a_run_is_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = leave_run(tmp_path / "run", 3)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == str(directory.report)
    assert "Run run" in directory.report.read_text()
    assert main(["report", str(tmp_path)]) == 1
    assert "run directory" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path)]) == 1
    assert "folder" in capsys.readouterr().err
    lines = directory.metrics.read_text()
    directory.metrics.write_text(lines + lines[:10])  # as of a copy that was cut short
    assert main(["report", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    directory.metrics.write_text(lines + "junk\n")
    assert main(["report", str(tmp_path / "run")]) == 1
    assert re.search(r"metrics.jsonl.*line 4\b", capsys.readouterr().err)
    directory.metrics.write_bytes(lines.encode() + b"\xff\n")
    assert main(["report", str(tmp_path / "run")]) == 1
    assert re.search("metrics.jsonl.*'utf-8' codec", capsys.readouterr().err)
    directory.metrics.write_text(lines)
    new = tmp_path / "new" / "it.html"
    assert main(["report", str(tmp_path / "run"), "--output", str(new)]) == 0
    assert new.exists()
    (tmp_path / "study.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 1
    assert "study" in capsys.readouterr().err


def test_a_million_steps_open_at_once(tmp_path: Path, browser: Browser) -> None:
    epochs = 100_000  # of ten steps
    directory = leave_run(tmp_path / "run", 1, ranks=64)
    line = json.dumps({"accounting": account(64, 1)})[1:]
    rng = np.random.default_rng(0)
    losses = 1 / (1 + np.arange(epochs) / 1000) + rng.normal(0, 0.01, epochs)
    losses[54_321] = 7.5
    lines = (
        f'{{"epoch": {e}, "loss": {loss}, "val_loss": {loss + 0.1}, ' + line
        for e, loss in enumerate(losses[:10_000])
    )
    bare = (
        f'{{"epoch": {e}, "loss": {loss}, "val_loss": {loss + 0.1}}}'
        for e, loss in enumerate(losses[10_000:], 10_000)
    )
    directory.metrics.write_text("\n".join([*lines, *bare]) + "\n")
    begin = time.process_time()
    page = run_page(read_facts(directory, time.time()))
    assert time.process_time() - begin < 30
    assert len(page.encode()) < MEGABYTE / 2
    assert "7.5" in page
    seen = browser.look(page)
    seen.check()
    assert seen.seconds < 1.5


@pytest.mark.thorough
def test_any_number_of_metrics_and_ranks(tmp_path: Path, browser: Browser) -> None:
    directory = leave_run(tmp_path / "run", 3, ranks=4096)
    metrics = [{f"metric_{i}_" + "long" * 9: e * i * 1.0 for i in range(300)} for e in range(500)]
    directory.write_metrics(metrics, [account(4096, e) for e in range(500)])
    page = run_page(read_facts(directory, time.time()))
    assert len(page.encode()) < 2 * MEGABYTE
    assert "240 more metrics are in metrics.jsonl" in page
    browser.look(page).check()


def test_what_a_run_lacks_is_left_out(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    directory = RunDirectory(str(place))
    with pytest.raises(InvalidInputError, match="run directory"):
        write_report(directory)
    directory.write_config({})
    page = run_page(read_facts(directory, time.time()))
    assert "not finished" in page
    assert "<svg" not in page
    nan, inf = float("nan"), float("inf")
    values: list[dict[str, object]] = [
        {"loss": nan, "word": "x", "list": [1.0, 2.0], "flag": True},
        {"loss": inf},
    ]
    directory.write_metrics(values, [None, {"ranks": [0], "seconds": {}}])
    directory.add_call({"seconds": {"attempts": 3.0}, "error": "DataError: no", "ended": 1.0})
    directory.attempts.write_text("damaged")
    page = run_page(read_facts(directory, time.time()))
    assert "last ∞" in page
    assert "DataError: no" in page
    assert "Attempts" in page


@pytest.mark.parametrize(
    ("file", "damage", "told"),
    [
        ("metrics.jsonl", lambda text: text[:-9], "metrics.jsonl[^<]*line 3"),
        (
            "metrics.jsonl",
            lambda text: text.replace('"data": [', '"data": ["x", '),
            r"metrics.jsonl[^<]*\b1, 2, 3",
        ),
        ("metrics.jsonl", lambda text: text.replace('"ranks": [0, ', '"ranks": ['), r"\bline 1"),
        ("attempts.jsonl", lambda text: text[:-9], "attempts.jsonl"),
        (
            "attempts.jsonl",
            lambda text: text.replace('"ended": ', '"ended": "then", "was": '),
            r"attempts.jsonl[^<]*line 1\b",
        ),
        ("attempts.jsonl", lambda text: text + "7\n", "attempts.jsonl[^<]*line 3"),
        ("calls.jsonl", lambda text: text[:-9], "calls.jsonl"),
        ("calls.jsonl", lambda text: "[]\n" + text, "calls.jsonl[^<]*line 1"),
        ("calls.jsonl", lambda text: text.replace('"gpus": []', '"gpus": 1'), "calls.jsonl"),
        ("calls.jsonl", lambda text: text.replace('"check": 0.2', '"check": "x"'), "calls.jsonl"),
        ("config.json", lambda text: text[:-9], "config.json"),
        (
            "config.json",
            lambda text: text.replace('"fit": {', '"fit": 1, "was": {'),
            "config.json",
        ),
        ("config.json", None, "config.json"),
    ],
)
def test_what_of_a_run_cannot_be_read_is_told(
    tmp_path: Path, file: str, damage: Callable[[str], str] | None, told: str
) -> None:
    """A report of what is left, which says that something is not."""
    directory = leave_run(tmp_path / "run", 3)
    place = tmp_path / "run" / file
    if damage is None:
        place.unlink()
    else:
        text = place.read_text()
        place.write_text(damage(text))
        assert place.read_text() != text
    facts = read_facts(directory, time.time())
    for page in (run_page(facts), comparison_page([facts, facts])):
        assert "What is missing here" in page
        assert re.search(told, page)


def test_a_run_that_goes_on_says_so_unless_its_own_report_is_written(tmp_path: Path) -> None:
    directory = leave_run(tmp_path / "run", 2)
    with directory.lease():
        assert read_facts(directory, time.time()).state.state == "running"
        assert read_facts(directory, time.time(), ended=True).state.state == "finished"


def test_a_metric_called_like_a_validation_is_drawn_once(tmp_path: Path) -> None:
    """Keras, too, gives the validation's loss the place of a training metric ``val_loss``."""
    directory = leave_run(tmp_path / "run", 3)
    epoch: dict[str, object] = {"loss": 1.0, "val_loss": 0.5, "val_val_loss": 0.25}
    directory.write_metrics([epoch] * 3)
    page = run_page(read_facts(directory, time.time()))
    assert page.count("val_loss: last 0.5") == 1
    assert page.count("val_val_loss: last 0.25") == 1
