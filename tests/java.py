"""An archive of the classes that Spark loads, from which its JVMs start with less work.

The tests start many short-lived JVMs. Java keeps what it has parsed and checked of the classes of
one in a file that the others map (class data sharing); one that it does not fit goes without.
``python -m tests.java FILE`` makes it of what a session loads.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.spark_home import SPARK_HOME

ROOT = Path(__file__).parents[1]
# Spark's many short-lived JVMs start in half the time without the second compiler.
FAST = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# One for all checkouts: making it takes a minute.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hsr-tests")
MASTERS = ("local[2]", "local-cluster[2,1,1024]")


def options() -> str:
    """Return the options of Java for the tests' JVMs; make the archive if there is none."""
    archive = CACHE / f"spark-{_key()}.jsa"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not archive.exists():
                _have_made(archive)
    # Java would tell of every other program's classes that these are none of them.
    return f"{FAST} -XX:SharedArchiveFile={archive} -Xlog:cds=off -Xlog:cds+dynamic=off"


def _key() -> str:
    """Return what stands for this Java and this Spark."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    version = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    jars = SPARK_HOME / "jars"
    facts = [FAST, version, str(jars), jars.stat().st_mtime_ns]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _have_made(archive: Path) -> None:
    # They are large; one of another Java or Spark may be in use by turns with this one.
    for old in sorted(archive.parent.glob("*.jsa"), key=lambda path: path.stat().st_mtime)[:-1]:
        old.unlink()
    aside = archive.with_suffix(".new")
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "SPARK_"))}
    made = subprocess.run(
        [sys.executable, "-m", "tests.java", str(aside)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**settings, "JDK_JAVA_OPTIONS": FAST, "PYSPARK_PYTHON": sys.executable},
        timeout=480,
    )
    assert aside.exists(), f"no archive of Spark's classes: {made.stderr[-2000:]}"
    aside.rename(archive)


def main() -> None:
    """Use a session on each kind of master, in one JVM, and have that one leave the archive."""
    from pyspark.sql import SparkSession

    (target,) = sys.argv[1:]
    builder = SparkSession.builder.config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1")
    builder = builder.config("spark.driver.extraJavaOptions", f"-XX:ArchiveClassesAtExit={target}")
    for master in MASTERS:
        session = builder.master(master).getOrCreate()
        gateway = session.sparkContext._gateway
        with tempfile.TemporaryDirectory() as folder:
            _use(session, folder)
        session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


def _use(session: Any, folder: str) -> None:
    """Do what the tests do: write and read Parquet, compute in Python, in barrier stages, too."""

    def same(batches: Iterable[Any]) -> Iterable[Any]:
        yield from batches

    rows = session.range(0, 200, 1, 2)
    rows = rows.selectExpr("id", "array(float(id), 1.0f) as x", "cast(id % 10 as int) as y")
    rows.mapInArrow(same, rows.schema).write.parquet(f"{folder}/rows")
    read = session.read.parquet(f"{folder}/rows").repartition(2)
    read.groupBy("y").count().orderBy("y").collect()
    read.selectExpr("avg(array_position(x, array_max(x)))", "count(distinct y)").first()
    session.range(0, 2, 1, 2).mapInArrow(same, "id long", barrier=True).collect()
    session.createDataFrame([([1.0, 2.0], 1)], "x array<float>, y int").toPandas()


if __name__ == "__main__":
    main()
