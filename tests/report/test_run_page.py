"""The report of a run: what it tells, of any run, and that it opens at once."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from horovod_spark_runner.checkpoint.files import CheckpointInfo, LogValue, save_checkpoint
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.commands.cli import main
from horovod_spark_runner.errors import InvalidInputError
from horovod_spark_runner.frameworks import KERAS
from horovod_spark_runner.observe.report.facts import read_facts
from horovod_spark_runner.observe.report.run_page import comparison_page, run_page, write_report

from .browser import PHONE, Browser
from .runs import account, leave_model, leave_run

SECTIONS = [
    "Metrics",
    "Where the time went",
    "Attempts",
    "Model",
    "Ranks",
    "Settings",
    "Versions",
]
MEGABYTE = 10**6
WIDE, NARROW = 1800, 400


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
        "run <b>1",
        str(directory.location),
        "finished",
        "40/40 epochs",
        "last val_loss\n0.3001",
        "epoch 29, restored by EarlyStopping (monitors val_loss)",
        "training rows\n5,000",
        "validation rows\n1,250",
        "parameters\n12,480",
        "4,160 of them trainable",
        "dense_2\tDense\t(None, 64)\t4,160",
        "killed by signal 9 <script>",
        "10 steps trained again",
        "val_loss last 0.3001, lowest 0.2742 in epoch 29",
        f", highest {max(held):.4g} in epoch {1 + held.index(max(held))}",
        "node-b",
        "Each rank waited at least 9 s for slower ones",
        "40 of 40 epochs",
        "3.15.1",
        "spark://master:7077",
        "last call ended",
    ):
        assert told in light.text, told
    assert "secret" not in page
    assert light.told.startswith("at ")
    assert light.columns == [2, 2, 2]  # metrics, times, tables
    browser.look(page, dark=True).check()
    wide = browser.look(page, width=WIDE)
    wide.check()
    assert min(wide.columns) >= 2
    assert wide.used > 0.95 * WIDE
    for width in (PHONE, NARROW):
        narrow = browser.look(page, width=width)
        narrow.check()
        assert narrow.columns == [1, 1, 1]


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
    assert seen.headings[:3] == ["In short", "Metrics", "Where the time went: 1 first"]
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
    assert f"<title>run – {tmp_path / 'run'}</title>" in directory.report.read_text()
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


def test_a_long_history_of_a_large_model_stays_small(tmp_path: Path) -> None:
    directory = leave_run(tmp_path / "run", 5_000, ranks=64)
    leave_model(directory, 5_000)
    attempt = {**directory.read_attempts()[0], "cause": "x" * 10_000}
    directory.write_attempts([{**attempt, "number": i} for i in range(2_000)])
    call = directory.read_calls()[0]
    directory.calls.write_text(f"{json.dumps(call)}\n" * 1_000)
    metrics: dict[str, LogValue] = {f"metric_{i}": 0.5 for i in range(300)}
    for step in range(30):
        info = CheckpointInfo(step, step, [metrics], "", [], KERAS)
        save_checkpoint(directory, info, {})
    page = run_page(read_facts(directory, time.time()))
    assert len(page.encode()) < MEGABYTE
    assert "4,600 more layers are left out" in page
    assert "and 1,500 more" in page
    assert "step-00000029" in page


def test_the_cause_of_a_failure_and_the_best_checkpoint_are_at_the_top(tmp_path: Path) -> None:
    directory = leave_run(tmp_path / "run", 3, checkpoints={"best_metric": "val_loss"})
    attempts = directory.read_attempts()
    directory.write_attempts([attempts[0]])
    directory.add_call({"seconds": {}, "error": "RankFailedError: boom", "ended": 1.0})
    for step, loss in ((10, 0.25), (20, 0.5)):
        history: list[dict[str, LogValue]] = [{"val_loss": loss}]
        info = CheckpointInfo(step, step // 10, history, "", [], KERAS)
        save_checkpoint(directory, info, {})
    head = run_page(read_facts(directory, time.time())).partition("<section>")[0]
    assert "RankFailedError: boom" in head
    assert "<dt>best val_loss</dt><dd>0.25, checkpoint of epoch 1</dd>" in head
    assert "weights of the model" not in head  # those are of the call before
    directory.write_attempts(attempts)
    assert "boom" not in run_page(read_facts(directory, time.time())).partition("<section>")[0]


def test_a_run_that_a_callback_has_stopped_says_so(tmp_path: Path) -> None:
    directory = leave_run(tmp_path / "run", 3, fit={"epochs": 9})
    save_checkpoint(directory, CheckpointInfo(30, 3, [{}] * 3, "", [], KERAS), {})
    page = run_page(read_facts(directory, time.time()))
    assert "3/9 epochs, stopped by a callback" in page
    assert "plain allreduce" not in page
    directory.write_metrics(directory.read_metrics()[:2])  # a part of it is missing
    assert "stopped by" not in run_page(read_facts(directory, time.time()))


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
    assert page.count("val_loss <span>last 0.5") == 1
    assert page.count("val_val_loss <span>last 0.25") == 1
