"""Which slot becomes which rank, on which host, with which devices. Pure.

A *slot* is one task of the Spark barrier stage; its index is the task's partition. A *rank* is
its place in the MPI world. Ranks are contiguous per host, so that Horovod's ``local_rank`` and
``cross_rank`` and MPI's shared-memory transport see the hosts as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import LaunchError


@dataclass(frozen=True)
class SlotInfo:
    """What one slot tells the others before ranks are given out.

    Attributes:
        slot: index of the barrier task.
        host: name of the machine or container, for people.
        node: identity of the machine or container; slots with equal ``node`` share memory.
        address: IP address the other hosts can reach this slot at.
        socket: path of the Unix socket its rank's shim connects to.
        gpus: GPU addresses Spark gave to the task; empty on CPU.
    """

    slot: int
    host: str
    node: str
    address: str
    socket: str
    gpus: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> SlotInfo:
        return cls(**{**fields, "gpus": tuple(fields["gpus"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RankPlacement:
    """Where one rank runs.

    Attributes:
        rank: place in the world, from 0.
        slot: Spark barrier task that owns it.
        host: machine or container name.
        local_rank: place among the ranks of its host, from 0.
        cross_rank: place of its host among the hosts, from 0.
        gpus: devices visible to it (``CUDA_VISIBLE_DEVICES``).
    """

    rank: int
    slot: int
    host: str
    local_rank: int
    cross_rank: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Node:
    """One machine or container of the world and the ranks it holds."""

    host: str
    address: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class World:
    """All ranks of a run, in rank order, and the nodes they are on."""

    placements: tuple[RankPlacement, ...]
    nodes: tuple[Node, ...]
    sockets: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.placements)

    def of_slot(self, slot: int) -> RankPlacement:
        return next(p for p in self.placements if p.slot == slot)


def arrange(infos: Sequence[SlotInfo]) -> World:
    """Give every slot its rank.

    Nodes are ordered by their lowest slot, so the node of slot 0, which starts ``mpirun``, holds
    rank 0; within a node, slots are ordered by device, then by slot.

    Args:
        infos: one entry per slot, in any order.

    Returns:
        The world, the same for every order of ``infos``.

    Raises:
        LaunchError: slots are missing or double, or two slots of a node were given one device.
    """
    ordered = sorted(infos, key=lambda info: info.slot)
    if [info.slot for info in ordered] != list(range(len(ordered))):
        raise LaunchError(f"slots reported {[info.slot for info in ordered]}: not one each")
    nodes: dict[str, list[SlotInfo]] = {}
    for info in ordered:
        nodes.setdefault(info.node, []).append(info)
    placements: list[RankPlacement] = []
    described: list[Node] = []
    sockets: list[str] = []
    for cross_rank, members in enumerate(nodes.values()):
        _check_devices(members)
        first = len(placements)
        for local_rank, info in enumerate(sorted(members, key=_device_order)):
            placements.append(
                RankPlacement(
                    rank=len(placements),
                    slot=info.slot,
                    host=info.host,
                    local_rank=local_rank,
                    cross_rank=cross_rank,
                    gpus=info.gpus,
                )
            )
            sockets.append(info.socket)
        ranks = tuple(range(first, len(placements)))
        described.append(Node(members[0].host, members[0].address, ranks))
    return World(tuple(placements), tuple(described), tuple(sockets))


def _device_order(info: SlotInfo) -> tuple[tuple[tuple[int, str], ...], int]:
    # Numeric addresses in numeric order ("2" before "10"), names after them.
    devices = tuple((int(g), "") if g.isdecimal() else (1 << 30, g) for g in info.gpus)
    return devices, info.slot


def _check_devices(members: Sequence[SlotInfo]) -> None:
    owners: dict[str, int] = {}
    for info in members:
        for gpu in info.gpus:
            if gpu in owners:
                raise LaunchError(
                    f"slots {owners[gpu]} and {info.slot} on host {info.host} were both given "
                    f"GPU {gpu}: each Spark worker on a host discovers the GPUs for itself; run "
                    "one worker per host, or give each its own devices in the discovery script"
                )
            owners[gpu] = info.slot


def format_placement(placements: Sequence[RankPlacement]) -> str:
    """Return one line per host: its ranks and their devices."""
    by_host: dict[tuple[int, str], list[RankPlacement]] = {}
    for placement in placements:
        by_host.setdefault((placement.cross_rank, placement.host), []).append(placement)
    lines = []
    for (_, host), members in sorted(by_host.items()):
        ranks = ", ".join(
            f"{p.rank} (GPU {','.join(p.gpus)})" if p.gpus else str(p.rank) for p in members
        )
        devices = "" if any(p.gpus for p in members) else " (CPU)"
        lines.append(f"{host}: ranks {ranks}{devices}")
    return "\n".join(lines)
