"""Environments of processes in which packages are not installed."""

from __future__ import annotations

import os
from pathlib import Path


def without(*names: str) -> dict[str, str]:
    """Return an environment in which modules and distributions of these names are not found."""
    path = os.environ.get("PYTHONPATH")
    folders = [str(Path(__file__).parent), *([path] if path else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "ABSENT": " ".join(names)}
