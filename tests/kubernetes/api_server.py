"""Kubernetes' own API server, from the cache, and etcd.

    python -m tests.kubernetes.api_server

builds it from the Go module proxy, which takes a quarter of an hour on two cores: no test does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner.commands.build_horovod import default_cache
from tests.cluster.hosts import Hosts

VERSION = "1.33.5"
PROGRAM = default_cache() / f"kubernetes-{VERSION}" / "kube-apiserver"
PROXY = "https://proxy.golang.org/k8s.io/kubernetes/@v"
PROGRAMS = {"etcd": "etcd-server", "kubectl": "kubernetes-client", "tini": "tini"}
PROGRAMS |= {"setpriv": "util-linux", "openssl": "openssl"}
TOKEN = "tests"
SECONDS_TO_START = 120


class ApiServer:
    """An API server without controllers on a host; who has `TOKEN` may do all, as an administrator.

    Use as a context manager, which skips the test where it cannot be had.
    """

    def __init__(self, hosts: Hosts, name: str, folder: Path) -> None:
        self._hosts = hosts
        self._name = name
        self._folder = folder
        self.url = f"https://{hosts.address(name)}:443"
        self.certificate = folder / "apiserver.crt"
        self.kubeconfig = folder / "kubeconfig"
        self._running = contextlib.ExitStack()

    def __enter__(self) -> ApiServer:
        program = find_program()
        self._folder.mkdir(parents=True, exist_ok=True)
        key = self._folder / "accounts.key"
        generated = ["openssl", "genrsa", "-out", str(key), "2048"]
        subprocess.run(generated, check=True, capture_output=True)
        tokens = self._folder / "tokens.csv"
        tokens.write_text(f"{TOKEN},tests,tests,system:masters\n")
        with contextlib.ExitStack() as running:
            data, peers = (
                f"--data-dir={self._folder}/etcd",
                "--listen-peer-urls=http://127.0.0.1:2380",
            )
            self._start(running, "etcd", data, peers, "--unsafe-no-fsync")
            self._start(
                running,
                str(program),
                "--etcd-servers=http://127.0.0.1:2379",
                f"--bind-address={self._hosts.address(self._name)}",
                "--secure-port=443",
                f"--cert-dir={self._folder}",
                f"--token-auth-file={tokens}",
                "--authorization-mode=RBAC",
                "--disable-admission-plugins=ServiceAccount",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={key}",
                f"--service-account-signing-key-file={key}",
                "--service-cluster-ip-range=10.96.0.0/16",
            )
            self._write_kubeconfig()
            self._await()
            self._running = running.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.close()

    def _start(self, running: contextlib.ExitStack, *command: str) -> None:
        log = running.enter_context((self._folder / f"{Path(command[0]).name}.log").open("wb"))
        process = subprocess.Popen(
            self._hosts.command(self._name, command),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        running.callback(process.wait)
        running.callback(process.kill)

    def _await(self) -> None:
        deadline = time.monotonic() + SECONDS_TO_START
        while True:
            # Its namespace "default" is the last of what the server makes for itself.
            get = ["kubectl", "get", "namespace", "default"]
            env = os.environ | {"KUBECONFIG": str(self.kubeconfig)}
            done = subprocess.run(
                self._hosts.command(self._name, get), env=env, capture_output=True, text=True
            )
            if done.returncode == 0:
                return
            if time.monotonic() > deadline:
                log = (self._folder / "kube-apiserver.log").read_text()[-3000:]
                raise AssertionError(f"no API server: {done.stderr}\n{log}")
            time.sleep(0.5)

    def _write_kubeconfig(self) -> None:
        cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        context = {"cluster": "tests", "user": "tests", "namespace": "default"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": "tests", "user": {"token": TOKEN}}],
            "contexts": [{"name": "tests", "context": context}],
            "current-context": "tests",
        }
        self.kubeconfig.write_text(json.dumps(config))


class Client:
    """Requests to the API server, from a thread that reaches it."""

    def __init__(self, server: ApiServer) -> None:
        self._url = server.url
        self._tls = ssl.create_default_context(cafile=str(server.certificate))
        handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._tls)]
        self._opener = urllib.request.build_opener(*handlers)

    def request(self, method: str, path: str, body: Any = None) -> dict[str, Any] | None:
        """Return the answer, or None where the object is not there (any more)."""
        kind = "merge-patch+json" if method == "PATCH" else "json"
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": f"application/{kind}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/api/v1/{path}", data, headers, method=method)
        try:
            with self._opener.open(request, timeout=20) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            if error.code in (404, 409):
                return None
            raise AssertionError(f"{method} {path}: {error.read().decode()}") from error


def find_program() -> Path:
    """Return the API server's program; skips the test where it, or another one, is missing."""
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian: apt-get install {package})")
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is missing: build it with python -m tests.kubernetes.api_server")
    return PROGRAM


def build() -> None:
    """Build the API server into the cache.

    Raises:
        FileNotFoundError: Go is not installed.
        URLError: the Go module proxy cannot be reached.
        CalledProcessError: Go could not build it.
    """
    with urllib.request.urlopen(f"{PROXY}/v{VERSION}.mod", timeout=30) as response:
        own = response.read().decode()
    language = re.search(r"^go (\S+)", own, re.MULTILINE)
    assert language is not None
    # Kubernetes' own file names its parts by folders, which are modules elsewhere.
    parts = re.findall(r"^\s*(\S+) => \./staging/", own, re.MULTILINE)
    lines = ["module apiserver", f"go {language[1]}", f"require k8s.io/kubernetes v{VERSION}"]
    lines += [f"replace {part} => {part} v0{VERSION[1:]}" for part in parts]
    names = {"gitVersion": f"v{VERSION}", "gitMajor": "1", "gitMinor": VERSION.split(".")[1]}
    flags = " ".join(f"-X k8s.io/component-base/version.{k}={v}" for k, v in names.items())
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PROGRAM.parent) as folder:
        Path(folder, "go.mod").write_text("\n".join(lines) + "\n")
        env = {**os.environ, "PATH": os.environ["PATH"] + ":/usr/local/go/bin"}
        env |= {"GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOPATH": f"{folder}/go"}
        env |= {"GOFLAGS": "-mod=mod -modcacherw -trimpath", "GOCACHE": f"{folder}/cache"}
        command = ["nice", "go", "build", "-ldflags", f"-s -w {flags}", "-o", "kube-apiserver"]
        command.append("k8s.io/kubernetes/cmd/kube-apiserver")
        subprocess.run(command, cwd=folder, env=env, check=True)
        Path(folder, "kube-apiserver").rename(PROGRAM)


if __name__ == "__main__":
    build()
