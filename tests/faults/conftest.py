"""The training that all faults are injected into, once without any."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from .training import make_frame, train


@pytest.fixture(scope="session")
def frame(spark: Any) -> Any:
    return make_frame(spark).cache()


@pytest.fixture(scope="session")
def undisturbed(frame: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory, which the first lane of tests that needs it makes for all."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # every lane has a folder of its own in there
    run_dir = folder / "undisturbed"
    with (folder / "undisturbed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not run_dir.exists():
            aside = folder / f"undisturbed-{os.getpid()}"
            train(frame, aside)
            aside.rename(run_dir)
    return run_dir
