"""What reading costs at first, as a plan measures it, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_spark_runner.planning import reading
from horovod_spark_runner.planning.reading import read_at_first


class Passes:
    """Passes of steps that take a second each, half of it on the processor."""

    def __init__(self, steps: int, rows: int) -> None:
        self.steps, self.rows = steps, rows
        self.now, self.open, self.given = 100.0, 0, 0
        self.begun: list[int] = []

    def steps_from(self, epoch: int) -> Generator[Any, None, None]:
        self.begun.append(epoch)
        self.open += 1
        try:
            for _ in range(self.steps):
                self.now += 1.0
                self.given += self.rows
                yield SimpleNamespace(batch=SimpleNamespace(rows=self.rows))
        finally:
            self.open -= 1


def read(passes: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, *, whole: bool) -> Any:
    clock = SimpleNamespace(
        perf_counter=lambda: passes.now, process_time=lambda: 7.0 + passes.now / 2
    )
    monkeypatch.setattr(reading, "time", clock)
    monkeypatch.setattr(reading, "report_progress", lambda: None)
    found = read_at_first(passes, seconds, whole=whole)
    assert passes.open == 0, "a reader reads on"
    return found


def test_a_whole_pass_is_read_to_its_end_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its last steps read is new memory, too, and a second pass reads none."""
    passes = Passes(steps=10, rows=4)
    assert read(passes, monkeypatch, 2.0, whole=True) == (4.0, 0.125)
    assert (passes.begun, passes.given) == ([0], 40)
    short = Passes(steps=1, rows=4)
    assert read(short, monkeypatch, 100.0, whole=True) == (4.0, 0.125)
    assert short.begun == [0]


def test_what_is_not_kept_is_read_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    long = Passes(steps=1000, rows=4)
    assert read(long, monkeypatch, 5.0, whole=False) == (4.0, 0.125)
    assert (long.begun, long.given) == ([0], 24)
    short = Passes(steps=2, rows=3)
    assert read(short, monkeypatch, 10.0, whole=False) == (3.0, pytest.approx(1 / 6))
    assert short.begun == [0, 1, 2], "other rows in each pass, to beyond half of the time"
