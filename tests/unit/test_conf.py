"""The settings in conf/ fit together; that Spark knows them, tests/spark/test_conf.py tells."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted(CONF.glob("*.conf"))


def settings(file: Path) -> dict[str, str]:
    lines = [line.strip() for line in file.read_text().splitlines()]
    pairs = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    # A comment behind a value would be part of it.
    assert all(len(pair) == 2 and "#" not in pair[1].split("#environment")[0] for pair in pairs)
    assert len({key for key, _ in pairs}) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("name", ["standalone", "yarn", "kubernetes"])
def test_applications_ask_for_gpus_and_for_a_fixed_set_of_executors(name: str) -> None:
    found = settings(CONF / f"{name}-gpu.conf")
    assert found["spark.dynamicAllocation.enabled"] == "false"
    assert found["spark.executor.resource.gpu.amount"] == found["spark.task.resource.gpu.amount"]
    assert found["spark.task.cpus"] == found["spark.executor.cores"]


def test_executors_get_the_python_of_the_archive() -> None:
    found = settings(CONF / "yarn-gpu.conf")
    name = found["spark.archives"].partition("#")[2]
    # Not spark.executorEnv.PYSPARK_PYTHON: the driver says which Python the executors start.
    assert found["spark.pyspark.python"] == f"./{name}/bin/python"
    assert "spark.executorEnv.PYSPARK_PYTHON" not in found


def test_gpus_of_containers_that_count_from_0_are_told_apart() -> None:
    """Two containers of one host, each of which is shown another GPU as number 0."""
    found = settings(CONF / "yarn-gpu.conf")
    given = {k.rpartition(".")[2]: v for k, v in found.items() if k.startswith("spark.executorEnv")}
    one, two = (addresses(f"GPU 0: A100 (UUID: GPU-{n}{n}-{n})\n", given) for n in "12")
    assert (one, two) == (["GPU-11-1"], ["GPU-22-2"])


def addresses(listing: str, environment: dict[str, str]) -> list[str]:
    """Return what the discovery script gives where ``nvidia-smi -L`` prints ``listing``."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "nvidia-smi")
        program.write_text(f"#!/bin/sh\n[ $1 = -L ] && printf '{listing}'\n")
        program.chmod(0o755)
        path = f"{folder}:{os.environ['PATH']}"
        script = CONF.parent / "scripts" / "discover_gpus.sh"
        done = subprocess.run(
            [str(script)],
            env={"PATH": path, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
    return list(json.loads(done.stdout)["addresses"])


def test_the_readme_names_every_file() -> None:
    text = (CONF / "README.md").read_text()
    assert FILES
    assert all(f"`{file.name}`" in text for file in FILES)
