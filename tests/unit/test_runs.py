"""``horovod-spark-runner runs``: summaries of run directories."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner.checkpoint.files import CheckpointInfo, save_checkpoint
from horovod_spark_runner.checkpoint.retry_policy import Attempt
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.commands.cli import main
from horovod_spark_runner.observe.report.facts import _close_attempts, read_facts, read_run
from horovod_spark_runner.observe.report.run_page import run_page
from horovod_spark_runner.training.spec import Binding
from horovod_spark_runner.training.trained_model import WEIGHTS_FILE, ModelWriter, Signature


def make_run(place: Path, *endings: str, **settings: Any) -> RunDirectory:
    directory = RunDirectory(str(place))
    directory.check_writable()
    directory.write_config({"fit": {"epochs": 5}, "num_workers": 2, **settings})
    history = []
    for epoch, loss in enumerate([0.5, 0.25], start=1):
        history.append({"val_loss": loss})
        info = CheckpointInfo(epoch * 10, epoch, list(history), "abc", [], "an.engine")
        save_checkpoint(directory, info, {"variables.npz": {"a": np.zeros(3)}})
    within = CheckpointInfo(24, 2, history, "abc", [], "an.engine", epoch_step=4)
    save_checkpoint(directory, within, {"variables.npz": {"a": np.zeros(3)}})
    attempts = [
        Attempt(n + 1, 2, 100.0, 130.0, n * 10, n * 10 + 13, ending, "why" if n == 0 else "")
        for n, ending in enumerate(endings)
    ]
    directory.write_attempts([asdict(attempt) for attempt in attempts])
    return directory


def test_show_tells_all_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = {"best_metric": "val_loss"}
    run = make_run(
        tmp_path / "run", "rank killed or lost", "running", checkpoints=best, program="/a b/t.py"
    )
    (tmp_path / "run/checkpoints/step-00000010/variables.npz").write_bytes(b"x")
    run.events.make_folder()
    assert main(["runs", "show", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert f"curves      tensorboard --logdir {tmp_path}/run/events\n" in text
    assert "state       interrupted\n" in text
    assert "progress    2 and 4 steps/5 epochs, 2 ranks" in text
    assert "step-00000024  epoch 2 + 4 steps  val_loss=0.25\n" in text
    assert "step-00000020  epoch 2  val_loss=0.25  best\n" in text
    assert re.search(r"step-00000010\b.*variables.npz.*damaged", text)
    assert re.search(r"attempts.*\b3 steps", text)
    assert re.search(r"attempt 1\b.*\b2 ranks.*\b30 s.*\b13\b.*rank killed or lost.*why", text)
    (resume,) = [line for line in text.splitlines() if line.startswith("resume ")]
    assert "'/a b/t.py'" in resume
    assert f"run_dir={str(run.location)!r}" in resume
    assert "step-00000024" in resume


def test_attempts_whose_driver_was_killed_are_told_by_what_they_left(tmp_path: Path) -> None:
    """Nobody has closed them: the record says that they run, for no time."""
    first = Attempt(1, 2, 100.0, 100.0, 0, 0, "running")
    second = Attempt(2, 2, 200.0, 230.0, 64, 76, "finished")
    ends = [103.0, 107.0, 215.0]
    told, same = _close_attempts([first, second], None, 76, ends)
    assert same == second
    assert (told.ending, told.started, told.ended) == ("interrupted", 100.0, 107.0)
    assert (told.first_step, told.last_step) == (0, 64)
    assert "driver" in told.cause
    (alone,) = _close_attempts([first], None, 60, [103.0])
    assert (alone.ending, alone.ended, alone.last_step) == ("interrupted", 103.0, 60)
    (alive,) = _close_attempts([first], 150.0, 60, [103.0])
    assert (alive.ending, alive.ended, alive.last_step) == ("running", 150.0, 60)
    run = make_run(tmp_path / "run", "running", "finished")
    assert [one.ending for one in read_run(run, 300.0, verify=False).attempts] == [
        "interrupted",
        "finished",
    ]
    run.add_call({"seconds": {"function": 30.0}, "workers": 2})
    assert "time of all calls, those that were killed left out" in run_page(read_facts(run, 300.0))


def test_a_metric_of_several_numbers_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", "completed")
    info = CheckpointInfo(30, 3, [{"loss": 0.5, "f1": [0.5, 0.12344]}], "abc", [], "an.engine")
    save_checkpoint(run, info, {"variables.npz": {"a": np.zeros(3)}})
    assert main(["runs", "show", str(tmp_path / "run")]) == 0
    assert "step-00000030  epoch 3  loss=0.5 f1=[0.5, 0.1234]\n" in capsys.readouterr().out


def test_json_is_what_every_reader_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", "completed")
    info = CheckpointInfo(30, 3, [{"loss": math.nan, "f1": [math.inf, 1.0]}], "abc", [], "e")
    save_checkpoint(run, info, {"variables.npz": {"a": np.zeros(3)}})
    for command in (["show", str(tmp_path / "run")], ["list", str(tmp_path)]):
        assert main(["runs", *command, "--json"]) == 0
        parsed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        (parsed,) = parsed if isinstance(parsed, list) else [parsed]
        assert parsed["checkpoints"][0]["metrics"] == {"loss": None, "f1": [None, 1.0]}


def test_settings_of_another_version_hide_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "one", "finished", checkpoints={"keep_best": 3})
    make_run(tmp_path / "two", "finished", checkpoints={"keep": "many"})
    assert main(["runs", "list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [["one", "finished"], ["two", "finished"]]


def test_a_running_one_names_who_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_run(tmp_path / "run", "running")
    with directory.lease():
        main(["runs", "show", str(tmp_path / "run")])
    text = capsys.readouterr().out
    assert "state       running (process " in text
    assert "resume" not in text


def test_list_has_a_line_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "one", "finished")
    make_run(tmp_path / "two", "preempted")
    (tmp_path / "neither").mkdir()
    assert main(["runs", "list", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [
        ["RUN", "STATE"],
        ["one", "finished"],
        ["two", "preempted"],
    ]
    assert lines[1][-1] == "val_loss=0.25"
    assert main(["runs", "list", str(tmp_path), "--json"]) == 0
    assert [run["state"] for run in json.loads(capsys.readouterr().out)] == [
        "finished",
        "preempted",
    ]


def test_list_reads_manifests_only_and_show_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run(tmp_path / "run", "killed")
    directory.checkpoint(24).join("variables.npz").write_bytes(b"damaged")
    assert main(["runs", "list", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert [line["problem"] for line in run["checkpoints"]] == ["", "", ""]
    main(["runs", "show", str(tmp_path / "run")])
    text = capsys.readouterr().out
    assert re.search(r"step-00000024\b.*variables.npz.*damaged", text)
    directory.checkpoint(24).join("checkpoint.json").write_text("{}")
    main(["runs", "list", str(tmp_path), "--json"])
    (run,) = json.loads(capsys.readouterr().out)
    assert "checkpoint.json" in run["checkpoints"][0]["problem"]


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "show", str(tmp_path)]) == 1
    assert "run directory" in capsys.readouterr().err
    assert main(["runs", "list", str(tmp_path / "none")]) == 1
    assert "folder" in capsys.readouterr().err


def test_a_finished_run_tells_whether_its_model_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run(tmp_path / "run", "finished")
    writer = ModelWriter(directory)
    writer.write(WEIGHTS_FILE, b"the model")
    writer.finish(Signature(Binding(()), (), None))
    main(["runs", "show", str(tmp_path / "run")])
    text = capsys.readouterr().out
    assert "model       whole\n" in text
    assert "resume" not in text
    (tmp_path / "run/model" / WEIGHTS_FILE).write_bytes(b"another")
    main(["runs", "show", str(tmp_path / "run")])
    text = capsys.readouterr().out
    assert "model       damaged: " in text
    assert re.search(f"{WEIGHTS_FILE}.*damaged", text)
    (resume,) = [line for line in text.splitlines() if line.startswith("resume ")]
    assert "step-00000024" in resume
