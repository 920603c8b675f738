"""The training that all faults are injected into, once without any."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.preload import PATIENT, build

from .training import PATIENT_VARIABLE, make_frame, train


@pytest.fixture(scope="module", autouse=True)
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ranks that wait for one that is held, stopped or cut off take no core from other tests."""
    library = build(PATIENT, tmp_path_factory.mktemp("patient"))
    if library is not None:
        os.environ[PATIENT_VARIABLE] = str(library)
    yield
    os.environ.pop(PATIENT_VARIABLE, None)


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    return make_frame(spark).cache()


@pytest.fixture(scope="module")
def undisturbed(frame: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(frame, run_dir)
    return run_dir
