"""Where the time of ranks goes: what is put down to what, and that nothing is lost."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.observe.report.times import _rank_wholes, _slow_ranks
from horovod_spark_runner.training.progress import Progress, shares
from horovod_spark_runner.training.time_breakdown import (
    KINDS,
    MOST_RANKS,
    Clock,
    Kind,
    mean_seconds,
    phases,
    record,
)


def table(ranks: int, **seconds: Any) -> np.ndarray:
    found = np.zeros((ranks, len(KINDS)))
    for kind, each in seconds.items():
        found[:, KINDS.index(kind)] = each
    return found


def test_all_time_is_put_down_to_something() -> None:
    moments = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    clock = Clock(lambda: next(moments))
    clock.to(Kind.DATA)
    clock.to(Kind.STEP)
    with clock.during(Kind.CHECKPOINT):
        pass
    seconds = clock.look()
    assert {kind: value for kind, value in seconds.items() if value} == {
        Kind.BUILD: 1.0,
        Kind.DATA: 2.0,
        Kind.STEP: 3.0 + 5.0,
        Kind.CHECKPOINT: 4.0,
    }
    assert sum(seconds.values()) == 15.0


def test_what_came_before_the_clock_counts_as_building() -> None:
    assert Clock(lambda: 10.0, began=7.0).look()[Kind.BUILD] == 3.0


def test_time_is_put_down_also_where_something_is_raised() -> None:
    moments = itertools.count()
    clock = Clock(lambda: float(next(moments)))
    with pytest.raises(KeyError), clock.during(Kind.VALIDATION):
        raise KeyError
    assert clock.look()[Kind.BUILD] == 2


def test_an_epoch_s_record_is_of_every_rank() -> None:
    account = record(table(2, data=[1.0, 2.0], step=[3.0, 1.0]))
    assert account == {"ranks": [0, 1], "seconds": {"data": [1.0, 2.0], "step": [3.0, 1.0]}}
    assert mean_seconds(account) == {"data": 1.5, "step": 2.0}
    assert mean_seconds(None) == {}


def test_the_record_of_a_large_world_is_small_and_keeps_its_extremes() -> None:
    ranks = 4096
    waited = np.random.default_rng(0).uniform(1, 2, ranks)
    waited[1234], waited[77] = 9.0, 0.1
    account = record(table(ranks, data=waited, exchange=waited[::-1]))
    assert len(account["ranks"]) <= MOST_RANKS
    assert {1234, 77, ranks - 1 - 1234, ranks - 1 - 77} <= set(account["ranks"])
    assert max(account["seconds"]["data"]) == 9.0
    assert mean_seconds(account)["data"] == pytest.approx(waited.mean(), abs=1e-4)
    assert len(json.dumps(account)) < 4000
    assert len(_rank_wholes(account)) <= 24


def test_phases_follow_each_other_and_hold_what_they_are_made_of() -> None:
    seconds = {kind: float(i + 1) for i, kind in enumerate(KINDS)}
    found = phases(seconds)
    assert found["build"] + found["epochs"] + found["save"] == sum(seconds.values())
    inside = sum(found[kind] for kind in KINDS if kind not in (Kind.BUILD, Kind.SAVE))
    assert found["epochs"] == inside
    assert Kind.STEP not in phases({**seconds, Kind.STEP: 0.0})


def test_waiting_is_told_as_a_part_of_the_time() -> None:
    assert shares({Kind.DATA: 1.0, Kind.COMPUTE: 3.0, Kind.EXCHANGE: 0.0}) == {Kind.DATA: 0.25}
    assert shares({}) == {}
    assert shares({Kind.DATA: 0.0}) == {}


def test_what_slow_ranks_cost() -> None:
    # Rank 1 computes for long: the others spend 2 and 3 seconds more in the exchange.
    first = record(table(3, compute=[5.0, 8.0, 4.0], exchange=[3.0, 1.0, 4.0]))
    second = record(table(3, compute=[5.0, 5.0, 5.0], exchange=[1.0, 1.0, 1.0]))
    slow = _slow_ranks([first, None, second])
    assert slow.waited == pytest.approx(5 / 3)
    assert slow.exchanged == pytest.approx(2.0)
    assert slow.last == {1: 1, 0: 1}
    assert slow.total == pytest.approx(25 / 3 + 6)
    # Where steps are one with the exchange, only the waiting can be told.
    merged = _slow_ranks([record(table(2, step=[3.0, 5.0]))])
    assert (merged.waited, merged.exchanged, merged.last) == (1.0, 0.0, {0: 1})
    assert _slow_ranks([record(table(1, step=[3.0]))]).total == 0
    # At an epoch's end, they wait for one whose callbacks take long there.
    late = _slow_ranks([record(table(2, exchange=[1.5, 1.0], agree=[2.0, 0.25], callbacks=[0, 2]))])
    assert (late.waited, late.exchanged, late.last) == (1.125, 1.0, {1: 1})


def test_accounts_lie_beside_metrics_and_are_none(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    account = record(table(1, data=[1.0]))
    directory.write_metrics([{"loss": 1.0}, {"loss": 0.5}, {"loss": 0.1}], [account, None])
    assert directory.read_metrics() == [{"loss": 1.0}, {"loss": 0.5}, {"loss": 0.1}]
    assert directory.read_accounts(3) == [account, None, None]
    directory.metrics.write_text("{")
    assert directory.read_accounts(1) == [None]


def test_metrics_called_like_the_record_of_an_epoch_are_kept_beside_it(tmp_path: Path) -> None:
    """A ``train_step`` may report ``epoch``; a log may be text, or the whole number of an epoch."""
    directory = RunDirectory(str(tmp_path))
    account = record(table(1, data=[1.0]))
    epochs: list[dict[str, object]] = [
        {"epoch": 1.5, "accounting": 7.0, "metrics": 2.0, "loss": 1.0},
        {"epoch": 77, "accounting": "mine", "metrics": [1.0, 2.0]},
        {"epoch": None},
    ]
    directory.write_metrics(epochs, [account] * 3)
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert [line["accounting"] for line in lines] == [account] * 3
    assert lines[0]["metrics"] == {"epoch": 1.5, "accounting": 7.0, "metrics": 2.0}
    assert lines[0]["loss"] == 1.0
    assert directory.read_metrics() == epochs
    assert directory.read_accounts(3) == [account] * 3


def test_a_run_is_over_after_its_epochs_or_where_it_was_stopped() -> None:
    assert Progress(epoch=3).is_finished(3)
    assert not Progress(epoch=3).is_finished(4)
    assert Progress(epoch=2, stopped_at=5).is_finished(5)
    assert Progress(epoch=2, stopped_at=5).is_finished(6)


def test_reading_the_clock_costs_next_to_nothing() -> None:
    """A step reads it four times; the quickest steps of two ranks take over a millisecond."""
    clock, best = Clock(), 1.0
    for _ in range(20):
        begin = Clock()
        for _ in range(250):
            clock.to(Kind.CALLBACKS)
            clock.to(Kind.STEP)
            clock.to(Kind.CALLBACKS)
            clock.to(Kind.DATA)
        best = min(best, begin.look()[Kind.BUILD] / 250)
    assert best < 5e-6
