"""Messages of the driver, the slots and code on a rank: one dataclass per kind. Pure.

`Envelope` wraps every message to the driver. The unions list what each receiver accepts;
`typed_json.parse` rejects anything else. The messages of a slot's processes are at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from ...typed_json import Message
from .outcome import Failure
from .topology import Part, SlotInfo

# -- from code on a rank to the driver, through its slot -----------------------------------------


@dataclass(frozen=True, slots=True)
class Started(Message):
    """The rank has joined MPI and calls the function."""


@dataclass(frozen=True, slots=True)
class Finished(Message):
    """The function has returned."""


@dataclass(frozen=True, slots=True)
class Alive(Message):
    """The rank makes progress."""


@dataclass(frozen=True, slots=True)
class Resumed(Message):
    """A training resumes from a checkpoint, after ``run_step`` steps of the whole run."""

    run_step: int


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """Progress of a training.

    Attributes:
        epoch: the current epoch, or the completed one, from 0.
        epochs: epochs of the run.
        step: steps of that epoch so far; of a whole epoch, ``steps``.
        steps: steps of an epoch.
        run_step: steps of the whole run.
        metrics: their values so far, by name.
        samples_per_second: the rate of a whole epoch; within one, that since the last report, if
            there was one.
        seconds_left: seconds that the rest of the run will take at its pace so far; ``None`` if
            unknown.
        waits: fraction of the time spent waiting, by reason: ``data``, ``exchange`` (with other
            ranks, and for them) or ``checkpoint``; of rank 0 since the last report, or, of a whole
            epoch, of all ranks.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    run_step: int
    metrics: dict[str, float]
    samples_per_second: float | None = None
    seconds_left: float | None = None
    waits: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Notice(Message):
    """Notice to the user that does not end the run.

    Attributes:
        text: the notice.
        warn: whether it is a warning, which is shown also where progress and logs are not.
    """

    text: str
    warn: bool


RankReport = Started | Finished | Alive | Resumed | Progress | Notice

# -- from a slot to the driver -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Spark has started the slot's task."""


@dataclass(frozen=True, slots=True)
class Located(Message):
    """Location of the slot, which requests its ranks."""

    info: SlotInfo


@dataclass(frozen=True, slots=True)
class CannotJoin(Message):
    """The slot cannot take part, for ``reason``."""

    slot: int
    reason: str


JoinReport = Located | CannotJoin
JOIN_REPORTS: tuple[type[JoinReport], ...] = get_args(JoinReport)


@dataclass(frozen=True, slots=True)
class Placed(Message):
    """The ranks of the world are assigned.

    Attributes:
        size: number of ranks.
        placement: text for people, a line per host.
    """

    size: int
    placement: str


@dataclass(frozen=True, slots=True)
class Back(Message):
    """The slot had lost its connection, and has reconnected."""


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """The slot is alive."""


@dataclass(frozen=True, slots=True)
class Leaving(Message):
    """The slot's executor shuts down; its ranks may be saving their state.

    Attributes:
        signal: name of the signal that it received.
    """

    signal: str


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """A rank has failed, or the slot before it had its ranks.

    The fields are those of `Failure`, without the pickled exception: that comes through Spark.
    """

    why: str
    time: float
    message: str
    exception_type: str | None
    traceback: str
    log_tail: tuple[str, ...]

    @classmethod
    def of(cls, failure: Failure) -> Failed:
        return cls(
            why=failure.kind,
            time=failure.time,
            message=failure.message,
            exception_type=failure.exception_type,
            traceback=failure.traceback,
            log_tail=failure.log_tail,
        )

    def failure(self) -> Failure:
        return Failure(
            kind=self.why,
            time=self.time,
            message=self.message,
            exception_type=self.exception_type,
            traceback=self.traceback,
            log_tail=self.log_tail,
        )


@dataclass(frozen=True, slots=True)
class Log(Message):
    """Lines that a rank has printed, without their ends."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dropped(Message):
    """Lines of output were dropped, because they came too fast."""

    lines: int


@dataclass(frozen=True, slots=True)
class CallWanted(Message):
    """The slot requests the run's call; it comes as raw data."""


@dataclass(frozen=True, slots=True)
class ResultFollows(Message):
    """The pickled result of the rank, of ``size`` bytes, follows as raw data."""

    size: int


@dataclass(frozen=True, slots=True)
class Ended(Message):
    """The slot is done; its connection ends in order."""


SlotReport = (
    Hello | Located | CannotJoin | Placed | Back | Heartbeat | Leaving | Failed | Log | Dropped
    | CallWanted | ResultFollows | Ended
)  # fmt: skip

# -- from the driver to itself; none of these travels --------------------------------------------


@dataclass(frozen=True, slots=True)
class Queued:
    """The run waits for slots that other runs of this process hold."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The slot's connection has ended without an `Ended`.

    Attributes:
        time: when, in seconds since the epoch.
    """

    time: float


@dataclass(frozen=True, slots=True)
class Silent:
    """The slot is connected, but has been silent for too long.

    Attributes:
        seconds: lower bound of the silence.
    """

    seconds: float


DriverEvent = Queued | Disconnected | Silent


@dataclass(frozen=True, slots=True)
class Envelope(Message):
    """A message to the driver, with its sender.

    Attributes:
        slot: Spark barrier task; -1 for the driver itself.
        rank: number in the world; -1 if no rank sent it, or the slot has no ranks yet.
        host: name of the slot's machine or container.
        message: the message.
    """

    slot: int
    rank: int
    host: str
    message: RankReport | SlotReport | DriverEvent


def from_driver(message: Placed | Dropped | Queued | Notice) -> Envelope:
    """Return the envelope of a message of the driver itself, for its observer."""
    return Envelope(-1, -1, "", message)


# -- from the driver to a slot -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assigned(Message):
    """The slot's part of the world."""

    part: Part


@dataclass(frozen=True, slots=True)
class Refused(Message):
    """There is no world, for ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Gather(Message):
    """The slots have to find each other through Spark."""


@dataclass(frozen=True, slots=True)
class Stalled(Message):
    """No rank makes progress: the slot has to report the stacks of its ranks, and end them.

    Attributes:
        reason: text for people.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """The slot has to end its ranks, and itself, for ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Preempt(Message):
    """The ranks have to save their state and end, as if their host shut down."""


Answer = Assigned | Refused | Gather
Instruction = Answer | Stalled | Preempt | Stop
INSTRUCTIONS: tuple[type[Instruction], ...] = get_args(Instruction)

# -- between slots -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartDaemon(Message):
    """The slot has to start its host's MPI daemon with ``arguments``; from slot 0."""

    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """The worker has to join MPI and run the function.

    Attributes:
        environment: variables that MPI gave the rank.
        rank: number in the world.
        size: ranks of the world.
    """

    environment: dict[str, str]
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Forked(Message):
    """The prefork process has forked the worker.

    Attributes:
        pid: its number.
        ready_bytes: memory of the prefork process.
    """

    pid: int
    ready_bytes: int


@dataclass(frozen=True, slots=True)
class Exited(Message):
    """The forked worker has ended with ``code``; that of a signal is negative."""

    code: int


ProcessReport = Forked | Exited
_WorkerReport = RankReport | ProcessReport
WORKER_REPORTS: tuple[type[_WorkerReport], ...] = get_args(_WorkerReport)


@dataclass(frozen=True, slots=True)
class ImportModules(Message):
    """The prefork process has to import ``modules``.

    Attributes:
        modules: their names.
        idle_timeout: seconds it has to wait for the next request.
    """

    modules: tuple[str, ...]
    idle_timeout: float


@dataclass(frozen=True, slots=True)
class ForkWorker(Message):
    """The prefork process has to fork a worker, whose output goes to the descriptor sent along.

    Attributes:
        directory: private directory of the rank.
        payload: file that will hold the pickled call when the rank begins.
        environment: of the worker.
        modules: modules that it has to have imported.
        idle_timeout: seconds the prefork process is to wait for the next request.
    """

    directory: str
    payload: str
    environment: dict[str, str]
    modules: tuple[str, ...]
    idle_timeout: float


PreforkRequest = ImportModules | ForkWorker
PREFORK_REQUESTS: tuple[type[PreforkRequest], ...] = get_args(PreforkRequest)
