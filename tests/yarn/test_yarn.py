"""Trainings on YARN: Hadoop's own resource manager, two node managers, and HDFS."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import job
from .hadoop import Yarn

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.cluster,
    pytest.mark.mpi,
    pytest.mark.spark,
    pytest.mark.timeout(600),
]

HERE = Path(__file__).parent
HOSTS = ("hsr-a", "hsr-b")


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yarn]:
    with Yarn(tmp_path_factory.mktemp("yarn"), HOSTS) as cluster:
        yield cluster


class Job:
    """A submission of `job`."""

    def __init__(self, yarn: Yarn, folder: Path, request: dict[str, Any], **options: Any) -> None:
        self.result = folder / "result.json"
        folder.chmod(0o777)
        arguments = [str(HERE / "job.py"), str(self.result), json.dumps(request)]
        self.process = yarn.submit(*arguments, **options)
        self.log = ""

    def answer(self, seconds: float = 240) -> dict[str, Any]:
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
        self.log = out + err
        assert self.result.exists(), self.log[-6000:]
        answer: dict[str, Any] = json.loads(self.result.read_text())
        return answer


def test_client_mode_trains_and_cluster_mode_resumes(yarn: Yarn, tmp_path: Path) -> None:
    run = f"{yarn.url}/runs/first"
    first = Job(yarn, tmp_path, {"run_dir": run})
    answer = first.answer()
    assert sorted(answer["hosts"]) == list(HOSTS), answer
    assert len(answer["loss"]) == 2
    assert answer["predicted"] == job.ROWS
    (tmp_path / "result.json").unlink()
    # The driver is in a container, and the user another one than that of the cluster, without HOME.
    alice = {"mode": "cluster", "env": {"HADOOP_USER_NAME": "alice"}, "without": ["HOME"]}
    second = Job(yarn, tmp_path, {"run_dir": run, "epochs": 3}, **alice)
    again = second.answer()
    assert again["loss"][:2] == answer["loss"]
    assert len(again["loss"]) == 3
    assert again["user"] == "alice"
    assert again["predicted"] == job.ROWS
    logs = yarn.hadoop("logs", "-applicationId", again["application"], user="alice")
    Path("/tmp/me/Y/logs").write_text(logs)
