"""How the slots learn which ranks they are: from the driver, to which all of them talk. Pure.

Spark's own way, ``allGather``, takes a second at least, because Spark looks once a second, and
carries what every slot says to every slot. It is left for runs in which some slots do not reach the
driver in time: then all exchange there what they know, or why they cannot take part.
"""

from __future__ import annotations

from ...errors import LaunchError
from .channel import Message
from .topology import SlotInfo, World, arrange, format_placement, read_info

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
        self._parts: dict[int, Message] = {}
        self._verdict: Message | None = None  # for all
        self.placed: Message | None = None

    def take(self, message: Message, now: float) -> dict[int, Message]:
        """Take a message of a slot; return what to tell which slots because of it."""
        if message.get("type") != "info":
            return {}
        slot = int(message["slot"])
        self._asked.add(slot)
        self._since = now
        if slot in self._parts:
            return {slot: self._parts[slot]}
        if self._verdict is not None:
            return {slot: self._verdict}
        try:
            self._infos[slot] = read_info(message["info"])
            if len(self._infos) < self._slots:
                return {}
            self._arrange()
        except LaunchError as error:
            return self._tell_all({"type": "refused", "reason": str(error)})
        return self._parts

    def look(self, now: float) -> dict[int, Message]:
        """Return what to tell which slots because of the time."""
        decided = self._parts or self._verdict is not None
        if decided or self._since is None or now - self._since < GATHER_AFTER:
            return {}
        return self._tell_all({"type": "gather"})

    def _arrange(self) -> None:
        world = arrange([*self._infos.values()], share_gpus=self._share_gpus)
        self._parts = {
            part.slot: {"type": "world", "part": part.to_fields()} for part in world.parts()
        }
        self.placed = placed(world)

    def _tell_all(self, verdict: Message) -> dict[int, Message]:
        self._verdict = verdict
        return dict.fromkeys(self._asked, verdict)


def placed(world: World) -> Message:
    """Return the message that tells people where the ranks are."""
    text = format_placement(world.placements)
    return {"type": "placed", "size": world.size, "placement": text}
