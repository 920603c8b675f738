"""Messages of a slot, its worker and the prefork process. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ...typed_json import Message
from .messages import RankReport


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
