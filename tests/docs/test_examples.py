"""The examples run as a user would run them, from another folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.sessions import with_own_daemon

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def run_example(name: str, folder: Path, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=folder,
        env=with_own_daemon(folder),
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def test_flights(tmp_path: Path) -> None:
    output = run_example("flights.py", tmp_path, "--rows", "20000", "--epochs", "3")
    errors = {
        name: float(minutes)
        for name, minutes in re.findall(r"^  (the \w+.*?) +([\d.]+)$", output, re.M)
    }
    # Three epochs on a few rows: better than not looking at all, if not yet than the departure.
    assert errors["the model"] < errors["the training mean"]
    (epochs, run_dir) = re.findall(r"^Epochs trained: (\d+); run directory: (.+)$", output, re.M)[0]
    assert epochs == "3"
    logs = sorted(path.name for path in (tmp_path / run_dir / "logs").iterdir())
    assert logs == ["rank-00000.log", "rank-00001.log"]


def test_digits_with_pytorch(tmp_path: Path) -> None:
    output = run_example("digits_torch.py", tmp_path, "--epochs", "4")
    assert "Epochs trained: 4" in output
    (accuracy,) = re.findall(r"^Held-out accuracy: ([\d.]+)$", output, re.M)
    assert float(accuracy) > 0.9


def set_up_already(folder: Path) -> dict[str, str]:
    """Return the environment of scripts for which ``folder`` holds what they would set up."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    # The Python of these tests, which nothing is to be installed into.
    python.write_text(f'#!/bin/sh\n[ "$1" != -m ] || exit 9\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "HSR_VENV": str(folder)}
    subprocess.run(
        ["bash", "-c", f'source "{ROOT}/scripts/common.sh"; wanted_stamp >"$VENV/.set-up"'],
        check=True,
        env=environment,
    )
    return environment


def test_the_demo_once_all_is_set_up(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = subprocess.run(
        [str(ROOT / "scripts" / "demo"), "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
        env=set_up_already(tmp_path / "venv"),
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "Setting up" not in run.stderr
    # What the README says is printed.
    ((accuracy, count),) = re.findall(
        r"^Held-out accuracy: ([\d.]+) \(\d+ of (\d+)", run.stdout, re.M
    )
    assert float(accuracy) > 0.95
    assert int(count) > 300
    assert re.findall(r"^  rank (\d) on \S+, GPUs: ", run.stdout, re.M) == ["0", "1"]
    assert re.search(r"^Throughput: [\d,]+ images/s", run.stdout, re.M)
    assert f"Run directory: {run_dir}" in run.stdout
    predictions = re.findall(r"^\| +(\d)\| +(\d)\| +([\d.]+)\|$", run.stdout, re.M)
    assert len(predictions) == 8
    assert sum(digit == predicted for digit, predicted, _ in predictions) >= 6


def test_tune_digits(tmp_path: Path) -> None:
    arguments = ("--trials", "3", "--epochs", "2", "--study-dir", "study")
    output = run_example("tune_digits.py", tmp_path, *arguments)
    ((best, _),) = re.findall(r"^Best: trial (\d), \{'rate': (.+)\}$", output, re.M)
    rows = re.findall(r"^ +(\d) +(finished|pruned) +([\d.]+) ", output, re.M)
    assert len(rows) == 3
    finished = [(float(value), number) for number, state, value in rows if state == "finished"]
    assert (max(finished)[0], best) in finished
    assert float(re.findall(r"^Its accuracy on the test images: ([\d.]+)$", output, re.M)[0]) > 0.5
    assert "3 trials in " in output
    assert len(list((tmp_path / "study" / "trials").iterdir())) == 3


def test_flights_pipeline(tmp_path: Path) -> None:
    arguments = ("--rows", "4000", "--epochs", "2", "--folds", "2")
    output = run_example("flights_pipeline.py", tmp_path, *arguments)
    tried = re.findall(r"^  modelArgs=\{'units': (\d+)\}, batchSize=(\d+) +([\d.]+)$", output, re.M)
    assert [(units, rows) for units, rows, _ in tried] == [
        *(("16", "64"), ("16", "512"), ("128", "64"), ("128", "512"))
    ]
    errors = {
        name: float(minutes)
        for name, minutes in re.findall(r"^  (the \w+ \w+) +([\d.]+)$", output, re.M)
    }
    assert errors["the best model"] < errors["the training mean"]
    # Two folds, in each a run for each of four, and one of the winner on all rows.
    assert len(list(tmp_path.glob("runs/*/fit-*"))) == 8
    assert len(list(tmp_path.glob("runs/*"))) == 3
    assert (tmp_path / "late_flights" / "stages").is_dir()
    # What it has saved leaves Spark.
    output = run_example("export_flights.py", tmp_path, "--rows", "500")
    found = re.findall(r"^(\d+) flights scored (.+); at most ([\d.]+) minutes apart$", output, re.M)
    assert [how for _, how, _ in found] == ["without Spark", "by onnxruntime"]
    for scored, _, apart in found:
        assert int(scored) > 400
        # Delays of up to hundreds of minutes, computed in float32.
        assert float(apart) < 1e-3
