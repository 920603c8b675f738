"""What checkpoints cost a training.

Two ranks train with a checkpoint every so many steps. The steps in the first half after one was
due, its stop and the writing in the background included, are compared with those of the second
half: the slowdown of a run with a checkpoint every half as many steps, pair by pair, within one run
and so under one load. Networks of three sizes, up to 100 MB of weights (300 MB with Adam's state);
the run directory on local storage and in an object store whose answers take 30 ms. How soon a
killed training takes its next step is measured by ``first_result.py``.

Usage: python benchmarks/checkpoint.py [--write]; ``--write`` puts the result into
``docs/benchmarks.md``, each row as it comes.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from model import SIDE, make_arrays, make_cnn, make_frame
from peers.object_store import object_store
from report import present, shown_command, table

from horovod_spark_runner import CheckpointOptions, DataOptions, run_training

BATCH = 64
# Seconds before an answer of the object store.
LATENCY = 0.03
HEAD = [
    "network, weights",
    "storage",
    "step",
    "steps between",
    "n",
    "median ratio",
    "quartiles",
    "ratio of means",
    "99th percentile of steps, first and second half",
    "still writing at half",
]
TEXT = (
    f"Two ranks on this machine, as many as it has cores, batches of {BATCH} per rank: the first "
    "half of the steps between two checkpoints, with its stop and its writing, compared with the "
    "second half; n is the number of such pairs. Where a checkpoint was still being written when "
    "the second half began, the ratio says too little. Answers of the object store begin "
    f"{1000 * LATENCY:.0f} ms late; its server runs on the same cores."
)


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
    # Writing takes longer there: the halves are so long that it ends in the first.
    Case("small", functools.partial(make_cnn, 1), 500, 5000, 3, 1, remote=True),
    Case("four times as wide", functools.partial(make_cnn, 4), 100, 1000, 3, 1, remote=True),
]


def note_steps(folder: str) -> Any:
    """Return callbacks that write when rank 0 ended each step, by epoch, and wrote checkpoints."""

    def callbacks() -> list[Any]:
        import horovod.tensorflow as hvd
        import keras

        from horovod_spark_runner.checkpoint import manager

        class Notes(keras.callbacks.Callback):
            def on_train_begin(self, logs: Any = None) -> None:
                self.times: list[list[float]] = []
                self.written: dict[int, float] = {}
                prune = manager.prune_checkpoints

                def prune_and_note(directory: Any, newest: int, options: Any) -> None:
                    prune(directory, newest, options)
                    self.written[newest] = time.perf_counter()

                manager.prune_checkpoints = prune_and_note  # is the last thing that writing does

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.times.append([])

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.times[-1].append(time.perf_counter())

            def on_train_end(self, logs: Any = None) -> None:
                if hvd.rank() == 0:
                    noted = {"times": self.times, "written": self.written}
                    Path(folder, "noted").write_text(json.dumps(noted))

        return [Notes()]

    return callbacks


class Pair(NamedTuple):
    """What follows one checkpoint.

    Attributes:
        after: seconds of each step of the first half.
        later: and of the second.
        late: whether the checkpoint was still being written when the second began.
    """

    after: list[float]
    later: list[float]
    late: bool


def pairs_of(
    times: Sequence[Sequence[float]], written: Mapping[str, float], half: int
) -> list[Pair]:
    """Return the two halves after each checkpoint. Pure.

    Args:
        times: moments at which steps ended, by epoch.
        written: when the writing of checkpoints came to its end, by step of the run.
        half: steps in half of the time between checkpoints.
    """
    pairs, before = [], 0
    for epoch in times:
        for step in range(-before % (2 * half), len(epoch) - 2 * half + 1, 2 * half):
            if step:  # the time of the step at whose end the checkpoint is taken
                moments = epoch[step - 1 : step + 2 * half]
                seconds = [later - earlier for earlier, later in pairwise(moments)]
                # What was not written when the training ended is not among them.
                late = written.get(str(before + step), math.inf) > moments[half]
                pairs.append(Pair(seconds[:half], seconds[half:], late))
        before += len(epoch)
    return pairs


def measure(frame: Any, case: Case, place: str, data_dir: str) -> list[Any]:
    """Return the figures of a row of the table."""
    pairs: list[Pair] = []
    for run in range(case.runs):
        with tempfile.TemporaryDirectory() as folder:
            run_training(
                frame,
                case.make,
                feature_cols=["image"],
                label_cols=["label"],
                data=DataOptions(shapes={"image": (SIDE, SIDE, 1)}, data_dir=data_dir),
                num_workers=2,
                batch_size=BATCH,
                epochs=case.epochs,
                steps_per_epoch=case.steps,
                run_dir=f"{place}/{case.title.replace(' ', '-')}-{run}",
                checkpoints=CheckpointOptions(every_steps=2 * case.half),
                callbacks=note_steps(folder),
                stream_logs=False,
            )
            noted = json.loads(Path(folder, "noted").read_text())
        pairs += pairs_of(noted["times"], noted["written"], case.half)
    ratios = [sum(pair.after) / sum(pair.later) for pair in pairs]
    low, median, high = statistics.quantiles(ratios, n=4)
    after = list(chain.from_iterable(pair.after for pair in pairs))
    later = list(chain.from_iterable(pair.later for pair in pairs))
    last = [statistics.quantiles(half, n=100)[-1] for half in (after, later)]
    return [
        f"{1000 * statistics.median(later):.1f} ms",
        2 * case.half,
        len(pairs),
        f"{median:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{statistics.mean(after) / statistics.mean(later):.3f}",
        f"{1000 * last[0]:.1f}, {1000 * last[1]:.1f} ms",
        sum(pair.late for pair in pairs),
    ]


def row_of(frame: Any, case: Case, place: str, data_dir: str) -> list[Any]:
    """Return a row of the table; one that says so if its runs fail, so that others are kept."""
    head = [
        f"{case.title}, {case.make().count_params():,}",
        "object store" if case.remote else "local",
    ]
    try:
        return head + measure(frame, case, place, data_dir)
    except Exception as error:
        traceback.print_exc()
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200].replace("|", "/")
        return [*head, f"failed: {reason}", *[""] * (len(HEAD) - len(head) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    rows: list[list[Any]] = []
    with object_store(LATENCY) as bucket, tempfile.TemporaryDirectory() as folder:
        frame = make_frame(*make_arrays())
        data_dir = f"{folder}/data"
        # The first run of a session is slower.
        first = Case("first", CASES[0].make, 50, 280, 2, 1)
        measure(frame, first, folder, data_dir)
        for case in CASES:
            place = f"{bucket}/runs" if case.remote else f"{folder}/runs"
            rows.append(row_of(frame, case, place, data_dir))
            present(
                "Checkpoints", shown_command(), f"{TEXT}\n\n{table(HEAD, rows)}", arguments.write
            )
        frame.sparkSession.stop()


if __name__ == "__main__":
    main()
