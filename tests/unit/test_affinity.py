"""Which cores a rank runs on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_spark_runner.cluster.worker.affinity import (
    _share_of_cores,
    bind_to_cores,
    side_by_side,
)

SHOW = """
import os, sys, threading, time
from horovod_spark_runner.cluster.worker.affinity import bind_to_cores
os.sched_setaffinity(0, map(int, sys.argv[1:]))
early = threading.Thread(target=time.sleep, args=(60,), daemon=True)
early.start()
bind_to_cores(os.environ)
print(*(sorted(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")), sep="\\n")
"""


def test_shares_are_disjoint_and_cover_all_cores() -> None:
    allowed = [0, 2, 3, 5, 8, 9, 10, 11]
    shares = [_share_of_cores(allowed, rank, 4, 2, 16) for rank in range(4)]
    assert shares == [[0, 2], [3, 5], [8, 9], [10, 11]]


def test_threads_of_a_core_and_cores_of_a_socket_stay_together(tmp_path: Path) -> None:
    # Two sockets of two cores of two threads, numbered as most systems do.
    for number in range(8):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{number % 2}\n")
        (topology / "core_id").write_text(f"{number % 4 // 2}\n")
    allowed = side_by_side(range(8), tmp_path)
    assert allowed == [0, 4, 2, 6, 1, 5, 3, 7]
    assert [_share_of_cores(allowed, rank, 4, 2, 16) for rank in range(4)] == [
        [0, 4],
        [2, 6],
        [1, 5],
        [3, 7],
    ]
    assert side_by_side([3, 1, 2], tmp_path / "says nothing") == [1, 2, 3]


@pytest.mark.parametrize(
    ("ranks", "cpus", "shares"),
    [
        (4, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (8, 2, [[core] for core in range(8)]),
        (16, 1, [[core] for core in range(8) for _ in range(2)]),
    ],
)
def test_where_spark_has_more_cores_than_there_are_they_are_dealt_out_evenly(
    ranks: int, cpus: int, shares: list[list[int]]
) -> None:
    assert [_share_of_cores(range(8), rank, ranks, cpus, 8) for rank in range(ranks)] == shares


@pytest.mark.parametrize(("ranks", "cpus"), [(1, 1), (2, 3), (3, 4), (12, 1)])
def test_nobody_is_bound_where_cores_are_left_or_shares_are_uneven(ranks: int, cpus: int) -> None:
    assert _share_of_cores(range(8), 0, ranks, cpus, 8) == []


def test_executors_with_cores_of_their_own_are_left_alone_where_ranks_are_more_than_these() -> None:
    """It is not known how many of the host's eight ranks are on the same four cores."""
    for allowed in (range(4), range(4, 8)):
        assert _share_of_cores(allowed, 2, 8, 1, 8) == []
        assert _share_of_cores(allowed, 2, 4, 1, 8) == [allowed[2]]


# Two cores stand in for a host: any machine's first ones.
TWO = sorted(os.sched_getaffinity(0))[:2]
several_cores = pytest.mark.skipif(len(TWO) < 2, reason="this machine has one core")


def show(rank: int, **environment: str) -> list[str]:
    """Return the cores of both threads of one of two ranks of a host with two cores."""
    place = {
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "HSR_CPUS": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", SHOW, *map(str, TWO)],
        capture_output=True,
        text=True,
        env={**os.environ, **place, **environment},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@several_cores
def test_all_threads_of_a_rank_are_bound() -> None:
    first, second = side_by_side(TWO)
    assert show(0) == [str([first])] * 2
    assert show(1) == [str([second])] * 2


@several_cores
@pytest.mark.parametrize("setting", [{"OMP_PROC_BIND": "false"}, {"GOMP_CPU_AFFINITY": "0"}])
def test_who_decides_otherwise_is_left_alone(setting: dict[str, str]) -> None:
    assert show(0, **setting) == [str(TWO)] * 2


def test_what_the_system_refuses_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(thread: int, cores: list[int]) -> None:
        asked.append(cores)
        raise PermissionError("not here")

    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    bind_to_cores(
        {
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(len(allowed)),
            "HSR_CPUS": "1",
        }
    )
    assert asked == [side_by_side(allowed)[:1]]
    assert os.sched_getaffinity(0) == allowed


def test_a_process_that_is_no_rank_is_left() -> None:
    allowed = os.sched_getaffinity(0)
    bind_to_cores({})
    assert os.sched_getaffinity(0) == allowed
