"""The packed environment on executors that have no other one, and the caller's own modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.submission import NOT_NEEDED
from tests.spark_home import SPARK_HOME

pytestmark = [pytest.mark.thorough, pytest.mark.cluster, pytest.mark.mpi, pytest.mark.spark]

HERE = Path(__file__).parent
STANDALONE = str(HERE.parent.parent / "scripts" / "standalone")
BIN = Path(sys.prefix) / "bin"


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """A worker whose environment leads to no Python packages."""
    kept = ("HOME", "JAVA_HOME", "JDK_JAVA_OPTIONS")
    bare = {name: os.environ[name] for name in kept if name in os.environ}
    bare |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "HSR_VENV": sys.prefix}
    place = str(tmp_path / "cluster")
    done = subprocess.run(
        [STANDALONE, "start", place, "1", "2", "1g"],
        capture_output=True,
        text=True,
        check=False,
        env=bare,
    )
    try:
        assert done.returncode == 0, done.stderr
        yield done.stdout.strip()
    finally:
        subprocess.run([STANDALONE, "stop", place], check=True)


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs a virtual environment")
def test_ranks_in_the_packed_environment(master: str, tmp_path: Path) -> None:
    archive = tmp_path / "packed.tar.gz"
    command = [sys.executable, "-m", "horovod_spark_runner.commands.cli", "pack", str(archive)]
    # Less to copy and unpack, several times over: what these ranks do not import.
    for name in NOT_NEEDED:
        command += ["--exclude", f"lib/python*/site-packages/{name}*"]
    packed = subprocess.run(
        [*command, "--compress-level", "0"], capture_output=True, text=True, check=False
    )
    assert packed.returncode == 0, packed.stderr
    (tmp_path / "shapes.py").write_text("def square(x):\n    return x * x\n")
    with zipfile.ZipFile(tmp_path / "units.zip", "w") as code:
        code.writestr("units/__init__.py", "")
        code.writestr("units/length.py", "def in_cm(metres):\n    return metres * 100\n")
    done = subprocess.run(
        [
            str(BIN / "spark-submit"),
            *("--master", master, "--executor-memory", "512m"),
            *("--archives", f"{archive}#environment"),
            *("--py-files", f"{tmp_path / 'shapes.py'},{tmp_path / 'units.zip'}"),
            *("--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.ui.enabled=false"),
            str(HERE / "packed_job.py"),
        ],
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
        env={
            **os.environ,
            "SPARK_HOME": str(SPARK_HOME),
            "PYSPARK_PYTHON": "./environment/bin/python",
            "PYSPARK_DRIVER_PYTHON": sys.executable,
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    ranks = json.loads(done.stdout.splitlines()[-1])
    assert len(ranks) == 2
    for rank in ranks:
        assert (rank["size"], rank["sum"]) == (2, 500.0)
        unpacked = rank["prefix"]
        assert unpacked.startswith(str(tmp_path / "cluster"))
        assert all(path.startswith(unpacked) for path in rank["modules"])
        # Neither Python's extensions nor MPI's or Horovod's libraries come from here.
        assert [path for path in rank["mapped"] if path.startswith(sys.prefix)] == []
        assert any(path.startswith(unpacked) and "libmpi.so" in path for path in rank["mapped"])
