"""The notebooks in ``examples/`` run in a Jupyter kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.notebooks import NOTEBOOKS, run_notebook, text_of

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]
# What is printed last that shows that the model has learned, and the least it may be.
RESULTS = {
    "keras_digits": (r"'accuracy': ([\d.]+)", 0.9),
    "pytorch_digits": (r"'accuracy': ([\d.]+)", 0.9),
    "spark_ml_pipeline": (r"^(0\.\d+)$", 0.97),
}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_model_has_learned(notebook: Path, tmp_path: Path) -> None:
    pattern, least = RESULTS[notebook.stem]
    text = text_of(run_notebook(notebook, tmp_path))
    *_, result = re.findall(pattern, text, re.MULTILINE)
    assert float(result) > least
