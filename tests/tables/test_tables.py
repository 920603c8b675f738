"""Delta Lake and Iceberg by Spark's own packages, with the newest Spark that they support.

The cases run in a process of their own, with that Spark.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .packages import fetch_packages

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.parametrize("cases", ["cases_delta.py", "cases_iceberg.py", "cases_s3.py"])
def test_tables(cases: str) -> None:
    spark, jars = fetch_packages()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", "--durations=8"]
    paths = f"{spark}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [*command, str(HERE / cases)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "TABLES_JARS": str(jars)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=1100,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
