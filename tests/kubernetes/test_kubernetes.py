"""Trainings by Spark's own Kubernetes backend on Kubernetes' own API server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.submission import Submission, Waiting, start_waiting
from tests.cluster.submitted_job import ROWS

from .cluster import Kubernetes
from .node import ROOT

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.cluster,
    pytest.mark.mpi,
    pytest.mark.spark,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    with Kubernetes(tmp_path_factory.mktemp("kubernetes")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def logs(kubernetes: Kubernetes) -> Iterator[None]:
    """Print the end of the pods' logs, which a failure shows."""
    before = set(kubernetes.nodes.pods)
    yield
    for uid in kubernetes.nodes.pods.keys() - before:
        print(kubernetes.nodes.pods[uid].log()[-6000:])


@pytest.fixture
def folder(kubernetes: Kubernetes, request: pytest.FixtureRequest) -> Path:
    """Return a folder that pods reach."""
    path = kubernetes.runs / request.node.name
    path.mkdir()
    return path


def waiting(cluster: Kubernetes, folder: Path, **options: Any) -> Waiting:
    """Start a training by a driver in a pod; return when its two ranks wait in the 6th step."""
    request = {"run_dir": str(folder / "run"), **options.pop("request", {})}
    return start_waiting(cluster, folder, request, mode="cluster", **options)


def executors(cluster: Kubernetes) -> list[str]:
    listed = cluster.kubectl("get", "pods", "-l", "spark-role=executor", "-o", "name")
    return listed.split()


def attempts(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "attempts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_driver_pod_trains_and_driver_outside_resumes(kubernetes: Kubernetes, folder: Path) -> None:
    request = {"run_dir": str(folder / "run")}
    first = Submission(kubernetes, folder, request, mode="cluster").answer()
    assert len(set(first["hosts"])) == 2, first
    assert len(first["loss"]) == 2
    assert first["predicted"] == ROWS
    again = Submission(kubernetes, folder, {**request, "epochs": 3}).answer()
    assert again["loss"][:2] == first["loss"], again
    assert len(again["loss"]) == 3
    assert again["predicted"] == ROWS


def test_settings_for_gpus_and_a_pod_that_leaves(kubernetes: Kubernetes, folder: Path) -> None:
    """Its ranks save first, by the hook of the pods' template; the next attempt resumes there."""
    text = (ROOT / "conf" / "kubernetes-gpu.conf").read_text()
    for name, value in {
        "spark.kubernetes.container.image": "tests",
        "spark.executor.instances": "2",
        "spark.executor.memory": "512m",
        "spark.executor.memoryOverhead": "2g",
    }.items():
        text, count = re.subn(rf"^{name} .*", f"{name} {value}", text, flags=re.MULTILINE)
        assert count == 1
    properties = folder / "gpu.conf"
    properties.write_text(text)
    running, _ = waiting(
        kubernetes, folder, properties=properties, request={"restarts": 2, "gpus": 1}
    )
    kubernetes.kubectl("delete", "--wait=false", executors(kubernetes)[0])
    time.sleep(3)  # the hook notifies the ranks, which are in a step
    (folder / "go").touch()
    answer = running.answer()
    assert len(answer["loss"]) == 2, answer
    assert answer["gpus"] == [["0"], ["0"]]
    assert attempts(folder)[-1]["first_step"] in (6, 7)  # not 4, of the regular checkpoint


def test_pod_deleted_by_force(kubernetes: Kubernetes, folder: Path) -> None:
    running, request = waiting(kubernetes, folder)
    kubernetes.kubectl("delete", "--force", executors(kubernetes)[0])
    answer = running.answer()
    assert "message" in answer, answer
    print(answer["message"])
    again = Submission(kubernetes, folder, request, mode="cluster").answer()
    assert len(again["loss"]) == 2, again
    assert attempts(folder)[-1]["first_step"] >= 4


def test_container_over_its_memory_is_named(kubernetes: Kubernetes, folder: Path) -> None:
    act = {"what": "eat", "step": 5, "folder": str(folder)}
    request = {"run_dir": str(folder / "run"), "act": act}
    answer = Submission(kubernetes, folder, request, mode="cluster").answer()
    assert "OOMKilled" in answer["message"], answer


def test_pods_that_stay_pending_are_explained(kubernetes: Kubernetes, folder: Path) -> None:
    request = {"run_dir": str(folder / "run"), "num_workers": 3, "start_timeout": 20}
    settings = {
        "spark.executor.instances": "3",
        "spark.kubernetes.executor.request.cores": "5",
    }
    answer = Submission(kubernetes, folder, request, mode="cluster", settings=settings).answer()
    assert answer["error"] == "NotEnoughSlotsError", answer
    for fact in ("found 2", "2 Running", "1 Pending", "0/2 nodes", "2 Insufficient cpu"):
        assert fact in answer["message"]
