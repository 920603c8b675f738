"""A Kubernetes of tests, and the machine outside of it that submits to it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.hosts import Hosts
from tests.spark_home import SPARK_HOME

from .api_server import ApiServer
from .node import ROOT, Nodes

BIN = Path(sys.prefix) / "bin"
CONTROL, CLIENT = "control", "client"
NODES = {name: {"cpu": "8", "memory": "12Gi", "nvidia.com/gpu": "1"} for name in ("a", "b")}
# What docs/clusters.md creates for the driver.
VERBS, KINDS = "--verb=*", "--resource=pods,services,configmaps,persistentvolumeclaims"
ACCOUNT = (
    ("create", "serviceaccount", "spark"),
    ("create", "role", "spark", VERBS, KINDS),
    ("create", "rolebinding", "spark", "--role=spark", "--serviceaccount=default:spark"),
)
PODS = {
    "spark.driver.memory": "512m",
    "spark.driver.memoryOverhead": "1536m",
    "spark.kubernetes.driver.request.cores": "0.5",
    "spark.dynamicAllocation.enabled": "false",
    "spark.executor.instances": "2",
    "spark.executor.memory": "512m",
    "spark.executor.memoryOverhead": "2g",
    "spark.kubernetes.executor.request.cores": "0.5",
    "spark.kubernetes.container.image": "tests",
    "spark.kubernetes.authenticate.driver.serviceAccountName": "spark",
}


class Kubernetes:
    """An API server, nodes, and a client outside, with a folder that the pods have as a volume.

    Use as a context manager, which skips the test where these cannot be had.

    Args:
        folder: an empty folder for files and logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.runs = folder / "runs"
        self._running = contextlib.ExitStack()

    def __enter__(self) -> Kubernetes:
        with contextlib.ExitStack() as running:
            hosts = Hosts(self._folder / "hosts", [CONTROL, CLIENT], strangers=True)
            self.hosts = running.enter_context(hosts)
            server = ApiServer(self.hosts, CONTROL, self._folder / "server")
            self.server = running.enter_context(server)
            self.nodes = Nodes(hosts, server, CONTROL, self._folder / "pods", NODES)
            running.enter_context(self.nodes)
            self.nodes.claims["runs"] = self.runs
            self.runs.mkdir()
            self.runs.chmod(0o777)
            for command in ACCOUNT:
                self.kubectl(*command)
            self._running = running.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.close()

    def _environment(self) -> dict[str, str]:
        return {
            "KUBECONFIG": str(self.server.kubeconfig),
            "SPARK_HOME": str(SPARK_HOME),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
        }

    def kubectl(self, *arguments: str) -> str:
        """Run ``kubectl`` outside the cluster; return what it prints."""
        env = {"KUBECONFIG": str(self.server.kubeconfig)}
        done = self.hosts.run(CLIENT, ["kubectl", *arguments], env, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(
        self,
        job: str,
        *arguments: str,
        mode: str = "client",
        settings: Mapping[str, str] | None = None,
        properties: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start ``spark-submit`` outside the cluster.

        Args:
            job: the script, which is in the image, too.
            arguments: of the script.
            mode: deploy mode.
            settings: of Spark.
            properties: a file of settings, in place of what else the pods have.
        """
        own = {
            "spark.ui.enabled": "false",
            "spark.log.level": "WARN",
            **({} if properties else PODS),
        }
        if mode == "client":
            # The pods are another user: they cannot write into folders of this one's.
            own["spark.hadoop.fs.permissions.umask-mode"] = "000"
            own["spark.driver.host"] = self.hosts.address(CLIENT)
        for role in ("driver", "executor"):
            volume = f"spark.kubernetes.{role}.volumes.persistentVolumeClaim.runs"
            own |= {f"{volume}.mount.path": str(self.runs), f"{volume}.options.claimName": "runs"}
        confs = [f"--conf={key}={value}" for key, value in {**own, **(settings or {})}.items()]
        command = [str(BIN / "spark-submit"), "--master", f"k8s://{self.server.url}"]
        command += ["--deploy-mode", mode]
        command += ["--properties-file", str(properties)] if properties else []
        local = f"local://{job}" if mode == "cluster" else job
        env = self.hosts.environment(CLIENT, self._environment())
        for name in [name for name in env if name.lower().endswith("_proxy")]:
            del env[name]
        return subprocess.Popen(
            self.hosts.command(CLIENT, [*command, *confs, local, *arguments]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=ROOT,
            umask=0,
        )
