"""Two hosts, each with its own name, address and network stack, and a Spark worker on each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner.cluster.protocol.processes import GUARD_NAME, READY_NAME

from . import counted
from .host_cluster import HostCluster
from .hosts import Hosts

# What all functions take falls on the first test.
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mpi,
    pytest.mark.spark,
    pytest.mark.timeout(1200),
]

HERE = Path(__file__).parent
NODES = ("hsr-a", "hsr-b")
SIZES = (2, 4)
KINDS = ("killed", "stopped", "torch")


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
            # Two ranks would fit on the host whose executor comes first.
            f"spark.cores.max={2 * len(NODES)}",
            "spark.scheduler.minRegisteredResourcesRatio=1.0",
        ]

    def start(self, *requests: dict[str, Any]) -> subprocess.Popen[str]:
        return self.popen(self.arguments(*requests))


def answers_of(job: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = job.communicate(timeout=480)
    assert job.returncode == 0, err[-4000:]
    answers: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
    return answers


@dataclass(frozen=True)
class Outcome:
    """Results of functions on two hosts, the second of which has vanished under the last.

    Attributes:
        answers: the functions', in order.
        unplugged: when the host vanished.
        left: processes of ranks and MPI that the other host still had half a minute after all.
    """

    answers: list[dict[str, Any]]
    unplugged: float
    left: list[str]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("hosts")
    requests = [
        {"what": "where", "num_workers": 3},
        {"what": "where_by_spark", "num_workers": 3},
        {"what": "forever", "num_workers": 2, "heartbeat_timeout": 15},
    ]
    with Hosts(folder / "hosts", NODES) as hosts:
        job = Cluster(hosts, NODES, folder).start(*requests)
        assert job.stderr is not None
        lines: list[str] = []
        while sum("in the loop" in line for line in lines) < 2:
            lines.append(job.stderr.readline())
            assert lines[-1], "".join(lines)[-4000:]
        hosts.unplug(NODES[1])
        unplugged = time.time()
        answers = answers_of(job)
        deadline = time.monotonic() + 30
        while (left := ranks_on(hosts, NODES[0])) and time.monotonic() < deadline:
            time.sleep(0.2)
    return Outcome(answers, unplugged, left)


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of 2 and 4 ranks, of ranks that add, and of trainings by `AsyncServer`."""
    folder = tmp_path_factory.mktemp("asynchronous")
    requests: list[dict[str, Any]] = [{"what": "where", "num_workers": ranks} for ranks in SIZES]
    requests.append({"what": "accumulates", "num_workers": 4, "each": 25_000})
    for kind in KINDS:
        requests.append({"what": "counted", "run_dir": str(folder / kind), "kind": kind})
    with Hosts(folder / "hosts", NODES) as hosts:
        return answers_of(Cluster(hosts, NODES, folder).start(*requests))


def ranks_on(hosts: Hosts, name: str) -> list[str]:
    """Return the processes of ranks and of MPI, but those that wait for the executor's next run."""
    return [
        process
        for process in hosts.processes(name)
        if ("horovod_spark_runner.cluster" in process or "prte" in process)
        and not process.startswith((READY_NAME, GUARD_NAME))
    ]


def check_world(results: list[dict[str, Any]], ranks: int) -> None:
    assert [r["rank"] for r in results] == list(range(ranks))
    assert {(r["size"], r["sum"]) for r in results} == {(ranks, float(sum(range(ranks))))}
    by_host: dict[str, list[int]] = {}
    for result in results:
        by_host.setdefault(result["host"], []).append(result["local_rank"])
        assert result["cross_rank"] == list(by_host).index(result["host"])
    assert set(by_host) == set(NODES)
    assert all(locals_ == list(range(len(locals_))) for locals_ in by_host.values())


def test_ranks_on_two_hosts(outcome: Outcome) -> None:
    answer, through_spark, _ = outcome.answers
    check_world(answer["results"], 3)
    assert "all_gather" not in answer["timings"]
    check_world(through_spark["results"], 3)
    assert through_spark["timings"]["all_gather"] > 0


@pytest.mark.thorough
def test_two_and_four_ranks_on_two_hosts(asynchronous: list[dict[str, Any]]) -> None:
    for ranks, answer in zip(SIZES, asynchronous, strict=False):
        check_world(answer["results"], ranks)


@pytest.mark.thorough
def test_sums_of_what_ranks_of_two_hosts_add_are_exact(asynchronous: list[dict[str, Any]]) -> None:
    answer = asynchronous[len(SIZES)]
    assert (
        answer["results"]
        == [
            {
                "wrong": {"int32": 0, "float32": 0},
                "counted": True,
                "accumulates": 100_000,
            }
        ]
        * 4
    )


@pytest.mark.thorough
def test_ranks_of_two_hosts_that_step_by_themselves_lose_no_update(
    asynchronous: list[dict[str, Any]],
) -> None:
    killed, stopped, undisturbed = asynchronous[len(SIZES) + 1 :]
    every = counted.EPOCHS * counted.PARTS
    for answer in (killed, undisturbed):
        assert set(answer["weights"]) == {every}
        # Each row is read once in an epoch.
        mean = (counted.ROWS - 1) / 2
        assert answer["labels"] == pytest.approx([mean] * counted.EPOCHS, rel=1e-6)
        assert 0 < sum(answer["late"]) <= every
        assert len(answer["late"]) <= 4 + 1 + 1
    assert undisturbed["endings"] == ["finished"]
    assert killed["endings"] == ["rank killed or lost", "finished"]
    assert killed["first_steps"][1] > 0
    # The other one shows where it waits; the one that was stopped is named.
    assert stopped["error"] == "StalledError"
    assert "asynchronous.py" in stopped["stacks"]["0"]
    assert "SIGSTOP" in stopped["stacks"]["1"]


def test_a_host_that_vanishes_without_a_word(outcome: Outcome) -> None:
    answer = outcome.answers[-1]
    assert answer["error"] == "RankFailedError", answer
    assert re.search("on hsr-b .* 15 s", answer["message"])
    # Detection takes the timeout and one heartbeat; then it is to be over soon.
    assert answer["ended"] - outcome.unplugged < 15 + 5 + 20
    assert outcome.left == []


@pytest.mark.thorough
def test_ranks_on_hosts_with_ipv6_only(tmp_path: Path) -> None:
    with Hosts(tmp_path / "hosts", NODES, ipv6=True) as hosts:
        cluster = Cluster(hosts, NODES, tmp_path)
        (answer,) = answers_of(cluster.start({"what": "where", "num_workers": 2}))
    check_world(answer["results"], 2)
    assert "all_gather" not in answer["timings"]
    assert {result["interface"] for result in answer["results"]} == {"=eth0"}
