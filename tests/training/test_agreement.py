"""What ranks agree on: by what a step carries, or where they meet."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner.data.read.reader import Batch
from horovod_spark_runner.errors import InvalidInputError, ModelError
from horovod_spark_runner.frameworks import KERAS
from horovod_spark_runner.training import agreement
from horovod_spark_runner.training.agreement import Agreement, StepTrials
from horovod_spark_runner.training.engine import engine_named, engine_of
from horovod_spark_runner.training.epochs import PREEMPT, SAVE, STOP, Step


class World:
    """A world whose other rank asks for something; counts the collectives."""

    def __init__(self, *other: int) -> None:
        self.other = np.array(other, np.uint8)
        self.calls = 0

    def Allreduce(self, _: Any, own: np.ndarray, op: Any) -> None:  # noqa: N802
        self.calls += 1
        np.maximum(own, self.other, out=own)


def test_ranks_that_do_not_meet_agree_on_nothing_and_say_nothing() -> None:
    world: Any = World(1, 0, 0)
    assert not any(Agreement(world).after_step((True, False, False), meet=False))
    assert world.calls == 0


def test_where_ranks_meet_they_learn_what_any_asks_for() -> None:
    world: Any = World(0, 1, 0)
    agreed = Agreement(world).after_step((None, False, True), meet=True)
    assert [bool(agreed[place]) for place in (STOP, SAVE, PREEMPT)] == [False, True, True]
    assert world.calls == 1


def test_a_function_says_its_engine() -> None:
    def model_fn() -> None: ...

    assert engine_of(model_fn) == engine_of("model.keras") == engine_of(None) == KERAS
    model_fn.horovod_engine = "my.engine"  # type: ignore[attr-defined]
    assert engine_of(model_fn) == "my.engine"
    bound = functools.partial(functools.partial(model_fn), units=3)
    assert engine_of(bound) == "my.engine"
    bound.horovod_engine = "another.engine"  # type: ignore[attr-defined]
    assert engine_of(bound) == "another.engine"
    with pytest.raises(InvalidInputError, match="'my.engine'.*No module"):
        engine_named("my.engine")
    with pytest.raises(InvalidInputError, match=r"has no attribute 'ENGINE'"):
        engine_named("json")
    model_fn.horovod_engine = 7  # type: ignore[attr-defined]
    with pytest.raises(InvalidInputError, match=r"\b7"):
        engine_of(model_fn)


def trials(size: int, probe: Any) -> tuple[StepTrials, list[int]]:
    """Run 20 steps of a run that is resumed at step 100; return which were tried."""
    rank: dict[str, Any] = {"bcast": lambda own: own, "allgather": lambda own: [own, None]}
    world: Any = SimpleNamespace(Get_size=lambda: size, Get_rank=lambda: 0, **rank)
    made, tried = StepTrials(world, probe), []
    for number in range(101, 121):
        if made.is_due():
            tried.append(number)
            rows = {"x": np.arange(number)}
            step = Step(number, Batch(number, number, rows), number, equal=True)
            made.run(step, number, together=number < 110)
    return made, tried


def test_steps_are_tried_at_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    told: list[str] = []
    monkeypatch.setattr(agreement, "notify", told.append)

    def probe(step: Step) -> list[str]:
        given.append(step.batch.rows)
        return ["first"] if len(given) == 1 else ["first", "later"]

    assert trials(2, probe)[1] == [101, 102, 104, 108, 116]
    assert given == [16] * 5
    assert told[0] == "first"
    assert len(told) == 2, "a warning is told once"
    assert "later" in told[1]
    assert "102" in told[1]
    assert trials(1, probe)[1] == []


def test_a_sum_that_is_found_late_names_the_steps_between_which_it_came_up() -> None:
    def probe(step: Step) -> list[str]:
        if step.number > 105:
            raise ModelError("the loss is a sum")
        return []

    with pytest.raises(ModelError, match=r"the loss is a sum.*\b108\b.*\b104\b"):
        trials(2, probe)

    def at_once(step: Step) -> list[str]:
        raise ModelError("the loss is a sum")

    with pytest.raises(ModelError, match="^the loss is a sum$"):
        trials(2, at_once)
