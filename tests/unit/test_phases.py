"""Where the time of a run goes, without a run."""

from __future__ import annotations

import pytest

from horovod_spark_runner.cluster.driver.result import PHASES, PhaseTimer
from horovod_spark_runner.cluster.protocol.messages import (
    CannotJoin,
    Envelope,
    Finished,
    Hello,
    Placed,
    Progress,
    Started,
)


def test_phases_end_with_the_last_and_take_all_the_time() -> None:
    phases = PhaseTimer(2, 2, 10.0)
    for message, slot, now in (
        (Hello(), 0, 10.5),
        (Hello(), 1, 11.0),
        (CannotJoin(0, "no room"), 0, 11.1),
        (Placed(2, ""), -1, 11.25),
        (Started(), 0, 12.0),
        (Started(), 1, 13.25),
        (Progress(0, 1, 1, 2, 1, {}), 0, 14.0),
        (Finished(), 1, 20.0),
        (Finished(), 0, 21.25),
    ):
        phases.take(Envelope(slot, slot, "h", message), now)
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
    phases = PhaseTimer(1, 2, 0.0)
    phases.take(Envelope(0, -1, "h", Hello()), 1.0)
    phases.take(Envelope(0, 0, "h", Started()), 2.0)  # of two ranks
    seconds = phases.seconds(5.0)
    assert seconds == {"tasks": 1.0, "results": 4.0}
    assert sum(seconds.values()) == pytest.approx(5.0)
