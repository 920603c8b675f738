"""How long sums between hosts take, with our settings of Open MPI and with its own.

Network namespaces are the hosts, whose cables the kernel (``tbf``) shapes to 100 Mbit/s and to
1 Gbit/s. Ranks on them call ``MPI_Allreduce`` as Horovod does, in worlds that `HorovodRunner`
starts, with its settings and with Open MPI's defaults in turns. Beside them stands what the cables
allow: of N hosts, each sends and receives 2(N-1)/N of the bytes at least, at 0.96 of the cable's
speed. Run it as root with ``python benchmarks/exchange.py``; ``--write`` puts the result into
``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from report import GOAL_HEAD, goal, present, shown_command, table

from tests.cluster.host_cluster import HostCluster
from tests.cluster.hosts import Hosts

RANKS = Path(__file__).resolve().parent / "peers" / "exchange_ranks.py"
# What a cable is called, what the kernel is told, and bits per second.
SPEEDS = {"100 Mbit/s": ("100mbit", "64kb", 1e8), "1 Gbit/s": ("1gbit", "512kb", 1e9)}
# Hosts, and ranks on each.
WORLDS = ((2, 1), (2, 2), (3, 1), (4, 1), (4, 2))
SIZES = (64 << 10, 2 << 20, 16 << 20)
ROUNDS = 3
# What Ethernet, IP and TCP leave of a cable.
PAYLOAD = 0.96
OURS, THEIRS = "ours", "theirs"
PARAMETERS: Mapping[str, Mapping[str, str]] = {
    OURS: {},
    THEIRS: {
        "btl_tcp_links": "1",
        "coll_tuned_use_dynamic_rules": "0",
        "coll_han_use_allreduce_algorithm": "default",
    },
}


class Sums(NamedTuple):
    """Sums of one size in one world.

    Attributes:
        speed: of the cables.
        hosts: how many.
        here: ranks on each.
        size: bytes.
        ours: seconds with our settings, the least of all rounds.
        theirs: likewise, with Open MPI's.
    """

    speed: str
    hosts: int
    here: int
    size: int
    ours: float
    theirs: float

    @property
    def possible(self) -> float:
        """The seconds that the cables allow."""
        part = 2 * (self.hosts - 1) / self.hosts
        return part * self.size * 8 / SPEEDS[self.speed][2] / PAYLOAD

    def cells(self) -> list[str]:
        """Return a row of the table."""
        size = f"{self.size >> 20} MiB" if self.size >> 20 else f"{self.size >> 10} KiB"
        seconds = [f"{1e3 * one:,.1f}" for one in (self.possible, self.theirs, self.ours)]
        return [
            *(self.speed, str(self.hosts), str(self.here), size),
            *seconds,
            f"{self.theirs / self.ours:.2f}",
            f"{self.possible / self.ours:.2f}",
        ]


def measured(speed: str, count: int, here: int) -> Iterator[Sums]:
    """Add up in one world."""
    rate, burst, _ = SPEEDS[speed]
    names = tuple(f"sums-{number}" for number in range(count))
    with tempfile.TemporaryDirectory(prefix="sums-") as folder, Hosts(Path(folder), names) as hosts:
        cluster = HostCluster(hosts, names, Path(folder), cores=here)
        for name in names:
            queue = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate]
            queue += ["burst", burst, "latency", "400ms"]
            subprocess.run(hosts.command(name, queue), check=True)
        command = [sys.executable, str(RANKS), cluster.master, hosts.address(cluster.driver)]
        peer = subprocess.Popen(
            hosts.command(cluster.driver, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=hosts.environment(cluster.driver, cluster.env),
        )
        assert peer.stdin is not None
        assert peer.stdout is not None
        found: dict[str, list[list[float]]] = {OURS: [], THEIRS: []}
        for _ in range(ROUNDS):
            for whose, parameters in PARAMETERS.items():
                asked = {"ranks": count * here, "parameters": parameters, "sizes": SIZES}
                peer.stdin.write(json.dumps(asked) + "\n")
                peer.stdin.flush()
                line = peer.stdout.readline()
                if not line:
                    raise RuntimeError(f"the ranks ended with {peer.wait()}")
                found[whose].append(json.loads(line))
        peer.communicate(timeout=60)
    best = {whose: [min(times) for times in zip(*found[whose], strict=True)] for whose in found}
    for number, size in enumerate(SIZES):
        yield Sums(speed, count, here, size, best[OURS][number], best[THEIRS][number])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    found = []
    for speed in SPEEDS:
        for count, here in WORLDS:
            for one in measured(speed, count, here):
                print(*one.cells(), flush=True)
                found.append(one)
    head = ["cables", "hosts", "ranks on each", "bytes", "possible, ms", "Open MPI's own, ms"]
    head += ["ours, ms", "times as fast", "of what is possible"]
    large = [one for one in found if one.size == max(SIZES)]
    rows = [
        goal(
            "Open MPI's own over ours, 16 MiB, median",
            statistics.median(one.theirs / one.ours for one in large),
            at_least=1.5,
        ),
        goal(
            "the same, worst of all sizes",
            min(one.theirs / one.ours for one in found),
            at_least=0.9,
        ),
        goal(
            "possible over ours, 16 MiB at 100 Mbit/s, worst",
            min(one.possible / one.ours for one in large if one.speed == "100 Mbit/s"),
            at_least=0.8,
        ),
    ]
    text = (
        f"Sums of 32-bit numbers by `MPI_Allreduce`, {ROUNDS} worlds of each kind in turns, the "
        "best of each; hosts are network namespaces on this machine, whose cores they share.\n\n"
        f"{table(head, [one.cells() for one in found])}\n\n{table(GOAL_HEAD, rows)}"
    )
    present("Sums between hosts", shown_command(), text, arguments.write)


if __name__ == "__main__":
    sys.exit(main())
