"""A Kubernetes of tests, and the machine outside of it that submits to it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
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
STORE_PORT = 5000
EXECUTORS = {
    "spark.executor.instances": "2",
    "spark.executor.memory": "512m",
    "spark.executor.memoryOverhead": "2g",
    "spark.kubernetes.executor.request.cores": "0.5",
    "spark.kubernetes.container.image": "tests",
    "spark.kubernetes.authenticate.driver.serviceAccountName": "spark",
}


class Kubernetes:
    """An API server, nodes, an object store, and a client outside.

    Use as a context manager, which skips the test where these cannot be had.

    Args:
        folder: an empty folder for files and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running = contextlib.ExitStack()

    def __enter__(self) -> Kubernetes:
        with contextlib.ExitStack() as running:
            hosts = Hosts(self.folder / "hosts", [CONTROL, CLIENT], strangers=True)
            self.hosts = running.enter_context(hosts)
            server = ApiServer(self.hosts, CONTROL, self.folder / "server")
            self.server = running.enter_context(server)
            self.nodes = Nodes(hosts, server, CONTROL, self.folder / "pods", NODES)
            running.enter_context(self.nodes)
            for command in ACCOUNT:
                self.kubectl(*command)
            self._start_store(running)
            self._running = running.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.close()

    def _start_store(self, running: contextlib.ExitStack) -> None:
        address = self.hosts.address(CONTROL)
        self.store = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ENDPOINT_URL": f"http://{address}:{STORE_PORT}",
            "AWS_REGION": "us-east-1",
        }
        moto = [sys.executable, "-m", "moto.server", "-H", address, "-p", str(STORE_PORT)]
        log = running.enter_context((self.folder / "store.log").open("wb"))
        process = subprocess.Popen(self.hosts.command(CONTROL, moto), stdout=log, stderr=log)
        running.callback(process.wait)
        running.callback(process.kill)
        create = "import boto3; boto3.client('s3').create_bucket(Bucket='runs')"
        deadline = time.monotonic() + 60
        while self._run(sys.executable, "-c", create).returncode:
            assert time.monotonic() < deadline, (self.folder / "store.log").read_text()[-3000:]
            time.sleep(0.5)

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.hosts.run(CLIENT, command, self._environment(), timeout=60)

    def _environment(self) -> dict[str, str]:
        return {
            "KUBECONFIG": str(self.server.kubeconfig),
            "SPARK_HOME": str(SPARK_HOME),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "AWS_DEFAULT_REGION": "us-east-1",
            **self.store,
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
        volume: Path,
        mode: str = "client",
        settings: Mapping[str, str] | None = None,
        properties: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start ``spark-submit`` outside the cluster.

        Args:
            job: the script, which is in the image, too.
            arguments: of the script.
            volume: a folder that all pods have under the same path.
            mode: deploy mode.
            settings: of Spark.
            properties: a file of settings, in place of what else the executors have.
        """
        own = {
            "spark.driver.memory": "512m",
            "spark.driver.memoryOverhead": "1536m",
            "spark.kubernetes.driver.request.cores": "0.5",
            "spark.ui.enabled": "false",
            "spark.log.level": "WARN",
            "spark.dynamicAllocation.enabled": "false",
            **({} if properties else EXECUTORS),
        }
        if mode == "client":
            own["spark.driver.host"] = self.hosts.address(CLIENT)
        for role, prefix in (
            ("driver", "spark.kubernetes.driverEnv."),
            ("executor", "spark.executorEnv."),
        ):
            mount = f"spark.kubernetes.{role}.volumes.hostPath.shared"
            own |= {f"{mount}.mount.path": str(volume), f"{mount}.options.path": str(volume)}
            own |= {prefix + name: value for name, value in self.store.items()}
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
        )
