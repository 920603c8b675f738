"""The environment for GPUs, made from nothing; on a machine with or without one.

Downloads gigabytes, so only with ``HSR_TEST_GPU_BUILD=1``::

    HSR_TEST_GPU_BUILD=1 pytest tests/gpu/test_build.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import copy_checkout

pytestmark = pytest.mark.thorough

ADD = """
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
print(hvd.nccl_built(), float(hvd.allreduce(tf.constant(hvd.rank() + 1.0), op=hvd.Sum)))
"""


def run(*command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.skipif(not os.environ.get("HSR_TEST_GPU_BUILD"), reason="downloads gigabytes")
@pytest.mark.timeout(3600)
def test_horovod_with_nccl_is_built_loads_and_adds_up(tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    checkout = copy_checkout(tmp_path / "source")
    constraints = str(checkout / "scripts" / "locks" / "gpu.txt")
    packages = [f"{checkout}[gpu]", "--constraint", constraints]
    run(python, "-m", "pip", "install", "--quiet", *packages)
    program = str(tmp_path / "venv" / "bin" / "horovod-spark-runner")
    cache = ["--cache", str(tmp_path / "cache")]
    run(program, "install-horovod", "--gpu", "--cuda-from-pypi", *cache)
    mpirun = str(tmp_path / "venv" / "bin" / "mpirun")
    options = ["--oversubscribe", "-n", "2"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    lines = run(mpirun, *options, python, "-c", ADD).splitlines()
    told = [line.split() for line in lines]
    assert [total for _, total in told] == ["3.0", "3.0"]
    assert all(int(nccl) >= 22700 for nccl, _ in told)
    assert run(python, "-c", "import horovod; print(horovod.BUILT_WITH_CUDA)").strip() == "13.0"
