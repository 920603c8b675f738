"""Ranks with GPUs through spark-submit; nvidia-smi alone is a stand-in."""

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

from tests.spark_home import SPARK_HOME

pytestmark = [pytest.mark.cluster, pytest.mark.mpi, pytest.mark.spark]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BIN = Path(sys.executable).parent
MIG = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
TWO_GPUS = "".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-0000000{i})\n" for i in range(2))
ONE_MIG = f"GPU 0: NVIDIA H200 (UUID: GPU-0)\n  MIG 1g.18gb     Device  0: (UUID: {MIG})\n"


class Cluster:
    """A standalone cluster whose workers find the GPUs that a stand-in for nvidia-smi lists."""

    def __init__(self, folder: Path, listing: str, workers: int, cores: int, gpus: int) -> None:
        self.folder = folder
        program = folder / "bin" / "nvidia-smi"
        program.parent.mkdir()
        (program.parent / "listing").write_text(listing)
        program.write_text('#!/bin/sh\n[ "$1" = -L ] && cat "$(dirname "$0")/listing"\n')
        program.chmod(0o755)
        self._env = {
            name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" not in name
        }
        self._env["PATH"] = f"{program.parent}:{BIN}:{self._env['PATH']}"
        properties = (ROOT / "conf" / "standalone-gpu-worker.conf").read_text()
        properties = properties.replace("/opt/horovod_spark_runner", str(ROOT))
        own = folder / "worker.conf"
        own.write_text(re.sub(r"(gpu\.amount\s+)2", rf"\g<1>{gpus}", properties))
        done = subprocess.run(
            [str(ROOT / "scripts/standalone"), "start", self._place, str(workers), str(cores)],
            capture_output=True,
            text=True,
            check=False,
            env={**self._env, "HSR_VENV": sys.prefix, "HSR_WORKER_PROPERTIES": str(own)},
        )
        self.master = done.stdout.strip()
        if done.returncode:
            self.stop()
            raise AssertionError(done.stderr)

    @property
    def _place(self) -> str:
        return str(self.folder / "cluster")

    def stop(self) -> None:
        subprocess.run([str(ROOT / "scripts/standalone"), "stop", self._place], check=True)

    def submit(self, script: Path, *arguments: str, **settings: str) -> str:
        """Return what ``script`` printed; ``settings`` are Spark's, with ``_`` for ``.``."""
        changed = {
            "spark.executor.cores": "1",
            "spark.task.cpus": "1",
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        options = [
            text for name, value in changed.items() for text in ("--conf", f"{name}={value}")
        ]
        template = ROOT / "conf" / "standalone-gpu.conf"
        done = subprocess.run(
            [
                str(BIN / "spark-submit"),
                *("--master", self.master, "--properties-file", str(template)),
                *options,
                str(script),
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=480,
            check=False,
            env={**self._env, "SPARK_HOME": str(SPARK_HOME), "PYSPARK_PYTHON": sys.executable},
        )
        assert done.returncode == 0, done.stdout + done.stderr[-6000:]
        return done.stdout

    def devices(self, *requests: dict[str, Any], **settings: str) -> list[Any]:
        texts = [json.dumps(request) for request in requests]
        answers: list[Any] = json.loads(
            self.submit(HERE / "gpu_job.py", *texts, **settings).splitlines()[-1]
        )
        return answers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker of four cores and two GPUs."""
    cluster = Cluster(tmp_path_factory.mktemp("gpus"), TWO_GPUS, workers=1, cores=4, gpus=2)
    yield cluster
    cluster.stop()


def seen(answer: Any) -> list[str]:
    assert isinstance(answer, list), answer
    assert [rank["rank"] for rank in answer] == list(range(len(answer)))
    assert {rank["met"] for rank in answer} == {len(answer)}
    return [rank["cuda"] for rank in answer]


def test_an_executor_per_gpu_that_other_tasks_share(cluster: Cluster) -> None:
    """As in conf/rapids-gpu.conf: a rank has a whole GPU although the session's tasks share it."""
    gpus, cpu, both, too_many = cluster.devices(
        {"num_workers": 2, "gpus_per_worker": 1},
        {"num_workers": 2},
        {"num_workers": 1, "gpus_per_worker": 2},
        {"num_workers": 3, "gpus_per_worker": 1, "start_timeout": 1},
        spark_task_resource_gpu_amount="0.25",
    )
    assert seen(gpus) == ["0", "1"]
    assert len({rank["executor"] for rank in gpus}) == 2
    assert {rank["order"] for rank in gpus} == {"PCI_BUS_ID"}
    assert seen(cpu) == ["", ""]
    # Its own GPU is cuda:{LOCAL_RANK} to a program of torch.distributed.
    assert [[rank["local_rank"] for rank in ranks] for ranks in (gpus, cpu)] == [
        ["0"] * 2,
        ["0", "1"],
    ]
    assert "EnvironmentProblem" in both
    assert re.search("gpus_per_worker=2.* 0.25 GPU", both)
    assert re.match("NotEnoughSlotsError: .*3 slots .*1 GPU.* 2", too_many), too_many


@pytest.mark.thorough
def test_several_gpus_in_one_task(cluster: Cluster) -> None:
    each, both, odd = cluster.devices(
        {"num_workers": 2, "gpus_per_worker": 1},
        {"num_workers": 1, "gpus_per_worker": 2},
        {"num_workers": 3, "gpus_per_worker": 1},
        spark_executor_resource_gpu_amount="2",
        spark_task_resource_gpu_amount="2",
    )
    assert seen(each) == ["0", "1"]
    assert len({rank["task"] for rank in each}) == 1
    assert seen(both) == ["0,1"]
    assert "InvalidInputError: num_workers=3" in odd


@pytest.mark.thorough
def test_training_through_spark_submit(cluster: Cluster, tmp_path: Path) -> None:
    output = cluster.submit(
        ROOT / "examples" / "train_submit.py",
        *("--num-workers", "2", "--gpus-per-worker", "1", "--epochs", "3"),
        *("--start-timeout", "90"),
        *("--run-dir", str(tmp_path / "run")),
    )
    assert re.findall(r"rank (\d): .*, GPU (.*)", output) == [("0", "0"), ("1", "1")]
    accuracy = re.findall(r"^epoch \d: .*val_accuracy ([\d.]+)", output, flags=re.MULTILINE)
    assert len(accuracy) == 3
    assert float(accuracy[-1]) > 0.8
    assert (tmp_path / "run" / "model" / "model.keras").exists()


@pytest.mark.thorough
def test_executors_that_find_the_same_device(tmp_path: Path) -> None:
    """Two workers of one host, each of which discovers the host's only MIG device for itself."""
    cluster = Cluster(tmp_path, ONE_MIG, workers=2, cores=1, gpus=1)
    try:
        refused, shared = cluster.devices(
            {"num_workers": 2, "gpus_per_worker": 1},
            {"num_workers": 2, "gpus_per_worker": 1, "share_gpus": True},
        )
    finally:
        cluster.stop()
    assert refused.startswith("LaunchError")
    assert f"GPU {MIG}" in refused
    assert seen(shared) == [MIG, MIG]
