"""Messages of the driver, the slots and code on a rank: one dataclass per kind. Pure.

`Told` is the envelope of all that the driver hears. The unions say who takes what, and
`typed_json.parse` takes nothing else. The messages of a slot's own processes are at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from ...typed_json import Message
from .outcome import Failure
from .topology import Part, SlotInfo

# -- what code on a rank reports to the driver, by way of its slot -------------------------------


@dataclass(frozen=True, slots=True)
class Started(Message):
    """The rank has joined MPI and calls the function."""


@dataclass(frozen=True, slots=True)
class Finished(Message):
    """The function has returned."""


@dataclass(frozen=True, slots=True)
class Alive(Message):
    """The rank gets on with its work."""


@dataclass(frozen=True, slots=True)
class Resumed(Message):
    """A training goes on from a checkpoint, after ``run_step`` steps of the whole run."""

    run_step: int


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """How far a training has come.

    Attributes:
        epoch: the epoch it is in, or has completed, from 0.
        epochs: epochs the run is to have.
        step: steps of that epoch so far; of a whole epoch, ``steps``.
        steps: steps of an epoch.
        run_step: steps of the whole run.
        metrics: their values so far, by name.
        samples_per_second: the rate of a whole epoch; within one, that since the last report, if
            there was one.
        seconds_left: what the rest of the run will take, at its pace so far; ``None`` if that is
            not known.
        waits: which part of the time was spent waiting, by what for: ``data``, ``exchange`` (with
            other ranks, and for them) or ``checkpoint``; of rank 0 since the last report, or, of a
            whole epoch, of all ranks.
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
    """Something that does not end the run.

    Attributes:
        text: what there is to know.
        warn: whether it is a warning, which is shown also where progress and logs are not.
    """

    text: str
    warn: bool


RankReport = Started | Finished | Alive | Resumed | Progress | Notice

# -- what a slot tells the driver ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Spark has started the slot's task."""


@dataclass(frozen=True, slots=True)
class Located(Message):
    """Where the slot is: it asks which ranks it has."""

    info: SlotInfo


@dataclass(frozen=True, slots=True)
class CannotJoin(Message):
    """The slot cannot take part, for ``reason``."""

    slot: int
    reason: str


Joining = Located | CannotJoin
JOINING: tuple[type[Joining], ...] = get_args(Joining)


@dataclass(frozen=True, slots=True)
class Placed(Message):
    """The ranks of the world are given out.

    Attributes:
        size: how many they are.
        placement: text for people, a line per host.
    """

    size: int
    placement: str


@dataclass(frozen=True, slots=True)
class Back(Message):
    """The slot had lost its connection, and this is another one."""


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """The slot lives."""


@dataclass(frozen=True, slots=True)
class Leaving(Message):
    """The slot's host is to be left; its ranks may be saving what they have.

    Attributes:
        signal: name of the signal that told it.
    """

    signal: str


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """A rank, or the slot before its ranks were known, has failed.

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
    """So many lines of output are left out: they came too fast."""

    lines: int


@dataclass(frozen=True, slots=True)
class CallWanted(Message):
    """The slot wants the run's call; it comes as raw data."""


@dataclass(frozen=True, slots=True)
class ResultFollows(Message):
    """The pickled result of the rank, of ``size`` bytes, follows as raw data."""

    size: int


@dataclass(frozen=True, slots=True)
class Ended(Message):
    """The slot is done; its connection ends as it should."""


SlotReport = (
    Hello | Located | CannotJoin | Placed | Back | Heartbeat | Leaving | Failed | Log | Dropped
    | CallWanted | ResultFollows | Ended
)  # fmt: skip

# -- what the driver finds out by itself; none of it travels -------------------------------------


@dataclass(frozen=True, slots=True)
class Queued:
    """The run waits for slots that other runs of this process hold."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The slot's connection has ended, and it had not said that it would.

    Attributes:
        time: when, in seconds since the epoch.
    """

    time: float


@dataclass(frozen=True, slots=True)
class Silent:
    """The slot is connected, but has said nothing for too long.

    Attributes:
        seconds: for so long at least.
    """

    seconds: float


DriverNews = Queued | Gone | Silent


@dataclass(frozen=True, slots=True)
class Told(Message):
    """A message to the driver, and who it is of.

    Attributes:
        slot: Spark barrier task; -1 for the driver itself.
        rank: number in the world; -1 if the message is of no rank, or the rank is not known yet.
        host: name of the slot's machine or container.
        message: what is told.
    """

    slot: int
    rank: int
    host: str
    message: RankReport | SlotReport | DriverNews


def by_driver(message: Placed | Dropped | Queued | Notice) -> Told:
    """Return the envelope of what the driver itself tells its observer."""
    return Told(-1, -1, "", message)


# -- what the driver tells a slot ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assigned(Message):
    """The slot's part of the world."""

    part: Part


@dataclass(frozen=True, slots=True)
class Refused(Message):
    """There will be no world, for ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Gather(Message):
    """The slots are to find each other through Spark."""


@dataclass(frozen=True, slots=True)
class Stalled(Message):
    """No rank gets on: the slot is to tell what its ranks do, and to end them.

    Attributes:
        reason: text for people.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """The slot is to end its ranks, and itself, for ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Preempt(Message):
    """The ranks are to save what they have and end, as if their host was to be left."""


Answer = Assigned | Refused | Gather
Instruction = Answer | Stalled | Preempt | Stop
INSTRUCTIONS: tuple[type[Instruction], ...] = get_args(Instruction)

# -- between slots -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartDaemon(Message):
    """Slot 0 wants the daemon of the other slot's host started with ``arguments``."""

    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """The worker is to join MPI and to run the function.

    Attributes:
        environment: what MPI gave the rank.
        rank: number in the world.
        size: ranks of the world.
    """

    environment: dict[str, str]
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Forked(Message):
    """The ready process has forked the worker.

    Attributes:
        pid: its number.
        ready_bytes: memory of the ready process.
    """

    pid: int
    ready_bytes: int


@dataclass(frozen=True, slots=True)
class Exited(Message):
    """The forked worker has ended with ``code``; that of a signal is negative."""

    code: int


ProcessReport = Forked | Exited
WorkerReport = RankReport | ProcessReport
WORKER_REPORTS: tuple[type[WorkerReport], ...] = get_args(WorkerReport)


@dataclass(frozen=True, slots=True)
class ImportModules(Message):
    """The ready process is to import ``modules``.

    Attributes:
        modules: their names.
        idle_timeout: seconds it is to wait for the next request.
    """

    modules: tuple[str, ...]
    idle_timeout: float


@dataclass(frozen=True, slots=True)
class ForkWorker(Message):
    """The ready process is to fork a worker, whose output goes to the descriptor sent along.

    Attributes:
        directory: private directory of the rank.
        payload: file that will hold the pickled call when the rank begins.
        environment: of the worker.
        modules: what it is to have imported.
        idle_timeout: seconds the ready process is to wait for the next request.
    """

    directory: str
    payload: str
    environment: dict[str, str]
    modules: tuple[str, ...]
    idle_timeout: float


ReadyRequest = ImportModules | ForkWorker
READY_REQUESTS: tuple[type[ReadyRequest], ...] = get_args(ReadyRequest)
