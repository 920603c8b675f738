"""Compare the predictions of `plan_training` with trainings.

For each of several models, a plan is measured with one rank and with two. Its prediction is
compared with the samples per second of `run_training`, in turns: on this host, and between two
hosts, network namespaces with a core each and a cable that the kernel (``tbf``) shapes to 1 Gbit/s
and to 100 Mbit/s. Each of the two ranks has a core. The network whose layers wait, as for a GPU, is
also compared on 4 and 8 ranks. Run it as root on a quiet machine: ``python benchmarks/planner.py``.
``--write`` puts the result into ``docs/benchmarks.md``; ``--cases 0 --where "1 Gbit/s"`` runs a
part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from model import SIDE, make_arrays, make_cnn, make_frame, waiting_layer
from report import GOAL_HEAD, goal, present, shown_command, table

from horovod_spark_runner import DataOptions, LaunchOptions, plan_training, run_training
from horovod_spark_runner.planning.measurement import Measurement
from horovod_spark_runner.planning.model import Cluster, parse_link, predict
from horovod_spark_runner.training.time_breakdown import step_seconds
from tests.cluster.host_cluster import HostCluster
from tests.cluster.hosts import Hosts

RANKS = (2,)
# Of the network that waits as for a GPU, so that ranks do not compete for cores.
WAITING_RANKS = (2, 4, 8)
EPOCHS = 4
# Steps of 4,096 rows, or of a part of that: none is of another size, which would be traced anew.
ROWS = 32_768
# Seconds that an epoch is to take, about, and how many steps it has at least.
SECONDS, STEPS = 2.0, 8
HERE = "this host"
NAMES = ("plan-1", "plan-2")
# What the kernel is told, by what people say, with bursts that the rate needs.
SPEEDS = {"1 Gbit/s": ("1gbit", "512kb"), "100 Mbit/s": ("100mbit", "64kb")}
PEER = Path(__file__).resolve().parent / "peers" / "planner_ranks.py"


def dense(*widths: int) -> Callable[[], Any]:
    """Return what makes a network of dense layers of these widths."""

    def make() -> Any:
        import keras

        layers = [keras.layers.Input((SIDE, SIDE, 1)), keras.layers.Flatten()]
        layers += [keras.layers.Dense(width, activation="relu") for width in widths]
        model = keras.Sequential([*layers, keras.layers.Dense(10, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    return make


def make_waiting() -> Any:
    """Return a network whose layers wait, as for a GPU: ranks that share cores do not slow it."""
    import keras

    layers = [waiting_layer(SIDE * SIDE, 0.005, 0.010) for _ in range(4)]
    layers = [keras.layers.Input((SIDE, SIDE, 1)), keras.layers.Flatten(), *layers]
    model = keras.Sequential([*layers, keras.layers.Dense(10, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


WAITING = "network whose layers wait, as for a GPU"


class Case(NamedTuple):
    """A model to plan for.

    Attributes:
        name: what it is.
        make: makes it.
        batch_size: rows per rank and step.
    """

    name: str
    make: Callable[[], Any]
    batch_size: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of ranks to compare."""
        return WAITING_RANKS if self.make is make_waiting else RANKS


CASES = (
    Case("small dense network", dense(64), 64),
    Case("wide dense network", dense(1024, 1024), 64),
    Case("convolutional network", make_cnn, 64),
    Case("convolutional network, batches of 256", make_cnn, 256),
    Case(WAITING, make_waiting, 64),
)


class Compared(NamedTuple):
    """Predictions, and what came.

    Attributes:
        where: the hosts.
        case: name of the model.
        ranks: how many.
        predicted: samples per second, by each plan.
        measured: likewise, in all epochs of each training.
        in_epochs: likewise, in each epoch.
    """

    where: str
    case: str
    ranks: int
    predicted: tuple[float, ...]
    measured: tuple[float, ...]
    in_epochs: tuple[float, ...]

    @property
    def error(self) -> float:
        """By how much the predictions are off, as a part of what came; negative if too low."""
        return statistics.fmean(self.predicted) / statistics.fmean(self.measured) - 1

    def cells(self) -> list[str]:
        """Return a row of the table."""
        numbers = [
            f"{statistics.fmean(self.predicted):,.0f}",
            f"{statistics.fmean(self.measured):,.0f}",
        ]
        span = f"{min(self.in_epochs):,.0f} to {max(self.in_epochs):,.0f}"
        return [self.where, self.case, str(self.ranks), *numbers, span, f"{self.error:+.0%}"]


def rates_of(
    frame: Any,
    case: Case,
    ranks: int,
    folder: Path,
    steps: int,
    env: Mapping[str, str] | None = None,
) -> tuple[float, list[float]]:
    """Return the samples per second of a training, in all epochs and in each.

    The first step is left out, and all but steps: a plan tells building the model and tracing it by
    themselves, and does not count what an epoch ends with.

    Args:
        frame: its rows.
        case: the model.
        ranks: how many.
        folder: a private folder, which keeps the rows.
        steps: of an epoch, whatever the rows.
        env: further environment variables of the ranks.
    """
    run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    run_training(
        frame,
        case.make,
        feature_cols=["image"],
        label_cols=["label"],
        num_workers=ranks,
        batch_size=case.batch_size,
        epochs=EPOCHS,
        steps_per_epoch=steps,
        run_dir=run_dir,
        data=DataOptions(shapes={"image": (SIDE, SIDE, 1)}, data_dir=folder / "rows"),
        launch=LaunchOptions(env=dict(env or {})),
        stream_logs=False,
    )
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    spent = [step_seconds(json.loads(line)["accounting"]) for line in lines]
    counted = [steps - (epoch == 0) for epoch in range(EPOCHS)]
    rows = ranks * case.batch_size
    rates = [rows * count / seconds for count, seconds in zip(counted, spent, strict=True)]
    return rows * sum(counted) / sum(spent), rates


def measure(frame: Any, case: Case, folder: Path) -> Measurement:
    """Measure for a plan, with one rank and two."""
    return plan_training(
        frame,
        case.make,
        feature_cols=["image"],
        label_cols=["label"],
        num_workers=2,
        batch_size=case.batch_size,
        epochs=EPOCHS,
        networks=("1gbit",),
        ranks_per_host=2,
        cores_per_host=2,
        data=DataOptions(shapes={"image": (SIDE, SIDE, 1)}, data_dir=folder / "rows"),
        plan_dir=tempfile.mkdtemp(prefix="plan-", dir=folder),
        stream_logs=False,
    ).measurement


def compare(frame: Any, case: Case, where: str, rounds: int) -> list[Compared]:
    """Plan with one rank and two, and train with each number of ranks, in turns.

    Args:
        frame: the rows.
        case: the model.
        where: this host, or the cable between two of a core each.
        rounds: how often all of it is done: what else the machine does then weighs on both.
    """
    hosts = 1 if where == HERE else len(NAMES)
    predicted: dict[int, list[float]] = {ranks: [] for ranks in case.ranks}
    measured: dict[int, list[float]] = {ranks: [] for ranks in case.ranks}
    in_epochs: dict[int, list[float]] = {ranks: [] for ranks in case.ranks}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(rounds):
            found = measure(frame, case, folder)
            # On one host, no rank asks what joins it to others.
            if hosts > 1 and found.between is None:
                raise RuntimeError("what joins the hosts was not measured")
            for ranks in case.ranks:
                here = ranks // hosts
                cluster = Cluster(here, here, found.between or parse_link("10gbit"))
                work = found.workload
                seconds = predict(work, cluster, ranks).step_seconds
                steps = max(STEPS, int(SECONDS / seconds))
                passes = EPOCHS * steps * ranks * case.batch_size / ROWS
                one = predict(replace(work, passes=passes), cluster, ranks)
                predicted[ranks].append(one.samples_per_second)
                rate, rates = rates_of(frame, case, ranks, folder, steps)
                measured[ranks].append(rate)
                in_epochs[ranks] += rates
    return [
        Compared(
            where,
            case.name,
            ranks,
            tuple(predicted[ranks]),
            tuple(measured[ranks]),
            tuple(in_epochs[ranks]),
        )
        for ranks in case.ranks
    ]


def make_rows() -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels to train on."""
    images, labels = make_arrays()
    return images[:ROWS], labels[:ROWS]


def on_this_host(cases: Sequence[int], rounds: int) -> Iterator[Compared]:
    """Compare on this machine."""
    frame = make_frame(*make_rows(), cores=max(WAITING_RANKS))
    try:
        for number in cases:
            yield from compare(frame, CASES[number], HERE, rounds)
    finally:
        frame.sparkSession.stop()


def between_hosts(cases: Sequence[int], rounds: int, speed: str) -> Iterator[Compared]:
    """Compare between two hosts of a core each, whose cables are shaped."""
    rate, burst = SPEEDS[speed]
    with (
        tempfile.TemporaryDirectory(prefix="plan-") as folder,
        Hosts(Path(folder, "hosts"), NAMES) as hosts,
    ):
        cluster = HostCluster(hosts, NAMES, Path(folder), cores=max(WAITING_RANKS) // len(NAMES))
        for core, name in enumerate(NAMES):
            hosts.pin(name, core)
            queue = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate]
            queue += ["burst", burst, "latency", "400ms"]
            subprocess.run(hosts.command(name, queue), check=True)
        command = [sys.executable, str(PEER), cluster.master, folder]
        peer = subprocess.Popen(
            hosts.command(
                cluster.driver,
                # It is pinned as what the host has started before.
                ["taskset", "--cpu-list", "0", *command, hosts.address(cluster.driver)],
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=hosts.environment(cluster.driver, cluster.env),
        )
        try:
            for number in cases:
                yield from _asked_of(peer, {"case": number, "where": speed, "rounds": rounds})
        finally:
            peer.communicate(timeout=60)


def _asked_of(peer: subprocess.Popen[str], asked: dict[str, Any]) -> list[Compared]:
    """Let the program on the first host compare one case."""
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(json.dumps(asked) + "\n")
    peer.stdin.flush()
    line = peer.stdout.readline()
    if not line:
        raise RuntimeError(f"the ranks ended with {peer.wait()}")
    return [Compared(**one) for one in json.loads(line)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the models, from 0; all")
    parser.add_argument(
        "--where", nargs="*", choices=[HERE, *SPEEDS], help="this host, or a cable's speed; all"
    )
    parser.add_argument("--rounds", type=int, default=2, help="how often all is done (2)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    cases = range(len(CASES)) if arguments.cases is None else arguments.cases
    began, load = time.monotonic(), os.getloadavg()[0]
    found: list[Compared] = []
    for where in arguments.where or (HERE, *SPEEDS):
        given = (cases, arguments.rounds)
        for one in on_this_host(*given) if where == HERE else between_hosts(*given, where):
            print(one, f"{one.error:+.0%}", flush=True)
            found.append(one)
    errors = [abs(one.error) for one in found]
    head = [
        "hosts",
        "model",
        "ranks",
        "samples/s predicted",
        "measured",
        "in single epochs",
        "error",
    ]
    goals = [
        goal("median error", statistics.median(errors), at_most=0.10),
        goal("worst error", max(errors), at_most=0.25),
    ]
    minutes = (time.monotonic() - began) / 60
    text = (
        "Plans from 1 and 2 ranks, and trainings, in turns, "
        f"{arguments.rounds} of each, in "
        f"{minutes:.0f} minutes; a rank has 64 rows in a step where nothing else is said. Of two "
        f"hosts, each has one core. The load average was {load:.1f} before.\n\n"
        f"{table(head, [one.cells() for one in found])}\n\n{table(GOAL_HEAD, goals)}"
    )
    present("Planner", shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
