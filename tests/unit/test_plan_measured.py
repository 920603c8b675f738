"""What measured figures become: on the ranks they were measured on, what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_spark_runner import InvalidInputError, Link
from horovod_spark_runner.frameworks import KERAS, TORCH
from horovod_spark_runner.planning.advice import advise
from horovod_spark_runner.planning.call import plan_of
from horovod_spark_runner.planning.figures import RankFigures, StepFigures
from horovod_spark_runner.planning.links import doubling_rounds, link_of, ring_seconds
from horovod_spark_runner.planning.measure import Launched, Measurement, combined
from horovod_spark_runner.planning.model import Cluster, StepTime, predict
from tests.unit.test_plan import FAST, measurement, workload

GRADIENTS = 10_000_000
BATCH = 32


def sums_on(link: Link, ranks: int, horovod: float = 0.0) -> dict[int, float]:
    """Return what sums take on a network: rings, but for what is small."""

    def seconds(size: int) -> float:
        rounds = doubling_rounds(ranks)
        small = rounds * (link.latency + size / link.bandwidth)
        return small if size <= 64 << 10 else ring_seconds(ranks, size, link)

    return {n: horovod + seconds(n) for n in (4 << 10, 64 << 10, 1 << 20, 8 << 20, GRADIENTS)}


def figures(
    step: float,
    exchange: float = 0.0,
    sums: Mapping[int, float] | None = None,
    latency: float = 0.0,
    *,
    reader_rows: float = 1e6,
    cores: int = 64,
    busy: float = 0.1,
) -> RankFigures:
    return RankFigures(
        build=1.0,
        first_step=0.5,
        steps={BATCH: StepFigures(step, 0.0, busy, exchange)},
        sums=sums or {},
        latency=latency,
        gradient_bytes=GRADIENTS,
        model_bytes=GRADIENTS,
        reader_rows=reader_rows,
        reader_cpu_seconds=0.0,
        cores=cores,
    )


def told(
    link: Link,
    ranks: int,
    *,
    shared: float = 0.1,
    exchange: float | None = None,
    engine: str = KERAS,
    hosts: int = 1,
    **given: Any,
) -> Measurement:
    """Return what a rank of 0.1 s a step tells, and ranks on a known link that take ``shared``."""
    sums = sums_on(link, ranks)
    shown = sums[GRADIENTS] if exchange is None else exchange
    rank = figures(shared + shown, shown, sums, doubling_rounds(ranks) * link.latency, **given)
    spec: Any = SimpleNamespace(engine=engine, fit=SimpleNamespace(batch_size=BATCH, epochs=10))
    names = tuple(f"host-{number % hosts}" for number in range(ranks))
    cores = given.get("cores", 64)
    return combined(
        spec,
        Launched((figures(0.1, cores=cores),), ("host-0",), 3.0),
        Launched((rank,) * ranks, names, 3.0),
        rows=10_000_000,
        known=100_000,
        kept=False,
        materialize=1.0,
        began=0.0,
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_the_latency_of_a_link_is_found(ranks: int) -> None:
    link = Link(50e-6, 1e9)
    measured = told(link, ranks, hosts=ranks)
    assert measured.between is not None
    assert measured.between.latency == pytest.approx(50e-6, rel=1e-6)
    assert measured.between.bandwidth == pytest.approx(1e9, rel=0.1)
    # What 1,024 ranks exchange hangs on it.
    work, far = measured.workload, Cluster(1, 64, measured.between)
    found = predict(work, far, 1024)
    true = predict(replace(work, overhead=0.0), Cluster(1, 64, link), 1024)
    assert found.latency + found.transfer == pytest.approx(true.latency + true.transfer, rel=0.05)


@pytest.mark.parametrize("hosts", [1, 4])
@pytest.mark.parametrize(
    ("engine", "cores", "shared", "exchange"),
    [
        (KERAS, 64, 0.1, None),
        (TORCH, 64, 0.1, None),
        (KERAS, 64, 0.25, None),  # ranks slow each other down
        (TORCH, 64, 0.25, None),
        (KERAS, 2, 0.4, 0.03),  # on few cores
        (TORCH, 2, 0.4, 0.03),
        (KERAS, 64, 0.25, 0.04),  # longer within a step than by itself
        (TORCH, 64, 0.25, 0.04),
        (TORCH, 64, 0.25, 0.004),  # some of it hides
        (TORCH, 64, 0.1, 0.0),  # all of it does
    ],
)
def test_measured_ranks_are_predicted_as_they_were(
    hosts: int, engine: str, cores: int, shared: float, exchange: float | None
) -> None:
    ranks = 8
    link = Link(20e-6, 1e9)
    rows = BATCH / (0.8 * shared)
    measured = told(
        link, ranks, shared=shared, exchange=exchange, engine=engine, hosts=hosts, cores=cores,
        reader_rows=rows,
    )  # fmt: skip
    cluster = Cluster(measured.ranks_per_host, measured.cores, measured.between or FAST)
    shown = sums_on(link, ranks)[GRADIENTS] if exchange is None else exchange
    found = predict(measured.workload, cluster, ranks)
    assert found.step_seconds == pytest.approx(shared + shown, rel=0.03)


def test_more_ranks_on_crowded_cores_are_slower() -> None:
    """The exchange was measured with four ranks on each core."""
    link = Link(20e-6, 1e9)
    rows = BATCH / 0.4
    work = told(link, 8, shared=0.4, exchange=0.03, cores=2, reader_rows=rows).workload
    assert work.crowding == 4.0
    alone = predict(work, Cluster(16, 2, FAST), 1)
    assert alone.step_seconds == pytest.approx(0.1), "as one rank was measured, which had a core"
    eight = predict(work, Cluster(16, 2, FAST), 8)
    sixteen = predict(work, Cluster(16, 2, FAST), 16)
    assert sixteen.latency + sixteen.transfer > 1.9 * (eight.latency + eight.transfer)


def test_what_hides_on_a_fast_link_is_no_bound_on_a_slow_one() -> None:
    """A small exchange hides as a whole: of one ten times as long, two thirds of a step can."""
    work = told(Link(2e-6, 10e9), 2, exchange=0.0, engine=TORCH).workload
    assert work.overlap == pytest.approx(1.0)
    slow = predict(work, Cluster(1, 64, Link(50e-6, 0.2e9)), 2)
    assert slow.latency + slow.transfer == pytest.approx(0.0)
    slower = predict(work, Cluster(1, 64, link_of("100mbit")), 2)
    exchange = ring_seconds(2, GRADIENTS, link_of("100mbit"))
    assert slower.latency + slower.transfer == pytest.approx(exchange - 0.1 * 2 / 3, rel=0.01)


def test_rounds_end_with_the_epoch() -> None:
    """64 ranks of 8 steps an epoch meet every 8 steps, however many are between meetings."""
    work = workload(
        rows=60_000, batch_size=32, steps={32: workload().steps[100]}, gradient_bytes=40_000_000,
        model_bytes=40_000_000,
    )  # fmt: skip
    cluster = Cluster(1, 4, link_of("100mbit"))
    found = advise("slow", work, cluster, [1, 256])
    assert found.every == 8, "steps of an epoch"
    assert found.local == predict(work, cluster, 256, 8)
    assert predict(work, cluster, 256, 512).step_seconds == found.local.step_seconds
    # Of 100 steps, rounds of 64 have two meetings.
    hundred = replace(work, rows=100 * 256 * 32)
    once = predict(hundred, cluster, 256, 100)
    twice = predict(hundred, cluster, 256, 64)
    assert twice.transfer == pytest.approx(2 * once.transfer)
    single = replace(work, rows=256 * 32)
    assert advise("slow", single, cluster, [1, 256]).local is None, "one step an epoch"


def test_rows_that_are_kept_are_read_once() -> None:
    cluster = Cluster(4, 64, FAST)
    read = workload(reader_rows={1: 100.0}, epochs=10)
    kept = replace(read, kept=True)
    alone, again = predict(read, cluster, 1), predict(kept, cluster, 1)
    first_epoch = alone.epoch_seconds
    others = first_epoch * (again.step_seconds - again.reading) / alone.step_seconds
    assert again.training_seconds == pytest.approx(first_epoch + 9 * others)
    assert alone.limit == "reader"
    # Ranks are dealt other rows in the next epochs, until they have had all.
    one, four = predict(kept, cluster, 1), predict(kept, cluster, 4)
    assert one.reading < four.reading < predict(read, cluster, 4).reading
    only = replace(kept, epochs=1)
    assert predict(only, cluster, 4) == predict(replace(only, kept=False), cluster, 4)


def test_what_pays_is_chosen_where_what_is_almost_as_good_does_not() -> None:
    """One process takes 240 s, 6 ranks 221, 8 ranks 211 and 12, the fastest, 201."""
    step = StepTime(1.0, 1.0, 0.0)
    work = workload(
        rows=24_000, epochs=1, steps={100: {1: step}}, gradient_bytes=1, model_bytes=1,
        overhead=0.0, reader_rows={1: 1e12}, build=0.0, launch={1: 1.0}, materialize=180.0,
        inside=Link(0.0, 1e15),
    )  # fmt: skip
    found = advise("x", work, Cluster(64, 64, Link(0.0, 1e15)), [1, 2, 4, 6, 8, 12])
    fastest = min(one.total_seconds for one in found.predictions)
    least = next(one for one in found.predictions if one.total_seconds <= 1.1 * fastest)
    assert least.total_seconds > 0.9 * found.alone >= fastest
    assert found.pays
    assert (least.ranks, found.best.ranks) == (6, 8)
    assert found.verdict.startswith(f"{found.best.ranks} ranks: ")


@pytest.mark.parametrize(("name", "value"), [("ranks_per_host", -4), ("cores_per_host", 0)])
def test_hosts_that_cannot_be_are_refused(name: str, value: int) -> None:
    given = {"ranks_per_host": None, "cores_per_host": None, name: value}
    with pytest.raises(InvalidInputError, match=f"{name} must be"):
        plan_of("x", measurement(workload()), ["1gbit"], [1, 2], **given)


def test_a_noise_scale_that_was_asked_for_is_told_of() -> None:
    asked = replace(measurement(workload()), noise_asked=True)
    hosts = {"ranks_per_host": None, "cores_per_host": None}
    assert "gradient noise scale: not found" in str(plan_of("x", asked, ["1gbit"], [2], **hosts))
    found = replace(asked, noise_scale=640.0)
    text = str(plan_of("x", found, ["1gbit"], [2], **hosts))
    assert "gradient noise scale: 640 rows; above about 6 ranks" in text
