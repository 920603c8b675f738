"""Assign ranks to slots: the slots report to the driver, which answers each. Pure.

Spark's ``allGather`` takes at least a second, because Spark polls once a second, and sends every
slot's report to every slot. It is the fallback for runs in which some slots do not reach the driver
in time: then all slots exchange their reports there, or why they cannot take part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...config.launch import LaunchSettings
from ...errors import LaunchError
from .messages import (
    Answer,
    Assigned,
    CannotJoin,
    Envelope,
    Gather,
    JoinReport,
    Placed,
    Refused,
)
from .topology import SlotInfo, World, arrange, format_placement

# Seconds without a further report after which the slots fall back to Spark: all start at once.
GATHER_AFTER = 10.0
# Larger results go to the driver directly: Spark holds them in the memory of its JVM, and together
# they may not exceed spark.driver.maxResultSize (1 GiB unless set).
_RESULT_BYTES = 8 * 1024 * 1024
_ALL_RESULTS_BYTES = 256 * 1024 * 1024
# Seconds between a slot's heartbeats.
HEARTBEAT_SECONDS = 5.0
# How long ranks may run, to save their state, after their executor has ended.
ORPHAN_GRACE = 30.0


class Rendezvous:
    """Collects the slots' reports and computes the answers to them.

    A slot that reports again, because it has lost its connection, gets the same answer again.

    Args:
        slots: number of slots.
        share_gpus: allow several ranks of a host on one device.
    """

    def __init__(self, slots: int, *, share_gpus: bool) -> None:
        self._slots = slots
        self._share_gpus = share_gpus
        self._infos: dict[int, SlotInfo] = {}
        self._reported: set[int] = set()
        self._since: float | None = None
        self._parts: dict[int, Answer] = {}
        self._verdict: Answer | None = None  # for all
        self.placed: Placed | None = None

    def take(self, envelope: Envelope, now: float) -> dict[int, Answer]:
        """Take a message of a slot; return the answers that it causes, by slot."""
        if not isinstance(envelope.message, JoinReport):
            return {}
        slot = envelope.slot
        self._reported.add(slot)
        self._since = now
        if slot in self._parts:
            return {slot: self._parts[slot]}
        if self._verdict is not None:
            return {slot: self._verdict}
        try:
            self._infos[slot] = read_slot_info(envelope.message)
            if len(self._infos) < self._slots:
                return {}
            self._arrange()
        except LaunchError as error:
            return self._answer_all(Refused(str(error)))
        return self._parts

    def check_timeout(self, now: float) -> dict[int, Answer]:
        """Return the answers if reports are missing for too long, by slot; else none."""
        decided = self._parts or self._verdict is not None
        if decided or self._since is None or now - self._since < GATHER_AFTER:
            return {}
        return self._answer_all(Gather())

    def _arrange(self) -> None:
        world = arrange([*self._infos.values()], share_gpus=self._share_gpus)
        self._parts = {part.slot: Assigned(part) for part in world.parts()}
        self.placed = placement_message(world)

    def _answer_all(self, verdict: Answer) -> dict[int, Answer]:
        self._verdict = verdict
        return dict.fromkeys(self._reported, verdict)


def read_slot_info(message: JoinReport) -> SlotInfo:
    """Return the location that a slot reported.

    Raises:
        LaunchError: it cannot take part.
    """
    if isinstance(message, CannotJoin):
        raise LaunchError(f"slot {message.slot} cannot take part: {message.reason}")
    return message.info


def placement_message(world: World) -> Placed:
    """Return the message on the placement of the ranks."""
    return Placed(world.size, format_placement(world.placements))


@dataclass(frozen=True)
class SlotPlan:
    """Plan of a run for its slots; travels in Spark's description of their task.

    Attributes:
        run_id: short name of the run.
        key: secret of the run's control messages.
        driver: address of the driver's control server.
        options: see `LaunchSettings`.
        workers: ranks of the run.
        slots: barrier tasks of the run.
        payload: pickled ``(function, args, kwargs)``; ``None`` to fetch it from the driver.
        payload_bytes: its size.
        modules: modules the workers import while the ranks find each other.
        torch_variables: set the variables of torch.distributed for the function.
        side_process: give rank 0 a side process.
        rank_timeout: seconds mpirun may take to start the ranks.
    """

    run_id: str
    key: bytes = field(repr=False)
    driver: tuple[str, int]
    options: LaunchSettings
    workers: int
    slots: int
    payload: bytes | None = field(repr=False)
    payload_bytes: int
    modules: tuple[str, ...] = ()
    torch_variables: bool = False
    side_process: bool = False
    rank_timeout: float = 120.0

    @property
    def ranks_per_slot(self) -> int:
        return self.workers // self.slots

    @property
    def max_result_bytes(self) -> int:
        """Largest size of a result that goes through Spark, which holds all of them at once."""
        return min(_RESULT_BYTES, _ALL_RESULTS_BYTES // self.workers)
