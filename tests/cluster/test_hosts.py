"""Two hosts, each with its own name, address and network stack, and a Spark worker on each."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner.launch.shared.processes import GUARD_NAME, READY_NAME

from .host_cluster import HostCluster
from .hosts import Hosts

pytestmark = [pytest.mark.cluster, pytest.mark.mpi, pytest.mark.spark]

HERE = Path(__file__).parent
NODES = ("hsr-a", "hsr-b")


class Cluster(HostCluster):
    """Runs functions on both hosts."""

    def arguments(self, *requests: dict[str, Any]) -> list[str]:
        return [
            sys.executable,
            str(HERE / "function_job.py"),
            self.master,
            *map(json.dumps, requests),
            f"spark.driver.host={self.hosts.spark_address(NODES[0])}",
            "spark.executor.memory=512m",
        ]

    def run(self, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        done = self.hosts.run(NODES[0], self.arguments(*requests), self.env)
        assert done.returncode == 0, done.stderr[-4000:]
        answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return answers


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Hosts(tmp_path / "hosts", NODES) as hosts:
        yield Cluster(hosts, NODES, tmp_path)


def check_world(results: list[dict[str, Any]], ranks: int) -> None:
    assert [r["rank"] for r in results] == list(range(ranks))
    assert {(r["size"], r["sum"]) for r in results} == {(ranks, float(sum(range(ranks))))}
    by_host: dict[str, list[int]] = {}
    for result in results:
        by_host.setdefault(result["host"], []).append(result["local_rank"])
        assert result["cross_rank"] == list(by_host).index(result["host"])
    assert set(by_host) == set(NODES)
    assert all(locals_ == list(range(len(locals_))) for locals_ in by_host.values())


def test_ranks_on_two_hosts(cluster: Cluster) -> None:
    sizes = (2, 3, 4)
    *answers, through_spark = cluster.run(
        *({"what": "where", "num_workers": ranks} for ranks in sizes),
        {"what": "where_by_spark", "num_workers": 3},
    )
    for ranks, answer in zip(sizes, answers, strict=True):
        check_world(answer["results"], ranks)
        assert "all_gather" not in answer["timings"]
    check_world(through_spark["results"], 3)
    assert through_spark["timings"]["all_gather"] > 0


def test_ranks_on_hosts_with_ipv6_only(tmp_path: Path) -> None:
    with Hosts(tmp_path / "hosts", NODES, ipv6=True) as hosts:
        (answer,) = Cluster(hosts, NODES, tmp_path).run({"what": "where", "num_workers": 2})
    check_world(answer["results"], 2)
    assert "all_gather" not in answer["timings"]
    assert {result["interface"] for result in answer["results"]} == {"=eth0"}


def test_a_host_that_vanishes_without_a_word(cluster: Cluster) -> None:
    request = {"what": "forever", "num_workers": 2, "heartbeat_timeout": 15}
    job = cluster.popen(cluster.arguments(request))
    assert job.stderr is not None
    lines: list[str] = []
    while sum("in the loop" in line for line in lines) < 2:
        lines.append(job.stderr.readline())
    cluster.hosts.unplug(NODES[1])
    cut = time.time()
    out, err = job.communicate(timeout=120)
    (answer,) = json.loads(out.splitlines()[-1])
    assert answer["error"] == "RankFailedError", err
    assert "on hsr-b failed: no sign of life for 15 s" in answer["message"]
    # Detection takes the timeout and one heartbeat; then it is to be over soon.
    assert answer["ended"] - cut < 15 + 5 + 20
    deadline = time.monotonic() + 30
    while left := [
        process
        for process in cluster.hosts.processes(NODES[0])
        if ("launch" in process or "prte" in process)
        # It waits for the executor's next run.
        and not process.startswith((READY_NAME, GUARD_NAME))
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
