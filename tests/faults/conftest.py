"""The training that all faults are injected into, once without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .training import make_frame, train


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    return make_frame(spark).cache()


@pytest.fixture(scope="module")
def undisturbed(frame: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(frame, run_dir)
    return run_dir
