"""MPI's own daemons on eight hosts, thirty-two ranks: launch, failure, clean-up."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .host_cluster import HostCluster
from .hosts import Hosts

pytestmark = [pytest.mark.thorough, pytest.mark.cluster, pytest.mark.mpi, pytest.mark.spark]

NAMES = tuple(f"hsr-{number}" for number in range(8))
RANKS = 32
JOB = str(Path(__file__).with_name("function_job.py"))


def run(cluster: HostCluster, *functions: str) -> list[dict[str, Any]]:
    address = cluster.hosts.address(cluster.driver)
    settings = [f"spark.driver.host={address}", "spark.executor.memory=512m"]
    # A light function, on machines with fewer cores than hosts.
    options = {"num_workers": RANKS, "start_timeout": 120}
    requests = [json.dumps({"what": what, **options}) for what in functions]
    command = [sys.executable, JOB, cluster.master, *requests, *settings]
    out, err = cluster.popen(command).communicate(timeout=560)
    assert out, err[-4000:]
    answers: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
    return answers


@pytest.mark.timeout(1200)
def test_thirty_two_ranks_on_eight_hosts(tmp_path: Path) -> None:
    with Hosts(tmp_path / "hosts", NAMES) as hosts:
        cluster = HostCluster(hosts, NAMES, tmp_path, cores=RANKS // len(NAMES))
        ran, failed = run(cluster, "light", "light_failure")
        results = ran["results"]
        assert [r["rank"] for r in results] == list(range(RANKS))
        assert {(r["size"], r["sum"]) for r in results} == {(RANKS, sum(range(RANKS)))}
        assert set(Counter(r["host"] for r in results).values()) == {RANKS // len(NAMES)}
        # A ring of hosts brings 2 x 7/8 of a large sum's bytes to each; to the one that Open MPI
        # has everything sent to, three times all.
        assert max(r["received"] for r in results) < 2

        assert failed["error"] == "RankFailedError", failed
        assert re.match(r"rank 17 on hsr-\d .*ValueError", failed["message"])
        moment = re.search(r"ValueError: at ([\d.]+)", failed["message"])
        assert moment is not None
        assert failed["ended"] - float(moment[1]) < 30
        deadline = time.monotonic() + 30
        while left := [
            process
            for name in NAMES
            for process in hosts.processes(name)
            if "horovod_spark_runner" in process or "prte" in process
        ]:
            assert time.monotonic() < deadline, left
            time.sleep(0.5)
