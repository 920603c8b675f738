"""The planner's formula against steps that are played through, message by message."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest

from horovod_spark_runner.planning.model import (
    Cluster,
    Link,
    StepTime,
    Workload,
    expected_maximum,
    predict,
    ring_seconds,
)

INSIDE = Link(2e-6, 8e9)
NETWORK = Link(50e-6, 1.175e9)


def ring(ready: np.ndarray, size: float, latencies: np.ndarray, rates: np.ndarray) -> float:
    """Return when a sum around a ring has ended, by its messages.

    In each of ``2 · (ranks - 1)`` rounds, a rank sends a part to the next one once it has that
    part, and has sent the one before.

    Args:
        ready: when each rank has computed.
        size: bytes of each rank.
        latencies: of the link from each rank to the next.
        rates: bytes per second of that link.
    """
    ranks = len(ready)
    part = size / ranks
    free = ready.copy()  # when a rank's way to the next has room
    holds = ready.copy()  # when a rank has what it sends next, and what that is added to
    for _ in range(2 * (ranks - 1)):
        begun = np.maximum(free, holds)
        arrived = begun + latencies + part / rates
        free = arrived
        holds = np.maximum(ready, np.roll(arrived, 1))
    return float(np.maximum(holds, free).max())


def ring_by_events(ready: np.ndarray, size: float, latency: float, rate: float) -> float:
    """Return the same from a queue of events, one for each message."""
    ranks = len(ready)
    rounds = 2 * (ranks - 1)
    took = latency + size / ranks / rate
    free, received = ready.copy(), [0] * ranks
    came = [[float(at)] + [np.inf] * rounds for at in ready]
    events = [(float(at), rank, 0) for rank, at in enumerate(ready)]
    heapq.heapify(events)
    ended = 0.0
    while events:
        now, rank, number = heapq.heappop(events)
        if number == rounds:
            ended = max(ended, now)
            continue
        begun = max(now, free[rank], came[rank][number])
        free[rank] = begun + took
        following = (rank + 1) % ranks
        came[following][number + 1] = max(begun + took, ready[following])
        received[following] += 1
        heapq.heappush(events, (came[following][number + 1], following, number + 1))
    assert received == [rounds] * ranks
    return max(ended, float(free.max()))


def workload(seconds: float = 0.1, spread: float = 0.0, size: int = 100_000_000) -> Workload:
    return Workload(
        rows=10**9,
        epochs=1,
        passes=1.0,
        batch_size=32,
        steps={1: StepTime(seconds, seconds, spread)},
        gradient_bytes=size,
        reader_rows={1: 1e12},
        reader_cpu_seconds=0.0,
        overhead=0.0,
        overlap=0.0,
        cached=False,
        inside=INSIDE,
        launch={1: 4.0},
        materialize=10.0,
        build=5.0,
    )


def played(work: Workload, cluster: Cluster, ranks: int, steps: int, seed: int) -> float:
    """Return the mean seconds of steps, with ranks that take longer and shorter by chance."""
    random = np.random.default_rng(seed)
    last_of_host = (np.arange(ranks) % cluster.ranks_per_host == cluster.ranks_per_host - 1) | (
        np.arange(ranks) == ranks - 1
    )
    crosses = last_of_host & (ranks > cluster.ranks_per_host)
    latencies = np.where(crosses, cluster.between.latency, INSIDE.latency)
    rates = np.where(crosses, cluster.between.bandwidth, INSIDE.bandwidth)
    time = work.steps[1]
    took = []
    for _ in range(steps):
        ready = random.normal(time.seconds, time.spread, ranks) if time.spread else np.full(
            ranks, time.seconds
        )  # fmt: skip
        took.append(ring(ready, work.gradient_bytes, latencies, rates))
    return float(np.mean(took))


def test_both_simulations_are_the_same() -> None:
    random = np.random.default_rng(0)
    for ranks in (2, 3, 8, 17):
        ready = random.uniform(0, 0.01, ranks)
        by_rounds = ring(ready, 1e6, np.full(ranks, 1e-5), np.full(ranks, 1e9))
        assert by_rounds == pytest.approx(ring_by_events(ready, 1e6, 1e-5, 1e9), rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 16, 100, 1024, 4096])
def test_the_formula_of_the_ring_is_exact(ranks: int) -> None:
    latencies, rates = np.full(ranks, NETWORK.latency), np.full(ranks, NETWORK.bandwidth)
    found = ring(np.zeros(ranks), 1e8, latencies, rates)
    assert found == pytest.approx(ring_seconds(ranks, 1e8, NETWORK), rel=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 4, 16, 64, 512, 4096])
@pytest.mark.parametrize("size", [1_000_000, 100_000_000])
def test_predicted_steps_are_those_that_are_played_through(ranks: int, size: int) -> None:
    """Hosts of four ranks, whose steps take longer or shorter by 5 %."""
    work = workload(spread=0.005, size=size)
    cluster = Cluster(ranks_per_host=4, cores_per_host=4, between=NETWORK)
    found = played(work, cluster, ranks, 12 if ranks > 64 else 200, seed=ranks)
    predicted = predict(work, cluster, ranks)
    # Agreeing on what is summed is no part of the ring.
    agreeing = 2 * np.ceil(np.log2(ranks)) * (NETWORK if ranks > 4 else INSIDE).latency
    assert predicted.step_seconds - (agreeing if ranks > 1 else 0.0) == pytest.approx(
        found, rel=0.02
    )


def test_the_slowest_of_many_is_as_slow_as_by_chance() -> None:
    random = np.random.default_rng(1)
    for count in (2, 16, 256, 4096):
        largest = random.normal(size=(2000, count)).max(axis=1).mean()
        assert expected_maximum(count) == pytest.approx(largest, abs=0.05)
    assert expected_maximum(1) == 0.0


# Horovod's paper (Sergeev and Del Balso, 2018): 128 servers of four P100 on 25 Gbit/s RoCE. Images
# per second of one P100 and batches of 64 are TensorFlow's published benchmarks (2017); that of
# ResNet-101 lies between ResNet-50 and ResNet-152. Weights in millions: the models' papers.
PUBLISHED = {
    "Inception V3": (142.0, 23.9, 0.90),
    "ResNet-101": (129.0, 44.5, 0.90),
    "VGG-16": (154.0, 138.4, 0.68),
}


def test_horovod_s_published_efficiencies_come_in_their_order() -> None:
    cluster = Cluster(4, 64, Link(5e-6, 25e9 / 8 * 0.94))
    least, most = {}, {}
    for name, (images, millions, _) in PUBLISHED.items():
        work = replace(
            workload(64 / images, 0.01 * 64 / images, int(millions * 4e6)),
            batch_size=64,
            steps={1: StepTime(64 / images, 64 / images, 0.01 * 64 / images)},
        )
        # Whatever part of the backward pass the exchange hides behind.
        least[name] = predict(work, cluster, 512).efficiency
        most[name] = predict(replace(work, overlap=1.0), cluster, 512).efficiency
    for name, (_, _, published) in PUBLISHED.items():
        assert least[name] - 0.01 <= published <= most[name], name
    for found in (least, most):
        assert found["VGG-16"] < found["ResNet-101"] <= found["Inception V3"] + 0.02
        assert found["ResNet-101"] - found["VGG-16"] > 0.1
