"""Steps of an epoch for one rank: its part of each batch, or whole batches on demand.

Where ranks make their steps together, or equally many of them, each has its part of every global
batch. Where they step by themselves, those parts are batches of their own, of whoever takes them:
first each rank those that would have been its part, from the first on, then what is left of others,
of the one with the most left. So each is trained on once, and a slow rank takes fewer.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from ..checkpoint.resume import TAKEN, check_not_taken
from ..data.read.reader import Batch
from ..sync.asynchronous import AsyncSynchroniser, Board
from ..sync.synchroniser import Synchroniser
from .agreement import NOTHING, SAVE, STOP, Agreement
from .epochs import Epochs, Step
from .progress import Progress

if TYPE_CHECKING:
    from mpi4py import MPI


class BatchPosition(NamedTuple):
    """A batch: the share it is of, and its number there."""

    share: int
    number: int


class Shares(Protocol):
    """The steps of one rank, epoch by epoch; all ranks call the same in the same order."""

    def restore(self, state: Mapping[str, Any], progress: Progress) -> None:
        """Resume from a checkpoint's `state`.

        Raises:
            RunDirectoryError: the remainder of its epoch cannot be determined.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON; ranks have met."""
        ...

    def steps(self, progress: Progress) -> Generator[Step, None, None]:
        """Yield this rank's remaining steps of the epoch of ``progress``."""
        ...

    def stops(self, requests: Sequence[object], *, watched: bool) -> bool:
        """Return whether all ranks leave the epoch after a step.

        Args:
            requests: what this rank asks for after it; see `agreement`.
            watched: whether callbacks may have decided it, on all ranks alike.
        """
        ...

    def end(self, progress: Progress) -> Sequence[object]:
        """Record the progress of all ranks, where they have met; return why they have left the
        epoch.
        """
        ...

    def last_fraction(self, step: Step | None) -> float:
        """Return this rank's part of the rows of all ranks' last steps of an epoch."""
        ...

    def lateness(self) -> list[int]:
        """Return a histogram of lateness: updates of other ranks since an update's weights were
        read.
        """
        ...


def shares_of(
    sync: Synchroniser,
    epochs: Epochs,
    world: MPI.Comm,
    agreement: Agreement,
    wants: Callable[[int], bool],
) -> Shares:
    """Return the steps of this rank, as its way of synchronising lets ranks make them.

    Args:
        sync: the way.
        epochs: the epochs.
        world: communicator of all ranks.
        agreement: of all ranks.
        wants: tells whether a checkpoint is due after so many steps of the run.
    """
    if sync.in_step:
        return EqualShares(epochs, agreement)
    return TakenShares(epochs, cast(AsyncSynchroniser, sync), world, wants)


def made_alone(state: Mapping[str, Any]) -> bool:
    """Return whether ranks stepped asynchronously before a checkpoint with this ``state``. Pure."""
    return TAKEN in state


class EqualShares:
    """Parts of global batches; see `Shares`.

    Args:
        epochs: the epochs.
        agreement: of all ranks.
    """

    def __init__(self, epochs: Epochs, agreement: Agreement) -> None:
        self._epochs, self._agreement = epochs, agreement

    def restore(self, state: Mapping[str, Any], progress: Progress) -> None:
        check_not_taken(state, progress.epoch)

    def state(self) -> dict[str, Any]:
        return {}

    def steps(self, progress: Progress) -> Generator[Step, None, None]:
        return self._epochs.steps_from(progress.epoch, progress.epoch_step, progress.step)

    def stops(self, requests: Sequence[object], *, watched: bool) -> bool:
        # Callbacks may look at their own clock: what one rank decides, all do.
        return watched and self._agreement.any_requests(requests[STOP])

    def end(self, progress: Progress) -> Sequence[object]:
        return NOTHING

    def last_fraction(self, step: Step | None) -> float:
        return 1.0 if step is None else step.fraction

    def lateness(self) -> list[int]:
        return []


class TakenShares:
    """Batches that ranks take as they come to them; see `Shares`.

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
        # Of an epoch that is not over, the batches of each share that are taken.
        self._taken: list[int] | None = None
        self._board: Board | None = None

    def restore(self, state: Mapping[str, Any], progress: Progress) -> None:
        self._taken = state.get(TAKEN)

    def state(self) -> dict[str, Any]:
        return {TAKEN: self._taken}

    def steps(self, progress: Progress) -> Generator[Step, None, None]:
        steps = self._epochs.steps
        taken = self._taken or [progress.epoch_step] * self._size
        counts, first = first_batches(taken, steps, self._size)
        self._board = board = self._sync.open(counts)
        return self._steps(progress, board, first[self._rank], sum(taken), len(taken))

    def _steps(
        self,
        progress: Progress,
        board: Board,
        position: BatchPosition | None,
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
                    board.end()  # no other rank needs this one's part in it
                else:
                    self._sync.go_on(number)
                    made += 1
                    yield replace(step, number=at)
                position = self._take(board, share)

    def _take(self, board: Board, share: int) -> BatchPosition | None:
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
                return BatchPosition(share, number)

    def stops(self, requests: Sequence[object], *, watched: bool) -> bool:
        assert self._board is not None
        self._board.ask(requests)
        return False  # all leave where they would take another batch

    def end(self, progress: Progress) -> Sequence[object]:
        steps, seen = self._epochs.steps, self._sync.seen
        self._taken = [min(number, steps) for number in seen.taken]
        done = sum(self._taken) // len(self._taken)
        whole = all(number == steps for number in self._taken)
        # Within an epoch, some of it is done, whatever is.
        progress.to_step(steps if whole else max(1, done))
        if whole or seen.requests[STOP]:
            self._taken = None  # the epoch is over, whatever of it is left
        return NOTHING if whole else seen.requests

    def last_fraction(self, step: Step | None) -> float:
        rows = 0 if step is None else step.batch.rows
        total = self._world.allreduce(rows)
        return rows / total if total else 0.0

    def lateness(self) -> list[int]:
        every = self._world.allgather(self._sync.lateness)
        counted: collections.Counter[int] = sum(every, collections.Counter())
        return [counted[number] for number in range(max(counted, default=-1) + 1)]


def first_batches(
    taken: Sequence[int], steps: int, ranks: int
) -> tuple[list[int], list[BatchPosition | None]]:
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
        positions.append(BatchPosition(share, counts[share]) if counts[share] < steps else None)
        counts[share] += counts[share] < steps
    return counts, positions
