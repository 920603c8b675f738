"""Importing frameworks quietly, and without the collector."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from horovod_spark_runner.frameworks import quiet_imports


def fail_to_import() -> None:
    with quiet_imports():
        assert not gc.isenabled()
        with quiet_imports():
            pass
        assert not gc.isenabled()
        raise ImportError


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(ImportError):
            fail_to_import()
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()


def test_what_a_rank_has_imported_ahead_is_not_looked_at_again() -> None:
    code = """
import gc
from horovod_spark_runner.cluster.worker.main import import_ahead
import_ahead(["decimal"])
assert gc.isenabled()
assert gc.get_freeze_count() > 1000
"""
    subprocess.run([sys.executable, "-c", code], check=True)
