"""Rounds of ranks that train alone, on variables of NumPy's: callbacks, and whole numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import DiLoCo, LocalSGD, ModelError
from horovod_spark_runner.sync.local_sgd import LocalSGDSynchroniser
from tests.threads import Threads, as_ranks
from tests.variables import NumPyVariables, Value


class Model(NumPyVariables):
    """A weight and counters; see `Variables`."""

    def __init__(self) -> None:
        named = {
            "model/weight": Value(np.zeros(2, np.float32), trained=True),
            "model/seen": Value(np.int64(3)),
            "model/flags": Value(np.array([0, 255, 7], np.uint8)),
            "model/first": Value(np.array(True)),
            "optimizer/iterations": Value(np.int64(0)),
        }
        super().__init__(**named)

    def step(self, change: float) -> None:
        self.named["model/weight"].value += np.float32(change)
        self.named["model/seen"].value += 1
        self.named["model/flags"].value += np.uint8(1)
        self.named["model/first"].value = np.array(False)


class Sums:
    """Sums over ranks that are threads; see `Collectives`."""

    def __init__(self, wire: Threads) -> None:
        self.size, self._wire = wire.size, wire

    def sum(self, tensors: Sequence[np.ndarray], name: str) -> list[np.ndarray]:
        return [self._wire.sum(tensor) for tensor in tensors]


Act = Callable[[Any, Model, Threads], Any]


def with_rounds(way: Any, ranks: int, act: Act) -> list[Any]:
    def on_rank(wire: Threads) -> Any:
        model: Any = Model()
        rounds = LocalSGDSynchroniser(way, Sums(wire))  # type: ignore[arg-type]
        rounds.begin(model)
        return act(rounds, model, wire)

    return as_ranks(ranks, on_rank)


def train(rounds: Any, model: Model, step: int, rows: int, change: float = 1.0) -> None:
    rounds.before_step(step)
    if rows:
        model.step(change)
    rounds.after_step(model, step + 1, rows)


@pytest.mark.parametrize("way", [LocalSGD(every=100), DiLoCo(every=100)], ids=str)
def test_what_a_callback_sets_where_ranks_have_met_is_what_a_round_begins_with(way: Any) -> None:
    def act(rounds: Any, model: Model, wire: Threads) -> Any:
        train(rounds, model, 0, rows=1)
        rounds.meet(model)
        model.named["model/weight"].assign(np.array([0, -5], np.float32))  # back to the best, say
        train(rounds, model, 1, rows=1, change=0.0)
        rounds.meet(model)
        return model["model/weight"]

    # DiLoCo's outer momentum goes on; that of the first round is 1.
    change = 0.7 * 0.9 * 0.9 if isinstance(way, DiLoCo) else 0.0
    for weight in with_rounds(way, 2, act):
        np.testing.assert_allclose(weight, [change, change - 5], rtol=1e-6)


@pytest.mark.parametrize("way", [LocalSGD(every=2), DiLoCo(every=2)], ids=str)
def test_ranks_without_rows_in_a_step_count_as_the_others(way: Any) -> None:
    def act(rounds: Any, model: Model, wire: Threads) -> Any:
        for step, rows in enumerate([[4, 4, 4], [1, 0, 2], [1, 1, 1], [0, 0, 1]]):
            train(rounds, model, step, rows[wire.rank])
        return [model[name].tolist() for name in model.named if name != "model/weight"]

    assert with_rounds(way, 3, act) == [[7, [4, 3, 11], False, 0]] * 3


def test_infinities_stay_and_may_become_numbers() -> None:
    def act(rounds: Any, model: Model, wire: Threads) -> Any:
        weight = model.named["model/weight"]
        weight.assign(np.array([-np.inf, np.inf], np.float32))
        rounds.before_step(0)
        if wire.rank < 2:  # the third has no rows
            weight.value[1] = wire.rank + 1.0
        rounds.after_step(model, 1, rows=2 * (wire.rank < 2))
        return model["model/weight"].tolist()

    assert with_rounds(LocalSGD(every=1), 3, act) == [[-np.inf, 1.5]] * 3


def test_whole_numbers_that_ranks_change_otherwise_stay_different() -> None:
    def act(rounds: Any, model: Model, wire: Threads) -> int:
        rounds.before_step(0)
        model.named["model/seen"].value += wire.rank
        rounds.after_step(model, 1, rows=wire.rank < 2)
        return int(model["model/seen"])

    seen = with_rounds(LocalSGD(every=1), 3, act)
    assert seen[:2] == [3, 4]


def test_whole_numbers_that_an_optimizer_makes_in_a_first_step_begin_with_zero() -> None:
    def act(rounds: Any, model: Model, wire: Threads) -> int:
        rounds.before_step(0)
        model.named["optimizer/step"] = Value(np.int64(0))
        model.named["optimizer/step"].value += 1
        rounds.after_step(model, 1, rows=1)
        return int(model["optimizer/step"])

    assert with_rounds(LocalSGD(every=1, average_optimizer=True), 2, act) == [1, 1]


def test_moments_that_only_some_ranks_have_have_no_mean() -> None:
    def act(rounds: Any, model: Model, wire: Threads) -> None:
        rounds.before_step(0)
        if wire.rank:
            model.named["optimizer/moment"] = Value(np.zeros(2, np.float32))
        with pytest.raises(ModelError, match="ranks.*average_optimizer"):
            rounds.after_step(model, 1, rows=1)

    with_rounds(LocalSGD(every=1, average_optimizer=True), 2, act)


def test_bytes_of_whole_numbers_are_counted() -> None:
    def act(rounds: Any, model: Model, wire: Threads) -> Any:
        train(rounds, model, 0, rows=1)
        return rounds.traffic()

    # In a ring of two, once: weights and rows; five whole numbers and whether they count.
    for traffic in with_rounds(LocalSGD(every=1), 2, act):
        assert traffic == (8 + 8 + 8 * 6, 8)
