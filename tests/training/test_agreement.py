"""What ranks agree on: by what a step carries, or where they meet."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner.errors import InvalidInputError
from horovod_spark_runner.frameworks import KERAS
from horovod_spark_runner.training.agreement import PREEMPT, SAVE, STOP, Agreement
from horovod_spark_runner.training.engine import engine_named, engine_of


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
    with pytest.raises(InvalidInputError, match="'my.engine' cannot be had: No module"):
        engine_named("my.engine")
    with pytest.raises(InvalidInputError, match=r"has no attribute 'ENGINE'"):
        engine_named("json")
    model_fn.horovod_engine = 7  # type: ignore[attr-defined]
    with pytest.raises(InvalidInputError, match="dotted name .* got 7"):
        engine_of(model_fn)
