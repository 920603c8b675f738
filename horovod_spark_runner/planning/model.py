"""How long a step takes on so many ranks, computed from what was measured on few. Pure.

A step computes, waits for the slowest rank, and exchanges. Ranks of a host share its cores: where
they ask for more processor time than there is, all are slower by as much. The exchange is a ring
over all ranks, as fast as its slowest link, or, where MPI adds up, one over the hosts.
`tests/unit/test_plan_simulation.py` plays such steps through, message by message, and compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from .links import Link, ring_seconds, slowed, slower, tree_seconds
from .waiting import (
    Lying,
    hidden_seconds,
    longer_by_sharing,
    read_part,
    waited_for_reader,
    waiting_seconds,
)

Key = TypeVar("Key", int, float)


@dataclass(frozen=True)
class StepTime:
    """What a step takes on one rank, without what it exchanges.

    Attributes:
        seconds: by the clock; the mean.
        cpu_seconds: of all threads of the rank's process.
        spread: standard deviation of a step's seconds.
    """

    seconds: float
    cpu_seconds: float
    spread: float


@dataclass(frozen=True)
class Workload:
    """A training as it was measured.

    Attributes:
        rows: rows of an epoch.
        epochs: how many there are to be.
        passes: how often they go over the rows that there are: with ``steps_per_epoch``, each takes
            more of them than there are, or fewer.
        batch_size: rows of a rank in a step.
        steps: by batch size, and by ranks on a host that computed at once.
        gradient_bytes: what a step exchanges.
        model_bytes: what ranks exchange where they take the mean of their models.
        reader_rows: rows per second that a rank reads at first, while it does nothing else, by
            ranks on a host that read at once.
        reader_cpu_seconds: processor time of reading a row, by ranks for each core: so many at
            once take more, as each keeps what it reads in memory that nobody has used before.
        lying: how the rows lie in storage; ``None`` where it is not known, and no rank is taken to
            read more of them than it uses.
        overhead: seconds that an exchange takes besides its messages: packing, and Horovod's
            waiting for the next cycle.
        overlap: which part of an exchange hides behind the backward pass, as long as that lasts.
        crowding: ranks for each core of a host when link and overhead, and the reader with most
            ranks, were measured; 1 if each had a core or more.
        kept: whether the rows fit ``window_bytes``, so that a rank reads none of them twice.
        inside: the link between ranks of a host; ``None`` if there was one rank only.
        by_hosts: whether the ranks of each host add up among themselves before hosts do, as Open
            MPI has them do; else one ring goes around all, as that of NCCL.
        sharing: seconds that a step takes longer than it would if each rank had a core, by ranks
            per core. Empty where it was not measured.
        launch: seconds from the call to the beginning of the ranks' work and back, by ranks on a
            host.
        materialize: seconds in which Spark writes the rows.
        build: seconds of building the model and of the first step.
    """

    rows: int
    epochs: int
    passes: float
    batch_size: int
    steps: Mapping[int, Mapping[int, StepTime]]
    gradient_bytes: int
    model_bytes: int
    reader_rows: Mapping[int, float]
    reader_cpu_seconds: Mapping[float, float]
    overhead: float
    overlap: float
    crowding: float
    kept: bool
    inside: Link | None
    launch: Mapping[int, float]
    materialize: float
    build: float
    lying: Lying | None = None
    by_hosts: bool = False
    sharing: Mapping[float, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """What the ranks are to run on.

    Attributes:
        ranks_per_host: a host is full with so many; where there are fewer, one host holds them.
        cores_per_host: cores of each host that the ranks may use.
        between: the link between hosts.
    """

    ranks_per_host: int
    cores_per_host: int
    between: Link


@dataclass(frozen=True)
class Prediction:
    """What a training takes on so many ranks.

    Attributes:
        ranks: how many.
        hosts: on how many hosts.
        every: steps from one exchange to the next: 1 for allreduce, more for LocalSGD.
        compute: seconds of a step's computing, on cores that nobody else wants.
        cores: what it takes longer because ranks share cores.
        waiting: for the slowest rank, whose step is longer by chance.
        latency: of the exchange that is not hidden: messages, however small, and their overhead.
        transfer: of the exchange that is not hidden: bytes.
        reading: what steps wait for the reader, the mean of all passes over the rows.
        samples_per_second: of all ranks.
        efficiency: of the rate of one rank, times their number.
        epoch_seconds: of the steps of an epoch.
        training_seconds: of those of all epochs.
        total_seconds: of the call: materializing, launching, building and all epochs.
        rank_hours: that ranks are held: all but the materializing.
    """

    ranks: int
    hosts: int
    every: int
    compute: float
    cores: float
    waiting: float
    latency: float
    transfer: float
    reading: float
    samples_per_second: float
    efficiency: float
    epoch_seconds: float
    training_seconds: float
    total_seconds: float
    rank_hours: float

    @property
    def step_seconds(self) -> float:
        """The seconds of a step."""
        parts = self.compute, self.cores, self.waiting, self.latency, self.transfer, self.reading
        return sum(parts)

    @property
    def limit(self) -> str:
        """What takes the most of a step besides computing; ``"compute"`` below a tenth of it."""
        parts = {
            "cores": self.cores,
            "slow ranks": self.waiting,
            "latency": self.latency,
            "bandwidth": self.transfer,
            "reader": self.reading,
        }
        name = max(parts, key=lambda part: parts[part])
        return name if parts[name] > 0.1 * self.step_seconds else "compute"


def predict(work: Workload, cluster: Cluster, ranks: int, every: int = 1) -> Prediction:
    """Return what a training takes on so many ranks.

    Args:
        work: what was measured.
        cluster: what the ranks are to run on.
        ranks: how many.
        every: steps between exchanges; above 1, the models' means are exchanged, and at the end of
            an epoch, too.
    """
    parts = _parts(work, cluster, ranks, every)
    step = sum(parts.values())
    alone = sum(_parts(work, cluster, 1, 1).values())
    rate = ranks * work.batch_size / step
    epoch = epoch_steps(work, ranks) * step
    here = min(ranks, cluster.ranks_per_host)
    held = between_measured(work.launch, here) + work.build + work.epochs * epoch
    return Prediction(
        ranks=ranks,
        hosts=math.ceil(ranks / cluster.ranks_per_host),
        every=every,
        **parts,
        samples_per_second=rate,
        efficiency=alone / step,
        epoch_seconds=epoch,
        training_seconds=work.epochs * epoch,
        total_seconds=work.materialize + held,
        rank_hours=ranks * held / 3600,
    )


def epoch_steps(work: Workload, ranks: int) -> int:
    """Return the steps of an epoch."""
    return math.ceil(work.rows / (ranks * work.batch_size))


def _parts(work: Workload, cluster: Cluster, ranks: int, every: int) -> dict[str, float]:
    """Return what a step consists of."""
    here = min(ranks, cluster.ranks_per_host)
    per_core = here / cluster.cores_per_host
    # What was measured with crowded cores is slow already; it is not known how fast it else is.
    crowding = max(1.0, per_core / work.crowding)
    if work.sharing and per_core > 1:
        # Ranks that share a core wait for their turns on it, whatever a step consists of.
        own = replace(cluster, cores_per_host=here)
        in_memory = replace(work, reader_cpu_seconds={1.0: 0.0})
        parts = _parts_in_memory(in_memory, own, ranks, every, crowding=1.0)
        parts["cores"] += longer_by_sharing(work.sharing, per_core)
        # It was measured on rows in memory; all on a core read theirs there, too, and waiting for
        # others keeps it busy.
        at_first = per_core * _reading_cpu(work, ranks, per_core)
        slower_by = per_core
    else:
        parts = _parts_in_memory(work, cluster, ranks, every, crowding)
        slower_by, at_first = crowding, 0.0
    reads = slower_by * _rows_read(work, ranks) / between_measured(work.reader_rows, here)
    reading = waited_for_reader(
        reads,
        sum(parts.values()),
        _dealt(work, ranks),
        work.passes,
        kept=work.kept,
        cpu=at_first,
    )
    parts["cores"] += _read_part(work, ranks) * at_first
    return {**parts, "reading": reading}


def _parts_in_memory(
    work: Workload, cluster: Cluster, ranks: int, every: int, crowding: float
) -> dict[str, float]:
    """Return what a step consists of besides waiting for the reader."""
    here = min(ranks, cluster.ranks_per_host)
    free = step_time(work, 1)
    shared = step_time(work, here)
    reading = _read_part(work, ranks) * _reading_cpu(work, ranks)
    asked = here * (shared.cpu_seconds + reading)
    busy = max(shared.seconds, asked / cluster.cores_per_host)
    steps = epoch_steps(work, ranks)
    between_meetings = steps / math.ceil(steps / every)
    latency, transfer = _exchange(work, cluster, ranks, every, crowding)
    latency, transfer = latency / between_meetings, transfer / between_meetings
    hidden = hidden_seconds(work.overlap, latency + transfer, busy) if every == 1 else 0.0
    shown = latency + transfer - hidden
    left = shown / (latency + transfer) if shown else 0.0
    spread = shared.spread * busy / shared.seconds if shared.seconds else 0.0
    # Over several steps, what is longer by chance is partly made up for.
    waiting = waiting_seconds(spread, ranks) / math.sqrt(between_meetings)
    return {
        "compute": min(free.seconds, busy),
        "cores": max(0.0, busy - free.seconds),
        "waiting": waiting,
        "latency": left * latency,
        "transfer": left * transfer,
    }


def _reading_cpu(work: Workload, ranks: int, per_core: float = 1.0) -> float:
    """Return the processor seconds of reading the rows of a rank's step, if it has kept none."""
    return _rows_read(work, ranks) * between_measured(work.reader_cpu_seconds, per_core)


def _rows_read(work: Workload, ranks: int) -> float:
    """Return the rows that a rank reads for a step, if it has kept none."""
    for_each = work.lying.rows_read(ranks, work.batch_size) if work.lying else 1.0
    return work.batch_size * for_each


def _dealt(work: Workload, ranks: int) -> int:
    """Return in how many parts the rows are dealt out to so many ranks."""
    return min(ranks, work.lying.lanes(ranks * work.batch_size)) if work.lying else ranks


def _read_part(work: Workload, ranks: int) -> float:
    """Return which part of its rows a rank reads, the mean of all passes."""
    return read_part(_dealt(work, ranks), work.passes) if work.kept else 1.0


def _exchange(
    work: Workload, cluster: Cluster, ranks: int, every: int, crowding: float
) -> tuple[float, float]:
    """Return the seconds that an exchange takes for latency and for bytes."""
    if ranks < 2:
        return 0.0, 0.0
    # Where it was not measured, it is taken for one of those between hosts, whose cables are no
    # slower for crowded cores.
    inside = work.inside and slowed(work.inside, crowding)
    inside = inside or Link(cluster.between.latency * crowding, cluster.between.bandwidth)
    link = inside if ranks <= cluster.ranks_per_host else slower(cluster.between, inside)
    size = work.gradient_bytes if every == 1 else work.model_bytes
    apart = tree_seconds(ranks, link) + work.overhead * crowding
    hosts = math.ceil(ranks / cluster.ranks_per_host)
    if not work.by_hosts or hosts in (1, ranks):
        fixed = ring_seconds(ranks, 0, link)
        return fixed + apart, ring_seconds(ranks, size, link) - fixed
    here = cluster.ranks_per_host
    fixed = ring_seconds(hosts, 0, cluster.between)
    crossing = ring_seconds(hosts, size, cluster.between) - ring_seconds(hosts, 0, cluster.between)
    within = 0.0
    if work.inside is not None:
        within = ring_seconds(here, size, inside) - ring_seconds(here, 0, inside)
        # Else it is a part of what was measured besides.
        fixed += ring_seconds(here, 0, inside)
    # Between two hosts, parts of the sum cross the cable while others are added up within them.
    return fixed + apart, max(crossing, within) if hosts == 2 else crossing + within


def step_time(work: Workload, here: int, batch_size: int | None = None) -> StepTime:
    """Return what a step takes where so many ranks of a host compute at once.

    Args:
        work: what was measured.
        here: ranks of a host. Above the most that were measured, as for these.
        batch_size: rows of a rank in a step; between measured sizes, on the line between them.
    """
    size = work.batch_size if batch_size is None else batch_size
    measured = {number: _at(sizes, size) for number, sizes in _by_ranks(work.steps).items()}
    return _at(measured, here, extend=False)


def between_measured(values: Mapping[Key, float], at: float) -> float:
    """Return the value at a number, on the lines between the known ones, constant beyond."""
    known = sorted(values)
    return float(np.interp(at, known, [values[one] for one in known]))


def _by_ranks(steps: Mapping[int, Mapping[int, StepTime]]) -> dict[int, dict[int, StepTime]]:
    found: dict[int, dict[int, StepTime]] = {}
    for size, by_ranks in steps.items():
        for number, time in by_ranks.items():
            found.setdefault(number, {})[size] = time
    return found


def _at(known: Mapping[int, StepTime], at: float, *, extend: bool = True) -> StepTime:
    """Return the step at a number, on the line between its neighbours that are known."""
    numbers = sorted(known)
    if len(numbers) == 1 or (not extend and not numbers[0] <= at <= numbers[-1]):
        return known[min(numbers, key=lambda one: abs(one - at))]
    upper = min(max(int(np.searchsorted(numbers, at)), 1), len(numbers) - 1)
    low, high = numbers[upper - 1], numbers[upper]
    part = (at - low) / (high - low)
    first, second = known[low], known[high]

    def mixed(a: float, b: float) -> float:
        # Beyond what is known, a line may fall below what can be: never below a half of the least.
        return max(a + part * (b - a), min(a, b) / 2)

    return StepTime(
        mixed(first.seconds, second.seconds),
        mixed(first.cpu_seconds, second.cpu_seconds),
        mixed(first.spread, second.spread),
    )
