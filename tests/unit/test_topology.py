"""Placement of ranks, without a process started."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from horovod_spark_runner.cluster.protocol.messages import Assigned, Located
from horovod_spark_runner.cluster.protocol.topology import (
    SlotInfo,
    arrange,
    format_placement,
    split_devices,
)
from horovod_spark_runner.errors import LaunchError
from horovod_spark_runner.typed_json import parse, to_json


def slot(index: int, node: str, *gpus: tuple[str, ...]) -> SlotInfo:
    doors = tuple(f"/tmp/{index}-{place}" for place in range(len(gpus) or 1))
    address = f"10.0.0.{node}"
    host, folder = f"host-{node}", f"/tmp/{index}"
    return SlotInfo(index, host, node, address, 7000 + index, folder, doors, gpus or ((),))


def test_ranks_are_contiguous_per_host_and_rank_0_is_with_slot_0() -> None:
    world = arrange([slot(0, "2"), slot(1, "1"), slot(2, "2"), slot(3, "1")])
    assert [(p.rank, p.slot, p.host, p.local_rank, p.cross_rank) for p in world.placements] == [
        (0, 0, "host-2", 0, 0),
        (1, 2, "host-2", 1, 0),
        (2, 1, "host-1", 0, 1),
        (3, 3, "host-1", 1, 1),
    ]
    assert [node.ranks for node in world.nodes] == [(0, 1), (2, 3)]
    assert [node.doors for node in world.nodes] == [
        ("/tmp/0-0", "/tmp/2-0"),
        ("/tmp/1-0", "/tmp/3-0"),
    ]
    assert [(n.name, n.leader, n.port) for n in world.nodes] == [
        ("host-2", 0, 7000),
        ("hsr-node-1", 1, 7001),
    ]


def test_a_slot_is_told_what_concerns_it() -> None:
    world = arrange([slot(0, "2"), slot(1, "1"), slot(2, "2"), slot(3, "1")])
    parts = world.parts()
    assert [part.slot for part in parts] == [0, 1, 2, 3]
    assert {(part.size, part.hosts) for part in parts} == {(4, 2)}
    assert [[p.rank for p in part.placements] for part in parts] == [[0], [2], [1], [3]]
    assert [part.leader_folder for part in parts] == ["/tmp/0", "/tmp/1", "/tmp/0", "/tmp/1"]
    assert [part.led for part in parts] == [world.nodes[0], world.nodes[1], None, None]
    # Slot 0 starts mpirun: it is told of all nodes, but not of sockets that are not its own.
    assert [node.name for node in parts[0].nodes] == ["host-2", "hsr-node-1"]
    assert [node.doors for node in parts[0].nodes] == [world.nodes[0].doors, ()]
    assert [parse(to_json(Assigned(part)), Assigned).part for part in parts] == parts


def test_a_slot_with_several_gpus_holds_several_ranks() -> None:
    world = arrange([slot(0, "1", ("2",), ("3",)), slot(1, "1", ("0",), ("1",))])
    assert [(p.slot, p.index, p.gpus) for p in world.placements] == [
        (1, 0, ("0",)),
        (1, 1, ("1",)),
        (0, 0, ("2",)),
        (0, 1, ("3",)),
    ]
    assert [p.rank for p in world.parts()[0].placements] == [2, 3]
    assert world.nodes[0].doors == ("/tmp/1-0", "/tmp/1-1", "/tmp/0-0", "/tmp/0-1")


def test_devices_of_a_slot_are_dealt_out_evenly() -> None:
    assert split_devices(("a", "b", "c", "d"), 2) == (("a", "b"), ("c", "d"))
    assert split_devices((), 1) == ((),)
    with pytest.raises(LaunchError, match="3 .*GPU"):
        split_devices(("a", "b", "c"), 2)


def test_ranks_of_a_host_follow_their_gpus_in_numeric_order() -> None:
    world = arrange([slot(0, "1", ("10",)), slot(1, "1", ("2",)), slot(2, "1", ("GPU-a",))])
    assert [p.gpus for p in world.placements] == [("2",), ("10",), ("GPU-a",)]


def test_22_hosts_of_8_gpus_in_any_order() -> None:
    infos = [slot(i, str(i % 22), (str(i // 22),)) for i in range(22 * 8)]
    world = arrange(infos)
    random.Random(1).shuffle(infos)
    assert arrange(infos) == world
    assert [p.rank for p in world.placements] == list(range(176))
    assert all(p.gpus == (str(p.local_rank),) for p in world.placements)
    assert {len(node.ranks) for node in world.nodes} == {8}


def test_uneven_hosts() -> None:
    world = arrange([slot(0, "1"), slot(1, "2"), slot(2, "2"), slot(3, "2"), slot(4, "3")])
    assert [len(node.ranks) for node in world.nodes] == [1, 3, 1]


def test_two_ranks_on_one_device_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"slots 0 .*\b1\b.*host-1\b.*GPU 0"):
        arrange([slot(0, "1", ("0",)), slot(1, "1", ("0",))])


def test_two_ranks_may_share_a_device_where_allowed() -> None:
    infos = [slot(0, "1", ("0",)), slot(1, "1", ("0",))]
    assert arrange(infos, share_gpus=True).size == 2


def test_the_same_address_on_two_hosts_is_two_devices() -> None:
    assert arrange([slot(0, "1", ("0",)), slot(1, "2", ("0",))]).size == 2


def test_containers_that_share_a_network_but_no_files_are_refused() -> None:
    shared = [replace(slot(0, "1"), node="1/mnt:1"), replace(slot(1, "1"), node="1/mnt:2")]
    with pytest.raises(LaunchError, match=r"slots 0 .*\b1\b.*10.0.0.1"):
        arrange(shared)


def test_missing_and_double_slots_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"\[0, 2\]"):
        arrange([slot(0, "1"), slot(2, "1")])


def test_infos_survive_json() -> None:
    infos = [slot(3, "1", ("0", "1")), slot(4, "2")]
    assert [parse(to_json(Located(info)), Located).info for info in infos] == infos


def test_placement_reads_well() -> None:
    world = arrange([slot(0, "1", ("0",)), slot(1, "1", ("1",)), slot(2, "2")])
    assert format_placement(world.placements) == (
        "host-1: ranks 0 (GPU 0), 1 (GPU 1)\nhost-2: rank 2 (CPU)"
    )
