"""Hadoop's own servers for tests: HDFS and YARN on hosts with names of their own.

Maven fetches them once into the cache, in the version of Spark's Hadoop client.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from horovod_spark_runner.commands.build_horovod import default_cache
from tests.cluster.hosts import Hosts
from tests.leftovers import MARK
from tests.spark_home import SPARK_HOME

ROOT = Path(__file__).parents[2]
BIN = Path(sys.prefix) / "bin"
SERVER = "org.apache.hadoop.yarn.server."
NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
DATA_NODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
RESOURCE_MANAGER = SERVER + "resourcemanager.ResourceManager"
NODE_MANAGER = SERVER + "nodemanager.NodeManager"
FAST = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Of Hadoop on a Java after 8.
OPENED = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in ("java.lang", "java.net")]
SECONDS_TO_START = 90
# Variables of a node manager that its containers have: Hadoop's default, and the tests' own.
KEPT: tuple[str, ...] = ("JAVA_HOME", "HADOOP_CONF_DIR", "PATH", "LANG", "TZ")
KEPT += (MARK, "JDK_JAVA_OPTIONS", "LD_PRELOAD", "TMPDIR")
LOGGING = """
log4j.rootLogger=INFO,out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.target=System.err
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d{HH:mm:ss} %p %c{1}: %m%n
"""


class Yarn:
    """A resource manager and HDFS on the first host, a node manager on each.

    Use as a context manager, which skips the test where Hadoop or hosts cannot be had. Containers
    are those of Hadoop's `DefaultContainerExecutor`: processes of the node manager's user.

    Args:
        folder: an empty folder for files, settings and logs.
        names: of the hosts.
        memory: MB that each node manager gives to containers.
        sites: settings beyond the default ones, by file such as ``"yarn-site"``.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        *,
        memory: int = 4096,
        sites: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.names = list(names)
        self.conf = folder / "conf"
        self._folder = folder
        self._memory = memory
        self._sites = sites or {}
        self._running = contextlib.ExitStack()
        self._managers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Yarn:
        jars = fetch()
        self._folder.mkdir(exist_ok=True)
        with contextlib.ExitStack() as running:
            self.hosts = running.enter_context(Hosts(self._folder / "hosts", self.names))
            self.url = f"hdfs://{self.names[0]}:8020"
            self._write_settings()
            self._classes = os.pathsep.join([str(self.conf), f"{jars}/*"])
            self._running = running
            first = self.names[0]
            self._await(self._start(first, NAME_NODE, "-format", "-nonInteractive"), "formatted")
            names = self._start(first, NAME_NODE)
            resources = self._start(first, RESOURCE_MANAGER)
            managers = [self.start_node(name) for name in self.names]
            self._await(names, "NameNode RPC up")
            self._await(self._start(first, DATA_NODE), "Successfully sent block report")
            self._await(resources, "Transitioned to active state")
            for log in managers:
                self._await(log, "Registered with ResourceManager")
            anybody = ("-D", "fs.permissions.umask-mode=000")
            self.hadoop("fs", *anybody, "-mkdir", "/tmp", "/user", "/runs")
            self._running = running.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.close()

    def start_node(self, name: str) -> Path:
        """Start the node manager of a host; return its log."""
        return self._start(name, NODE_MANAGER)

    def stop_node(self, name: str) -> None:
        """Kill the node manager of a host, and leave its containers."""
        self._managers[name].kill()
        self._managers[name].wait()

    def hadoop(self, command: str, *arguments: str, user: str = "root", host: str = "") -> str:
        """Run ``hadoop fs``, ``yarn application`` or ``yarn logs``; return what it prints."""
        main = {
            "fs": "org.apache.hadoop.fs.FsShell",
            "logs": "org.apache.hadoop.yarn.client.cli.LogsCLI",
            "node": "org.apache.hadoop.yarn.client.cli.NodeCLI",
        }.get(command)
        given = list(arguments) if main else [command, *arguments]
        main = main or "org.apache.hadoop.yarn.client.cli.ApplicationCLI"
        done = self.hosts.run(
            host or self.names[0],
            [*self._java(), "-cp", self._classes, main, *given],
            {"HADOOP_CONF_DIR": str(self.conf), "HADOOP_USER_NAME": user},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def environment(self, **env: str) -> dict[str, str]:
        """Return the environment of a command that submits, on the first host."""
        own = {
            "HADOOP_CONF_DIR": str(self.conf),
            "SPARK_HOME": str(SPARK_HOME),
            "PYSPARK_PYTHON": sys.executable,
            "JAVA_HOME": _java_home(),
        }
        return {**self.hosts.environment(self.names[0], own), **env}

    def submit(
        self, *arguments: str, mode: str = "client", settings: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None, without: Sequence[str] = (),
        properties: Path | None = None,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """Start ``spark-submit`` on the first host.

        Args:
            arguments: the script and its arguments.
            mode: deploy mode.
            settings: of Spark.
            env: changes of the environment.
            without: variables that it does not have.
            properties: a file of settings, in place of what else the executors have.
        """
        executors = {
            "spark.executor.instances": "2",
            "spark.executor.memory": "512m",
            # One executor and one driver fit on a host, two executors do not.
            "spark.executor.memoryOverhead": "2g",
        }
        own = {
            # As a cluster with Spark on every host; else each submission uploads Spark's jars.
            "spark.yarn.jars": f"local:{SPARK_HOME}/jars/*",
            "spark.driver.memory": "512m",
            "spark.driver.memoryOverhead": "768m",
            "spark.yarn.am.memory": "512m",
            "spark.ui.enabled": "false",
            "spark.log.level": "WARN",
            **({} if properties else executors),
            **(settings or {}),
        }
        confs = [word for item in own.items() for word in ("--conf", "=".join(item))]
        command = [str(BIN / "spark-submit"), "--master", "yarn", "--deploy-mode", mode]
        command += ["--properties-file", str(properties)] if properties else []
        environment = self.environment(**(env or {}))
        for name in without:
            environment.pop(name, None)
        return subprocess.Popen(
            self.hosts.command(self.names[0], [*command, *confs, *arguments]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self._folder,
        )

    def pids(self, name: str) -> list[str]:
        """Return the processes of a host."""
        return self.hosts._pids(self.hosts.space(name))

    def local_files(self, name: str) -> list[str]:
        """Return the application folders that a host's node manager still has."""
        users = self._folder / name / "local" / "usercache"
        return sorted(str(path) for path in users.glob("*/appcache/*"))

    def log_of(self, server: str) -> str:
        """Return the newest log of a server, such as `RESOURCE_MANAGER`."""
        return max(
            self._folder.glob(f"*-{server.rpartition('.')[2]}-*.log"), key=os.path.getmtime
        ).read_text(errors="replace")

    def _java(self) -> list[str]:
        return [f"{_java_home()}/bin/java", *FAST.split(), *OPENED, "-Xmx256m"]

    def _start(self, name: str, main: str, *arguments: str) -> Path:
        folder = self._folder / name
        short = main.rpartition(".")[2]
        log = self._folder / f"{name}-{short}-{len(list(self._folder.glob('*.log')))}.log"
        env = {"JAVA_HOME": _java_home(), "HADOOP_CONF_DIR": str(self.conf)}
        command = [*self._java(), f"-Dtests.folder={folder}", f"-Dtests.host={name}"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.hosts.command(name, [*command, "-cp", self._classes, main, *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.hosts.environment(name, env),
            )
        self._running.callback(_end, process)
        if main == NODE_MANAGER:
            self._managers[name] = process
        return log

    def _await(self, log: Path, pattern: str) -> None:
        deadline = time.monotonic() + SECONDS_TO_START
        while not re.search(pattern, text := log.read_text(errors="replace")):
            assert time.monotonic() < deadline, f"no {pattern!r} in {log}: {text[-3000:]}"
            time.sleep(0.1)

    def _write_settings(self) -> None:
        first = self.names[0]
        sites: dict[str, dict[str, str]] = {
            "core-site": {
                "fs.defaultFS": self.url,
                "hadoop.tmp.dir": "${tests.folder}",
                "hadoop.http.staticuser.user": "root",
            },
            "hdfs-site": {
                "dfs.replication": "1",
                "dfs.namenode.rpc-bind-host": "0.0.0.0",
                "dfs.datanode.hostname": "${tests.host}",
            },
            "yarn-site": {
                "yarn.resourcemanager.hostname": first,
                "yarn.nodemanager.hostname": "${tests.host}",
                "yarn.nodemanager.local-dirs": "${tests.folder}/local",
                "yarn.nodemanager.log-dirs": "${tests.folder}/logs",
                "yarn.nodemanager.resource.memory-mb": str(self._memory),
                "yarn.nodemanager.resource.cpu-vcores": "8",
                "yarn.nodemanager.vmem-check-enabled": "false",
                "yarn.nodemanager.container-monitor.interval-ms": "500",
                # Else the node manager leaves it to cgroups, which are not there.
                "yarn.nodemanager.resource.memory.enforced": "false",
                "yarn.nodemanager.delete.debug-delay-sec": "0",
                "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage":
                    "99.9",
                "yarn.nodemanager.env-whitelist": ",".join(KEPT),
                "yarn.scheduler.minimum-allocation-mb": "128",
                "yarn.scheduler.maximum-allocation-mb": str(self._memory),
                "yarn.log-aggregation-enable": "true",
                "yarn.nodemanager.remote-app-log-dir": "/tmp/logs",
                # Lost hosts are noticed in seconds rather than ten minutes.
                "yarn.nm.liveness-monitor.expiry-interval-ms": "15000",
                "yarn.resourcemanager.nm.liveness-monitor.interval-ms": "1000",
                "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "200",
            },
            "capacity-scheduler": {
                "yarn.scheduler.capacity.maximum-am-resource-percent": "1",
                "yarn.scheduler.capacity.resource-calculator":
                    "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator",
                "yarn.scheduler.capacity.root.queues": "default,small",
                "yarn.scheduler.capacity.root.default.capacity": "70",
                "yarn.scheduler.capacity.root.default.maximum-capacity": "100",
                "yarn.scheduler.capacity.root.small.capacity": "30",
                "yarn.scheduler.capacity.root.small.maximum-capacity": "30",
            },
        }  # fmt: skip
        for name, more in self._sites.items():
            sites.setdefault(name, {}).update(more)
        for page in ("hdfs", "datanode", "static"):  # of their web servers
            (self.conf / "webapps" / page).mkdir(parents=True, exist_ok=True)
        (self.conf / "log4j.properties").write_text(LOGGING)
        for name, settings in sites.items():
            lines = "".join(
                f"<property><name>{key}</name><value>{escape(value)}</value></property>\n"
                for key, value in settings.items()
            )
            text = f"<configuration>\n{lines}</configuration>\n"
            (self.conf / f"{name}.xml").write_text(text)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _java_home() -> str:
    java = os.environ.get("JAVA_HOME")
    return java or str(Path(shutil.which("java") or "/usr/bin/java").resolve().parents[1])


def fetch() -> Path:
    """Return the folder of Hadoop's jars, fetched by Maven if it is not there yet."""
    (client,) = SPARK_HOME.glob("jars/hadoop-client-api-*.jar")
    version = client.stem.rpartition("-")[2]
    cache = default_cache()
    place = cache / f"hadoop-{version}"
    if not place.is_dir():
        if shutil.which("mvn") is None:
            pytest.skip("no YARN to test with: no mvn (Debian: apt-get install maven)")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = ["mvn", "-B", "-q", "-f", str(Path(__file__).with_name("pom.xml"))]
            command += ["dependency:copy-dependencies", "-DincludeScope=runtime"]
            command += [f"-Dhadoop={version}", f"-DoutputDirectory={folder}/jars"]
            # Maven is no JVM of the tests': their options are not for it.
            env = {key: value for key, value in os.environ.items() if key != "JDK_JAVA_OPTIONS"}
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, env=env, timeout=540
                )
                failed = done.returncode != 0 and done.stdout[-500:] + done.stderr[-500:]
            except subprocess.TimeoutExpired as error:
                failed = str(error)
            if failed:
                pytest.skip(f"no YARN to test with: Maven could not fetch Hadoop: {failed}")
            with contextlib.suppress(OSError):  # another lane was first
                Path(folder, "jars").rename(place)
    return place
