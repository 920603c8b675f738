"""Spark's packages of Delta Lake, Iceberg and S3, fetched once into the cache.

They exist for earlier releases of Spark than the tests' own, so one of these is fetched, too: pip
gets it, and its own Ivy the packages from Maven Central. Of Amazon's client, 12 MB of modules stand
for the bundle of 690 MB that hadoop-aws names.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from horovod_spark_runner.commands.build_horovod import default_cache

# The newest that both Delta Lake and Iceberg support.
SPARK = "4.1.4"
DELTA, ICEBERG, HADOOP, AWS = "4.4.0", "1.12.0", "3.4.2", "2.29.52"
# Organisation, module, version; those of Amazon with what they depend on.
MODULES = (
    ("io.delta", "delta-spark_4.1_2.13", DELTA),
    ("io.delta", "delta-storage", DELTA),
    ("io.delta", "delta-kernel-api", DELTA),
    ("io.delta", "delta-kernel-defaults", DELTA),
    ("org.apache.iceberg", "iceberg-spark-runtime-4.1_2.13", ICEBERG),
    ("org.apache.hadoop", "hadoop-aws", HADOOP),
    ("software.amazon.awssdk", "s3", AWS),
    ("software.amazon.awssdk", "s3-transfer-manager", AWS),
    ("software.amazon.awssdk", "sts", AWS),
)


def fetch_packages() -> tuple[Path, Path]:
    """Return the folders of PySpark and of the packages; fetch them if they are not there.

    Skips the test where they cannot be had.
    """
    digest = hashlib.sha256(repr((SPARK, MODULES)).encode()).hexdigest()[:8]
    cache = default_cache()
    place = cache / f"tables-{digest}"
    if not place.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            fetched = Path(folder, "fetched")
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target"]
            _run([*pip, str(fetched / "spark"), f"pyspark=={SPARK}"])
            _fetch_jars(fetched, Path(folder))
            fetched.rename(place)
    return place / "spark", place / "jars"


def _fetch_jars(fetched: Path, folder: Path) -> None:
    lines = ['<ivy-module version="2.0"><info organisation="tests" module="tables"/>']
    lines.append('<configurations><conf name="default"/></configurations><dependencies>')
    for organisation, name, version in MODULES:
        scope = "default" if "amazon" in organisation else "master"
        lines.append(
            f'<dependency org="{organisation}" name="{name}" rev="{version}" '
            f'conf="default->{scope}"/>'
        )
    # Spark has these.
    lines.append('<exclude org="org.slf4j"/><exclude org="io.netty"/></dependencies></ivy-module>')
    wanted = folder / "ivy.xml"
    wanted.write_text("\n".join(lines))
    (ivy,) = (fetched / "spark" / "pyspark" / "jars").glob("ivy-*.jar")
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else "java"
    target = f"{fetched}/jars/[artifact]-[revision].[ext]"
    command = [java, "-jar", str(ivy), "-cache", str(folder / "ivy"), "-ivy", str(wanted)]
    _run([*command, "-confs", "default", "-retrieve", target])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        pytest.skip(f"no tables to test with: {' '.join(command)}: {said}")
