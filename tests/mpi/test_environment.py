"""Runs of an account whose environment and home hold what is not for our MPI."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]

RUNS = """
from pyspark.sql import SparkSession
from horovod_spark_runner import HorovodRunner

def rank():
    import os
    from mpi4py import MPI

    return MPI.COMM_WORLD.allreduce(1), os.environ["HOME"]

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
print(HorovodRunner(2, spark=spark).run(rank).results)
"""
# Each names a component that does not exist, so that who reads the file fails.
PARAMETERS = {
    ".openmpi/mca-params.conf": "pml = nosuch",
    ".pmix/mca-params.conf": "ptl = nosuch",
    ".prte/mca-params.conf": "plm = nosuch",
}
LIBRARIES = ("libmpi.so.40", "libprrte.so.3")


def make_library(folder: Path, name: str) -> None:
    """Make a library of that name in which there is nothing."""
    source = folder / "empty.c"
    source.write_text("int nothing;\n")
    command = ["cc", "-shared", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
    subprocess.run(command, check=True)


def run(environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RUNS], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    return done.stdout


def test_parameters_in_the_home_and_libraries_of_another_mpi_do_no_harm(tmp_path: Path) -> None:
    for name, text in PARAMETERS.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(f"{text}\n")
    for name in LIBRARIES:
        make_library(tmp_path, name)
    shown = run({**os.environ, "HOME": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)})
    assert shown == f"{((2, str(tmp_path)),) * 2}\n"


def test_an_account_without_a_home() -> None:
    environment = dict(os.environ)
    environment.pop("HOME", None)
    assert run(environment) == f"{((2, pwd.getpwuid(os.getuid()).pw_dir),) * 2}\n"


def test_a_library_of_another_mpi_that_ranks_would_load_is_named(tmp_path: Path) -> None:
    make_library(tmp_path, "libopen-pal.so.80")
    done = subprocess.run(
        [sys.executable, "-c", RUNS],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("horovod_spark_runner.errors.EnvironmentProblem"), done.stderr[-3000:]
    assert f"LD_LIBRARY_PATH={tmp_path}" in last
