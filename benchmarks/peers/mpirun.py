"""Bare mpirun and a script that does one allreduce.

Usage: python mpirun.py RANKS CALLS [as-it-comes]; else with our transport settings and binding.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from horovod_spark_runner.cluster.protocol.command import transport_parameters

SCRIPT = """
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == hvd.size()
"""


def main() -> None:
    ranks, calls = int(sys.argv[1]), int(sys.argv[2])
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    command = [mpirun, "--oversubscribe", "-n", str(ranks)]
    if "as-it-comes" not in sys.argv:
        command += ["--bind-to", "none"]
        # Without them it takes half a second longer: it looks for network devices.
        for name, value in transport_parameters(nodes=1).items():
            command += ["--mca", name, value]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    # The threads a rank of a one-core task gets from Spark.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    seconds = []
    for _ in range(calls):
        began = time.monotonic()
        subprocess.run(
            [*command, sys.executable, "-c", SCRIPT],
            check=True,
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        seconds.append(time.monotonic() - began)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
