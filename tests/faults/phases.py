"""Faults in the midst of what a training does beside its steps; each hits one attempt of it.

Rank 0, which comes to the place, stays there and kills what is to be killed, also the other rank:
so a fault hits the place exactly, wherever its victim is.
"""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_spark_runner.checkpoint.files import MANIFEST_FILE, VARIABLES_FILE
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.storage.contents import Contents, Sink
from horovod_spark_runner.storage.filesystem import Location
from tests.leftovers import own_task

from .injection import await_file, find_mpirun, note_path

# Half of the file with the variables has been written, in the second checkpoint of the attempt.
CHECKPOINT_FILE = "checkpoint file"
# That checkpoint is whole, but has not been given its name.
CHECKPOINT_FOLDER = "checkpoint folder"
# Rank 0 is about to read the arrays to go on from.
RESTORE = "restore"
# Both ranks have done the sixth step of the attempt.
STEP = "step"
# Both ranks have done the second batch of validation.
VALIDATION = "validation"
# Half of the trained model has been written; all of it but its signature.
MODEL_FILE = "model file"
SIGNATURE = "signature"
# Some of the DataFrame's rows have been written. Not a matter of attempts: there is none yet.
ROWS = "rows"


@dataclass(frozen=True)
class PhaseFault:
    """A fault of one attempt.

    Attributes:
        phase: one of those above.
        victims: (rank, kind) of what is killed at once: ``"sigkill"``, the rank; ``"spark
            worker"``, its Spark task; ``"mpirun"``; ``"driver"``. Among rows the ``"sigkill"`` is
            for Spark's Python worker, and there is ``"executor"``.
    """

    phase: str
    victims: tuple[tuple[int, str], ...]

    @property
    def text(self) -> str:
        """The fault as an argument of `job`."""
        return ":".join([self.phase, *(f"{rank}:{kind}" for rank, kind in self.victims)])


def hooks_for(
    faults: Sequence[PhaseFault], folder: str, run_dir: str, every: int
) -> Callable[[], list[Any]]:
    """Return a function that sets a trap for the attempt it is called in, on every rank.

    Must be called on the driver.

    Args:
        faults: of the first attempt of the run, the second, and so on.
        folder: for the notes that tell what has happened.
        run_dir: of the run.
        every: steps between checkpoints.
    """
    driver = os.getpid()
    of_attempts = [fault for fault in faults if fault.phase != ROWS]

    def make() -> list[Any]:
        import horovod.tensorflow as hvd
        import keras

        directory = RunDirectory(run_dir)
        attempt = len(directory.read_attempts())
        fault = of_attempts[attempt - 1] if attempt <= len(of_attempts) else None

        def note(name: str) -> Path:
            return note_path(folder, f"attempt-{attempt}-{name}")

        def reached() -> None:
            """Kill the victims, this process last."""
            assert fault is not None
            note("reached").touch()
            pids = []
            for rank, kind in fault.victims:
                await_file(note(f"rank-{rank}"))
                own, task = map(int, note(f"rank-{rank}").read_text().split())
                found = {"sigkill": own, "spark worker": task, "driver": driver}
                pids.append(find_mpirun().pid if kind == "mpirun" else found[kind])
            for pid in sorted(pids, key=os.getpid().__eq__):
                os.kill(pid, signal.SIGKILL)
            stay()

        if fault is not None:
            new = note(f"new-{hvd.rank()}")
            new.write_text(f"{os.getpid()} {own_task()}")
            new.rename(note(f"rank-{hvd.rank()}"))
            set_trap(fault.phase, reached)

        steps: list[int] = []  # of this process: what a callback holds is resumed

        class Phases(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                step = int(self.model.optimizer.iterations)
                steps.append(step)
                if fault is not None and fault.phase == STEP and len(steps) == 6:
                    self.reached_after(step)

            def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
                if fault is not None and fault.phase == VALIDATION and batch == 1:
                    self.reached_after(int(self.model.optimizer.iterations))

            def reached_after(self, step: int) -> None:
                """Wait for the other rank, and the checkpoint before: it is known what is lost."""
                note(f"there-{hvd.rank()}").touch()
                if hvd.rank():
                    stay()
                await_file(note("there-1"))
                await_file(Path(str(directory.checkpoint((step - 1) // every * every))))
                reached()

        return [Phases()]

    return make


def stay() -> None:
    """Do nothing until this process is ended."""
    while True:
        time.sleep(1)


def set_trap(phase: str, reached: Callable[[], None]) -> None:
    """Have ``reached`` called when rank 0 comes to a place in reading or writing files."""
    write, move, spool = Location.write_stream_in_place, Location.move_to, Location.spool
    seen: list[Location] = []

    def write_half(place: Location, fill: Callable[[Sink], object]) -> None:
        whole = io.BytesIO()
        fill(Sink(whole, lambda: None))
        half = whole.getvalue()[: len(whole.getvalue()) // 2]
        write(place, lambda sink: sink.write_all(half))
        reached()

    def trapped_write(place: Location, fill: Callable[[Sink], object]) -> None:
        if phase == CHECKPOINT_FILE and place.name == VARIABLES_FILE:
            seen.append(place)
            if len(seen) == 2:
                write_half(place, fill)
        if phase == MODEL_FILE and place.name.startswith(".model.keras."):
            write_half(place, fill)
        if phase == SIGNATURE and place.name.startswith(".signature.json."):
            reached()
        write(place, fill)

    def trapped_move(place: Location, target: Location) -> None:
        if phase == CHECKPOINT_FOLDER and place.join(MANIFEST_FILE).exists():
            seen.append(place)
            if len(seen) == 2:
                reached()
        move(place, target)

    def trapped_spool(place: Location, taker: Callable[[bytes], Any]) -> Contents:
        if phase == RESTORE and place.name == VARIABLES_FILE:
            reached()
        return spool(place, taker)

    Location.write_stream_in_place = trapped_write  # type: ignore[assignment]
    Location.move_to = trapped_move  # type: ignore[assignment]
    Location.spool = trapped_spool  # type: ignore[assignment]


def rows_with(faults: Sequence[PhaseFault], frame: Any, folder: str) -> Any:
    """Return ``frame`` computed by Python, which the faults among ``ROWS`` hit, each once.

    Must be called on the driver.
    """
    driver = os.getpid()
    kinds = [fault.victims[0][1] for fault in faults if fault.phase == ROWS]
    planned = [(kind, str(note_path(folder, f"rows-{kind}"))) for kind in kinds]
    if not planned:
        return frame
    kill = signal.SIGKILL

    # Nothing of this module: Spark's Python workers need not have it.
    def rows(batches: Iterator[Any]) -> Iterator[Any]:
        import psutil

        yield next(batches)
        for kind, note in planned:
            try:
                os.close(os.open(note, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            own = psutil.Process()
            victims = {
                "sigkill": own,
                "driver": psutil.Process(driver),
                "executor": next(p for p in own.parents() if p.name() == "java"),
            }
            os.kill(victims[kind].pid, kill)
            time.sleep(60)
        yield from batches

    return frame.mapInArrow(rows, frame.schema)
