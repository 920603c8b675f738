"""What mpirun itself does with the command, on more hosts than a test can have."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from horovod_spark_runner.cluster.protocol.command import mpirun_command
from horovod_spark_runner.cluster.protocol.processes import find_mpirun
from horovod_spark_runner.config.launch import MpiOptions
from tests.unit.test_command import nodes_of

pytestmark = [pytest.mark.mpi]


def test_daemons_are_started_on_hundreds_of_hosts(tmp_path: Path) -> None:
    """By default, mpirun refuses to start more than 128 by agents that stay as long as they do."""
    asked, agent = tmp_path / "asked", tmp_path / "agent"
    agent.write_text(f'#!/bin/sh\necho "$1" >> {asked}\nexit 1\n')
    agent.chmod(0o755)
    nodes = nodes_of(*map(str, range(200)))
    root = os.geteuid() == 0
    argv = mpirun_command(find_mpirun(), nodes, MpiOptions(), agent=str(agent), as_root=root)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert "concurrent" not in done.stdout + done.stderr
    hosts = set(asked.read_text().split())
    assert hosts <= {node.name for node in nodes}
    assert hosts
