"""Models whose weights are most of the memory there is: how many copies of them there are.

A model of more than 2 GB takes minutes and 10 GB of memory, so only with ``HSR_TEST_LARGE=1``::

    HSR_TEST_LARGE=1 pytest -n0 tests/spark/test_large_models.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.large_model import WIDTH

pytestmark = pytest.mark.thorough

# Rows of the table of weights: of 200 MB, and of more than 2 GiB.
MIDDLE, LARGE = 400_000, 4_500_000
PROGRAM = "tests.spark.large_model"
large = pytest.mark.skipif(not os.environ.get("HSR_TEST_LARGE"), reason="takes 10 GB of memory")
SIZES = [MIDDLE, pytest.param(LARGE, marks=large)]


def run(kind: str, rows: int, place: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", PROGRAM, kind, str(rows), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    size = 4 * rows * WIDTH
    told["copies"] = {step: more / size for step, more in told["steps"].items()}
    return told


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rows", SIZES)
def test_few_copies_are_made_of_a_model(rows: int, tmp_path: Path) -> None:
    told = run("adopt", rows, tmp_path / "stage")
    assert told["found"] == told["wanted"]
    copies = told["copies"]
    # The one that is loaded to see that it can be, and for a moment one array that HDF5 writes.
    assert copies["from_keras"] < 1.5
    # Neither its bytes nor its weights are held beside the user's own model.
    assert copies["transform"] < 0.5
    assert copies["save"] < 0.5
    again = run("load", rows, tmp_path / "stage")
    assert again["found"] == told["wanted"]
    assert again["held"] == rows * WIDTH
    assert again["copies"]["load"] < 0.5
    assert again["copies"]["transform"] < 0.5
    assert again["copies"]["getModel"] < 1.5
    # Beside the model there is TensorFlow, which takes some 250 MB.
    assert 1 <= again["copies"]["worker"] < 1.2 + 300e6 / (4 * rows * WIDTH)
    # Through Spark Connect, too, whose messages hold no such model.
    distant = run("connect", rows, tmp_path / "stage")
    assert distant["found"] == distant["wanted"] == told["wanted"]
    assert distant["copies"]["transform"] < 0.5
    assert distant["copies"]["again"] < 0.5


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rows", SIZES)
def test_a_trained_model_stays_out_of_the_driver(rows: int, tmp_path: Path) -> None:
    told = run("train", rows, tmp_path / "run")
    assert told["found"] == told["wanted"]
    assert told["copies"]["run_training"] < 0.5
    assert told["copies"]["from_run"] < 0.25
    assert told["copies"]["initial_weights"] < 0.5
