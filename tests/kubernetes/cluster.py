"""A Kubernetes of tests, and the machine outside of it that submits to it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Hosts
from tests.spark_home import SPARK_HOME

from .api_server import ApiServer
from .node import Nodes

HERE = Path(__file__).parent
CONTROL, CLIENT = "control", "client"
TWO_NODES = {name: {"cpu": "4", "memory": "12Gi"} for name in ("node-a", "node-b")}
POD_SETTINGS = {
    "spark.kubernetes.container.image": "tests",
    "spark.executor.instances": "2",
    "spark.executor.memory": "512m",
    "spark.executor.memoryOverhead": "2g",
    "spark.dynamicAllocation.enabled": "false",
    "spark.kubernetes.executor.request.cores": "0.5",
}


class Kubernetes:
    """An API server, nodes, and a client with a folder that all pods reach as ``/runs``.

    Use as a context manager.
    """

    def __init__(self, folder: Path, nodes: Mapping[str, Mapping[str, str]] = TWO_NODES) -> None:
        self._folder = folder
        self._nodes = nodes
        self._running = contextlib.ExitStack()

    def __enter__(self) -> Kubernetes:
        with contextlib.ExitStack() as running:
            hosts = Hosts(self._folder / "hosts", [CONTROL, CLIENT], strangers=True)
            self.hosts = running.enter_context(hosts)
            server = ApiServer(self.hosts, CONTROL, self._folder / "server")
            self.server = running.enter_context(server)
            nodes = Nodes(hosts, server, CONTROL, self._folder / "pods", self._nodes)
            self.nodes = running.enter_context(nodes)
            self.runs = self._folder / "runs"
            self.runs.mkdir(mode=0o777)
            self.runs.chmod(0o777)
            self._running = running.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.close()

    def settings(self) -> dict[str, str]:
        """Return Spark's settings for the client's side."""
        address = self.hosts.address(CLIENT)
        volume = "spark.kubernetes.{}.volumes.hostPath.runs"
        mounts = {}
        for role in ("driver", "executor"):
            # The client, outside, has the folder under its own name.
            mounts[f"{volume.format(role)}.mount.path"] = str(self.runs)
            mounts[f"{volume.format(role)}.options.path"] = str(self.runs)
        return {"spark.master": f"k8s://{self.server.url}", "spark.driver.host": address, **mounts}

    def start(self, request: Mapping[str, Any], **settings: str) -> subprocess.Popen[str]:
        """Start `job` outside the cluster: client mode. ``__`` in a setting's name is a dot."""
        own = {name.replace("__", "."): value for name, value in settings.items()}
        given = {**POD_SETTINGS, **self.settings(), **own}
        job = [sys.executable, str(HERE / "job.py"), json.dumps(request)]
        return subprocess.Popen(
            self.hosts.command(CLIENT, [*job, *(f"{k}={v}" for k, v in given.items())]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(),
        )

    def environment(self) -> dict[str, str]:
        env = {"KUBECONFIG": str(self.server.kubeconfig), "SPARK_HOME": str(SPARK_HOME)}
        env["PYSPARK_PYTHON"] = sys.executable
        env["PYTHONPATH"] = os.environ.get("PYTHONPATH", str(HERE.parents[1]))
        return self.hosts.environment(CLIENT, env)

    def kubectl(self, *arguments: str) -> str:
        done = subprocess.run(
            self.hosts.command(CLIENT, ["kubectl", *arguments]),
            env=self.environment(), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout
