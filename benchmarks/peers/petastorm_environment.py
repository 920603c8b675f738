"""The environment in which Petastorm's readers work, and how they are run there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CACHE = Path.home() / ".cache" / "horovod_spark_runner" / "petastorm-reader"
# The newest that Petastorm's readers work with.
PACKAGES = (
    "petastorm==0.13.1",
    "pyarrow==14.0.2",
    "numpy==1.26.4",
    "pandas<2.3",
    "pyspark==3.5.9",
    "tensorflow-cpu==2.16.2",
    "setuptools<70",
)
ENVIRONMENT = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}


def set_up() -> Path:
    """Make the environment, once; return its Python."""
    python = CACHE / "bin" / "python"
    if not (CACHE / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", CACHE], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
        (CACHE / "complete").touch()
    return python


def read(
    folder: Path,
    *,
    rows: int,
    width: int,
    batch_size: int,
    epochs: int,
    at_once: Sequence[int] = (),
) -> dict[str, float]:
    """Return seconds per epoch by reader, the best number of workers each, and the rows lost.

    Args:
        folder: of Parquet files with the columns ``features`` and ``label``.
        rows: how many there are.
        width: numbers in ``features``.
        batch_size: rows of a batch.
        epochs: how often they are read.
        at_once: numbers of steps that ``model.fit`` runs at a time; each is timed.
    """
    script = Path(__file__).resolve().parent / "petastorm_reader.py"
    numbers = map(str, (rows, width, batch_size, epochs, *at_once))
    run = subprocess.run(
        [set_up(), script, folder, *numbers],
        capture_output=True,
        text=True,
        env={name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"},
        check=False,
    )
    if run.returncode:
        raise RuntimeError(run.stderr[-3000:])
    found: dict[str, float] = {"lost": 0}
    for line in run.stdout.splitlines():
        if line.startswith("{"):
            values = json.loads(line)
            found["lost"] += values.pop("lost", 0)
            for name, seconds in values.items():
                reader = name.rpartition("_")[0] if name.startswith("make_") else name
                found[reader] = min(seconds, found.get(reader, seconds))
    return found
