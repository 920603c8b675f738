"""Steps of an epoch for one rank: its part of each global batch, or whole batches on demand.

Where ranks make their steps together, or equally many of them, each has its part of every global
batch. Where they step by themselves, those parts are batches of their own, of whoever takes them:
first each rank those that would have been its part, from the first on, then what is left of others,
of the one with the most left. So each is trained on once, and a slow rank takes fewer.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from ..checkpoint.resume import TAKEN, check_not_taken
from ..config.training import FitOptions
from ..data.manifest import Manifest
from ..data.read.reader import Batch, DatasetReader
from ..data.read.sharding import EpochPlan, batch_rows, epoch_steps, plan_epoch
from ..sync.asynchronous import AsyncSynchroniser, Board
from ..sync.synchroniser import Synchroniser
from ..typed_json import JsonObject
from .progress import Progress

if TYPE_CHECKING:
    from mpi4py import MPI

    from .agreement import Agreement

# Requests of a rank to all ranks at a step, in this order.
STOP, SAVE, PREEMPT = range(3)
NOTHING = (False, False, False)


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
        self._steps_of_pass = epoch_steps(manifest.rows, global_batch)
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


class _BatchPosition(NamedTuple):
    """A batch: the share it is of, and its number there."""

    share: int
    number: int


class _BatchSchedule(Protocol):
    """The steps of one rank, epoch by epoch; all ranks call the same in the same order."""

    def restore(self, state: Mapping[str, object], progress: Progress) -> None:
        """Resume from a checkpoint's `state`.

        Raises:
            RunDirectoryError: the remainder of its epoch cannot be determined.
        """
        ...

    def state(self) -> JsonObject:
        """Return the state for a checkpoint, as JSON; ranks have met."""
        ...

    def steps(self, progress: Progress) -> Generator[Step, None, None]:
        """Yield this rank's remaining steps of the epoch of ``progress``."""
        ...

    def stops(self, requests: Sequence[object], *, watched: bool) -> bool:
        """Return whether all ranks leave the epoch after a step.

        Args:
            requests: what this rank asks for after it; see `STOP`.
            watched: whether callbacks may have decided it, on all ranks alike.
        """
        ...

    def end(self, progress: Progress) -> Sequence[object]:
        """Record the progress of ranks that have met; return why they have left the epoch."""
        ...

    def last_fraction(self, step: Step | None) -> float:
        """Return this rank's part of the rows of all ranks' last steps of an epoch."""
        ...

    def lateness(self) -> list[int]:
        """Return a histogram of the updates between reading weights and adding to them."""
        ...


def batch_schedule(
    sync: Synchroniser,
    epochs: Epochs,
    world: MPI.Comm,
    agreement: Agreement,
    wants: Callable[[int], bool],
) -> _BatchSchedule:
    """Return the steps of this rank under its synchronisation strategy.

    Args:
        sync: the strategy.
        epochs: the epochs.
        world: communicator of all ranks.
        agreement: of all ranks.
        wants: returns whether a checkpoint is due after so many steps of the run.
    """
    if sync.in_step:
        return _SynchronousBatches(epochs, agreement)
    return OnDemandBatches(epochs, cast(AsyncSynchroniser, sync), world, wants)


def was_asynchronous(state: Mapping[str, object]) -> bool:
    """Return whether ranks stepped asynchronously before a checkpoint with this ``state``. Pure."""
    return TAKEN in state


class _SynchronousBatches:
    """Parts of global batches; see `_BatchSchedule`.

    Args:
        epochs: the epochs.
        agreement: of all ranks.
    """

    def __init__(self, epochs: Epochs, agreement: Agreement) -> None:
        self._epochs, self._agreement = epochs, agreement

    def restore(self, state: Mapping[str, object], progress: Progress) -> None:
        check_not_taken(state, progress.epoch)

    def state(self) -> JsonObject:
        return {}

    def steps(self, progress: Progress) -> Generator[Step, None, None]:
        return self._epochs.steps_from(progress.epoch, progress.epoch_step, progress.step)

    def stops(self, requests: Sequence[object], *, watched: bool) -> bool:
        # Callbacks may use their own clock: one rank's decision holds for all.
        return watched and self._agreement.any_requests(requests[STOP])

    def end(self, progress: Progress) -> Sequence[object]:
        return NOTHING

    def last_fraction(self, step: Step | None) -> float:
        return 1.0 if step is None else step.fraction

    def lateness(self) -> list[int]:
        return []


class OnDemandBatches:
    """Batches that ranks take on demand; see `_BatchSchedule`.

    Args:
        epochs: the epochs.
        sync: the way of synchronising.
        world: communicator of all ranks.
        wants: tells whether a checkpoint is due after so many steps of the run.
    """

    def __init__(
        self,
        epochs: Epochs,
        sync: AsyncSynchroniser,
        world: MPI.Comm,
        wants: Callable[[int], bool],
    ) -> None:
        self._epochs, self._sync, self._wants = epochs, sync, wants
        self._world = world
        self._rank, self._size = world.Get_rank(), world.Get_size()
        # Batches taken of each share, in an unfinished epoch.
        self._taken: list[int] | None = None
        self._board: Board | None = None

    def restore(self, state: Mapping[str, Any], progress: Progress) -> None:
        self._taken = state.get(TAKEN)

    def state(self) -> JsonObject:
        return {TAKEN: self._taken}

    def steps(self, progress: Progress) -> Generator[Step, None, None]:
        steps = self._epochs.steps
        taken = self._taken or [progress.epoch_step] * self._size
        counts, first = _first_batches(taken, steps, self._size)
        self._board = board = self._sync.open(counts)
        return self._steps(progress, board, first[self._rank], sum(taken), len(taken))

    def _steps(
        self,
        progress: Progress,
        board: Board,
        position: _BatchPosition | None,
        done: int,
        shares: int,
    ) -> Generator[Step, None, None]:
        """Yield the steps, given the first, how many batches are done, and of how many shares."""
        epoch, steps = progress.epoch, self._epochs.steps
        before = progress.step - progress.epoch_step
        share, reading, made = self._rank % shares, None, 0
        with contextlib.ExitStack() as stack:
            while position is not None or not made:
                number = board.begin()
                at = min((done + number) // shares, steps - 1)
                if number and (done + number) % shares == 0 and self._wants(before + at):
                    board.ask([request == SAVE for request in range(len(NOTHING))])
                if position is None:  # nothing is left for this rank
                    step = Step(at, Batch(at, 0, {}), 1, equal=False)
                else:
                    if reading is None or position.share != share:
                        stack.close()  # one is read at a time
                        share = position.share
                        reading = stack.enter_context(
                            contextlib.closing(
                                self._epochs.steps_from(
                                    epoch,
                                    position.number,
                                    before + position.number,
                                    (share, shares),
                                )
                            )
                        )
                    step = next(one for one in reading if one.number == position.number)
                if made and self._size == 1 and not step.batch.rows:
                    board.end()  # no other rank waits for this one
                else:
                    self._sync.go_on(number)
                    made += 1
                    yield replace(step, number=at)
                position = self._take(board, share)

    def _take(self, board: Board, share: int) -> _BatchPosition | None:
        """Take a batch, of this share while it has some; ``None`` if none is left."""
        steps = self._epochs.steps
        while True:
            seen = board.read()
            if any(seen.requests):
                return None
            if seen.taken[share] >= steps:
                share = min(range(len(seen.taken)), key=seen.taken.__getitem__)
                if seen.taken[share] >= steps:
                    return None
            number = board.take(share)
            if number < steps:
                return _BatchPosition(share, number)

    def stops(self, requests: Sequence[object], *, watched: bool) -> bool:
        assert self._board is not None
        self._board.ask(requests)
        return False  # all ranks leave before their next batch

    def end(self, progress: Progress) -> Sequence[object]:
        steps, seen = self._epochs.steps, self._sync.seen
        self._taken = [min(number, steps) for number in seen.taken]
        done = sum(self._taken) // len(self._taken)
        whole = all(number == steps for number in self._taken)
        # An unfinished epoch has at least one step.
        progress.to_step(steps if whole else max(1, done))
        if whole or seen.requests[STOP]:
            self._taken = None  # the epoch ends, even if batches are left
        return NOTHING if whole else seen.requests

    def last_fraction(self, step: Step | None) -> float:
        rows = 0 if step is None else step.batch.rows
        total = self._world.allreduce(rows)
        return rows / total if total else 0.0

    def lateness(self) -> list[int]:
        every = self._world.allgather(self._sync.lateness)
        counted: collections.Counter[int] = sum(every, collections.Counter())
        return [counted[number] for number in range(max(counted, default=-1) + 1)]


def _first_batches(
    taken: Sequence[int], steps: int, ranks: int
) -> tuple[list[int], list[_BatchPosition | None]]:
    """Assign each rank a first batch, so that none is without a step. Pure.

    Args:
        taken: batches of each share that are taken.
        steps: batches that each has.
        ranks: number of ranks.

    Returns:
        Those that are taken then, and each rank's; ``None`` where there are none left.
    """
    counts, positions = list(taken), []
    for rank in range(ranks):
        share = rank if rank < len(counts) and counts[rank] < steps else counts.index(min(counts))
        positions.append(_BatchPosition(share, counts[share]) if counts[share] < steps else None)
        counts[share] += counts[share] < steps
    return counts, positions
