"""The same job on Spark's kinds of cluster, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mpi,
    pytest.mark.spark,
    pytest.mark.timeout(1200),
]

HERE = Path(__file__).parent
STANDALONE = HERE.parent.parent / "scripts" / "standalone"


def run_job(
    master: str, run_dir: Path, *given: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Train on ``master``; ``given`` are what else `job` does, and settings."""
    return subprocess.run(
        [sys.executable, str(HERE / "job.py"), master, str(run_dir), *given],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, **env},
    )


def result_of(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert run.returncode == 0, run.stderr[-4000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def check(result: dict[str, Any]) -> None:
    assert [place["rank"] for place in result["places"]] == [0, 1]
    assert [place["local_rank"] for place in result["places"]] == [0, 1]
    assert {place["size"] for place in result["places"]} == {2}
    assert len(result["history"]) == 2
    assert result["accuracy"] > 0.7


def check_search(result: dict[str, Any]) -> None:
    assert result["search"] == {
        "states": ["finished", "finished"],
        "best": {"rate": 0.01},
        "predicted": 5,
        "study": [".lock", "data", "journal.log", "study.json", "trials"],
    }


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A master and two workers of one core each, on this machine."""
    place = str(tmp_path_factory.mktemp("standalone") / "cluster")
    started = subprocess.run(
        [str(STANDALONE), "start", place, "2", "1", "1g"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HSR_VENV": sys.prefix},
    )
    try:
        assert started.returncode == 0, started.stderr
        yield started.stdout.strip()
    finally:
        subprocess.run([str(STANDALONE), "stop", place], check=True)


@pytest.fixture(scope="module")
def of_encrypted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of a job where Spark encrypts and all is on this machine."""
    encrypted = ("spark.network.crypto.enabled=true", "spark.authenticate=true")
    secret = "spark.authenticate.secret=only-for-this-test"
    run_dir = tmp_path_factory.mktemp("encrypted") / "run"
    return result_of(run_job("local-cluster[2,1,1024]", run_dir, *encrypted, secret))


def test_local_cluster_with_an_executor_per_rank(of_encrypted: dict[str, Any]) -> None:
    check(of_encrypted)
    assert len({place["executor"] for place in of_encrypted["places"]}) == 2


@pytest.fixture(scope="module")
def of_standalone(standalone: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became, in one session, of a job and of functions, the last three of which want more.

    They want one core for each rank, two, a GPU, and one more rank than there are cores. Spark
    would run slow tasks twice, and leave out executors that tasks failed on.
    """
    ask = {"what": "where", "start_timeout": 1}
    asked = ({"cpus": 1}, {"cpus": 2}, {"gpu": 1})
    requests = [{**ask, "num_workers": 2, "resources": resources} for resources in asked]
    requests.append({**ask, "num_workers": 3})
    settings = ["spark.executor.memory=512m", "spark.excludeOnFailure.enabled=true"]
    settings += [f"spark.speculation{key}" for key in ("=true", ".multiplier=1.1", ".quantile=0.1")]
    given = ["search", *map(json.dumps, requests), *settings]
    return result_of(run_job(standalone, tmp_path_factory.mktemp("standalone") / "run", *given))


@pytest.mark.thorough
def test_standalone_cluster(of_standalone: dict[str, Any]) -> None:
    check(of_standalone)
    check_search(of_standalone)


@pytest.mark.thorough
def test_resources_of_one_stage(of_standalone: dict[str, Any]) -> None:
    one, two, gpu, _ = of_standalone["answers"]
    assert [r["rank"] for r in one["results"]] == [0, 1]
    assert two["error"] == "NotEnoughSlotsError", two
    assert re.search(r"2 slots.* 2 cores.*\b0", two["message"])
    assert gpu["error"] == "EnvironmentProblem", gpu
    assert "spark.executor.resource.gpu.amount" in gpu["message"]


@pytest.mark.thorough
def test_standalone_cluster_with_too_few_slots(of_standalone: dict[str, Any]) -> None:
    too_few = of_standalone["answers"][-1]
    assert too_few["error"] == "NotEnoughSlotsError", too_few
    assert re.search(r"3 slots.* 1 core .*\b2", too_few["message"])


@pytest.mark.thorough
def test_executors_without_the_package_are_explained(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    run = run_job("local[2]", tmp_path / "run", PYSPARK_PYTHON=str(bare / "bin" / "python"))
    assert run.returncode != 0
    assert re.search("EnvironmentProblem: .*Python.*executors.*module", run.stderr)


@pytest.fixture(scope="module")
def of_connect(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became, on one server, of functions of two and of three ranks, and a job."""
    requests = [{"what": "where", "num_workers": ranks} for ranks in (2, 3)]
    run_dir = tmp_path_factory.mktemp("connect") / "run"
    return result_of(run_job("connect:local[2]", run_dir, "search", *map(json.dumps, requests)))


@pytest.mark.thorough
def test_spark_connect(of_connect: dict[str, Any]) -> None:
    check(of_connect)
    check_search(of_connect)


@pytest.mark.thorough
def test_functions_on_spark_connect(of_connect: dict[str, Any]) -> None:
    ran, too_many = of_connect["answers"]
    assert [(r["rank"], r["size"], r["sum"]) for r in ran["results"]] == [(0, 2, 1.0), (1, 2, 1.0)]
    assert too_many["error"] == "NotEnoughSlotsError"
    assert re.search(r"3 slots.* 1 core .*\b2", too_many["message"])


def test_encrypted_spark_is_not_undermined(
    of_encrypted: dict[str, Any], standalone: str, tmp_path: Path
) -> None:
    check(of_encrypted)  # all on this machine
    run = run_job(standalone, tmp_path / "run", "spark.ssl.enabled=true")
    assert run.returncode != 0
    assert "EnvironmentProblem" in run.stderr
    assert "allow_unencrypted=True" in run.stderr
