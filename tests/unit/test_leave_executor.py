"""The preStop hook asks ranks to end, all of a container's and no others, and waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "leave_executor.sh"
RANK = """
import signal, sys, time
from pathlib import Path
from horovod_spark_runner.cluster.protocol.processes import name_process
name_process("horovod-rank")
def save(number, frame):
    time.sleep(0.5)
    Path(sys.argv[1], "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
Path(sys.argv[1], "ready").touch()
time.sleep(60)
"""
CONTAINER = """
"$PYTHON" -c "$RANK" "$1" &
while [ ! -e "$1/ready" ]; do sleep 0.05; done
"$SCRIPT"
ls "$1"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a process name space of its own needs root")
def test_ranks_save_before_their_container_ends(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "RANK": RANK, "SCRIPT": str(SCRIPT)}
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", CONTAINER, "sh", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ready", "saved"]
