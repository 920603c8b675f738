"""How slots learn their ranks from the driver, without a connection."""

from __future__ import annotations

from typing import Any

from horovod_spark_runner.launch.shared.rendezvous import GATHER_AFTER, Rendezvous
from horovod_spark_runner.launch.shared.topology import SlotInfo, read_part, refusal


def info(slot: int, gpu: str = "") -> dict[str, Any]:
    gpus = ((gpu,) if gpu else (),)
    told = SlotInfo(slot, "h", "node", "10.0.0.1", 7000, f"/t/{slot}", (f"/t/{slot}/d",), gpus)
    return {"type": "info", "slot": slot, "info": told.to_fields()}


def test_all_are_told_once_all_are_there() -> None:
    rendezvous = Rendezvous(3, share_gpus=False)
    assert rendezvous.take({"type": "hello", "slot": 1}, 0.0) == {}
    assert rendezvous.take(info(1), 0.0) == {}
    assert rendezvous.take(info(0), 1.0) == {}
    assert rendezvous.placed is None
    answers = rendezvous.take(info(2), 2.0)
    assert [read_part(answers[slot]["part"]).placements[0].rank for slot in range(3)] == [0, 1, 2]
    assert rendezvous.placed == {"type": "placed", "size": 3, "placement": "h: ranks 0, 1, 2 (CPU)"}
    assert rendezvous.look(1000.0) == {}


def test_a_slot_that_asks_again_is_told_again() -> None:
    rendezvous = Rendezvous(2, share_gpus=False)
    assert rendezvous.take(info(0), 0.0) == {}
    assert rendezvous.take(info(0), 5.0) == {}  # it had lost its connection
    answers = rendezvous.take(info(1), 6.0)
    assert rendezvous.take(info(0), 7.0) == {0: answers[0]}


def test_one_that_cannot_take_part_is_told_to_all_who_ask_and_who_will() -> None:
    rendezvous = Rendezvous(3, share_gpus=False)
    assert rendezvous.take(info(0), 0.0) == {}
    refused = {"type": "info", "slot": 2, "info": refusal(2, "its disk is full")}
    verdict = {"type": "refused", "reason": "slot 2 cannot take part: its disk is full"}
    assert rendezvous.take(refused, 0.0) == {0: verdict, 2: verdict}
    assert rendezvous.take(info(1), 1.0) == {1: verdict}


def test_devices_given_twice_are_refused_for_all() -> None:
    rendezvous = Rendezvous(2, share_gpus=False)
    rendezvous.take(info(0, "0"), 0.0)
    answers = rendezvous.take(info(1, "0"), 0.0)
    assert {slot: answer["type"] for slot, answer in answers.items()} == {
        0: "refused",
        1: "refused",
    }
    assert "both given GPU 0" in answers[0]["reason"]


def test_where_some_do_not_come_spark_carries_it() -> None:
    rendezvous = Rendezvous(3, share_gpus=False)
    assert rendezvous.look(100.0) == {}  # nobody is there yet: Spark starts the tasks
    rendezvous.take(info(0), 100.0)
    assert rendezvous.look(100.0 + GATHER_AFTER / 2) == {}
    assert rendezvous.look(100.0 + GATHER_AFTER) == {0: {"type": "gather"}}
    assert rendezvous.take(info(1), 120.0) == {1: {"type": "gather"}}
    # All are there now, but two have gone the other way.
    assert rendezvous.take(info(2), 121.0) == {2: {"type": "gather"}}
    assert rendezvous.look(200.0) == {}
