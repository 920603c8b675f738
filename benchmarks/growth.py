"""How the start of a run and its control traffic grow with the number of ranks.

Measured on this machine:

* the driver places so many slots, whose part light clients play (`scale.watch_slots`);
* the real mpirun asks for its daemons on so many hosts (`scale.ask_for_daemons`);
* mpirun's CPU time and the first host's traffic until all ranks are in ``MPI_Init``, and a rank's
  CPU time in it: real daemons and ranks on up to 64 hosts, which are network namespaces;
* Horovod's negotiation: what rank 0 takes to read each rank's request for a new tensor, from its
  timeline, and the bytes over the first host's cable. What else it does for them is not measured.

Computed from straight lines through the last two: worlds of up to 4,096 ranks, 8 on each host.
Not in it: waiting for the network. Run it as root with ``python benchmarks/growth.py``;
``--write`` puts the tables into ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from report import present, shown_command, table
from scale import PER_HOST, Conduct, ask_for_daemons, watch_slots

from horovod_spark_runner.cluster.protocol.command import SHIM, mpirun_command, worker_environment
from horovod_spark_runner.cluster.protocol.network import Interface, daemon_network
from horovod_spark_runner.cluster.protocol.processes import find_mpirun
from horovod_spark_runner.cluster.protocol.topology import SlotInfo, arrange
from horovod_spark_runner.config.launch import LaunchSettings
from tests.cluster.hosts import Hosts

RANK = Path(__file__).resolve().parent / "peers" / "growth_rank.py"
SIZES = (8, 64, 256, 1024, 4096)
# Hosts, and ranks on each.
MPI_WORLDS = ((2, 1), (4, 2), (8, 2), (16, 2), (32, 2), (64, 1), (64, 2))
HOROVOD_WORLDS = (2, 4, 8)
# mpirun sends to so many daemons itself; they pass it on.
RADIX = 64
# Of a model, for the first step.
TENSORS = 200


class World(NamedTuple):
    """What one real start took.

    Attributes:
        hosts: how many.
        ranks: of all hosts.
        mpirun_cpu: seconds of mpirun, on the first host.
        reports: what the ranks printed, by rank.
        timeline: Horovod's, of rank 0.
    """

    hosts: int
    ranks: int
    mpirun_cpu: float
    reports: list[Mapping[str, float]]
    timeline: str


def start_world(count: int, here: int, mode: str) -> World:
    """Start ranks on hosts with the real mpirun, daemons and all, by our command and settings."""
    nodes = arrange(
        [
            SlotInfo(
                slot, f"growth-{host}", str(host), f"10.77.0.{host + 1}", 1, "/", ("/",), ((),)
            )
            for slot, host in enumerate(rank // here for rank in range(count * here))
        ]
    ).nodes
    names = [node.name for node in nodes]
    with (
        tempfile.TemporaryDirectory(prefix="growth-") as folder,
        Hosts(Path(folder), names) as hosts,
    ):
        agent = Path(folder, "agent.sh")
        there = " ".join(hosts.command("$host", []))
        agent.write_text(
            f'host=$1; shift; TMPDIR={folder}/$host; export TMPDIR; mkdir "$TMPDIR"\n'
            f'exec {there} sh -c "$*"\n'
        )
        options, network = LaunchSettings(count * here), Interface("eth0", nodes[0].address)
        command = mpirun_command(
            find_mpirun(), nodes, options.mpi, agent=f"/bin/sh {agent}", as_root=True
        )
        timeline = Path(folder, "timeline.json")
        environment = {
            **worker_environment(
                os.environ, options, gpus=(), cpus=1, python_path=sys.path, temporary=folder
            ),
            **daemon_network(network),
            "OMPI_MCA_btl_tcp_if_include": network.name,
            "HOROVOD_TIMELINE": str(timeline),
        }
        mpirun = subprocess.Popen(
            hosts.command(names[0], [*command[: -len(SHIM)], sys.executable, str(RANK), mode]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
        reports: list[Mapping[str, float]] = []
        others, cpu = [], 0.0
        assert mpirun.stdout is not None
        for line in mpirun.stdout:
            if not line.startswith('{"rank"'):
                others.append(line)
                continue
            reports.append(json.loads(line))
            if len(reports) == count * here:
                cpu = sum(psutil.Process(mpirun.pid).cpu_times()[:2])
        if mpirun.wait() or len(reports) < count * here:
            raise RuntimeError("".join(others))
        text = timeline.read_text() if timeline.exists() else ""
    reports.sort(key=lambda report: report["rank"])
    return World(count, count * here, cpu, reports, text)


def seconds_per_request(timeline: str) -> float:
    """Return what rank 0 takes, on average, for one tensor of one other rank. Pure.

    Horovod's timeline notes when rank 0 reads each rank's request.
    """
    events = re.findall(r'"ph": "X", "name": "(\d+)", "ts": (\d+)', timeline)
    gaps = [
        int(after[1]) - int(before[1])
        for before, after in itertools.pairwise(events)
        if before[0] == after[0] != "0"
    ]
    # A longer gap is another cycle, or this machine's cores doing something else.
    return statistics.mean(gap for gap in gaps if gap < 100) / 1e6


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return slope and start of the straight line that fits best. Pure."""
    slope, start = statistics.linear_regression(*zip(*points, strict=True))
    return slope, start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    placed, asked = {}, {}
    for ranks in SIZES:
        placed[ranks] = watch_slots(ranks, Conduct(2.0))
        hosts = ranks // PER_HOST
        asked[ranks] = ask_for_daemons(hosts - 1) if hosts > 1 else 0.0
        print(ranks, placed[ranks]["placed"], asked[ranks], flush=True)
    worlds = []
    for hosts, here in MPI_WORLDS:
        worlds.append(start_world(hosts, here, "mpi"))
        print(worlds[-1][:3], flush=True)
    mpirun, mpirun_start = line_through([(world.hosts, world.mpirun_cpu) for world in worlds])
    init, init_start = line_through(
        [
            (world.ranks, statistics.median(report["init_cpu"] for report in world.reports))
            for world in worlds
        ]
    )
    spread, _ = line_through(
        [(world.hosts * world.ranks, world.reports[0]["traffic"]) for world in worlds]
    )
    negotiations = [start_world(hosts, 1, "horovod") for hosts in HOROVOD_WORLDS]
    request = seconds_per_request(negotiations[-1].timeline)
    new = statistics.mean(world.reports[0]["new"] / (world.ranks - 1) for world in negotiations)
    later, later_start = line_through(
        [(math.log2(world.ranks), world.reports[0]["later"]) for world in negotiations]
    )
    times, traffic = [], []
    for ranks in SIZES:
        hosts = ranks // PER_HOST
        steps = [
            placed[ranks]["placed"],
            asked[ranks],
            mpirun_start + mpirun * hosts,
            init_start + init * ranks,
            request * TENSORS * ranks,
        ]
        times.append([f"{ranks:,}", *(f"{step:.2f} s" for step in steps)])
        parts = [
            placed[ranks]["bytes"],
            spread * min(hosts, RADIX) * ranks if hosts > 1 else 0,
            new * TENSORS * ranks if hosts > 1 else 0,
        ]
        row = [f"{part / 1e6:.2f} MB" for part in parts]
        step = later_start + later * math.log2(ranks)
        traffic.append([f"{ranks:,}", *row, f"{step / 1e3:.0f} KB"])
    head = ["ranks", "placed by the driver", "daemons asked for", "mpirun", "`MPI_Init`"]
    head += [f"requests for {TENSORS} tensors"]
    cables = ["ranks", "driver", "MPI's start", f"first step, {TENSORS} tensors", "a later step"]
    text = (
        f"{PER_HOST} ranks per host. Placing and asking are measured. The others are computed, CPU "
        f"time without waiting: mpirun takes {mpirun * 1e3:.1f} ms per host (measured up to 64); "
        f"a rank, in `MPI_Init`, {init * 1e3:.2f} ms per rank of the world (up to 128); rank 0 "
        f"{request * 1e6:.2f} µs to read a rank's request for a new tensor, the least that the "
        "negotiation takes. mpirun by itself asks for its daemons through ssh and has the rest of "
        f"it, but for the placing.\n\n{table(head, times)}\n\n"
        "Bytes over the driver's cable, and computed over the first host's: MPI sends "
        f"{spread:.0f} bytes per rank to each host, to {RADIX} directly (not measured beyond), so "
        f"that up to there its start is of hosts times ranks. Horovod sends {new:.0f} per new "
        f"tensor and rank.\n\n{table(cables, traffic)}"
    )
    present("Growth", shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
