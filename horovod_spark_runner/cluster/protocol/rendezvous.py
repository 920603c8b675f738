"""Assign ranks to slots: the slots report to the driver, which answers each. Pure.

Spark's own way, ``allGather``, takes a second at least, because Spark looks once a second, and
carries what every slot says to every slot. It is left for runs in which some slots do not reach the
driver in time: then all exchange there what they know, or why they cannot take part.
"""

from __future__ import annotations

from ...errors import LaunchError
from .messages import (
    Answer,
    Assigned,
    CannotJoin,
    Gather,
    Joining,
    Placed,
    Refused,
    Told,
)
from .topology import SlotInfo, World, arrange, format_placement

# Seconds without a further slot after which it is looked for through Spark: all start at once.
GATHER_AFTER = 10.0


class Rendezvous:
    """Collects what the slots tell of themselves, and says what to answer them.

    A slot that asks again, because it has lost its connection, gets the same answer again.

    Args:
        slots: how many take part.
        share_gpus: allow several ranks of a host on one device.
    """

    def __init__(self, slots: int, *, share_gpus: bool) -> None:
        self._slots = slots
        self._share_gpus = share_gpus
        self._infos: dict[int, SlotInfo] = {}
        self._asked: set[int] = set()
        self._since: float | None = None
        self._parts: dict[int, Answer] = {}
        self._verdict: Answer | None = None  # for all
        self.placed: Placed | None = None

    def take(self, told: Told, now: float) -> dict[int, Answer]:
        """Take a message of a slot; return what to tell which slots because of it."""
        if not isinstance(told.message, Joining):
            return {}
        slot = told.slot
        self._asked.add(slot)
        self._since = now
        if slot in self._parts:
            return {slot: self._parts[slot]}
        if self._verdict is not None:
            return {slot: self._verdict}
        try:
            self._infos[slot] = info_of(told.message)
            if len(self._infos) < self._slots:
                return {}
            self._arrange()
        except LaunchError as error:
            return self._tell_all(Refused(str(error)))
        return self._parts

    def look(self, now: float) -> dict[int, Answer]:
        """Return what to tell which slots because of the time."""
        decided = self._parts or self._verdict is not None
        if decided or self._since is None or now - self._since < GATHER_AFTER:
            return {}
        return self._tell_all(Gather())

    def _arrange(self) -> None:
        world = arrange([*self._infos.values()], share_gpus=self._share_gpus)
        self._parts = {part.slot: Assigned(part) for part in world.parts()}
        self.placed = placed(world)

    def _tell_all(self, verdict: Answer) -> dict[int, Answer]:
        self._verdict = verdict
        return dict.fromkeys(self._asked, verdict)


def info_of(message: Joining) -> SlotInfo:
    """Return what a slot told of itself.

    Raises:
        LaunchError: it cannot take part.
    """
    if isinstance(message, CannotJoin):
        raise LaunchError(f"slot {message.slot} cannot take part: {message.reason}")
    return message.info


def placed(world: World) -> Placed:
    """Return the message that tells people where the ranks are."""
    return Placed(world.size, format_placement(world.placements))
