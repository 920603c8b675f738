"""What checkpoints cost a training.

Two ranks train with a checkpoint every so many steps. The steps in the first half after one was
due, its stop and the writing in the background included, are compared with those of the second
half: the slowdown of a run with a checkpoint every half as many steps, pair by pair, within one run
and so under one load. Networks of three sizes, up to 100 MB of weights (300 MB with Adam's state);
the run directory on local storage and in an object store whose answers take 30 ms. How soon a
killed training takes its next step is measured by ``first_result.py``. Run it with
``python benchmarks/checkpoint.py``; ``--write`` puts the result into ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from model import SIDE, make_arrays, make_cnn, make_frame
from peers.object_store import object_store
from report import present, table

from horovod_spark_runner import run_training

BATCH = 64
# Seconds before an answer of the object store.
LATENCY = 0.03


class Case(NamedTuple):
    """One row of the table.

    Attributes:
        title: of the network.
        make: builds it.
        half: steps in half of the time between checkpoints.
        steps: of an epoch.
        epochs: of a run.
        runs: how many.
        remote: whether the run directory is in the object store.
    """

    title: str
    make: Any
    half: int
    steps: int
    epochs: int
    runs: int
    remote: bool = False


def make_heavy() -> Any:
    """Return a compiled network of 25 million weights, most of them in one layer."""
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((SIDE, SIDE, 1)),
            layers.Flatten(),
            layers.Dense(4800, activation="relu"),
            layers.Dense(4800, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


CASES = [
    Case("small", functools.partial(make_cnn, 1), 50, 280, 8, 4),
    Case("four times as wide", functools.partial(make_cnn, 4), 50, 280, 4, 4),
    Case("dense", make_heavy, 10, 130, 1, 2),
    Case("small", functools.partial(make_cnn, 1), 50, 280, 8, 2, remote=True),
    Case("four times as wide", functools.partial(make_cnn, 4), 50, 280, 4, 2, remote=True),
]


def note_steps(folder: str) -> Any:
    """Return callbacks that write the time of every step of rank 0, by epoch."""

    def callbacks() -> list[Any]:
        import horovod.tensorflow as hvd
        import keras

        class Notes(keras.callbacks.Callback):
            def on_train_begin(self, logs: Any = None) -> None:
                self.times: list[list[float]] = []

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.times.append([])

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.times[-1].append(time.perf_counter())

            def on_train_end(self, logs: Any = None) -> None:
                if hvd.rank() == 0:
                    Path(folder, "times").write_text(json.dumps(self.times))

        return [Notes()]

    return callbacks


def halves_of(times: Sequence[Sequence[float]], half: int) -> list[tuple[list[float], list[float]]]:
    """Return the seconds of each step in the two halves after each checkpoint. Pure."""
    pairs, before = [], 0
    for epoch in times:
        for step in range(-before % (2 * half), len(epoch) - 2 * half, 2 * half):
            if step:  # the time of the step at whose end the checkpoint is taken
                moments = epoch[step - 1 : step + 2 * half]
                seconds = [later - earlier for earlier, later in pairwise(moments)]
                pairs.append((seconds[:half], seconds[half:]))
        before += len(epoch)
    return pairs


def measure(frame: Any, case: Case, place: str) -> list[Any]:
    """Return a row of the table."""
    pairs = []
    for run in range(case.runs):
        with tempfile.TemporaryDirectory() as folder:
            run_training(
                frame,
                case.make,
                feature_cols=["image"],
                label_cols=["label"],
                shapes={"image": (SIDE, SIDE, 1)},
                num_workers=2,
                batch_size=BATCH,
                epochs=case.epochs,
                steps_per_epoch=case.steps,
                run_dir=f"{place}/{case.half}-{case.epochs}-{run}",
                checkpoint_every_steps=2 * case.half,
                callbacks=note_steps(folder),
                verbose=False,
            )
            pairs += halves_of(json.loads(Path(folder, "times").read_text()), case.half)
    ratios = [sum(after) / sum(later) for after, later in pairs]
    low, median, high = statistics.quantiles(ratios, n=4)
    after, later = (list(chain.from_iterable(half)) for half in zip(*pairs, strict=True))
    last = [statistics.quantiles(half, n=100)[-1] for half in (after, later)]
    return [
        f"{case.title}, {case.make().count_params():,}",
        "object store" if case.remote else "local",
        f"{1000 * statistics.median(later):.1f} ms",
        2 * case.half,
        len(pairs),
        f"{median:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{statistics.mean(after) / statistics.mean(later):.3f}",
        f"{1000 * last[0]:.1f}, {1000 * last[1]:.1f} ms",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    rows = []
    with object_store(LATENCY) as bucket, tempfile.TemporaryDirectory() as folder:
        frame = make_frame(*make_arrays())
        # The first run of a session is slower.
        measure(frame, Case("", CASES[0].make, 50, 280, 2, 1), f"{folder}/first")
        for case in CASES:
            rows.append(measure(frame, case, f"{bucket}/runs" if case.remote else folder))
            print(rows[-1], flush=True)
        frame.sparkSession.stop()
    head = ["network, weights", "storage", "step", "steps between", "n", "median ratio"]
    head += ["quartiles", "ratio of means", "99th percentile of steps, first and second half"]
    text = (
        f"Two ranks on this machine, as many as it has cores, batches of {BATCH} per rank: the "
        "first half of the steps between two checkpoints, with its stop and its writing, compared "
        "with the second half; n is the number of such pairs. Answers of the object store take "
        f"{1000 * LATENCY:.0f} ms.\n\n{table(head, rows)}"
    )
    present("Checkpoints", "python benchmarks/checkpoint.py --write", text, arguments.write)


if __name__ == "__main__":
    main()
