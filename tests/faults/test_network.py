"""Networks and clocks that are not as they should be, under a training on two hosts."""

from __future__ import annotations

import json
import re
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner.checkpoint.retry_policy import FINISHED, KILLED
from tests.cluster.host_cluster import HostCluster
from tests.cluster.hosts import Hosts
from tests.preload import build

from .injection import Fault, go_file, note_of
from .test_faults import assert_little_is_lost, job_command
from .training import assert_same_end

pytestmark = [pytest.mark.thorough, pytest.mark.cluster, pytest.mark.mpi, pytest.mark.spark]

NAMES = ("hsr-one", "hsr-two")
AHEAD = 3600


def attempts_of(job: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = job.communicate(timeout=600)
    assert job.returncode == 0, err[-3000:]
    attempts: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
    return attempts


def clock_ahead(folder: Path) -> dict[str, str]:
    """Return the environment of processes whose clock is ahead."""
    library = build(Path(__file__).with_name("clock_ahead.c"), folder)
    if library is None:
        pytest.skip("no C compiler")
    return {"LD_PRELOAD": str(library), "HSR_CLOCK_AHEAD": str(AHEAD)}


@pytest.mark.timeout(1200)
def test_strangers_an_hour_apart_on_a_slow_link(undisturbed: Path, tmp_path: Path) -> None:
    """Hosts that cannot resolve each other's names, 1 Mbit/s between them, and two clocks."""
    with Hosts(tmp_path / "hosts", NAMES, strangers=True) as hosts:
        env = {NAMES[1]: clock_ahead(tmp_path)}
        cluster = HostCluster(hosts, NAMES, tmp_path, env, cores=1)
        for name in NAMES:
            hosts.slow_down(name, "1mbit")
        faults = [Fault(30, 1, "sigkill")]
        run_dir = tmp_path / "run"
        job = cluster.popen(job_command(cluster.master, run_dir, tmp_path, faults))
        attempts = attempts_of(job)
    assert [attempt["ending"] for attempt in attempts][-1] == FINISHED
    assert len(attempts) == 2
    assert_little_is_lost(faults[0], attempts[1]["first_step"])
    assert re.search(r"rank 1 on hsr-\w+ .*SIGKILL", attempts[0]["cause"])
    # The clocks did differ, as the titles of the logs tell.
    logs = "".join(path.read_text() for path in (run_dir / "logs").iterdir())
    titles = re.findall(r"--- ([\d-]+ [\d:]+ [+-]\d+) rank \d of 2 on (hsr-\w+)", logs)
    assert len(titles) == 4
    for moment, host in titles:
        ahead = datetime.strptime(moment, "%Y-%m-%d %H:%M:%S %z").timestamp() - time.time()
        assert (ahead > AHEAD / 2) == (host == NAMES[1])
    assert_same_end(run_dir, undisturbed)


@pytest.mark.timeout(1200)
def test_a_host_that_vanishes_is_done_without(undisturbed: Path, tmp_path: Path) -> None:
    """For 20 seconds its interface is down, which the attempt survives; then it is for good."""
    away, gone = Fault(20, 0, "pause later"), Fault(40, 1, "pause later")
    with Hosts(tmp_path / "hosts", NAMES) as hosts:
        cluster = HostCluster(hosts, NAMES, tmp_path, cores=2)
        run_dir = tmp_path / "run"
        options = {"launch": {"heartbeat_timeout": 30}, "restarts": {"max_restarts": 6}}
        faults = [away, gone]
        job = cluster.popen(job_command(cluster.master, run_dir, tmp_path, faults, **options))
        await_fault(job, away, tmp_path)
        hosts.unplug(NAMES[1])
        go_file(str(tmp_path), away).touch()
        time.sleep(20)
        hosts.plug_in(NAMES[1])
        await_fault(job, gone, tmp_path)
        hosts.unplug(NAMES[1])
        attempts = attempts_of(job)
    assert attempts[0]["ending"] == KILLED, attempts[0]["cause"]
    # Spark may miss it first: its limit is the same here, and its signs of life are others.
    silence = rf"on {NAMES[1]} .* (30|12.5) s"
    assert re.search(silence, attempts[0]["cause"]), attempts[0]["cause"]
    assert attempts[-1]["ending"] == FINISHED
    # Until Spark, too, has missed the host, attempts may still be given a place there.
    for attempt in attempts[1:]:
        assert_little_is_lost(gone, attempt["first_step"])
    assert_same_end(run_dir, undisturbed)


def await_fault(job: subprocess.Popen[str], fault: Fault, folder: Path) -> None:
    while not note_of(str(folder), fault).exists():
        assert job.poll() is None, job.communicate()[1][-3000:]
        time.sleep(0.1)
