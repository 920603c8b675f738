"""The examples run as a user would run them, from another folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def run_example(name: str, folder: Path, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=folder,
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
    assert "2 ranks" in output or "Epochs trained: 3" in output
