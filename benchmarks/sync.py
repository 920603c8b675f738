"""What each way of synchronising costs and gives, between two hosts on networks of three speeds.

Two ranks train a network of five million weights on scikit-learn's digits, each on a host of its
own: a network namespace, whose cable is shaped by the kernel (``tbf``) to 100 Mbit/s, to 1 Gbit/s
or not at all. Measured are the samples per second of the epochs but the first, the bytes that a
rank sends per step, and how many steps it takes until 90 % of the held-out digits are right, which
no network changes; from these follow the seconds to that accuracy. The limit of ways that meet
after τ steps is 1/(compute + communication/τ). Run it as root with ``python benchmarks/sync.py``;
``--write`` puts the result into ``docs/benchmarks.md``, and a picture beside it.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peers.sync_ranks import BATCH, STEPS
from report import DOCUMENT, GOAL_HEAD, goal, present, shown_command, table

from tests.cluster.host_cluster import HostCluster
from tests.cluster.hosts import Hosts

RANKS = Path(__file__).resolve().parent / "peers" / "sync_ranks.py"
NAMES = ("sync-1", "sync-2")
# What the kernel is told, by what people say; bursts that the rate needs.
SPEEDS = {"unshaped": "", "1 Gbit/s": "1gbit 512kb", "100 Mbit/s": "100mbit 64kb"}
ACCURACY = 0.9
EPOCHS, LONG = 2, 6
PLAIN, SHORT_ROUNDS, LONG_ROUNDS = "`Allreduce()`", "`LocalSGD(every=8)`", "`DiLoCo(every=16)`"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    '`"fp16"`': {"compression": "fp16"},
    '`"bf16"`': {"compression": "bf16"},
    "`TopK(ratio=0.01, warmup_steps=16)`": {
        "compression": {"way": "top_k", "ratio": 0.01, "warmup_steps": 16}
    },
    "`Threshold(start=0.001)`": {"compression": {"way": "threshold", "start": 0.001}},
    "`PowerSGD(rank=2)`": {"compression": {"way": "power_sgd", "rank": 2}},
    SHORT_ROUNDS: {"way": "local_sgd", "every": 8},
    LONG_ROUNDS: {"way": "diloco", "every": 16},
    "`AsyncServer()`": {"way": "async_server"},
}
PICTURE = DOCUMENT.with_name("synchronising.svg")
COLOURS = {"unshaped": "#7a7a7a", "1 Gbit/s": "#1f77b4", "100 Mbit/s": "#d62728"}


class Measured(NamedTuple):
    """What one run gave.

    Attributes:
        rate: samples per second of both ranks, without the first epoch.
        sent: bytes that a rank sends per step.
        steps: until the accuracy was reached; ``None`` if it was not, or not looked for.
    """

    rate: float
    sent: float
    steps: int | None


class Ranks:
    """A program on the first host that trains as it is told.

    Args:
        hosts: two hosts.
        folder: a private folder.
    """

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        cluster = HostCluster(hosts, NAMES, folder, cores=1)
        command = [sys.executable, str(RANKS), cluster.master, str(folder)]
        self._process = subprocess.Popen(
            hosts.command(cluster.driver, [*command, hosts.address(cluster.driver)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=hosts.environment(cluster.driver, cluster.env),
        )

    def shape(self, speed: str) -> None:
        """Let both hosts send no more than so much."""
        rate, _, burst = SPEEDS[speed].partition(" ")
        for name in NAMES if rate else ():
            queue = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate]
            queue += ["burst", burst, "latency", "400ms"]
            subprocess.run(self._hosts.command(name, queue), check=True)

    def train(self, way: dict[str, Any], epochs: int) -> Measured:
        """Return what a training of so many epochs gave."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"way": way, "epochs": epochs, "validate": epochs == LONG}
        self._process.stdin.write(f"{json.dumps(asked)}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the ranks ended with {self._process.wait()}")
        found = json.loads(line)
        accounts = found["accounts"][1:]
        seconds = sum(1 / account["samples_per_second"] for account in accounts)
        sent = sum(account["bytes_sent"] for account in accounts)
        reached = [m.get("val_accuracy", 0.0) >= ACCURACY for m in found["metrics"]]
        steps = (reached.index(True) + 1) * STEPS if any(reached) else None
        return Measured(len(accounts) / seconds, sent / len(accounts) / STEPS / len(NAMES), steps)

    def end(self) -> None:
        """Let the program end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measure(speeds: Sequence[str], ways: Sequence[str]) -> dict[str, dict[str, Measured]]:
    """Return what each of the ways gave on each network."""
    found: dict[str, dict[str, Measured]] = {name: {} for name in ways}
    with (
        tempfile.TemporaryDirectory(prefix="sync-") as folder,
        Hosts(Path(folder, "hosts"), NAMES) as hosts,
    ):
        ranks = Ranks(hosts, Path(folder))
        ranks.train(WAYS[PLAIN], EPOCHS)  # which imports the framework
        for speed in speeds:
            ranks.shape(speed)
            for name in ways:
                found[name][speed] = ranks.train(WAYS[name], EPOCHS if SPEEDS[speed] else LONG)
                print(speed, name, found[name][speed], flush=True)
        ranks.end()
    return found


def shown(found: dict[str, dict[str, Measured]]) -> str:
    """Return the tables."""
    rows = []
    for name, by_speed in found.items():
        steps = by_speed["unshaped"].steps
        cells = []
        for speed in SPEEDS:
            rate = by_speed[speed].rate
            seconds = f"{steps * BATCH * len(NAMES) / rate:,.1f} s" if steps else "-"
            cells.append(f"{rate:,.0f} · {seconds}")
        sent = f"{by_speed['unshaped'].sent / 1e6:,.2f} MB"
        rows.append([name, sent, steps or f"> {LONG * STEPS}", *cells])
    slow = {name: by_speed["100 Mbit/s"].rate for name, by_speed in found.items()}
    compressed = [name for name, way in WAYS.items() if "compression" in way]
    goals = [
        goal(
            "the best compression / plain allreduce, at 100 Mbit/s",
            max(slow[name] for name in compressed) / slow[PLAIN],
            at_least=4,
        )
    ]
    # What a step computes, as near as can be told: that of ranks that hardly meet.
    compute = 1 / found[LONG_ROUNDS]["unshaped"].rate
    for name, every in ((SHORT_ROUNDS, 8), (LONG_ROUNDS, 16)):
        limit = 1 / (compute + (1 / slow[PLAIN] - compute) / every)
        goals.append(goal(f"{name} / its limit, at 100 Mbit/s", slow[name] / limit, at_least=0.85))
        goals.append([f"{name} / plain, at 100 Mbit/s", f"{slow[name] / slow[PLAIN]:.1f}", "", ""])
    head = ["`sync` or `compression`", "sent per step and rank", f"steps to {ACCURACY:.0%}"]
    return f"{table([*head, *SPEEDS], rows)}\n\n{table(GOAL_HEAD, goals)}"


def picture(found: dict[str, dict[str, Measured]]) -> str:
    """Return a drawing (SVG) of how many times as fast as plain allreduce each way is."""
    left, right, top, line = 270, 640, 56, 26
    bottom = top + line * len(found)
    low, high = -3.0, 5.0  # powers of two

    def across(ratio: float) -> float:
        power = min(high, max(low, math.log2(ratio)))
        return left + (right - left) * (power - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 {bottom + 34}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="10" y="18">Samples per second, as multiples of plain allreduce</text>',
    ]
    for number, (speed, colour) in enumerate(COLOURS.items()):
        x = left + 130 * number
        parts += [
            f'<circle cx="{x}" cy="36" r="5" fill="{colour}"/>',
            f'<text x="{x + 10}" y="41">{speed}</text>',
        ]
    for power in range(int(low), int(high) + 1):
        x = across(2.0**power)
        colour = "#444" if power == 0 else "#ddd"
        parts += [
            f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="{colour}"/>',
            f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{2.0**power:g}</text>',
        ]
    for number, (name, by_speed) in enumerate(found.items()):
        y = top + line * (number + 0.5)
        label = html.escape(name.strip("`"))
        parts.append(f'<text x="{left - 20}" y="{y + 5}" text-anchor="end">{label}</text>')
        for speed, colour in COLOURS.items():
            x = across(by_speed[speed].rate / found[PLAIN][speed].rate)
            parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="5" fill="{colour}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument(
        "--speeds", nargs="*", choices=SPEEDS, help="to look at these networks only"
    )
    parser.add_argument(
        "--ways", type=int, nargs="*", help="numbers of ways, from 0, with --speeds"
    )
    arguments = parser.parse_args()
    ways = list(WAYS)
    if arguments.speeds:
        measure(arguments.speeds, [ways[n] for n in arguments.ways or range(len(ways))])
        return
    found = measure(list(SPEEDS), ways)
    if arguments.write:
        PICTURE.write_text(picture(found))
    text = (
        f"Two ranks on a core each, five million weights, batches of {BATCH} rows per rank, SGD "
        "with momentum; samples per second of both ranks · seconds of training until "
        f"{ACCURACY:.0%} of the held-out digits are right (looked at after every {STEPS} steps), "
        f"by network.\n\n{shown(found)}"
    )
    present("Ways of synchronising", shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
