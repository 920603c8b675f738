"""How slots learn their ranks from the driver, without a connection."""

from __future__ import annotations

import pytest

from horovod_spark_runner.cluster.protocol.messages import (
    Answer,
    Assigned,
    CannotJoin,
    Envelope,
    Gather,
    Hello,
    Located,
    Placed,
    Refused,
)
from horovod_spark_runner.cluster.protocol.rendezvous import (
    GATHER_AFTER,
    Rendezvous,
    read_slot_info,
)
from horovod_spark_runner.cluster.protocol.topology import SlotInfo
from horovod_spark_runner.errors import LaunchError


def info(slot: int, gpu: str = "") -> Envelope:
    gpus = ((gpu,) if gpu else (),)
    slot_info = SlotInfo(slot, "h", "node", "10.0.0.1", 7000, f"/t/{slot}", (f"/t/{slot}/d",), gpus)
    return Envelope(slot, -1, "h", Located(slot_info))


def rank_of(answer: Answer) -> int:
    assert isinstance(answer, Assigned)
    return answer.part.placements[0].rank


def test_all_are_told_once_all_are_there() -> None:
    rendezvous = Rendezvous(3, share_gpus=False)
    assert rendezvous.take(Envelope(1, -1, "h", Hello()), 0.0) == {}
    assert rendezvous.take(info(1), 0.0) == {}
    assert rendezvous.take(info(0), 1.0) == {}
    assert rendezvous.placed is None
    answers = rendezvous.take(info(2), 2.0)
    assert [rank_of(answers[slot]) for slot in range(3)] == [0, 1, 2]
    assert rendezvous.placed == Placed(3, "h: ranks 0, 1, 2 (CPU)")
    assert rendezvous.check_timeout(1000.0) == {}


def test_a_slot_that_asks_again_is_told_again() -> None:
    rendezvous = Rendezvous(2, share_gpus=False)
    assert rendezvous.take(info(0), 0.0) == {}
    assert rendezvous.take(info(0), 5.0) == {}  # it had lost its connection
    answers = rendezvous.take(info(1), 6.0)
    assert rendezvous.take(info(0), 7.0) == {0: answers[0]}


def test_one_that_cannot_take_part_is_told_to_all_who_ask_and_who_will() -> None:
    rendezvous = Rendezvous(3, share_gpus=False)
    assert rendezvous.take(info(0), 0.0) == {}
    refused = Envelope(2, -1, "h", CannotJoin(2, "its disk is full"))
    verdict = Refused("slot 2 cannot take part: its disk is full")
    assert rendezvous.take(refused, 0.0) == {0: verdict, 2: verdict}
    assert rendezvous.take(info(1), 1.0) == {1: verdict}


def test_devices_given_twice_are_refused_for_all() -> None:
    rendezvous = Rendezvous(2, share_gpus=False)
    rendezvous.take(info(0, "0"), 0.0)
    answers = rendezvous.take(info(1, "0"), 0.0)
    assert answers.keys() == {0, 1}
    for answer in answers.values():
        assert isinstance(answer, Refused)
        assert "GPU 0" in answer.reason


def test_where_some_do_not_come_spark_carries_it() -> None:
    rendezvous = Rendezvous(3, share_gpus=False)
    assert rendezvous.check_timeout(100.0) == {}  # nobody is there yet: Spark starts the tasks
    rendezvous.take(info(0), 100.0)
    assert rendezvous.check_timeout(100.0 + GATHER_AFTER / 2) == {}
    assert rendezvous.check_timeout(100.0 + GATHER_AFTER) == {0: Gather()}
    assert rendezvous.take(info(1), 120.0) == {1: Gather()}
    # All are there now, but two have gone the other way.
    assert rendezvous.take(info(2), 121.0) == {2: Gather()}
    assert rendezvous.check_timeout(200.0) == {}


def test_a_slot_that_cannot_take_part_ends_the_run_with_its_reason() -> None:
    with pytest.raises(LaunchError, match="slot 1.*no such interface"):
        read_slot_info(CannotJoin(1, "no such interface"))
