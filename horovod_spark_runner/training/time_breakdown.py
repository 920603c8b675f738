"""Time breakdown of a rank: each moment belongs to exactly one activity."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoint.run_directory import Account
from ..sync.synchroniser import Traffic
from ..typed_json import JsonObject

if TYPE_CHECKING:
    from mpi4py import MPI


class Kind:
    """Activity that time is attributed to.

    Attributes:
        BUILD: building the model, restoring or sharing its values; all up to the first epoch.
        FIRST_STEP: the first step, in which a framework compiles what is left, its checks, and
            those of some later steps.
        DATA: waiting for the reader.
        STEP: computing and exchanging in one, where a framework does not tell them apart.
        COMPUTE: steps, but for what they spend exchanging.
        EXCHANGE: exchanging with other ranks, and waiting for those that compute longer.
        CALLBACKS: callbacks, and the loop itself.
        VALIDATION: all of it, reading as well.
        AGREE: metrics of all ranks, and what ranks agree on at an epoch's end; waiting for others.
        CHECKPOINT: what checkpoints hold a training up.
        SAVE: all after the last epoch, such as writing the model.
    """

    BUILD = "build"
    FIRST_STEP = "first_step"
    DATA = "data"
    STEP = "step"
    COMPUTE = "compute"
    EXCHANGE = "exchange"
    CALLBACKS = "callbacks"
    VALIDATION = "validation"
    AGREE = "agree"
    CHECKPOINT = "checkpoint"
    SAVE = "save"


# Parts of an epoch that a plan counts: its steps.
_OF_STEPS = (Kind.DATA, Kind.STEP, Kind.COMPUTE, Kind.EXCHANGE, Kind.CALLBACKS)
KINDS: tuple[str, ...] = tuple(v for k, v in vars(Kind).items() if k.isupper())
# Bytes that all ranks have sent in an epoch or run, and what allreduce would without compression.
SENT, WHOLE = "bytes_sent", "bytes_uncompressed"
# In larger worlds, an epoch's record has this many ranks, and the mean of all.
MOST_RANKS = 64


class Clock:
    """Puts the time from now on down to kinds, one after the other; begins with `Kind.BUILD`.

    Args:
        read: seconds of a steady clock.
        began: when the first kind began, by that clock; by default, now.

    Attributes:
        seconds: of each kind, up to the last change.
    """

    def __init__(
        self, read: Callable[[], float] = time.perf_counter, began: float | None = None
    ) -> None:
        self._read = read
        self._last = read() if began is None else began
        self._kind = Kind.BUILD
        self.seconds = dict.fromkeys(KINDS, 0.0)

    def to(self, kind: str) -> None:
        """Attribute the time from now on to ``kind``."""
        now = self._read()
        self.seconds[self._kind] += now - self._last
        self._last, self._kind = now, kind

    @contextlib.contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Attribute the time inside to ``kind``, and the time after it to the previous one."""
        before = self._kind
        self.to(kind)
        try:
            yield
        finally:
            self.to(before)

    def look(self) -> dict[str, float]:
        """Return the seconds of each kind up to now."""
        self.to(self._kind)
        return dict(self.seconds)


class Accounts:
    """The accounts of a rank's training, epoch by epoch, and on rank 0 those of all ranks.

    An epoch's account goes from the end of the one before to the moment its metrics are known; its
    checkpoint, taken after that, counts to what follows.

    Args:
        world: communicator of all ranks.
        clock: this rank's.
        exchanged: returns the seconds that steps have spent exchanging so far; ``None`` where that
            cannot be separated from computing.
        traffic: returns the bytes that this rank has sent in its steps so far.

    Attributes:
        epochs: on rank 0, the record of each whole epoch, as `metrics.jsonl` keeps it; ``None``
            where nothing is known of one.
    """

    def __init__(
        self,
        world: MPI.Comm,
        clock: Clock,
        exchanged: Callable[[], float | None],
        traffic: Callable[[], Traffic],
    ) -> None:
        self._world = world
        self._clock = clock
        self._exchanged = exchanged
        self._traffic = traffic
        self._traffic_before = traffic()
        self._first = 0.0
        self._before = dict.fromkeys(KINDS, 0.0)
        self.epochs: list[Account] = []

    def first_step_ended(self) -> None:
        """Begin to count the exchange: the first step has an account of its own."""
        self._first = self._exchanged() or 0.0

    def seconds(self) -> dict[str, float]:
        """Return this rank's seconds of each kind up to now."""
        seconds, exchanged = self._clock.look(), self._exchanged()
        if exchanged is not None:
            # Clocks that are read in different places may differ by moments.
            part = min(max(exchanged - self._first, 0.0), seconds[Kind.STEP])
            seconds[Kind.COMPUTE] = seconds[Kind.STEP] - part
            seconds[Kind.EXCHANGE] += part
            seconds[Kind.STEP] = 0.0
        return seconds

    def end_epoch(self, rows: int, seconds: float, facts: Mapping[str, float]) -> float:
        """Close an epoch's account, with all other ranks; return all ranks' samples per second.

        Args:
            rows: rows that this rank has trained on in the epoch.
            seconds: what its training steps took.
            facts: what else is to be kept of the epoch.

        Returns:
            The rate on rank 0, 0 on the others.
        """
        now, traffic = self.seconds(), self._traffic()
        sent = np.subtract(traffic, self._traffic_before)
        row = [rows, *sent, *(now[kind] - self._before[kind] for kind in KINDS)]
        table = _gather(self._world, row)
        self._before, self._traffic_before = now, traffic
        if table is None:
            return 0.0
        rate = float(table[:, 0].sum()) / max(seconds, 1e-9)
        self.epochs.append(
            {
                "time": round(time.time(), 3),
                "workers": len(table),
                "samples_per_second": rate,
                **facts,
                **_sums(table[:, 1:3]),
                **record(table[:, 3:]),
            }
        )
        return rate

    def totals(self) -> JsonObject:
        """Return the `record` of the whole training on rank 0; all ranks must call it."""
        table = _gather(self._world, [*self._traffic(), *self.seconds().values()])
        return {} if table is None else {**_sums(table[:, :2]), **record(table[:, 2:])}


def _sums(table: np.ndarray) -> dict[str, int]:
    """Return the bytes that all ranks have sent, given a row of `Traffic` for each."""
    sent, whole = table.sum(axis=0)
    return {SENT: round(sent), WHOLE: round(whole)}


def _gather(world: MPI.Comm, row: Sequence[float]) -> np.ndarray | None:
    """Return a row of numbers of each rank on rank 0, ``None`` on the others."""
    sent = np.asarray(row, np.float64)
    table = np.empty((world.Get_size(), len(sent))) if world.Get_rank() == 0 else None
    world.Gather(sent, table)
    return table


def record(table: np.ndarray) -> JsonObject:
    """Return where the time of all ranks went, as JSON.

    Args:
        table: a row for each rank, a column for each of `KINDS`.

    Returns:
        ``ranks``, which they are of, and ``seconds``, of each kind on each of these. Of more than
        `MOST_RANKS` these are the extremes of each kind and others, and there is the ``mean`` of
        all.
    """
    size = len(table)
    kinds = [(i, kind) for i, kind in enumerate(KINDS) if table[:, i].any()]
    ranks = list(range(size))
    if size > MOST_RANKS:
        extreme = {int(f(table[:, i])) for i, _ in kinds for f in (np.argmin, np.argmax)}
        even = np.linspace(0, size - 1, MOST_RANKS - len(extreme), dtype=int).tolist()
        ranks = sorted({*extreme, *even})
    breakdown: JsonObject = {
        "ranks": ranks,
        "seconds": {kind: _rounded(table[ranks, i]) for i, kind in kinds},
    }
    if size > MOST_RANKS:
        breakdown["mean"] = {kind: _rounded(table[:, i].mean()) for i, kind in kinds}
    return breakdown


def mean_seconds(account: Account) -> dict[str, float]:
    """Return the seconds of each kind in an epoch's record, as the mean of all ranks."""
    if account is None:
        return {}
    if "mean" in account:
        return dict(account["mean"])
    return {kind: sum(each) / len(each) for kind, each in account["seconds"].items()}


def step_seconds(account: Account) -> float:
    """Return the seconds of an epoch's steps, its first step left out, as the mean of all ranks."""
    means = mean_seconds(account)
    return sum(means.get(kind, 0.0) for kind in _OF_STEPS)


def phases(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a rank's phases, and of the activities within the epochs."""
    within = {
        kind: value
        for kind, value in seconds.items()
        if kind not in (Kind.BUILD, Kind.SAVE) and value
    }
    return {
        "build": seconds[Kind.BUILD],
        "epochs": sum(within.values()),
        "save": seconds[Kind.SAVE],
        **within,
    }


def _rounded(values: Any) -> object:
    return np.round(values, 5).tolist()
