"""scikit-learn's 1,797 handwritten digits, read from its file: importing it takes a second."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return images of 64 numbers in 0…1, float32, and labels, int32."""
    spec = find_spec("sklearn")
    assert spec is not None, "scikit-learn is not installed"
    file = Path(str(spec.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    return rows[:, :64] / 16, rows[:, 64].astype(np.int32)
