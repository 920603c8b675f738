"""A copy of this checkout, to build wheels from."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]


def copy_checkout(folder: Path) -> Path:
    """Copy what a wheel is made of into ``folder``.

    In place, setuptools leaves a folder ``build``, from which a later wheel takes old modules.
    """
    left_out = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT, folder, ignore=left_out))
