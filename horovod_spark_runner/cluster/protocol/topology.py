"""Placement of ranks: hosts, slots, devices. Pure.

A *slot* is one task of the Spark barrier stage; its index is the task's partition. It holds one
rank, or several where Spark gave the task several ranks' GPUs. A *rank* is a process of the MPI
world. Ranks are contiguous per host, so that Horovod's ``local_rank`` and ``cross_rank`` and MPI's
shared-memory transport see the hosts as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...errors import LaunchError


def format_ranks(ranks: int) -> str:
    """Return "1 rank" or "8 ranks"."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


@dataclass(frozen=True)
class SlotInfo:
    """Report of one slot before ranks are assigned.

    Attributes:
        slot: index of the barrier task.
        host: name of the machine or container, for people.
        node: identity of the machine or container; slots with equal ``node`` share memory.
        address: IP address the other hosts can reach this slot at.
        port: port at ``address`` where the slot takes the command of its host's MPI daemon.
        folder: its private folder, where slots of the same node find the call it has fetched.
        doors: paths of the Unix sockets its ranks' shims connect to, one per rank.
        gpus: GPU addresses of each of its ranks; empty ones on CPU.
    """

    slot: int
    host: str
    node: str
    address: str
    port: int
    folder: str
    doors: tuple[str, ...]
    gpus: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class RankPlacement:
    """Placement of one rank.

    Attributes:
        rank: number in the world, from 0.
        slot: Spark barrier task that owns it.
        host: machine or container name.
        local_rank: number among the ranks of its host, from 0.
        cross_rank: number of its host among the hosts, from 0.
        gpus: devices visible to it (``CUDA_VISIBLE_DEVICES``).
        index: number among the ranks of its slot, from 0.
    """

    rank: int
    slot: int
    host: str
    local_rank: int
    cross_rank: int
    gpus: tuple[str, ...] = ()
    index: int = 0


@dataclass(frozen=True)
class Node:
    """One machine or container of the world and the ranks it holds.

    Attributes:
        name: name for MPI's daemons. Not a real one but for the first node: nothing resolves it,
            and two containers may have equal host names.
        host: its host name.
        address: IP address the other nodes reach it at.
        port: where its leader takes its daemon's command.
        leader: slot that runs its daemon.
        ranks: its ranks.
        doors: socket paths of its ranks' shims, by local rank.
    """

    name: str
    host: str
    address: str
    port: int
    leader: int
    ranks: tuple[int, ...]
    doors: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """One slot's part of the world; its size does not grow with the world, except for slot 0.

    Attributes:
        slot: the slot.
        size: ranks of the world.
        hosts: nodes of the world.
        placements: the slot's own ranks, by index.
        nodes: all nodes for the slot that starts mpirun; else the one that the slot leads, if any.
        leader_folder: private folder of the slot that leads this node.
    """

    slot: int
    size: int
    hosts: int
    placements: tuple[RankPlacement, ...]
    nodes: tuple[Node, ...]
    leader_folder: str

    @property
    def starts_mpirun(self) -> bool:
        """True for the leader of the first node, on which mpirun's command relies."""
        return len(self.nodes) == self.hosts and self.nodes[0].leader == self.slot

    @property
    def led(self) -> Node | None:
        """Node whose daemon the slot runs, if any."""
        return next((node for node in self.nodes if node.leader == self.slot), None)


@dataclass(frozen=True)
class World:
    """All ranks of a run, in rank order, and the nodes they are on.

    Attributes:
        placements: of the ranks.
        nodes: by their lowest slot.
        leader_folders: for every slot, the private folder of the slot that leads its node.
    """

    placements: tuple[RankPlacement, ...]
    nodes: tuple[Node, ...]
    leader_folders: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.placements)

    def parts(self) -> list[Part]:
        """Return every slot's part, by slot."""
        by_slot: dict[int, list[RankPlacement]] = {}
        for placement in self.placements:
            by_slot.setdefault(placement.slot, []).append(placement)
        led: dict[int, tuple[Node, ...]] = {node.leader: (node,) for node in self.nodes}
        # The sockets of other nodes are not needed here, and there may be thousands.
        first, others = self.nodes[0], self.nodes[1:]
        led[first.leader] = (first, *(replace(node, doors=()) for node in others))
        return [
            Part(
                slot=slot,
                size=self.size,
                hosts=len(self.nodes),
                placements=tuple(sorted(by_slot[slot], key=lambda placement: placement.index)),
                nodes=led.get(slot, ()),
                leader_folder=folder,
            )
            for slot, folder in enumerate(self.leader_folders)
        ]


@dataclass(frozen=True)
class _Seat:
    """One rank of a slot, before it has a number."""

    slot: int
    index: int
    door: str
    gpus: tuple[str, ...]

    @property
    def order(self) -> tuple[tuple[tuple[int, str], ...], int, int]:
        # Numeric addresses in numeric order ("2" before "10"), names after them.
        devices = tuple((int(g), "") if g.isdecimal() else (1 << 30, g) for g in self.gpus)
        return devices, self.slot, self.index


def arrange(infos: Sequence[SlotInfo], *, share_gpus: bool = False) -> World:
    """Assign ranks to slots.

    Nodes are ordered by their lowest slot, so the node of slot 0, which starts ``mpirun``, holds
    rank 0; within a node, ranks are ordered by device, then by slot.

    Args:
        infos: one entry per slot, in any order.
        share_gpus: allow several ranks of a node on one device.

    Returns:
        The world, the same for every order of ``infos``.

    Raises:
        LaunchError: slots are missing or double, two ranks of a node were given one device, or two
            nodes have one address.
    """
    ordered = sorted(infos, key=lambda info: info.slot)
    if [info.slot for info in ordered] != list(range(len(ordered))):
        raise LaunchError(f"slots reported {[info.slot for info in ordered]}: not one each")
    members: dict[str, list[SlotInfo]] = {}
    for info in ordered:
        members.setdefault(info.node, []).append(info)
    _check_addresses([slots[0] for slots in members.values()])
    placements: list[RankPlacement] = []
    nodes: list[Node] = []
    folders: dict[int, str] = {}
    for cross_rank, slots in enumerate(members.values()):
        if not share_gpus:
            _check_devices(slots)
        leader, first = slots[0], len(placements)
        folders.update((info.slot, leader.folder) for info in slots)
        seats = sorted(_seats(slots), key=lambda seat: seat.order)
        for local_rank, seat in enumerate(seats):
            placements.append(
                RankPlacement(
                    rank=first + local_rank,
                    slot=seat.slot,
                    host=leader.host,
                    local_rank=local_rank,
                    cross_rank=cross_rank,
                    gpus=seat.gpus,
                    index=seat.index,
                )
            )
        nodes.append(
            Node(
                name=f"hsr-node-{cross_rank}" if cross_rank else leader.host,
                host=leader.host,
                address=leader.address,
                port=leader.port,
                leader=leader.slot,
                ranks=tuple(range(first, len(placements))),
                doors=tuple(seat.door for seat in seats),
            )
        )
    return World(tuple(placements), tuple(nodes), tuple(folders[info.slot] for info in ordered))


def split_devices(gpus: Sequence[str], ranks: int) -> tuple[tuple[str, ...], ...]:
    """Return the devices of each of a slot's ``ranks``, in the order Spark gave them.

    Raises:
        LaunchError: they cannot be distributed evenly.
    """
    if len(gpus) % ranks:
        raise LaunchError(f"Spark gave {len(gpus)} GPUs ({', '.join(gpus)}) to {ranks} ranks")
    share = len(gpus) // ranks
    return tuple(tuple(gpus[i * share : (i + 1) * share]) for i in range(ranks))


def _seats(slots: Sequence[SlotInfo]) -> list[_Seat]:
    return [
        _Seat(info.slot, index, door, gpus)
        for info in slots
        for index, (door, gpus) in enumerate(zip(info.doors, info.gpus, strict=True))
    ]


def _check_addresses(leaders: Sequence[SlotInfo]) -> None:
    by_address: dict[str, SlotInfo] = {}
    for info in leaders:
        other = by_address.setdefault(info.address, info)
        if other is not info:
            raise LaunchError(
                f"slots {other.slot} and {info.slot} on host {info.host} share the address "
                f"{info.address}, but not their files: they are in separate containers on the "
                "host's network (hostNetwork, or a private /tmp), where Open MPI's ranks do not "
                "find each other. Give each container its own network, or run one executor "
                "per host"
            )


def _check_devices(members: Sequence[SlotInfo]) -> None:
    owners: dict[str, int] = {}
    for info in members:
        for gpu in (gpu for devices in info.gpus for gpu in devices):
            if gpu in owners:
                raise LaunchError(
                    f"slots {owners[gpu]} and {info.slot} on host {info.host} were both given "
                    f"GPU {gpu}: each Spark worker on a host discovers the GPUs for itself; run "
                    "one worker per host, give each its own devices in the discovery script, or "
                    "allow sharing with share_gpus=True"
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
        lines.append(f"{host}: rank{'s' * (len(members) > 1)} {ranks}{devices}")
    return "\n".join(lines)
