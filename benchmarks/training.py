"""What a training step costs through ``run_training``, compared with the same loop by hand.

Two ranks train a small convolutional network on scikit-learn's digits, enlarged and repeated: with
``run_training`` from a DataFrame, and with a loop written by hand under bare ``mpirun`` on arrays
that are in memory already, in turns; the latter also with the settings of threads and transport
that ``run_training`` gives its ranks. Compared are samples per second in the steps of each epoch
but the first, without its first steps: the launch has a benchmark of its own; as a second figure,
samples per second of the whole training, from the moment rank 0 has made the model until the last
checkpoint, one at the end of each epoch, has reached the disk: the broadcast, tracing and the first
epoch included; and the seconds from that moment to the end of the first step.

With ``--framework torch``, the same network in PyTorch, against DistributedDataParallel with gloo
between two processes, started by torchrun and by Spark's TorchDistributor; whole epochs but the
first are compared, from the first step to the results. Run it with ``python
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
from model import SIDE, SKIP, Rates, make_arrays, make_cnn, make_frame, seconds_of_training
from report import GOAL_HEAD, goal, present, shown_command, table

from horovod_spark_runner.cluster.protocol.command import transport_parameters

LOOP = Path(__file__).resolve().parent / "peers" / "training_loop.py"
# What ranks on few cores need and mpirun does not set.
SETTINGS = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
}
HAND, TUNED = "by hand, arrays in memory", "by hand, our settings"
OURS = "`run_training`"


def by_hand(arrays: Path, epochs: int, batch_size: int, *, tuned: bool = False) -> Rates:
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
    command += [sys.executable, str(LOOP), str(arrays), str(epochs), str(batch_size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
    return Rates(**json.loads(lines[-1]))


def note_time(place: Path) -> None:
    """Note the time of rank 0 in a file, the first time only."""
    import horovod.tensorflow as hvd

    if hvd.rank() == 0 and not place.exists():
        place.write_text(repr(time.time()))


def noting_maker(folder: str) -> Any:
    """Return a function that makes the model and notes when it is made."""

    def make_model() -> Any:
        model = make_cnn()
        note_time(Path(folder, "made"))
        return model

    return make_model


def stopwatch(folder: str, batch_size: int) -> Any:
    """Return a function that makes the callback that times the steps of rank 0."""

    def callbacks() -> list[Any]:
        import horovod.tensorflow as hvd
        import keras

        class Stopwatch(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.epoch = epoch

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                steps = self.params["steps"] - 1  # the last one may be partial
                if batch == 0:
                    note_time(Path(folder, "first"))
                elif batch == SKIP - 1:
                    self.began = time.perf_counter()
                elif batch == steps - 1 and hvd.rank() == 0:
                    rows = (steps - SKIP) * batch_size * hvd.size()
                    rate = rows / (time.perf_counter() - self.began)
                    Path(folder, str(self.epoch)).write_text(repr(rate))

        return [Stopwatch()]

    return callbacks


def ours(frame: Any, epochs: int, batch_size: int) -> Rates:
    """Return how fast ``run_training`` is."""
    with tempfile.TemporaryDirectory() as name:
        whole = seconds_of_training(
            frame,
            noting_maker(name),
            (SIDE, SIDE, 1),
            stopwatch(name, batch_size),
            Path(name),
            epochs,
            batch_size,
        )
        steps = [float(Path(name, str(epoch)).read_text()) for epoch in range(epochs)]
        made, first = (float(Path(name, one).read_text()) for one in ("made", "first"))
        return Rates(steps, epochs * frame.count() / whole, first - made)


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


def of_keras(rounds: Rounds, rows: int, epochs: int, batch_size: int) -> str:
    """Return the section on Keras."""
    first_steps = [f"{rounds.first(name):.2f} s" for name in rounds.names]
    return (
        f"Two ranks, {rows:,} images of {SIDE} x {SIDE}, batches of {batch_size} per rank; "
        "samples per second of both ranks: in the steps, median of the epochs but the first "
        f"(n = {rounds.count * (epochs - 1)}) · of the whole training of {epochs} epochs, from the "
        "moment rank 0 has made the model until the last checkpoint, one after each epoch, has "
        f"reached the disk (n = {rounds.count}). Our settings are threads that yield the core "
        "while they wait in MPI, TensorFlow threads to match, and MPI over shared memory alone. "
        "Both ways, each rank is bound to a core."
        f"\n\n{table(['round', *rounds.names], rounds.rows)}\n\n"
        "From the moment the model is made to the end of the first step (by hand, the arrays have "
        f"been read by then; medians, n = {rounds.count}):\n\n"
        f"{table(rounds.names, [first_steps])}\n\n{table(GOAL_HEAD, rounds.goals(HAND, TUNED))}"
    )


def of_torch(rounds: Rounds, rows: int, epochs: int, batch_size: int) -> str:
    """Return the section on PyTorch."""
    return (
        f"Two ranks, {rows:,} images of {SIDE} x {SIDE}, batches of {batch_size} per rank; "
        "samples per second of both ranks: in whole epochs but the first, from the first step to "
        f"the results, median (n = {rounds.count * (epochs - 1)}) · of the whole training of "
        f"{epochs} epochs, from the moment rank 0 has made the module until the last checkpoint, "
        f"one after each epoch, has reached the disk (n = {rounds.count}). All compute with one "
        "thread per rank and report loss and accuracy; DistributedDataParallel has gloo between "
        "its two processes. `run_training` binds each rank to a core."
        f"\n\n{table(['round', *rounds.names], rounds.rows)}\n\n"
        f"{table(GOAL_HEAD, rounds.goals(*rounds.names[:-1]))}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=("keras", "torch"), default="keras")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (3)")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of a run (4)")
    parser.add_argument("--batch-size", type=int, default=64, help="rows per rank and step (64)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    images, labels = make_arrays()
    frame = make_frame(images, labels)
    epochs, batch_size = arguments.epochs, arguments.batch_size
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder, "digits.npz")
        np.savez(arrays, images=images, labels=labels)
        if arguments.framework == "torch":
            contenders = torch_training.contenders(arrays, frame, epochs, batch_size)
        else:
            contenders = {
                HAND: lambda: by_hand(arrays, epochs, batch_size),
                TUNED: lambda: by_hand(arrays, epochs, batch_size, tuned=True),
                OURS: lambda: ours(frame, epochs, batch_size),
            }
        rounds = Rounds(contenders, arguments.rounds)
    frame.sparkSession.stop()
    torch = arguments.framework == "torch"
    text = (of_torch if torch else of_keras)(rounds, len(images), epochs, batch_size)
    title = "Training with PyTorch" if torch else "Training"
    present(title, shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
