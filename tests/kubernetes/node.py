"""Nodes for a Kubernetes of tests: pods are processes in namespaces of their own.

A fake of the scheduler, the kubelets and the DNS of services. The image is this machine's file
system, with this checkout, Spark and its entry point as user 185; what a pod writes goes into a
layer of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Hosts
from tests.leftovers import MARK
from tests.spark_home import SPARK_HOME

from .api_server import ApiServer, Client

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
CGROUPS = Path("/sys/fs/cgroup/memory")  # version 1
USER = 185
GPU = "nvidia.com/gpu"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}


class Nodes:
    """Runs the pods that the API server has.

    Use as a context manager.

    Args:
        hosts: hosts; each pod is added as one.
        server: the API server.
        name: of its host.
        folder: for volumes and logs.
        nodes: what each node has, such as ``{"a": {"cpu": "4", "memory": "8Gi"}}``.
    """

    def __init__(
        self,
        hosts: Hosts,
        server: ApiServer,
        name: str,
        folder: Path,
        nodes: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.hosts = hosts
        self.server = server
        self.name = name
        self.folder = folder
        self.nodes = {
            node: {name: quantity(text) for name, text in has.items()}
            for node, has in nodes.items()
        }
        self.claims: dict[str, Path] = {}  # of volumes, by name
        self.pods: dict[str, Pod] = {}
        self.errors: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes")

    def __enter__(self) -> Nodes:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()
        for pod in self.pods.values():
            pod.end()
        assert not self.errors, "\n".join(self.errors)

    def _run(self) -> None:
        self.enter_network()
        self.client = Client(self.server)
        while not self._over.wait(0.3):
            try:
                self._reconcile()
            except Exception:
                self.errors.append(traceback.format_exc())

    def enter_network(self) -> None:
        """Let this thread reach the API server."""
        space = Path("/run/netns", self.hosts.space(self.name))
        with space.open() as file:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.setns(file.fileno(), NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())

    def _reconcile(self) -> None:
        listed = self.client.request("GET", "pods") or {"items": []}
        for item in listed["items"]:
            uid, meta = item["metadata"]["uid"], item["metadata"]
            pod = self.pods.get(uid)
            if pod is None and "deletionTimestamp" not in meta:
                node = self._schedule(item)
                if node is not None:
                    self.pods[uid] = Pod(self, item, node)
            elif pod is not None and "deletionTimestamp" in meta:
                pod.delete(meta["deletionGracePeriodSeconds"])
        for uid in self.pods.keys() - {item["metadata"]["uid"] for item in listed["items"]}:
            self.pods[uid].delete(0)  # by force
        self._resolve_services()

    def _schedule(self, item: dict[str, Any]) -> str | None:
        """Return the node that has what the pod requests; else report it as a scheduler does."""
        wanted = requests(item)
        lacking: dict[str, int] = {}
        for node, has in self.nodes.items():
            taken = [p.requests for p in self.pods.values() if p.node == node and not p.is_over]
            short = [
                k for k, v in wanted.items() if v + sum(t.get(k, 0) for t in taken) > has.get(k, 0)
            ]
            if not short:
                return node
            for name in short:
                lacking[name] = lacking.get(name, 0) + 1
        reasons = ", ".join(f"{count} Insufficient {name}" for name, count in lacking.items())
        message = f"0/{len(self.nodes)} nodes are available: {reasons}."
        conditions = item["status"].get("conditions", [])
        if not any(c.get("message") == message for c in conditions):
            unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            meta = item["metadata"]
            path = f"namespaces/{meta['namespace']}/pods/{meta['name']}"
            status = {"status": {"conditions": [{**unschedulable, "message": message}]}}
            self.client.request("PATCH", f"{path}/status", status)
            event = {
                "metadata": {"generateName": f"{meta['name']}."},
                "involvedObject": {
                    "kind": "Pod", "name": meta["name"], "namespace": meta["namespace"],
                    "uid": meta["uid"],
                },
                "type": "Warning", "reason": "FailedScheduling", "message": message,
                "source": {"component": "default-scheduler"}, "firstTimestamp": now(),
                "lastTimestamp": now(), "count": 1,
            }  # fmt: skip
            self.client.request("POST", f"namespaces/{meta['namespace']}/events", event)
        return None

    def _resolve_services(self) -> None:
        """Let the pods resolve services by name, as a cluster's DNS does."""
        lines = [f"{self.hosts.address(self.name)} kubernetes.default.svc"]
        for service in (self.client.request("GET", "services") or {"items": []})["items"]:
            selector, meta = service["spec"].get("selector"), service["metadata"]
            names = f"{meta['name']}.{meta['namespace']}.svc {meta['name']}"
            for pod in self.pods.values():
                labels = pod.item["metadata"].get("labels", {})
                if selector and selector.items() <= labels.items() and not pod.is_over:
                    lines.append(f"{pod.address} {names}")
        for pod in self.pods.values():
            if not pod.is_over:
                pod.resolve(lines)


class Pod:
    """A pod of one container, which runs it in a thread."""

    def __init__(self, nodes: Nodes, item: dict[str, Any], node: str) -> None:
        self.node = node
        self.item = item
        self.requests = requests(item)
        self.is_over = False
        self._nodes = nodes
        self._meta = item["metadata"]
        self._name = self._meta["name"]
        self._namespace = self._meta["namespace"]
        self._path = f"namespaces/{self._namespace}/pods/{self._name}"
        self._container = item["spec"]["containers"][0]
        self._folder = nodes.folder / self._name
        self._folder.mkdir()
        self._log = self._folder / "log"
        self._log.touch()
        self._group = _own_group() / self._name
        self._deleted = threading.Event()
        self._grace = 30.0
        self._started = now()
        nodes.hosts.add(self._name)
        self.address = nodes.hosts.address(self._name)
        self.resolve([])
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"metadata": {"name": self._name}, "target": target}
        nodes.client.request("POST", f"{self._path}/binding", binding)
        self._thread = threading.Thread(target=self._run, name=f"pod {self._name}")
        self._thread.start()

    def delete(self, grace: float) -> None:
        """End the pod within a time, in the background."""
        if not self._deleted.is_set():
            self._grace = grace
            self._deleted.set()

    def end(self) -> None:
        """Kill the pod and wait for its end."""
        self.delete(0)
        self._thread.join()

    def log(self) -> str:
        """Return what the pod has printed, after its name."""
        return f"== {self._name}\n{self._log.read_text(errors='replace')}"

    def resolve(self, lines: list[str]) -> None:
        """Write the names that the pod can resolve: its own, which no other can, and these."""
        own = ["127.0.0.1 localhost", f"{self.address} {self._name[:63]}"]
        # In place: the file is mounted.
        (self._folder / "hosts").write_text("\n".join([*own, *lines]) + "\n")

    def _run(self) -> None:
        try:
            self._live()
        except Exception:
            self._nodes.errors.append(traceback.format_exc())
        finally:
            self.is_over = True
            self._nodes.hosts.remove(self._name)
            with contextlib.suppress(OSError):
                self._group.rmdir()

    def _live(self) -> None:
        counter = self._limit_memory()
        script = self._write_volumes()
        command = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        command = [*self._nodes.hosts.network(self._name), *command, "sh", "-ec", script]
        if counter is not None:
            join = 'echo 0 > "$0" && exec "$@"'
            command = ["sh", "-c", join, str(counter.with_name("cgroup.procs")), *command]
        with self._log.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment())
        self._set_status("Running", {"running": {"startedAt": self._started}}, ready=True)
        is_out_of_memory = False
        while process.poll() is None and not self._deleted.wait(0.1):
            # As kubelets do where cgroups are of version 2: all processes of the container.
            if counter is not None and "oom_kill 0" not in counter.read_text():
                is_out_of_memory = True
                break
        if self._deleted.is_set() and process.poll() is None:
            self._terminate(process)
        is_killed = process.poll() is None
        if is_killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first_process(process), 9)
        process.wait()
        code = 137 if is_killed else process.returncode % 256
        reason = "OOMKilled" if is_out_of_memory else "Error" if code else "Completed"
        terminated = {"exitCode": code, "reason": reason, "startedAt": self._started}
        state = {"terminated": {**terminated, "finishedAt": now()}}
        self.is_over = True
        self._set_status("Failed" if code else "Succeeded", state, ready=False)
        self._deleted.wait()
        gone = {"gracePeriodSeconds": 0, "preconditions": {"uid": self._meta["uid"]}}
        self._nodes.client.request("DELETE", self._path, gone)

    def _terminate(self, process: subprocess.Popen[bytes]) -> None:
        """Run the hook before a container's end, signal it, and wait within the grace period."""
        deadline = time.monotonic() + self._grace
        first = self._first_process(process)
        hook = self._container.get("lifecycle", {}).get("preStop", {}).get("exec")
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if hook and self._grace:
                inside = ["nsenter", f"--target={first}", "--all", "--root"]
                become = ["setpriv", f"--reuid={USER}", "--regid=0", "--clear-groups"]
                command = [*inside, *become, *hook["command"]]
                env = self._environment()
                subprocess.run(command, env=env, timeout=self._grace, check=False)
            os.kill(first, 15)
            process.wait(max(0.0, deadline - time.monotonic()))

    @staticmethod
    def _first_process(process: subprocess.Popen[bytes]) -> int:
        """Return the process that has number 1 in the container; before its start, its parent."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0]) if children else process.pid

    def _limit_memory(self) -> Path | None:
        """Return what counts the processes that were killed for memory, where there are cgroups."""
        limit = self._container.get("resources", {}).get("limits", {}).get("memory")
        if limit is None or not os.access(self._group.parent, os.W_OK):
            return None
        self._group.mkdir()
        (self._group / "memory.limit_in_bytes").write_text(str(int(quantity(limit))))
        return self._group / "memory.oom_control"

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        image = {
            "PATH": path,
            "HOME": "/",
            "SPARK_HOME": str(SPARK_HOME),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "KUBERNETES_SERVICE_HOST": self._nodes.hosts.address(self._nodes.name),
            "KUBERNETES_SERVICE_PORT": "443",
        }
        inherited = (MARK, "JDK_JAVA_OPTIONS", "JAVA_HOME")
        image |= {name: os.environ[name] for name in inherited if name in os.environ}
        fields = {
            "status.podIP": self.address,
            "metadata.name": self._name,
            "metadata.namespace": self._namespace,
        }
        own = {}
        for entry in self._container.get("env", []):
            source = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            own[entry["name"]] = fields[source] if source else entry.get("value", "")
        return image | own

    def _write_volumes(self) -> str:
        """Return the script that makes the container's file system and starts it."""
        root, layer = self._folder / "root", self._folder / "layer"
        temporary = self._folder / "tmp"
        for folder in (root, layer, temporary):
            folder.mkdir()
        temporary.chmod(0o1777)
        quote = shlex.quote
        lines = ["mount --make-rprivate /", f"hostname {quote(self._name[:63])}"]
        lines += [f"mount -t tmpfs tmpfs {layer}", f"mkdir {layer}/upper {layer}/work"]
        options = f"lowerdir=/,upperdir={layer}/upper,workdir={layer}/work"
        lines += [f"mount -t overlay overlay -o {options} {root}", f"cd {root}"]
        lines += [
            "mount -t proc proc proc",
            "mount --rbind /sys sys",
            "mount --rbind /dev dev",
            "mount -t tmpfs -o size=64m,mode=1777 tmpfs dev/shm",
            f"mount --bind {temporary} tmp",
            f"mount --bind {self._folder}/hosts etc/hosts",
            "rm -f etc/resolv.conf",
            "chmod 755 root",  # where this machine's Python may be
            f"mkdir -p opt/spark/work-dir opt/spark/conf .{ACCOUNT}",
            f"cp {self._nodes.server.certificate} .{ACCOUNT}/ca.crt",
            f"printf %s {self._account_token()} > .{ACCOUNT}/token",
            f"printf %s {self._namespace} > .{ACCOUNT}/namespace",
            f"ln -s {ROOT} opt/horovod_spark_runner",
            f"chown {USER} opt/spark/work-dir",
            f"echo '{USER}:x:{USER}:0:anonymous:/opt/spark:/bin/false' >> etc/passwd",
        ]
        if gpus := int(self.requests.get(GPU, 0)):
            uuids = [f"GPU-{self.node}-{i}" for i in range(gpus)]
            listing = "".join(f"GPU {i}: H200 (UUID: {uuid})\n" for i, uuid in enumerate(uuids))
            program = f"#!/bin/sh\n[ $1 != -L ] || printf %s {quote(listing)}\n"
            (self._folder / "nvidia-smi").write_text(program)
            lines += [f"install -m 755 {self._folder}/nvidia-smi usr/bin/nvidia-smi"]
        volumes = {volume["name"]: volume for volume in self.item["spec"].get("volumes", [])}
        for mount in self._container.get("volumeMounts", []):
            target = quote(mount["mountPath"].lstrip("/"))
            lines += [f"mkdir -p {target}", self._mount(volumes[mount["name"]], target)]
        command = self._container.get("command", ["/opt/entrypoint.sh"])
        command = [*command, *self._container.get("args", [])]
        lines += [
            f"cp {HERE}/entrypoint.sh opt/entrypoint.sh",
            f"exec chroot {root} setpriv --reuid={USER} --regid=0 --clear-groups --no-new-privs "
            f"sh -c 'cd /opt/spark/work-dir && exec \"$@\"' sh {shlex.join(command)}",
        ]
        return "\n".join(lines)

    def _account_token(self) -> str:
        """Return a token of the pod's account; an empty one where there is no such account."""
        account = self.item["spec"].get("serviceAccountName", "default")
        path = f"namespaces/{self._namespace}/serviceaccounts/{account}/token"
        answer = self._nodes.client.request("POST", path, {"spec": {}})
        token: str = answer["status"]["token"] if answer else ""
        return token

    def _mount(self, volume: dict[str, Any], target: str) -> str:
        if claim := volume.get("persistentVolumeClaim"):
            folder = self._nodes.claims[claim["claimName"]]
            return f"mount --bind {shlex.quote(str(folder))} {target}"
        source = self._folder / "volumes" / volume["name"]
        source.mkdir(parents=True)
        source.chmod(0o777)
        if "configMap" in volume:
            self._write_map(source, volume["configMap"])
        elif volume.get("emptyDir", {}).get("medium") == "Memory":
            size = int(quantity(volume["emptyDir"].get("sizeLimit", "1Gi")))
            return f"mount -t tmpfs -o size={size},mode=1777 tmpfs {target}"
        return f"mount --bind {source} {target}"

    def _write_map(self, folder: Path, wanted: dict[str, Any]) -> None:
        """Write a map's files, once there is one: it may come after the pod."""
        deadline = time.monotonic() + 60
        path = f"namespaces/{self._namespace}/configmaps/{wanted['name']}"
        while (found := self._nodes.client.request("GET", path)) is None:
            assert time.monotonic() < deadline, f"no {path}"
            time.sleep(0.2)
        paths = {item["key"]: item["path"] for item in wanted.get("items", [])}
        for key, text in found.get("data", {}).items():
            (folder / paths.get(key, key)).write_text(text)

    def _set_status(self, phase: str, state: dict[str, Any], *, ready: bool) -> None:
        container = {
            "name": self._container["name"],
            "image": self._container["image"],
            "imageID": "",
            "ready": ready,
            "restartCount": 0,
            "started": ready,
            "state": state,
        }
        truth = {True: "True", False: "False"}
        conditions = [{"type": "PodScheduled", "status": "True"}]
        conditions += [
            {"type": kind, "status": truth[ready]} for kind in ("ContainersReady", "Ready")
        ]
        status = {
            "phase": phase,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self._started,
            "conditions": conditions,
            "containerStatuses": [container],
        }
        self._nodes.client.request("PATCH", f"{self._path}/status", {"status": status})


def _own_group() -> Path:
    """Return this process's folder of cgroups for memory, which may not be there."""
    found = re.search(r"^\d+:memory:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    return CGROUPS / (found[1].lstrip("/") if found else "")


def requests(item: dict[str, Any]) -> dict[str, float]:
    """Return what a pod requests."""
    resources = item["spec"]["containers"][0].get("resources", {})
    wanted = {**resources.get("limits", {}), **resources.get("requests", {})}
    return {name: quantity(text) for name, text in wanted.items()}


def quantity(text: str) -> float:
    """Return a quantity such as ``"500m"`` or ``"2Gi"`` as a number."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    return float(text.removesuffix(unit)) * UNITS.get(unit, 1)


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
