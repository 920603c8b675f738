"""What a trial of a step leaves behind: nothing."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horovod_spark_runner.engines.torch.probe import forgetting


class Annealer:
    def __init__(self) -> None:
        self.beta = 0.0
        self.inner = types.SimpleNamespace(steps=0)

    def step(self) -> None:
        self.beta += 0.1
        self.inner.steps += 1
        self.late = True


class Frozen(dict[str, float]):
    """A dictionary that allows no changes, as those of some configurations."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError

    def update(self, *given: Any, **named: Any) -> None:
        raise TypeError


class Notes(nn.Module):
    seen: torch.Tensor
    calls: int
    new: int

    def __init__(self) -> None:
        super().__init__()
        self.settings = Frozen(a=1.0)
        self.annealer = Annealer()
        self.queue = collections.deque([1], maxlen=3)
        self.centers = np.zeros(2)
        self.history = {"loss": [1.0]}
        self.counts = collections.Counter({"a": 2})
        self.ordered = collections.OrderedDict(a=1)
        self.pair = ([0], 1)
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0

    def forward(self) -> None:
        self.annealer.step()
        self.queue.append(2)
        self.centers[0] += 1
        self.history["loss"].append(2.0)
        self.counts["a"] += 1
        self.ordered["b"] = 2
        self.pair[0].append(1)
        self.seen += 1
        self.calls += 1
        self.new = 1

    def facts(self) -> list[Any]:
        annealer = self.annealer
        return [
            *(dict(self.settings), annealer.beta, annealer.inner.steps, hasattr(annealer, "late")),
            *(list(self.queue), self.queue.maxlen, self.centers.tolist(), str(self.history)),
            *(dict(self.counts), list(self.ordered), str(self.pair), self.seen.tolist()),
            *(self.calls, hasattr(self, "new")),
        ]


def as_a_module(notes: Notes) -> tuple[object, Callable[[], None]]:
    return notes, notes


def as_an_object(notes: Notes) -> tuple[object, Callable[[], None]]:
    """What a function's closure holds; a module there is not one of those that are tried."""
    held = types.SimpleNamespace(**{n: v for n, v in vars(notes).items() if n[0] != "_"})
    held.seen = notes.seen

    def step(add: int) -> None:
        Notes.forward(held)  # type: ignore[arg-type]

    tried = functools.partial(step, 1)
    return tried, tried


@pytest.mark.parametrize("way", [as_a_module, as_an_object])
def test_nothing_is_left(way: Callable[[Notes], tuple[object, Callable[[], None]]]) -> None:
    notes = Notes()
    before, held = notes.facts(), (notes.queue, notes.centers, notes.history["loss"])
    tried, call = way(notes)
    with forgetting(tried):
        call()
        assert notes.facts() != before
    assert notes.facts() == before
    after = notes.queue, notes.centers, notes.history["loss"]
    assert all(one is other for one, other in zip(held, after, strict=True))


def test_a_failure_leaves_nothing_either() -> None:
    notes = Notes()
    before = notes.facts()

    def fail() -> None:
        with forgetting(notes):
            notes()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert notes.facts() == before
