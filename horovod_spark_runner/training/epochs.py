"""Global batches of an epoch, and this rank's part of each."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from ..config.training import FitOptions
from ..data.manifest import Manifest
from ..data.read.reader import Batch, DatasetReader
from ..data.read.sharding import EpochPlan, batch_rows, plan_epoch


@dataclass(frozen=True)
class Step:
    """One step of an epoch.

    Attributes:
        number: its number in the epoch, from 0.
        batch: this rank's part of the global batch.
        rows: rows of the global batch.
        equal: whether all ranks have equally many of them.
    """

    number: int
    batch: Batch
    rows: int
    equal: bool

    @property
    def fraction(self) -> float:
        """This rank's part of the rows."""
        return self.batch.rows / self.rows


@dataclass
class _Reading:
    """Batches that a thread reads ahead, one pass over the rows after the other.

    Attributes:
        batches: what is left of them.
        part: which part of each global batch they are, and of how many.
        at: global batches of the run before the next of them.
        end: those before the end.
    """

    batches: Generator[Batch, None, None]
    part: tuple[int, int]
    at: int
    end: int


class Epochs:
    """The epochs of a dataset, as one rank reads them.

    With ``steps_per_epoch``, an epoch is so many global batches and continues where the last one
    ended; the rows are reshuffled whenever all have been seen.

    Args:
        reader: reads the dataset.
        manifest: the dataset.
        fit: batch size, shuffle and the like.
        global_batch: rows of a global batch.
        window_bytes: memory of the shuffle window.
        rank: this rank.
        size: number of ranks.
        training: ``False`` for the order of storage, every row once.
        ahead: read on into the next epoch while one ends: until `close`.
    """

    def __init__(
        self,
        reader: DatasetReader,
        manifest: Manifest,
        fit: FitOptions,
        global_batch: int,
        window_bytes: int,
        rank: int,
        size: int,
        *,
        training: bool = True,
        ahead: bool = False,
    ) -> None:
        self._reader = reader
        self._groups = [(group.rows, group.size) for group in manifest.row_groups]
        self._fit = fit
        self._global_batch = global_batch
        self._window_bytes = window_bytes
        self._rank, self._size = rank, size
        self._training = training
        self._ahead = ahead
        self._reading: _Reading | None = None
        self._rows = manifest.rows
        self._steps_of_pass = -(-manifest.rows // global_batch)
        self.steps = (fit.steps_per_epoch if training else None) or self._steps_of_pass

    def steps_from(
        self,
        epoch: int,
        first: int = 0,
        run_step: int | None = None,
        part: tuple[int, int] | None = None,
    ) -> Generator[Step, None, None]:
        """Yield the steps of ``epoch``, from the ``first`` on, read ahead by a thread.

        Args:
            epoch: its number.
            first: the step to begin with.
            run_step: steps of the whole run before that one; by default, as if all epochs had as
                many as this one. With ``steps_per_epoch`` the position in the data follows from it.
            part: which part of each global batch, and of how many; by default, this rank's.
        """
        part = part or (self._rank, self._size)
        before = 0
        if self._training:
            before = epoch * self.steps
            if run_step is not None and self._fit.steps_per_epoch is not None:
                before = run_step - first
        # Positions of the run in the data are counted in global batches.
        epochs = max(1, self._fit.epochs - epoch) if self._ahead else 1
        reading = self._at(before + first, before + epochs * self.steps, part)
        try:
            for number in range(first, self.steps):
                batch = next(reading.batches)
                reading.at += 1
                rows = batch_rows(self._rows, self._global_batch, batch.step)
                equal = rows == self._global_batch and rows % part[1] == 0
                yield Step(number, batch, rows, equal)
        finally:
            if not self._ahead or reading.at == reading.end:
                self.close()

    def close(self) -> None:
        """End the prefetch."""
        if self._reading is not None:
            self._reading.batches.close()
            self._reading = None

    def _at(self, at: int, end: int, part: tuple[int, int]) -> _Reading:
        """Return the reading at a position; continue the current one where it fits."""
        reading = self._reading
        if reading is None or (reading.part, reading.at, reading.end) != (part, at, end):
            self.close()
            passed, begin = divmod(at, self._steps_of_pass)
            plans = map(self._plan, range(passed, -(-end // self._steps_of_pass)))
            reading = _Reading(self._reader.passes(plans, *part, begin), part, at, end)
            self._reading = reading
        return reading

    def _plan(self, passed: int) -> EpochPlan:
        return plan_epoch(
            self._groups,
            global_batch=self._global_batch,
            seed=self._fit.seed,
            epoch=passed,
            window_bytes=self._window_bytes,
            shuffle=self._fit.shuffle and self._training,
        )


def execution(number: int, steps: int, length: int) -> tuple[bool, bool, int]:
    """Return whether a step begins and ends an execution of several steps, and its last step."""
    end = number - number % length + length - 1
    return number % length == 0, number in (end, steps - 1), end
