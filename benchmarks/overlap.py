"""What of the gradient exchange hides behind the backward pass, and what that is worth.

Two ranks train two networks of five million weights in ten layers: one that computes, on a core
for each rank, and one whose layers wait in place of computing, as for a GPU, and leave the core to
the exchange. Compared are one exchange after the backward pass and buckets of gradients that leave
while it goes on, in turns, between two hosts: network namespaces whose cable the kernel (``tbf``)
shapes to 1 Gbit/s. The arithmetic limit is the longer of a step without any exchange and of the
exchange alone. Run it as root with ``python benchmarks/overlap.py``; ``--write`` puts
the result into ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.overlap_ranks import BACKWARD, BATCH, FORWARD, LAYERS, WIDTH
from report import GOAL_HEAD, goal, present, shown_command, table

from tests.cluster.host_cluster import HostCluster
from tests.cluster.hosts import Hosts

RANKS = Path(__file__).resolve().parent / "peers" / "overlap_ranks.py"
NAMES = ("overlap-1", "overlap-2")
RATE, BURST = "1gbit", "512kb"
NETWORKS = {"dense": "that computes", "waiting": "that waits"}
ROUNDS = 3
# More than all gradients have.
ONE_GROUP = 1 << 30
ALONE, SUM, AFTER, BUCKETS = "alone", "sum", "after", "buckets"


class Ranks:
    """A program that trains as it is told.

    Args:
        command: what starts it.
        env: its environment; that of this process if ``None``.
    """

    def __init__(self, command: list[str], env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )

    def ask(self, **asked: Any) -> float:
        """Return the seconds that were asked for."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(asked)}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the ranks ended with {self._process.wait()}")
        return float(json.loads(line))

    def step(self, network: str, *, meeting: bool = True, bucket_bytes: int | None = None) -> float:
        """Return the seconds of a step."""
        return self.ask(what="train", network=network, meeting=meeting, bucket_bytes=bucket_bytes)

    def end(self) -> None:
        """Let the program end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measured(ranks: Ranks) -> dict[str, dict[str, float]]:
    """Return the seconds of steps and of the sum, by network."""
    took: dict[str, dict[str, list[float]]] = {}
    ranks.step("dense")  # which imports the framework
    for number in range(ROUNDS):
        for network in NETWORKS:
            mine = took.setdefault(network, {way: [] for way in (ALONE, SUM, AFTER, BUCKETS)})
            mine[ALONE].append(ranks.step(network, meeting=False))
            mine[SUM].append(ranks.ask(what="sum"))
            mine[AFTER].append(ranks.step(network, bucket_bytes=ONE_GROUP))
            mine[BUCKETS].append(ranks.step(network))
            shown = {way: round(1000 * found[-1]) for way, found in mine.items()}
            print(number + 1, network, shown, "ms", flush=True)
    return {
        network: {way: statistics.median(found) for way, found in mine.items()}
        for network, mine in took.items()
    }


def between_hosts(folder: Path) -> dict[str, dict[str, float]]:
    """Return what is measured between two hosts."""
    with Hosts(folder / "hosts", NAMES) as hosts:
        cluster = HostCluster(hosts, NAMES, folder, cores=1)
        for name in NAMES:
            queue = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", RATE]
            queue += ["burst", BURST, "latency", "400ms"]
            subprocess.run(hosts.command(name, queue), check=True)
        command = [sys.executable, str(RANKS), cluster.master, str(folder)]
        command = hosts.command(cluster.driver, [*command, hosts.address(cluster.driver)])
        ranks = Ranks(command, hosts.environment(cluster.driver, cluster.env))
        try:
            return measured(ranks)
        finally:
            ranks.end()


def shown(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return the tables."""
    rows, goals = [], []
    for network, kind in NETWORKS.items():
        took = found[network]
        seconds = [f"{1000 * took[way]:,.0f} ms" for way in (ALONE, SUM, AFTER, BUCKETS)]
        reached, gain = max(took[ALONE], took[SUM]) / took[BUCKETS], took[AFTER] / took[BUCKETS]
        rows.append([kind, *seconds, f"{reached:.2f}"])
        what = f"one exchange after the pass / buckets, a network {kind}"
        if network == "waiting":
            goals.append(goal(what, gain, at_least=1.3))
            goals.append(goal(f"the limit / buckets, a network {kind}", reached, at_least=0.9))
        else:
            goals.append([what, f"{gain:.2f}", "", ""])
    head = ["network", "no exchange", "exchange alone", "after the pass", "in buckets"]
    return f"{table([*head, 'limit ÷ in buckets'], rows)}\n\n{table(GOAL_HEAD, goals)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        found = between_hosts(Path(folder))
    text = (
        f"Two ranks, {LAYERS * WIDTH**2:,} weights in {LAYERS} layers, batches of {BATCH} rows; "
        f"layers that wait take {1000 * FORWARD:.0f} ms forwards and {1000 * BACKWARD:.0f} ms "
        f"backwards. Seconds of a step, medians of {ROUNDS} turns. On one host, whose ranks "
        "compute and add up on the same cores, all gradients leave together.\n\n" + shown(found)
    )
    present("Overlap", shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
