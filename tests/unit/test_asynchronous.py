"""Ranks that step by themselves, as threads: what they take, add, wait for and end with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import AsyncServer, InvalidInputError, ModelError, RunDirectoryError
from horovod_spark_runner.checkpoint.resume import check_not_taken
from horovod_spark_runner.config.sync import check_servers
from horovod_spark_runner.config.training import FitOptions
from horovod_spark_runner.data.read.reader import Batch
from horovod_spark_runner.sync.asynchronous import AsyncSynchroniser
from horovod_spark_runner.sync.distributed_memory import _holder_of, divided
from horovod_spark_runner.training.epochs import (
    NOTHING,
    SAVE,
    STOP,
    OnDemandBatches,
    Step,
    _first_batches,
    _SynchronousBatches,
    was_asynchronous,
)
from horovod_spark_runner.training.learning_rate import LearningRate
from horovod_spark_runner.training.progress import Progress
from tests.threads import Threads, as_ranks
from tests.variables import NumPyVariables, Value

ROWS = 4  # of a batch


class Shared:
    """Memory of threads; see `Memory`."""

    nbytes = 0  # as what ranks give each other has

    def __init__(self, values: np.ndarray) -> None:
        self.values, self._lock = values.copy(), threading.Lock()

    def get(self) -> np.ndarray:
        with self._lock:
            copy: np.ndarray = self.values.copy()
        return copy

    def add(self, values: np.ndarray) -> None:
        with self._lock:
            self.values += values

    def add_at(self, index: int, value: int) -> int:
        with self._lock:
            before = int(self.values[index])
            self.values[index] += value
        return before

    def close(self) -> None:
        """Threads give it up with their names for it."""


class Ranks:
    """Ranks that are threads; see `Ranks` of the way, and `Collectives`, and MPI's."""

    def __init__(self, wire: Threads) -> None:
        self.rank, self.size, self._wire = wire.rank, wire.size, wire

    def memory(self, values: np.ndarray, holders: Sequence[int]) -> Shared:
        every: list[Shared] = self._wire.gather(Shared(values))  # type: ignore[arg-type,assignment]
        return every[0]

    def barrier(self) -> None:
        self._wire.sum(np.zeros(1))

    def sum(self, tensors: Sequence[np.ndarray], name: str) -> list[np.ndarray]:
        return [self._wire.sum(tensor) for tensor in tensors]

    def Get_rank(self) -> int:  # noqa: N802 - as MPI calls it
        return self.rank

    def Get_size(self) -> int:  # noqa: N802 - as MPI calls it
        return self.size

    def allreduce(self, value: int) -> int:
        return int(self._wire.sum(np.array(value)))

    def bcast(self, value: Any) -> Any:
        return self.allgather(value)[0]

    def allgather(self, value: Any) -> list[Any]:
        found: list[Any] = self._wire.gather(np.array([value, None], object))
        return [one[0] for one in found]


class Rates:
    """The rate of one optimizer; see `Rates`."""

    def __init__(self) -> None:
        self.values = [1.0]

    def read(self) -> list[float]:
        return list(self.values)

    def write(self, values: Sequence[float]) -> None:
        self.values = list(values)


class Model(NumPyVariables):
    """A weight, what goes with it, and an optimizer; see `Variables`."""

    def __init__(self, **more: Value) -> None:
        named = {
            "model/weight": Value(np.zeros((2, 3), np.float32), trained=True),
            "model/bias": Value(np.float32(0), trained=True),
            "model/moment": Value(np.zeros(2, np.float32)),
            "model/seen": Value(np.int64(3)),
            "model/first": Value(np.array(True)),
            "optimizer/steps": Value(np.int64(0)),
            **more,
        }
        super().__init__(**named)

    def step(self, change: int) -> None:
        self.named["model/weight"].value += np.float32(change)
        self.named["model/bias"].value = self["model/bias"] + np.float32(2 * change)
        self.named["model/moment"].value += np.float32(change)
        self.named["model/seen"].value += 1
        self.named["model/first"].value = np.array(False)
        self.named["optimizer/steps"].value += 1


class Epochs:
    """Epochs whose batches are their numbers; see `Epochs`."""

    def __init__(self, steps: int, empty: Container[tuple[int, int]] = ()) -> None:
        self.steps, self._empty = steps, empty

    def steps_from(self, epoch: int, first: int, run_step: int, part: tuple[int, int]) -> Any:
        assert run_step == epoch * self.steps + first
        for number in range(first, self.steps):
            rows = 0 if (part[0], number) in self._empty else ROWS
            batch = Batch(number, rows, {"at": np.array((part[0], number))})
            yield Step(number, batch, ROWS * part[1], equal=True)


class Rank:
    """What a rank of a training has."""

    def __init__(
        self,
        wire: Threads,
        steps: int,
        staleness: int = 8,
        empty: Container[tuple[int, int]] = (),
        **more: Value,
    ) -> None:
        self.ranks = Ranks(wire)
        self.model: Any = Model(**more)
        any_ranks: Any = self.ranks
        self.sync = AsyncSynchroniser(AsyncServer(staleness=staleness), any_ranks, any_ranks)
        self.sync.begin(self.model)
        self.due: set[int] = set()
        epochs: Any = Epochs(steps, empty)
        self.shares = OnDemandBatches(epochs, self.sync, any_ranks, self.due.__contains__)
        self.progress = Progress()

    def train(
        self, act: Callable[[int, Step], object] = lambda made, step: None, change: int = 1
    ) -> tuple[list[tuple[int, int]], Sequence[object]]:
        """Make the steps of an epoch; return the batches, and what all had asked for."""
        made: list[tuple[int, int]] = []
        for step in self.shares.steps(self.progress):
            self.sync.before_step(0)
            if step.batch.rows:
                made.append(tuple(step.batch.arrays["at"].tolist()))
                self.model.step(change)
            act(len(made), step)
            self.sync.after_step(self.model, 0, step.batch.rows)
            self.progress.to_step(step.number + 1)
            assert not self.shares.stops(NOTHING, watched=True)
        self.sync.meet(self.model)
        return made, self.shares.end(self.progress)


def whole(steps: int, shares: int) -> list[tuple[int, int]]:
    return sorted((share, number) for share in range(shares) for number in range(steps))


def test_infinities_that_are_trained_stay() -> None:
    def act(wire: Threads) -> Any:
        rank = Rank(wire, 6)
        rank.model.named["model/weight"].value[0] = [-np.inf, np.inf, 0]
        rank.train()
        return rank.model["model/weight"][0].tolist()

    assert as_ranks(3, act) == [[-np.inf, np.inf, 18.0]] * 3


def test_every_batch_is_taken_once_and_a_slow_rank_takes_fewer() -> None:
    def act(wire: Threads) -> Any:
        rank = Rank(wire, 30)
        pause = 0.02 if wire.rank == 1 else 0.002
        found = []
        for _ in range(2):
            made, asked = rank.train(lambda made, step: time.sleep(pause), wire.rank + 1)
            assert not any(asked)
            assert rank.progress.epoch_step == 30
            found.append(made)
            rank.progress.epoch += 1
            rank.progress.epoch_step = 0
        assert rank.progress.step == 60
        weight, bias = rank.model["model/weight"], rank.model["model/bias"]
        late = rank.shares.lateness()
        return found, weight.tolist(), float(bias), rank.model, late

    ranks = as_ranks(3, act)
    for epoch in range(2):
        made = [found[epoch] for found, *_ in ranks]
        assert sorted(one for own in made for one in own) == whole(30, 3)
        assert len(made[1]) < len(made[0]) / 2
        assert made[0][:10] == [(0, number) for number in range(10)]
    # No update is lost, and none counts twice.
    total = sum((rank + 1) * len(own) for rank, (found, *_) in enumerate(ranks) for own in found)
    rows = [sum(map(len, found)) for found, *_ in ranks]
    for _, weight, bias, model, late in ranks:
        assert weight == [[total] * 3] * 2
        assert bias == 2 * total
        assert sum(late) == sum(rows) == 180
        assert len(late) <= (8 + 1) * 2 + 1
        assert model["model/first"] == np.array(False)
        assert model["model/seen"] - 3 in (58, 59, 60)
    # What is not trained is the same on all ranks; each optimizer is its rank's.
    moments = {tuple(model["model/moment"].tolist()) for *_, model, _ in ranks}
    assert len(moments) == 1
    assert [int(model["optimizer/steps"]) for *_, model, _ in ranks] == rows


@pytest.mark.parametrize("staleness", [1, 3])
def test_no_more_steps_begin_beside_one_than_are_allowed(staleness: int) -> None:
    begun: list[int] = []
    beside: list[int] = []

    def act(wire: Threads) -> Any:
        rank = Rank(wire, 20, staleness)

        def step(made: int, step: Step) -> None:
            begun.append(wire.rank)
            if wire.rank == 0 and made == 3:
                before, deadline = len(begun), time.monotonic() + 30
                while len(begun) == before and time.monotonic() < deadline:
                    time.sleep(0.01)  # the others may not be given a core at once
                time.sleep(0.3)
                beside.append(len(begun) - before)

        rank.train(step)
        return rank.shares.lateness()

    late = as_ranks(3, act)[0]
    # Those that had begun before it may be seen to begin only now, or be all that may begin.
    assert (0 if staleness == 1 else 1) <= beside[0] <= staleness * 2 + 2
    assert len(late) - 1 <= (staleness + 1) * 2


def test_ranks_leave_an_epoch_where_one_asks_for_it_and_go_on_as_others() -> None:
    kept: dict[str, Any] = {}

    def save(wire: Threads) -> Any:
        rank = Rank(wire, 20)
        rank.due.add(10)
        pause = 0.004 * (wire.rank + 1)
        made, asked = rank.train(lambda made, step: time.sleep(pause))
        assert [bool(one) for one in asked] == [number == SAVE for number in range(3)]
        state = rank.shares.state()
        kept.update(state, step=rank.progress.epoch_step)
        return made, rank.model["model/weight"]

    first = as_ranks(3, save)
    assert 10 <= kept["step"] < 13
    assert sum(kept["taken"]) == sum(len(made) for made, _ in first) < 40

    def go_on(wire: Threads) -> Any:
        rank = Rank(wire, 20)
        rank.progress.to_step(kept["step"])
        rank.shares.restore(kept, rank.progress)
        made, asked = rank.train()
        assert not any(asked)
        assert rank.shares.state() == {"taken": None}
        return made

    done = [one for made, _ in first for one in made]
    for ranks in (1, 2, 3, 5):
        rest = [one for made in as_ranks(ranks, go_on) for one in made]
        assert sorted(done + rest) == whole(20, 3)
    epochs: Any = Epochs(20)
    alike: Any = None
    with pytest.raises(RunDirectoryError, match=r"epoch 3\b.*sync=AsyncServer"):
        _SynchronousBatches(epochs, alike).restore(kept, Progress(epoch=2, epoch_step=9))


def test_one_rank_stops_all_and_the_next_epoch_is_whole() -> None:
    def act(wire: Threads) -> Any:
        rank = Rank(wire, 60)

        def stop(made: int, step: Step) -> None:
            time.sleep(0.001)
            if wire.rank == 1 and made == 3:
                rank.shares.stops([number == STOP for number in range(3)], watched=True)

        made, asked = rank.train(stop)
        assert asked[STOP]
        # As its checkpoint says, any way may go on: the epoch is over.
        state = rank.shares.state()
        assert not was_asynchronous({})
        assert was_asynchronous(state)
        check_not_taken(state, 0)
        rank.progress.epoch, rank.progress.epoch_step = 1, 0
        rank.progress.step = 60
        rank.shares.restore(state, rank.progress)
        return len(made), rank.train()[0]

    ranks = as_ranks(3, act)
    assert max(made for made, _ in ranks) < 30
    assert sorted(one for _, made in ranks for one in made) == whole(60, 3)


def test_a_rank_alone_makes_no_steps_without_rows() -> None:
    def act(wire: Threads, taken: list[int]) -> Any:
        rank = Rank(wire, 4, empty={(1, 1), (1, 3)})
        rank.progress.to_step(2)
        rank.shares.restore({"taken": taken}, rank.progress)
        rows = []
        rank.train(lambda made, step: rows.append(step.batch.rows))
        return rows, rank.shares.state()

    assert as_ranks(1, lambda wire: act(wire, [3, 1])) == [([ROWS] * 2, {"taken": None})]
    # Some step there is in any case.
    assert as_ranks(1, lambda wire: act(wire, [4, 3])) == [([0], {"taken": None})]


def test_ranks_go_on_with_the_same_rates() -> None:
    options = FitOptions(epochs=9, lr_scaling="linear", warmup_epochs=4.0)

    def act(wire: Threads) -> Any:
        world: Any = Ranks(wire)
        rates = Rates()
        rate = LearningRate(rates, options, 2)
        rate.before_step(1.0 + 0.1 * wire.rank)  # rank 1 is further in its steps
        (state, _) = world.allgather(rate.state)
        resumed = LearningRate(rates, options, 2, state)
        resumed.share(world)
        same = list(rates.values)
        resumed.before_step(1.5)
        resumed.before_step(2.0)
        return same, rates.values

    assert as_ranks(2, act) == [([1.25], [1.5])] * 2


def test_each_rank_has_a_batch_to_begin_with() -> None:
    assert _first_batches([0, 0], 5, 2) == ([1, 1], [(0, 0), (1, 0)])
    assert _first_batches([5, 2], 5, 2) == ([5, 4], [(1, 2), (1, 3)])
    assert _first_batches([4, 5], 5, 3) == ([5, 5], [(0, 4), None, None])
    assert _first_batches([1, 2, 3], 5, 1) == ([2, 2, 3], [(0, 1)])


def test_what_cannot_be_is_refused() -> None:
    def act(wire: Threads) -> None:
        with pytest.raises(ModelError, match="'model/wave'.*complex"):
            Rank(wire, 1, 8, (), **{"model/wave": Value(1j)})

    as_ranks(1, act)
    check_servers(AsyncServer(servers=2), 2)
    check_servers(AsyncServer(), 2)
    with pytest.raises(InvalidInputError, match=r"servers=3\).*\b2\b"):
        check_servers(AsyncServer(servers=3), 2)


@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_each_number_has_one_holder(size: int) -> None:
    parts = divided(size, [4, 1, 3])
    assert list(parts) == [4, 1, 3]
    held = [rank for rank, (begin, end) in parts.items() for _ in range(begin, end)]
    assert [_holder_of(parts, index) for index in range(size)] == held
    assert len(held) == size
