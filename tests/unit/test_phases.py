"""Where the time of a run goes, without a run."""

from __future__ import annotations

import pytest

from horovod_spark_runner.launch.driver.phases import PHASES, Phases


def test_phases_end_with_the_last_and_take_all_the_time() -> None:
    phases = Phases(2, 2, 10.0)
    for kind, slot, now in (
        ("hello", 0, 10.5),
        ("hello", 1, 11.0),
        ("info", 0, 11.1),
        ("placed", 0, 11.25),
        ("started", 0, 12.0),
        ("started", 1, 13.25),
        ("progress", 0, 14.0),
        ("finished", 1, 20.0),
        ("finished", 0, 21.25),
    ):
        phases.take({"type": kind, "slot": slot, "rank": slot}, now)
    seconds = phases.seconds(21.5)
    assert seconds == {
        "tasks": 1.0,
        "rendezvous": 0.25,
        "start": 2.0,
        "function": 8.0,
        "results": 0.25,
    }
    assert tuple(seconds) == PHASES


def test_what_was_not_heard_of_belongs_to_the_next() -> None:
    phases = Phases(1, 2, 0.0)
    phases.take({"type": "hello", "slot": 0}, 1.0)
    phases.take({"type": "started", "slot": 0, "rank": 0}, 2.0)  # of two ranks
    seconds = phases.seconds(5.0)
    assert seconds == {"tasks": 1.0, "results": 4.0}
    assert sum(seconds.values()) == pytest.approx(5.0)
