"""Time breakdown of a launch, from the messages the driver receives. Pure."""

from __future__ import annotations

from ..protocol.messages import Finished, Hello, Placed, Started, Told

# In their order. Each ends when the last of the slots or ranks has told of what it is named for.
TASKS, RENDEZVOUS, START, FUNCTION, RESULTS = PHASES = (
    "tasks",
    "rendezvous",
    "start",
    "function",
    "results",
)


class Phases:
    """Notes when the phases of a run end; together they take all of its time.

    Args:
        slots: tasks of the run.
        ranks: ranks of the run.
        now: when its job starts, by any steady clock, as in all methods.
    """

    def __init__(self, slots: int, ranks: int, now: float) -> None:
        self._wanted: dict[type, tuple[str, int]] = {
            Hello: (TASKS, slots),
            Placed: (RENDEZVOUS, 1),
            Started: (START, ranks),
            Finished: (FUNCTION, ranks),
        }
        self._began = now
        self._heard: dict[type, set[tuple[int, int]]] = {}
        self._ends: dict[str, float] = {}

    def take(self, told: Told, now: float) -> None:
        """Take one message."""
        kind = type(told.message)
        if kind not in self._wanted:
            return
        phase, count = self._wanted[kind]
        heard = self._heard.setdefault(kind, set())
        heard.add((told.slot, told.rank))
        if len(heard) == count:
            self._ends.setdefault(phase, now)

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds of each phase, up to ``now``, but of those not heard of."""
        seconds, before = {}, self._began
        for phase in PHASES:
            end = now if phase == RESULTS else self._ends.get(phase)
            if end is not None:
                seconds[phase], before = max(0.0, end - before), max(before, end)
        return seconds
