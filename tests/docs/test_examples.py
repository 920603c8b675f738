"""The examples run from another folder: one as a user runs it, the others in one Spark session."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.sessions import Interpreter

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.mpi, pytest.mark.spark]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples run."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def interpreter(folder: Path) -> Iterator[Interpreter]:
    interpreter = Interpreter(folder)
    yield interpreter
    interpreter.end()


def example(name: str) -> Path:
    return ROOT / "examples" / f"{name}.py"


@pytest.mark.thorough
def test_flights(interpreter: Interpreter, folder: Path) -> None:
    output, _ = interpreter.run(example("flights"), "--rows", "20000", "--epochs", "3")
    errors = {
        name: float(minutes)
        for name, minutes in re.findall(r"^  (the \w+.*?) +([\d.]+)$", output, re.M)
    }
    # Three epochs on a few rows: better than not looking at all, if not yet than the departure.
    assert errors["the model"] < errors["the training mean"]
    (epochs, run_dir) = re.findall(r"^Epochs trained: (\d+); run directory: (.+)$", output, re.M)[0]
    assert epochs == "3"
    logs = sorted(path.name for path in (folder / run_dir / "logs").iterdir())
    assert logs == ["rank-00000.log", "rank-00001.log"]


@pytest.mark.thorough
def test_digits_with_pytorch(interpreter: Interpreter) -> None:
    output, _ = interpreter.run(example("digits_torch"), "--epochs", "4")
    assert "Epochs trained: 4" in output
    (accuracy,) = re.findall(r"^Held-out accuracy: ([\d.]+)$", output, re.M)
    assert float(accuracy) > 0.9


@pytest.mark.thorough
def test_digits_with_lightning(interpreter: Interpreter) -> None:
    for epochs in ("2", "4"):  # the second call resumes
        output, _ = interpreter.run(example("digits_lightning"), "--epochs", epochs)
        assert f"Epochs trained: {epochs}" in output
    (accuracy,) = re.findall(r"^Held-out accuracy: ([\d.]+)$", output, re.M)
    assert float(accuracy) > 0.9


@pytest.mark.thorough
def test_text_with_keras(interpreter: Interpreter, folder: Path) -> None:
    output, _ = interpreter.run(example("text_keras"), "--epochs", "5", "--run-dir", "text")
    (accuracy,) = re.findall(r"^Held-out accuracy: ([\d.]+)$", output, re.M)
    assert float(accuracy) > 0.75
    assert "Parse the header of a message. -> email" in output
    assert (folder / "text" / "exported" / "saved_model.pb").is_file()


@pytest.mark.thorough
def test_text_with_hugging_face(interpreter: Interpreter, folder: Path) -> None:
    output, _ = interpreter.run(
        example("text_huggingface"), "--lora", "--epochs", "5", "--run-dir", "pieces"
    )
    accuracies = [float(one) for one in re.findall(r"^Held-out accuracy: ([\d.]+)$", output, re.M)]
    assert accuracies[0] > 0.75  # of four packages
    assert accuracies[1] > 0.5
    for name, weights in (("adapter", "adapter_model"), ("merged", "model")):
        assert (folder / "pieces" / name / f"{weights}.safetensors").is_file()
    sizes = {name: size_of(folder / "pieces" / name) for name in ("adapter", "merged")}
    assert sizes["adapter"] < sizes["merged"] / 4


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def set_up_already(folder: Path) -> dict[str, str]:
    """Return the environment of scripts for which ``folder`` holds what they would set up."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    # The Python of these tests, which nothing is to be installed into.
    python.write_text(f'#!/bin/sh\n[ "$1" != -m ] || exit 9\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    environment = runpy.run_path(str(ROOT / "scripts" / "environment.py"))["Environment"]
    environment(folder, ROOT / "scripts" / "locks", gpu=False).mark_ready("demo")
    return {**os.environ, "HSR_VENV": str(folder)}


def test_the_demo_once_all_is_set_up(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = subprocess.run(
        [str(ROOT / "scripts" / "demo"), "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=480,
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


@pytest.mark.thorough
def test_tune_digits(interpreter: Interpreter, folder: Path) -> None:
    arguments = ("--trials", "3", "--epochs", "2", "--study-dir", "study")
    output, _ = interpreter.run(example("tune_digits"), *arguments)
    ((best, _),) = re.findall(r"^Best: trial (\d), \{'rate': (.+)\}$", output, re.M)
    rows = re.findall(r"^ +(\d) +(finished|pruned) +([\d.]+) ", output, re.M)
    assert len(rows) == 3
    finished = [(float(value), number) for number, state, value in rows if state == "finished"]
    assert (max(finished)[0], best) in finished
    assert float(re.findall(r"^Its accuracy on the test images: ([\d.]+)$", output, re.M)[0]) > 0.5
    assert "3 trials in " in output
    assert len(list((folder / "study" / "trials").iterdir())) == 3


@pytest.mark.thorough
def test_flights_pipeline(interpreter: Interpreter, folder: Path) -> None:
    arguments = ("--rows", "4000", "--epochs", "2", "--folds", "2", "--run-dir", "searched")
    output, _ = interpreter.run(example("flights_pipeline"), *arguments)
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
    assert len(list(folder.glob("searched/*/fit-*"))) == 8
    assert len(list(folder.glob("searched/*"))) == 3
    assert (folder / "late_flights" / "stages").is_dir()
    # What it has saved leaves Spark.
    output, _ = interpreter.run(example("export_flights"), "--rows", "500")
    ((scored, apart),) = re.findall(
        r"^(\d+) flights scored by onnxruntime; at most ([\d.]+) minutes apart$", output, re.M
    )
    assert int(scored) > 400
    # Delays of up to hundreds of minutes, computed in float32.
    assert float(apart) < 1e-3
