"""Trainings on YARN: Hadoop's own resource manager, two node managers, and HDFS."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.submission import NOT_NEEDED, Submission, Waiting, start_waiting
from tests.cluster.submitted_job import ROWS
from tests.leftovers import leftovers

from .hadoop import Yarn

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.cluster,
    pytest.mark.mpi,
    pytest.mark.spark,
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]
HOSTS = ("hsr-a", "hsr-b")


# What nvidia-smi prints to Hadoop's node manager (-q -x) and to `discover_gpus.sh` (-L): one GPU,
# with the host in its UUID.
NVIDIA_SMI = """#!/bin/sh
uuid=GPU-$(hostname)
case "$*" in
-L) echo "GPU 0: NVIDIA H200 (UUID: $uuid)" ;;
*) cat <<END
<nvidia_smi_log><driver_version>550.1</driver_version><gpu><product_name>NVIDIA H200</product_name>
<uuid>$uuid</uuid><minor_number>0</minor_number><utilization><gpu_util>0 %</gpu_util></utilization>
<fb_memory_usage><total>9 MiB</total><used>0 MiB</used><free>9 MiB</free></fb_memory_usage>
<temperature><gpu_temp>30 C</gpu_temp></temperature></gpu></nvidia_smi_log>
END
esac
"""


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yarn]:
    folder = tmp_path_factory.mktemp("yarn")
    program = folder / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    # As the head of conf/yarn-gpu.conf says, but for cgroups.
    sites = {
        "resource-types": {"yarn.resource-types": "yarn.io/gpu"},
        "yarn-site": {
            "yarn.nodemanager.resource-plugins": "yarn.io/gpu",
            "yarn.nodemanager.resource-plugins.gpu.path-to-discovery-executables": str(program),
            "yarn.nodemanager.admin-env": f"PATH={folder}:{os.environ['PATH']}",
        },
    }
    with Yarn(folder / "cluster", HOSTS, sites=sites) as cluster:
        yield cluster


def test_client_mode_trains_and_cluster_mode_resumes(yarn: Yarn, tmp_path: Path) -> None:
    """By another user than that of the cluster, without a home."""
    alice: dict[str, Any] = {"env": {"HADOOP_USER_NAME": "alice"}, "without": ["HOME"]}
    run = f"{yarn.url}/runs/first"
    first = Submission(yarn, tmp_path, {"run_dir": run}, **alice).answer()
    assert sorted(first["hosts"]) == list(HOSTS), first
    assert len(first["loss"]) == 2
    assert first["predicted"] == ROWS
    again = Submission(
        yarn, tmp_path, {"run_dir": run, "epochs": 3}, mode="cluster", **alice
    ).answer()
    assert again["loss"][:2] == first["loss"], again
    assert len(again["loss"]) == 3
    assert again["user"] == "alice"
    assert again["predicted"] == ROWS


def left_by(yarn: Yarn) -> list[str]:
    """Return what there is of applications: processes, files, segments."""
    found = leftovers()
    for host in HOSTS:
        found += [p for p in yarn.hosts.processes(host) if "hadoop." not in p]
        found += yarn.local_files(host)
    return found


def await_nothing_left(yarn: Yarn, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while left := left_by(yarn):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def waiting(yarn: Yarn, folder: Path, name: str, **options: Any) -> Waiting:
    """Start a training and return when its two ranks wait in the 6th step."""
    request = {"run_dir": f"{yarn.url}/runs/{name}", **options.pop("request", {})}
    return start_waiting(yarn, folder, request, **options)


def attempts_of(yarn: Yarn, name: str) -> list[dict[str, Any]]:
    """Return the attempts that a run directory lists."""
    lines = yarn.hadoop("fs", "-cat", f"/runs/{name}/attempts.jsonl").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_killed_application_leaves_nothing_and_is_resumed(yarn: Yarn, tmp_path: Path) -> None:
    running, request = waiting(yarn, tmp_path, "killed")
    (application,) = set(re.findall(r"application_\d+_\d+", yarn.hadoop("application", "-list")))
    yarn.hadoop("application", "-kill", application)
    answer = running.answer(90)
    assert "KILLED" in answer["message"] or "stopped" in answer["message"], answer
    await_nothing_left(yarn)
    again = Submission(yarn, tmp_path, request).answer()
    assert len(again["loss"]) == 2, again
    assert attempts_of(yarn, "killed")[-1]["first_step"] >= 4


def test_second_attempt_of_the_application_resumes(yarn: Yarn, tmp_path: Path) -> None:
    running, _ = waiting(
        yarn, tmp_path, "master", mode="cluster", settings={"spark.yarn.maxAppAttempts": "2"}
    )
    masters = [
        pid
        for host in HOSTS
        for pid in yarn.pids(host)
        if b"deploy.yarn.ApplicationMaster" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    for pid in masters:
        os.kill(int(pid), signal.SIGKILL)
    answer = running.answer()
    assert len(answer["loss"]) == 2, answer
    assert attempts_of(yarn, "master")[-1]["first_step"] >= 4
    await_nothing_left(yarn)
    # The driver's log has the output of all ranks.
    logs = yarn.hadoop("logs", "-applicationId", answer["application"])
    for rank in range(2):
        assert re.search(f"rank {rank} of \\d+ acts", logs)


def test_node_manager_that_is_killed(yarn: Yarn, tmp_path: Path) -> None:
    running, _ = waiting(yarn, tmp_path, "node", request={"restarts": 2})
    yarn.stop_node(HOSTS[1])
    time.sleep(3)
    yarn.start_node(HOSTS[1])
    answer = running.answer()
    assert len(answer["loss"]) == 2, answer
    await_nothing_left(yarn)


def test_container_over_its_memory_is_named_and_replaced(yarn: Yarn, tmp_path: Path) -> None:
    request = {
        "run_dir": f"{yarn.url}/runs/eats",
        "act": {"what": "eat", "step": 5, "folder": str(tmp_path)},
        "restarts": 1,
        "transform": False,
    }
    running = Submission(yarn, tmp_path, request)
    answer = running.answer()
    assert len(answer["loss"]) == 2, answer
    assert "physical memory" in running.log
    assert "memoryOverhead" in running.log


def test_queue_that_cannot_hold_the_executors_is_named(yarn: Yarn, tmp_path: Path) -> None:
    request = {"run_dir": f"{yarn.url}/runs/queue", "start_timeout": 15}
    running = Submission(yarn, tmp_path, request, settings={"spark.yarn.queue": "small"})
    answer = running.answer()
    assert answer["error"] == "NotEnoughSlotsError"
    for fact in ("small", "30%", "memory:", "found 0"):
        assert fact in answer["message"]


@pytest.mark.timeout(900)
def test_settings_for_gpus_with_the_environment_on_hdfs(yarn: Yarn, tmp_path: Path) -> None:
    archive = tmp_path / "environment.tar.gz"
    program = Path(sys.executable).with_name("horovod-spark-runner")
    command = [str(program), "pack", str(archive)]
    for name in set(NOT_NEEDED) - {"hdfs_native"}:
        command += ["--exclude", f"lib/python*/site-packages/{name}*"]
    subprocess.run([*command, "--compress-level", "0"], check=True, capture_output=True)
    yarn.hadoop("fs", "-put", str(archive), "/environment.tar.gz")
    archive.unlink()
    settings = (ROOT / "conf" / "yarn-gpu.conf").read_text()
    settings = settings.replace("/opt/horovod_spark_runner", str(ROOT))
    settings = settings.replace("environment.tar.gz#", f"{yarn.url}/environment.tar.gz#")
    settings = settings.replace("driver.python                 python3",
                                f"driver.python {sys.executable}")  # fmt: skip
    settings = re.sub(r"(executor.instances +)4", r"\g<1>2", settings)
    settings = re.sub(r"(executor.memory +)4g", r"\g<1>512m", settings)
    settings = re.sub(r"(memoryOverhead +)24g", r"\g<1>2g", settings)
    own = tmp_path / "own.conf"
    own.write_text(settings)
    request = {"run_dir": f"{yarn.url}/runs/gpus", "gpus": 1, "transform": False}
    request["start_timeout"] = 400  # each host unpacks 2 GB
    answer = Submission(yarn, tmp_path, request, properties=own).answer(600)
    assert sorted(answer["gpus"]) == [[f"GPU-{host}"] for host in HOSTS], answer
    await_nothing_left(yarn)
