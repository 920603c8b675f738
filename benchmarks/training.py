"""What a training step costs through ``run_training``, compared with the same loop by hand.

Two ranks train on scikit-learn's digits, enlarged and repeated: with ``run_training`` from a
DataFrame, and with a loop written by hand under bare ``mpirun`` on arrays that are in memory
already, in turns; the latter also with the settings that ``run_training`` gives its ranks. Compared
are samples per second of each epoch but the first, from its first step to its results: the launch
has a benchmark of its own; as a second figure, samples per second of the whole training, from the
moment rank 0 has made the model until the last checkpoint, one at the end of each epoch, has
reached the disk: the broadcast, tracing and the first epoch included; and the seconds from that
moment to the end of the first step.

``--network linear`` computes next to nothing: what a step takes there is what the loop costs. With
``--framework torch``, the same networks in PyTorch, against DistributedDataParallel with gloo
between two processes, started by torchrun and by Spark's TorchDistributor. Run it with ``python
benchmarks/training.py``; ``--write`` puts the result into ``docs/benchmarks.md``.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch_training
from model import (
    CNN,
    LINEAR,
    SIDE,
    Rates,
    make_arrays,
    make_frame,
    make_network,
    seconds_of_training,
)
from report import GOAL_HEAD, goal, present, shown_command, table

from horovod_spark_runner.cluster.protocol.command import transport_parameters

LOOP = Path(__file__).resolve().parent / "peers" / "training_loop.py"
# What `run_training` sets for its ranks and mpirun does not.
SETTINGS = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "HOROVOD_CYCLE_TIME": "0.5",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
}
HAND, TUNED = "by hand, arrays in memory", "by hand, our settings"
OURS = "`run_training`"
# Of its logs after each batch, which are those of all ranks, a loop by hand has none.
WATCHED = "`run_training`, a callback after each batch"


def by_hand(
    arrays: Path, epochs: int, batch_size: int, network: str, *, tuned: bool = False
) -> Rates:
    """Return how fast the loop is under mpirun, as it comes or with our settings."""
    command = [str(Path(sys.executable).with_name("mpirun")), "-n", "2", "--bind-to", "core"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    # The threads a rank of a one-core task gets from Spark.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if tuned:
        environment.update(SETTINGS)
        for name, value in transport_parameters(1).items():
            command += ["--mca", name, value]
    command += [sys.executable, str(LOOP), str(arrays), str(epochs), str(batch_size), network]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
    return Rates(**json.loads(lines[-1]))


def note_time(place: Path) -> None:
    """Note the time of rank 0 in a file, the first time only."""
    import horovod.tensorflow as hvd

    if hvd.rank() == 0 and not place.exists():
        place.write_text(repr(time.time()))


def noting_maker(folder: str, network: str) -> Any:
    """Return a function that makes the model and notes when it is made."""

    def make_model() -> Any:
        model = make_network(network)
        note_time(Path(folder, "made"))
        return model

    return make_model


def stopwatch(folder: str, *, watched: bool) -> Any:
    """Return a function that makes the callback that times the epochs of rank 0.

    Args:
        folder: where it notes them.
        watched: whether it is called after each batch as well.
    """

    def callbacks() -> list[Any]:
        import horovod.tensorflow as hvd
        import keras

        class Stopwatch(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.began = time.perf_counter()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                if hvd.rank() == 0:
                    seconds = time.perf_counter() - self.began
                    Path(folder, f"epoch-{epoch}").write_text(repr(seconds))

        class OfBatches(Stopwatch):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch == 0:
                    note_time(Path(folder, "first"))

        return [OfBatches() if watched else Stopwatch()]

    return callbacks


def ours(frame: Any, epochs: int, batch_size: int, network: str, *, watched: bool = False) -> Rates:
    """Return how fast ``run_training`` is."""
    with tempfile.TemporaryDirectory() as name:
        whole = seconds_of_training(
            frame,
            noting_maker(name, network),
            (SIDE, SIDE, 1),
            stopwatch(name, watched=watched),
            Path(name),
            epochs,
            batch_size,
        )
        rows = frame.count()
        seconds = [float(Path(name, f"epoch-{epoch}").read_text()) for epoch in range(epochs)]
        first = 0.0
        if watched:
            first = float(Path(name, "first").read_text()) - float(Path(name, "made").read_text())
        return Rates([rows / each for each in seconds], epochs * rows / whole, first)


class Rounds:
    """Runs of all contenders in turns, and what they have measured.

    Args:
        contenders: return how fast each is, by name.
        count: how often each runs.
    """

    def __init__(self, contenders: Mapping[str, Callable[[], Rates]], count: int) -> None:
        self.names, self.count = list(contenders), count
        self.found: dict[str, list[Rates]] = {name: [] for name in contenders}
        self.rows: list[list[str]] = []
        for number in range(1, count + 1):
            cells = [str(number)]
            for name, measure in contenders.items():
                part = measure()
                self.found[name].append(part)
                cells.append(f"{statistics.median(part.steps[1:]):,.0f} · {part.whole:,.0f}")
            self.rows.append(cells)
            print(cells, flush=True)

    def steps(self, name: str) -> float:
        """Return the samples per second in steps: the median of all epochs but the first ones."""
        return statistics.median(rate for part in self.found[name] for rate in part.steps[1:])

    def whole(self, name: str) -> float:
        """Return the samples per second of whole trainings, the median."""
        return statistics.median(part.whole for part in self.found[name])

    def first(self, name: str) -> float:
        """Return the seconds to the end of the first step, the median."""
        return statistics.median(part.first for part in self.found[name])

    def lost(self, other: str, rows: int) -> float:
        """Return what a step of so many rows takes longer by `run_training`, in milliseconds."""
        return 1000 * rows * (1 / self.steps(OURS) - 1 / self.steps(other))

    def goals(self, *others: str) -> list[list[str]]:
        """Return rows of goals: `run_training` against others."""
        return [
            *(
                goal(f"steps / {other}", self.steps(OURS) / self.steps(other), at_least=0.97)
                for other in others
            ),
            *(
                [f"whole training / {other}", f"{self.whole(OURS) / self.whole(other):.2f}", "", ""]
                for other in others
            ),
        ]


def of_keras(rounds: Rounds) -> str:
    """Return what is to be said of Keras."""
    watched = rounds.steps(WATCHED) / rounds.steps(OURS)
    return (
        "Our settings: threads yield the core while they wait in MPI, TensorFlow threads to match, "
        "large pages, Horovod's cycle of 0.5 ms, MPI over shared memory alone. Both ways, each "
        "rank is bound to a core. A callback after each batch gets the logs of all ranks, which a "
        "loop by hand does not have: with one, "
        f"steps run at {watched:.2f} of the pace without.\n\nMaking the model and the first step "
        f"(n = {rounds.count}): "
        + "; ".join(f"{rounds.first(name):.2f} s {name}" for name in (HAND, TUNED, WATCHED))
        + "."
    )


OF_TORCH = (
    "All compute with one thread per rank and report loss and accuracy; DistributedDataParallel "
    "has gloo between its two processes. `run_training` binds each rank to a core."
)


def section(rounds: Rounds, rows: int, epochs: int, batch_size: int, more: str) -> str:
    """Return the section of the page.

    Args:
        rounds: what was measured.
        rows: of the dataset.
        epochs: of each training.
        batch_size: rows of a rank in a step.
        more: what else there is to say of a framework.
    """
    others = [name for name in rounds.names if name not in (OURS, WATCHED)]
    lost = "; ".join(f"{rounds.lost(name, 2 * batch_size):.2f} ms ({name})" for name in others)
    return (
        f"Two ranks, {rows:,} images of {SIDE} x {SIDE}, batches of {batch_size} per rank. Samples "
        "per second of both ranks: in whole epochs but the first, median "
        f"(n = {rounds.count * (epochs - 1)}) · of the whole training of {epochs} epochs with a "
        f"checkpoint after each (n = {rounds.count}). {more}"
        f"\n\n{table(['round', *rounds.names], rounds.rows)}\n\n"
        f"{table(GOAL_HEAD, rounds.goals(*others))}\n\nA step takes longer by: {lost}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=("keras", "torch"), default="keras")
    parser.add_argument("--network", choices=(CNN, LINEAR), default=CNN)
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (3)")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of a run (4)")
    parser.add_argument("--batch-size", type=int, default=64, help="rows per rank and step (64)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    images, labels = make_arrays()
    frame = make_frame(images, labels)
    torch = arguments.framework == "torch"
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder, "digits.npz")
        np.savez(arrays, images=images, labels=labels)
        given = arguments.epochs, arguments.batch_size, arguments.network
        contenders = {
            HAND: lambda: by_hand(arrays, *given),
            TUNED: lambda: by_hand(arrays, *given, tuned=True),
            OURS: lambda: ours(frame, *given),
            WATCHED: lambda: ours(frame, *given, watched=True),
        }
        if torch:
            contenders = torch_training.contenders(arrays, frame, *given)
        rounds = Rounds(contenders, arguments.rounds)
    frame.sparkSession.stop()
    more = OF_TORCH if torch else of_keras(rounds)
    text = section(rounds, len(images), arguments.epochs, arguments.batch_size, more)
    title = "Training with PyTorch" if torch else "Training"
    if arguments.network != CNN:
        title += f" ({arguments.network})"
    present(title, shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
