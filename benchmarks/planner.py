"""How near what `plan_training` predicts comes to what a training then does.

For each of several models, a plan is measured with one rank and with two. What it predicts for 2, 4
and 8 ranks on this host is compared with the samples per second of `run_training` on so many, in
its epochs but the first; with 4 and 8, ranks share cores where there are two. Run it with
``python benchmarks/planner.py``; ``--write`` puts the result into ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from model import SIDE, make_arrays, make_cnn, make_frame
from report import GOAL_HEAD, goal, present, shown_command, table

from horovod_spark_runner import DataOptions, plan_training, run_training

RANKS = (2, 4, 8)
EPOCHS = 4


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


CASES = (
    Case("small dense network", dense(64), 64),
    Case("wide dense network", dense(1024, 1024), 64),
    Case("convolutional network", make_cnn, 64),
    Case("convolutional network, batches of 256", make_cnn, 256),
)


class Compared(NamedTuple):
    """A prediction, and what came.

    Attributes:
        where: the hosts.
        case: name of the model.
        ranks: how many.
        predicted: samples per second.
        measured: likewise.
    """

    where: str
    case: str
    ranks: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """By how much the prediction is off, as a part of what came."""
        return abs(self.predicted / self.measured - 1)


def rate_of(frame: Any, case: Case, ranks: int, folder: Path) -> float:
    """Return the samples per second of a training, the median of its epochs but the first."""
    run_dir = folder / f"run-{ranks}"
    run_training(
        frame,
        case.make,
        feature_cols=["image"],
        label_cols=["label"],
        num_workers=ranks,
        batch_size=case.batch_size,
        epochs=EPOCHS,
        run_dir=run_dir,
        data=DataOptions(shapes={"image": (SIDE, SIDE, 1)}, data_dir=folder / "rows"),
        stream_logs=False,
    )
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()[1:]
    return statistics.median(json.loads(line)["accounting"]["samples_per_second"] for line in lines)


def compare(frame: Any, case: Case, ranks: tuple[int, ...], where: str) -> list[Compared]:
    """Plan with one rank and two, and train with each number of ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = plan_training(
            frame,
            case.make,
            feature_cols=["image"],
            label_cols=["label"],
            num_workers=2,
            batch_size=case.batch_size,
            batch_sizes=(),
            epochs=EPOCHS,
            networks=("10gbit",),
            ranks=ranks,
            ranks_per_host=max(ranks),
            data=DataOptions(shapes={"image": (SIDE, SIDE, 1)}, data_dir=folder / "rows"),
            plan_dir=folder / "plan",
            stream_logs=False,
        )
        print(plan, flush=True)
        found = []
        for one in plan.networks[0].predictions:
            if one.ranks in ranks:
                measured = rate_of(frame, case, one.ranks, folder)
                compared = Compared(where, case.name, one.ranks, one.samples_per_second, measured)
                print(compared, f"{compared.error:.0%}", flush=True)
                found.append(compared)
        return found


def on_this_host(cases: tuple[Case, ...]) -> list[Compared]:
    """Compare on this machine."""
    frame = make_frame(*make_arrays(), cores=max(RANKS))
    try:
        return [one for case in cases for one in compare(frame, case, RANKS, "this host")]
    finally:
        frame.sparkSession.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the models, from 0; all")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    chosen = range(len(CASES)) if arguments.cases is None else arguments.cases
    found = on_this_host(tuple(CASES[number] for number in chosen))
    rows = [
        [one.where, one.case, one.ranks, f"{one.predicted:,.0f}", f"{one.measured:,.0f}",
         f"{one.predicted / one.measured - 1:+.0%}"]
        for one in found
    ]  # fmt: skip
    errors = [one.error for one in found]
    head = ["hosts", "model", "ranks", "samples/s predicted", "samples/s measured", "error"]
    goals = [
        goal("median error", statistics.median(errors), at_most=0.10),
        goal("worst error", max(errors), at_most=0.25),
    ]
    text = f"{table(head, rows)}\n\n{table(GOAL_HEAD, goals)}"
    present("Planner", shown_command(), text, arguments.write)


if __name__ == "__main__":
    sys.exit(main())
