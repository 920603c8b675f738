"""What mpirun itself does with the command, on more hosts than a test can have."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from horovod_spark_runner.cluster.protocol.command import mpirun_command
from horovod_spark_runner.cluster.protocol.network import active_interfaces
from horovod_spark_runner.cluster.protocol.processes import find_mpirun
from horovod_spark_runner.cluster.protocol.topology import SlotInfo, arrange
from horovod_spark_runner.cluster.slot.node_runtime import NodeRuntime
from horovod_spark_runner.cluster.slot.workspace import Workspace
from horovod_spark_runner.config.launch import MpiOptions
from tests.unit.test_command import nodes_of
from tests.unit.test_connections import serve

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


def test_a_host_that_takes_no_order_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="a b", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setenv("TMPDIR", folder)
        workspace = Workspace("unit")
        assert " " in str(workspace.path)
        infos = [
            SlotInfo(slot, host, host, f"127.0.0.{slot + 1}", 1, "/", ("/door",), ((),))
            for slot, host in enumerate((socket.gethostname(), "away"))
        ]
        # The daemons do not take the loopback interface.
        interface = next(one for one in active_interfaces() if not one.is_loopback)
        runtime = NodeRuntime(interface, b"x" * 32, workspace)
        runtime.join(arrange(infos).parts()[0], MpiOptions())
        try:
            serve(runtime, lambda: runtime.problem or runtime.has_ended)
        finally:
            runtime.close()
            workspace.close()
    assert re.search(r"cannot reach host away at 127.0.0.2 port 1\b", runtime.problem)
