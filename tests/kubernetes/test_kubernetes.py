"""Spark's own Kubernetes backend on Kubernetes' own API server, with pods as processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from .cluster import Kubernetes

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mpi,
    pytest.mark.spark,
    pytest.mark.thorough,
    pytest.mark.timeout(1800),  # the first builds the API server
]


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    with Kubernetes(tmp_path_factory.mktemp("kubernetes")) as cluster:
        yield cluster


def outcome_of(job: subprocess.Popen[str], cluster: Kubernetes) -> dict[str, Any]:
    out, err = job.communicate(timeout=240)
    logs = cluster.nodes.log("exec")[-6000:]
    assert job.returncode == 0, f"{err[-6000:]}\n{logs}"
    outcome: dict[str, Any] = json.loads(out.splitlines()[-1])
    return {**outcome, "stderr": err}


def test_training_with_the_driver_outside(kubernetes: Kubernetes) -> None:
    run_dir = str(kubernetes.runs / "outside")
    request = {"run_dir": run_dir, "num_workers": 2, "epochs": 3}
    outcome = outcome_of(kubernetes.start(request), kubernetes)
    assert len(set(outcome["hosts"])) == 2
    assert outcome["losses"][-1] < outcome["losses"][0]
    resumed = outcome_of(kubernetes.start({**request, "epochs": 5}), kubernetes)
    assert resumed["losses"][:3] == outcome["losses"]
    assert len(resumed["losses"]) == 5
