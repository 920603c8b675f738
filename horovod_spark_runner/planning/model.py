"""Predict the step time of N ranks from measurements on a few. Pure.

A step computes, waits for the slowest rank, exchanges gradients, and may wait for its reader. Each
rank has a core or a GPU of its own. The exchange is a ring over all ranks, as fast as its slowest
link, or, where Open MPI first sums within each host, a ring over the hosts.
`tests/unit/test_plan_simulation.py` compares the formulas with a message-by-message simulation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from ..errors import InvalidInputError, brief
from ..formatting import number

# The exchange can overlap with the backward pass, at most this part of a step's computation.
BACKWARD = 2 / 3


@dataclass(frozen=True)
class StepTime:
    """Duration of a step on one rank, without its exchange.

    Attributes:
        seconds: mean wall-clock time.
        cpu_seconds: processor time of all threads.
        spread: standard deviation of the wall-clock time.
    """

    seconds: float
    cpu_seconds: float
    spread: float


@dataclass(frozen=True)
class Workload:
    """A measured training.

    Attributes:
        rows: rows of an epoch.
        epochs: number of epochs.
        passes: passes over the dataset in all epochs; differs from ``epochs`` with
            ``steps_per_epoch``.
        batch_size: rows of a rank in a step.
        steps: step time by the number of ranks that computed on a host at once.
        gradient_bytes: bytes that a step exchanges.
        reader_rows: rows per second that a rank reads from storage, by ranks on a host.
        reader_cpu_seconds: processor time of reading a row from storage.
        overhead: seconds of an exchange besides its messages: packing, and Horovod's cycle time.
        overlap: part of an exchange that overlaps with the backward pass.
        cached: whether the rows fit ``window_bytes``, so that a rank reads each only once.
        inside: link between ranks of a host; ``None`` if only one rank was measured.
        by_hosts: whether the ranks of a host sum among themselves before the hosts do, as Open
            MPI does by default; otherwise one ring goes over all ranks, as in NCCL.
        launch: seconds of launching, by ranks on a host.
        materialize: seconds in which Spark writes the rows.
        build: seconds of building the model and of the first step.
    """

    rows: int
    epochs: int
    passes: float
    batch_size: int
    steps: Mapping[int, StepTime]
    gradient_bytes: int
    reader_rows: Mapping[int, float]
    reader_cpu_seconds: float
    overhead: float
    overlap: float
    cached: bool
    inside: Link | None
    launch: Mapping[int, float]
    materialize: float
    build: float
    by_hosts: bool = False


@dataclass(frozen=True)
class Cluster:
    """Hosts to predict for.

    Attributes:
        ranks_per_host: ranks of a full host; fewer ranks are all on one host.
        cores_per_host: cores that the ranks of a host may use, one per rank or more.
        between: link between hosts.
    """

    ranks_per_host: int
    cores_per_host: int
    between: Link


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a training on so many ranks.

    Attributes:
        ranks: number of ranks.
        hosts: number of hosts.
        compute: seconds of a step's computation.
        waiting: seconds of waiting for the slowest rank.
        latency: seconds of message latency and overhead that do not overlap with computation.
        transfer: seconds of transferring gradients that do not overlap with computation.
        reading: seconds of waiting for the reader, averaged over all passes.
        samples_per_second: of all ranks together.
        efficiency: throughput relative to one rank's, times the number of ranks.
        epoch_seconds: steps of an epoch.
        training_seconds: steps of all epochs.
        total_seconds: the whole call: materializing, launching, building and all epochs.
        rank_hours: ranks times the hours they are held, that is without materializing.
    """

    ranks: int
    hosts: int
    compute: float
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
        """Seconds of a step."""
        return self.compute + self.waiting + self.latency + self.transfer + self.reading

    @property
    def limit(self) -> str:
        """Largest part of a step besides computation; ``"compute"`` if below a tenth."""
        parts = {
            "slow ranks": self.waiting,
            "latency": self.latency,
            "bandwidth": self.transfer,
            "reader": self.reading,
        }
        name = max(parts, key=lambda part: parts[part])
        return name if parts[name] > 0.1 * self.step_seconds else "compute"


def predict(work: Workload, cluster: Cluster, ranks: int) -> Prediction:
    """Predict a training on so many ranks."""
    parts = _step_parts(work, cluster, ranks)
    step = sum(parts.values())
    epoch = _epoch_steps(work, ranks) * step
    held = _interpolate(work.launch, min(ranks, cluster.ranks_per_host)) + work.build
    held += work.epochs * epoch
    return Prediction(
        ranks=ranks,
        hosts=math.ceil(ranks / cluster.ranks_per_host),
        **parts,
        samples_per_second=ranks * work.batch_size / step,
        efficiency=sum(_step_parts(work, cluster, 1).values()) / step,
        epoch_seconds=epoch,
        training_seconds=work.epochs * epoch,
        total_seconds=work.materialize + held,
        rank_hours=ranks * held / 3600,
    )


def _epoch_steps(work: Workload, ranks: int) -> int:
    """Count the steps of an epoch."""
    return math.ceil(work.rows / (ranks * work.batch_size))


def _step_parts(work: Workload, cluster: Cluster, ranks: int) -> dict[str, float]:
    here = min(ranks, cluster.ranks_per_host)
    step = _step_time(work, here)
    # Reading takes processor time on the cores that compute.
    reading_cpu = work.batch_size * work.reader_cpu_seconds * _read_fraction(work, ranks)
    compute = max(step.seconds, here * (step.cpu_seconds + reading_cpu) / cluster.cores_per_host)
    latency, transfer = _exchange_seconds(work, cluster, ranks)
    exchange = latency + transfer
    shown = 1 - min(work.overlap, BACKWARD * compute / exchange) if exchange else 1.0
    parts = {
        "compute": compute,
        "waiting": step.spread * compute / (step.seconds or 1.0) * expected_maximum(ranks),
        "latency": shown * latency,
        "transfer": shown * transfer,
    }
    read = work.batch_size / _interpolate(work.reader_rows, here)
    return {**parts, "reading": _reader_wait(work, ranks, read, sum(parts.values()))}


def _step_time(work: Workload, here: int) -> StepTime:
    """Return the step time with so many ranks on a host; beyond the most measured, as for these."""
    return StepTime(
        *(
            _interpolate({count: getattr(one, name) for count, one in work.steps.items()}, here)
            for name in ("seconds", "cpu_seconds", "spread")
        )
    )


def _interpolate(values: Mapping[int, float], at: float) -> float:
    """Interpolate linearly between known values; constant beyond them."""
    known = sorted(values)
    return float(np.interp(at, known, [values[one] for one in known]))


@cache
def expected_maximum(count: int) -> float:
    """Return the expected largest of so many standard normal numbers (Blom's formula)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def _unread(ranks: int, number: int) -> float:
    """Part of a pass's rows that a caching rank has not read in earlier passes.

    Each pass deals the rows anew, so a rank has read an N-th of them by chance in each.
    """
    return float((1 - 1 / ranks) ** number)


def _read_fraction(work: Workload, ranks: int) -> float:
    """Part of its rows that a rank reads from storage, averaged over all passes."""
    passes = max(1.0, work.passes)
    return ranks * (1 - _unread(ranks, 1) ** passes) / passes if work.cached else 1.0


def _reader_wait(work: Workload, ranks: int, read: float, step: float) -> float:
    """Seconds that a step of ``step`` seconds waits for reading of ``read``, over all passes."""
    if not work.cached:
        return max(0.0, read - step)
    passes = max(1.0, work.passes)
    waits = (
        min(1.0, passes - number) * max(0.0, read * _unread(ranks, number) - step)
        for number in range(math.ceil(passes))
    )
    return sum(waits) / passes


def _exchange_seconds(work: Workload, cluster: Cluster, ranks: int) -> tuple[float, float]:
    """Return the seconds of an exchange for latency and for bytes."""
    if ranks < 2:
        return 0.0, 0.0
    # An unmeasured link within a host is assumed to be as slow as those between hosts.
    inside = work.inside or cluster.between
    link = inside if ranks <= cluster.ranks_per_host else _slower_link(cluster.between, inside)
    extra = tree_seconds(ranks, link) + work.overhead
    hosts = math.ceil(ranks / cluster.ranks_per_host)
    if not work.by_hosts or hosts in (1, ranks):
        latency = ring_seconds(ranks, 0, link)
        return latency + extra, ring_seconds(ranks, work.gradient_bytes, link) - latency
    latency = ring_seconds(hosts, 0, cluster.between)
    crossing = ring_seconds(hosts, work.gradient_bytes, cluster.between) - latency
    within = 0.0
    if work.inside is not None:
        setup = ring_seconds(cluster.ranks_per_host, 0, inside)
        within = ring_seconds(cluster.ranks_per_host, work.gradient_bytes, inside) - setup
        latency += setup
    # Between two hosts, parts of the sum cross the cable while others are summed within them.
    return latency + extra, max(crossing, within) if hosts == 2 else crossing + within


# Part of a link's speed that Ethernet, IP and TCP leave for data.
_PAYLOAD = 0.94
# Seconds of a small message between two hosts over TCP, assumed where only a speed is given.
ETHERNET_LATENCY = 50e-6
# Largest part of a sum that can be latency, so that some is left for the bytes.
_OF_A_SUM = 0.9
_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*(mbit|gbit)(?:/s)?", re.IGNORECASE)


@dataclass(frozen=True)
class Link:
    """Link between two ranks: a message of n bytes takes ``latency + n / bandwidth`` seconds.

    Attributes:
        latency: seconds of an empty message (alpha).
        bandwidth: bytes per second (the inverse of beta).

    Raises:
        InvalidInputError: a number cannot be right.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        for name, least in (("latency", 0.0), ("bandwidth", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidInputError(f"{name} of a Link must be a number, got {brief(value)}")
            if not least <= value < math.inf:
                raise InvalidInputError(
                    f"{name} of a Link must be finite and at least {least:g}, got {brief(value)}"
                )


def format_link(link: Link) -> str:
    """Format a link."""
    return f"{link.latency * 1e6:.3g} µs, {number(link.bandwidth * 8 / 1e9, 3)} Gbit/s"


def slow_link(link: Link, factor: float) -> Link:
    """Return a link that is slower by a factor, in latency and in bandwidth."""
    return Link(link.latency * factor, link.bandwidth / factor)


def _slower_link(link: Link, other: Link) -> Link:
    """Return a link with the higher latency and the lower bandwidth of two."""
    return Link(max(link.latency, other.latency), min(link.bandwidth, other.bandwidth))


def parse_link(given: object) -> Link:
    """Return the link for a `Link` or a named speed, such as ``"10gbit"``.

    Of a named speed, 94 % are for data, and the latency is 50 microseconds.

    Raises:
        InvalidInputError: it is neither.
    """
    if isinstance(given, Link):
        return given
    found = _SPEED.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None or not float(found[1]):
        raise InvalidInputError(
            'a network is a speed such as "100mbit" or "10gbit", or a Link(latency=…, '
            f"bandwidth=…) in seconds and bytes per second; got {brief(given)}"
        )
    bits = float(found[1]) * (1e9 if found[2].lower() == "gbit" else 1e6)
    return Link(ETHERNET_LATENCY, bits / 8 * _PAYLOAD)


def ring_seconds(ranks: int, size: float, link: Link) -> float:
    """Return the seconds of a sum over all ranks by a ring.

    Each rank sends ``2 · (ranks - 1)`` messages of ``size / ranks`` bytes, one after the other.

    Args:
        ranks: how many there are.
        size: bytes that each rank has.
        link: the slowest link of the ring.
    """
    if ranks < 2:
        return 0.0
    return 2 * (ranks - 1) * (link.latency + size / ranks / link.bandwidth)


def tree_seconds(ranks: int, link: Link) -> float:
    """Return the seconds in which all ranks agree on a few bytes: up a tree of them and down."""
    return 2 * math.ceil(math.log2(ranks)) * link.latency if ranks > 1 else 0.0


def doubling_rounds(ranks: int) -> int:
    """Return the messages, one after the other, in which MPI adds up one number of each rank.

    Open MPI sums what is too small for a ring by recursive doubling. Where the ranks are no power
    of two, those beyond one hand their number over first, and get the sum last.
    """
    whole = ranks.bit_length() - 1
    return whole if ranks == 1 << whole else whole + 2


def fit_link(seconds: Mapping[int, float], ranks: int, latency: float) -> Link:
    """Return the link of that latency on which `ring_seconds` comes nearest to what was measured.

    Small and large messages count alike: errors are weighed by what the message has taken.

    Args:
        seconds: what sums took, by bytes; of such as go around a ring.
        ranks: how many took part, 2 at least.
        latency: seconds of an empty message. Nine tenths of the shortest sum at most count for it:
            where ranks share cores, a single small message may take longer than one of many.
    """
    size, took = np.array(sorted(seconds.items()), np.float64).T
    rounds = 2 * (ranks - 1)
    latency = min(latency, _OF_A_SUM * float(took.min()) / rounds)
    column = rounds * size / ranks / took
    per_byte = float(column @ (1 - rounds * latency / took) / (column @ column))
    return Link(latency, 1.0 / per_byte)
