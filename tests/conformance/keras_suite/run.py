"""Runs Keras' own tests, as they are installed, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# For all tests; a quiet machine of two cores takes a quarter of it.
SECONDS = 1500
# Of Keras' tests, those of what training is: the trainer, callbacks, and others that call ``fit``.
MODULES = (
    "trainers/trainer_test.py",
    "callbacks/*_test.py",
    "optimizers/*_test.py",
    "optimizers/schedules/*_test.py",
    "models/model_test.py",
    "models/functional_test.py",
)


@dataclass(frozen=True)
class Result:
    """What became of one of Keras' tests.

    Attributes:
        outcome: ``"passed"``, ``"failed"`` or ``"skipped"`` (by Keras itself).
        message: the exception, or Keras' reason for skipping.
        seconds: how long it took.
        asked: its calls of ``fit``.
        trained: of those, the ones that our training has taken.
        refused: why others could not be told to it.
    """

    outcome: str
    message: str
    seconds: float
    asked: int
    trained: int
    refused: list[str]


def suite_files() -> list[Path]:
    """Return the files of Keras' tests that are run: those in which ``fit`` is called."""
    spec = find_spec("keras")
    source = Path(str(spec and spec.origin)).parent / "src"
    files = (path for pattern in MODULES for path in sorted(source.glob(pattern)))
    return [path for path in files if ".fit(" in path.read_text()]


def run_suite(*options: str) -> tuple[dict[str, Result], str]:
    """Run Keras' tests with our training for ``fit``.

    Args:
        options: further arguments for pytest, such as ``"-k"``.

    Returns:
        What became of each, by name, and what pytest has printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A file of settings of its own, or pytest would take those of this project.
        settings, results = Path(folder, "pytest.ini"), Path(folder, "results.json")
        settings.write_text("[pytest]\n")
        arguments = ["-c", str(settings), "-p", "tests.conformance.keras_suite.plugin"]
        arguments += ["-p", "no:cacheprovider", "-q", "--assert=plain", "-W", "ignore"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments, *options, *map(str, suite_files())],
            cwd=folder,
            env={
                **os.environ,
                "KERAS_BACKEND": "tensorflow",
                "KERAS_SUITE_RESULTS": str(results),
                "TMPDIR": folder,  # MPI leaves a folder there
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            },
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if not results.is_file():
            return {}, done.stdout + done.stderr
        found = json.loads(results.read_text())
    return {name: Result(**values) for name, values in found.items()}, done.stdout + done.stderr


if __name__ == "__main__":
    found, output = run_suite(*sys.argv[1:])
    print(output[-20000:])
    for name, result in found.items():
        print(f"{result.outcome:8}{result.asked}/{result.trained} {name} {result.message[:150]!r}")
