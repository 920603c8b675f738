"""Ranks that step by themselves: weights on servers inside the ranks, which all add to.

A rank takes the weights, makes a step as a process of its own, and adds by how much that has
changed them. How late that may come is bounded: a step begins only once all those are over that
have begun more than so many steps before it. Sources: see `AsyncServer`.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..config.sync import AsyncServer
from ..errors import ModelError
from .distributed_memory import Memory, Ranks
from .synchroniser import (
    MODEL,
    Arrays,
    Collectives,
    Share,
    SyncedState,
    Tensor,
    Traffic,
    Variables,
    base_of,
    bytes_of_sum,
    change_of,
    read_values,
)

# Seconds between polls for ranks that are behind.
_LOOK, _MOST = 0.0002, 0.005


class AsyncSynchroniser:
    """Asynchronous `Synchroniser`: ranks hold equal weights at the end of each `open`.

    What is in the model but not trained (moments of normalisation, say) is each rank's own until
    ranks meet: then real numbers have changed by the mean of what they have on all ranks, by rows,
    and whole numbers by their mean on those with rows, rounded down.

    Args:
        options: how late a rank may be, and who holds the weights.
        collectives: sums of the framework's tensors.
        ranks: what it shares with all others.

    Attributes:
        lateness: how many updates came so many updates of other ranks after their weights were
            taken.
        seen: what the board showed when ranks met last.
    """

    meets_in_every_step = False
    in_step = False
    synced_state = SyncedState.WEIGHTS
    delays_gradients = False

    def __init__(self, options: AsyncServer, collectives: Collectives, ranks: Ranks) -> None:
        self._collectives = collectives
        self._ranks = ranks
        servers = min(options.servers or ranks.size, ranks.size)
        # Spread out, so that servers are on several hosts.
        self._holders = [number * ranks.size // servers for number in range(servers)]
        self._bound = options.staleness * (ranks.size - 1)
        self._server: Memory | None = None
        self._board: Board | None = None
        self._number = self._updates = self._rows = 0
        self._trained: list[str] = []
        self._taken = np.empty(0)
        self._met: Arrays = {}
        self._sent = self._whole = self._step_sent = self._step_whole = 0.0
        self.lateness: collections.Counter[int] = collections.Counter()
        self.seen = _Seen(0, [], [], [])

    def begin(self, variables: Variables) -> None:
        self._variables = variables
        for name in variables.named:
            if np.asarray(self._value(name)).dtype.kind == "c":
                raise ModelError(
                    f"sync=AsyncServer(…): weight {name!r} is of complex numbers, which servers "
                    "do not add up; use sync=Allreduce()"
                )

    # -- steps that ranks make by themselves ---------------------------------------------------

    def open(self, taken: Sequence[int]) -> Board:
        """Begin steps that each rank makes by itself, from here to `meet`; all ranks call this.

        Args:
            taken: batches of each share of the epoch that were taken before; see `Board`.
        """
        ranks, variables = self._ranks, self._variables
        named = variables.named
        self._trained = [
            name
            for name in read_values(variables, (MODEL,))
            if variables.is_trained(named[name]) and _is_real(self._value(name))
        ]
        values = self._flat()
        self._server = ranks.memory(values, self._holders)
        board = Board(lambda of: ranks.memory(of, [0]), ranks.rank, ranks.size, taken)
        self._board = board
        self._met = self._rest()
        self._rows = 0
        elsewhere = 1 - (ranks.rank in self._holders) / len(self._holders)
        self._step_sent = 2 * values.nbytes * elsewhere
        self._step_whole = bytes_of_sum(
            sum(self._value(name).nbytes for name in self._trained), ranks.size
        )
        return board

    def go_on(self, number: int) -> None:
        """Set the number of the next step among all ranks' steps."""
        self._number = number

    def before_step(self, step: int) -> None:
        assert self._board is not None
        assert self._server is not None
        pause = _LOOK
        while min((seen := self._board.read()).running) < self._number - self._bound:
            time.sleep(pause)
            pause = min(2 * pause, _MOST)
        self._updates = seen.updates
        self._assign(self._server.get())
        self._taken = self._flat()
        self._sent += self._step_sent / 2

    def gradients(
        self,
        gradients: Sequence[Tensor | None],
        share: Share,
        name: str,
        place: str,
        along: Sequence[Tensor] = (),
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        return list(gradients), []

    def changes(self, changes: Sequence[Tensor], share: Share, name: str) -> list[Tensor]:
        return list(changes)

    def after_step(self, variables: Variables, step: int, rows: int) -> bool:
        assert self._board is not None
        assert self._server is not None
        if rows:
            now = self._flat()
            with np.errstate(invalid="ignore"):  # inf - inf
                change = now - self._taken
            self._server.add(np.where(now == self._taken, now.dtype.type(0), change))
            self.lateness[self._board.updated() - self._updates] += 1
            self._sent += self._step_sent / 2
            self._whole += self._step_whole
            self._rows += rows
        self._board.end()
        return False

    # -- where they meet -----------------------------------------------------------------------

    def meet(self, variables: Variables) -> None:
        if self._board is None or self._server is None:
            return
        self._board.leave()
        self._ranks.barrier()  # no rank adds anything after it
        self.seen = self._board.read()
        self._assign(self._server.get())
        self._board.close()
        self._server.close()
        self._board = self._server = None
        self._meet_rest()

    def _meet_rest(self) -> None:
        """Average the state that is not trained."""
        now, met, named = self._rest(), self._met, self._variables.named
        busy = bool(self._rows)
        rows = np.array([self._rows, busy], np.float64)
        terms: list[np.ndarray] = []
        for name, value in now.items():
            if _is_real(value):
                terms.append(change_of(value, met[name], self._rows))
            else:
                change = value.astype(np.int64) - met[name].astype(np.int64)
                terms.append(np.asarray(busy * change))
        *sums, total = map(np.asarray, self._collectives.sum([*terms, rows], "meeting"))
        nbytes = sum(term.nbytes for term in terms) + rows.nbytes
        self._sent += bytes_of_sum(nbytes, self._ranks.size)
        for (name, value), summed in zip(now.items(), sums, strict=True):
            if _is_real(value):
                after = base_of(met[name]) + summed / np.asarray(max(total[0], 1.0), summed.dtype)
            else:
                after = met[name].astype(np.int64) + summed // max(int(total[1]), 1)
            named[name].assign(after.astype(self._value(name).dtype))

    # -- values --------------------------------------------------------------------------------

    def _value(self, name: str) -> np.ndarray:
        variables = self._variables
        return np.asarray(variables.view(variables.named[name]))

    def _flat(self) -> np.ndarray:
        """Return a copy of the trained weights as one array, of single precision or more."""
        values = read_values(self._variables, (MODEL,), self._trained)
        parts = [value.reshape(-1) for value in values.values()]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def _assign(self, flat: np.ndarray) -> None:
        named, begin = self._variables.named, 0
        for name in self._trained:
            value = self._value(name)
            part = flat[begin : begin + value.size].reshape(value.shape)
            named[name].assign(part.astype(value.dtype))
            begin += value.size

    def _rest(self) -> Arrays:
        """Return copies of the model's state that is not trained."""
        trained = set(self._trained)
        names = [name for name in self._variables.named if name not in trained]
        return read_values(self._variables, (MODEL,), names)

    def traffic(self) -> Traffic:
        return Traffic(self._sent, self._whole)

    def capture(self, rank: int) -> Arrays:
        return {}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """There is nothing to keep."""


def _is_real(value: np.ndarray) -> bool:
    return value.dtype.kind not in "iub"


# Later than any step.
_NEVER = 1 << 40
_STARTED, _UPDATES = range(2)
# Requests of a rank to all ranks; see `training.epochs.STOP`.
_REQUESTS = slice(2, 5)


class _Seen(NamedTuple):
    """A rank's reading of a `Board`.

    Attributes:
        updates: updates of the weights, of all ranks.
        requests: how many ranks have asked for each thing; see `training.epochs.STOP`.
        running: of each rank, the number of the step it is in, or of one that is before its next.
        taken: batches of each share that were taken, or more where there were no more.
    """

    updates: int
    requests: list[int]
    running: list[int]
    taken: list[int]


class Board:
    """The counters of an epoch, or of its remainder; all ranks create it together.

    Args:
        opened: returns memory of all ranks that begins with such values.
        rank: this rank.
        size: number of ranks.
        taken: batches of each share that were taken before.
    """

    def __init__(
        self, opened: Callable[[np.ndarray], Memory], rank: int, size: int, taken: Sequence[int]
    ) -> None:
        self._rank, self._size = rank, size
        self._first = _REQUESTS.stop
        self._running = 0
        values = np.zeros(self._first + size + len(taken), np.int64)
        values[self._first + size :] = taken
        self._memory = opened(values)

    def read(self) -> _Seen:
        """Return the counters of all ranks."""
        values = self._memory.get().tolist()
        shares = self._first + self._size
        return _Seen(
            values[_UPDATES], values[_REQUESTS], values[self._first : shares], values[shares:]
        )

    def take(self, share: int) -> int:
        """Take the next batch of a share; return its number, which may be beyond the last."""
        return self._memory.add_at(self._first + self._size + share, 1)

    def begin(self) -> int:
        """Begin a step; return its number."""
        number = self._memory.add_at(_STARTED, 1)
        self._run(number)
        return number

    def end(self) -> None:
        """End a step; the next one's number will be larger."""
        self._run(self._running + 1)

    def leave(self) -> None:
        """Begin no more steps."""
        self._run(_NEVER)

    def updated(self) -> int:
        """Count an update; return how many there were before it."""
        return self._memory.add_at(_UPDATES, 1)

    def ask(self, requests: Sequence[object]) -> None:
        """Ask all ranks for something."""
        for number, request in enumerate(requests):
            if request:
                self._memory.add_at(_REQUESTS.start + number, 1)

    def close(self) -> None:
        """Release it; all ranks must call it."""
        self._memory.close()

    def _run(self, number: int) -> None:
        # As a sum, like all updates of the board.
        self._memory.add_at(self._first + self._rank, number - self._running)
        self._running = number
