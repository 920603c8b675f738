"""Tests of facts about frameworks."""

from __future__ import annotations

import subprocess
import sys

BOTH = """
from horovod_spark_runner.frameworks import quiet_imports
with quiet_imports():
    import tensorflow
import torch._dynamo
print("imported")
"""


def test_tensorflow_and_pytorchs_compiler_share_a_process() -> None:
    done = subprocess.run([sys.executable, "-c", BOTH], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr[-2000:]
