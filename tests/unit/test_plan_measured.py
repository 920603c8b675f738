"""What measured figures become: on the ranks they were measured on, what was measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from horovod_spark_runner import Link, RunFailedError
from horovod_spark_runner.config.training import FitOptions
from horovod_spark_runner.frameworks import KERAS, TORCH
from horovod_spark_runner.planning import measure as measuring
from horovod_spark_runner.planning.measure import _extrapolate_writing
from horovod_spark_runner.planning.measurement import (
    MeasuredLaunch,
    Measurement,
    RankFigures,
    combine_launches,
)
from horovod_spark_runner.planning.model import (
    Cluster,
    StepTime,
    doubling_rounds,
    parse_link,
    predict,
    ring_seconds,
)
from horovod_spark_runner.planning.plan import _advise
from horovod_spark_runner.storage.filesystem import Location
from tests.unit.test_plan import FAST, workload

GRADIENTS = 10_000_000
BATCH = 32


class SpecOf(NamedTuple):
    """What of a `TrainingSpec` is looked at."""

    engine: str
    fit: FitOptions


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
    spread: float = 0.0,
) -> RankFigures:
    return RankFigures(
        build=1.0,
        first_step=0.5,
        step=StepTime(step, busy, spread),
        exchange=exchange,
        sums=sums or {},
        latency=latency,
        gradient_bytes=GRADIENTS,
        reader_rows=reader_rows,
        reader_cpu_seconds=0.0,
        cores=cores,
    )


def measure(
    link: Link,
    ranks: int,
    *,
    shared: float = 0.1,
    exchange: float | None = None,
    engine: str = KERAS,
    hosts: int = 1,
    horovod: float = 0.0,
    steps_per_epoch: int | None = None,
    launches: tuple[float, float] = (3.0, 3.0),
    by_hosts: bool = False,
    rows: int = 10_000_000,
    **given: Any,
) -> Measurement:
    """Return what a rank of 0.1 s a step tells, and ranks on a known link that take ``shared``."""
    sums = sums_on(link, ranks, horovod)
    shown = sums[GRADIENTS] if exchange is None else exchange
    rank = figures(shared + shown, shown, sums, doubling_rounds(ranks) * link.latency, **given)
    fit = FitOptions(batch_size=BATCH, epochs=10, steps_per_epoch=steps_per_epoch)
    spec: Any = SpecOf(engine, fit)
    names = tuple(f"host-{number % hosts}" for number in range(ranks))
    same = {name: given[name] for name in ("cores", "spread") if name in given}
    return combine_launches(
        spec,
        MeasuredLaunch((figures(0.1, **same),), ("host-0",), launches[0]),
        MeasuredLaunch((rank,) * ranks, names, launches[1]),
        rows=rows,
        measured_rows=100_000,
        cached=False,
        materialize=1.0,
        seconds=1.0,
        by_hosts=by_hosts,
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_the_latency_of_a_link_is_found(ranks: int) -> None:
    link = Link(50e-6, 1e9)
    measured = measure(link, ranks, hosts=ranks)
    assert measured.between is not None
    assert measured.between.latency == pytest.approx(50e-6, rel=1e-6)
    assert measured.between.bandwidth == pytest.approx(1e9, rel=0.1)
    # What 1,024 ranks exchange hangs on it.
    work, far = measured.workload, Cluster(1, 64, measured.between)
    found = predict(work, far, 1024)
    true = predict(replace(work, overhead=0.0), Cluster(1, 64, link), 1024)
    assert found.latency + found.transfer == pytest.approx(true.latency + true.transfer, rel=0.05)


@pytest.mark.parametrize("hosts", [1, 4, 8])
@pytest.mark.parametrize(
    ("engine", "cores", "shared", "exchange"),
    [
        (KERAS, 64, 0.1, None),
        (TORCH, 64, 0.1, None),
        (KERAS, 64, 0.25, None),  # ranks slow each other down
        (TORCH, 64, 0.25, None),
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
    measured = measure(
        link, ranks, shared=shared, exchange=exchange, engine=engine, hosts=hosts, cores=cores,
        reader_rows=rows,
    )  # fmt: skip
    cluster = Cluster(measured.ranks_per_host, measured.cores, measured.between or FAST)
    shown = sums_on(link, ranks)[GRADIENTS] if exchange is None else exchange
    found = predict(measured.workload, cluster, ranks)
    assert found.step_seconds == pytest.approx(shared + shown, rel=0.03)


def test_sums_within_hosts_are_a_part_of_what_was_measured() -> None:
    measured = measure(Link(500e-6, 1e9), 8, exchange=0.06, hosts=4, by_hosts=True)
    assert measured.between is not None
    cluster = Cluster(measured.ranks_per_host, measured.cores, measured.between)
    found = predict(measured.workload, cluster, 8)
    assert found.step_seconds == pytest.approx(0.16, rel=0.01)


@pytest.mark.parametrize("engine", [KERAS, TORCH])
def test_waiting_for_slower_ranks_counts_once(engine: str) -> None:
    """Ranks see it as a part of their exchange."""
    link, cluster = Link(20e-6, 1e9), Cluster(8, 64, FAST)
    work = measure(link, 8, shared=0.25, exchange=0.1, engine=engine, spread=0.02).workload
    found = predict(work, cluster, 8)
    assert found.waiting > 0.02
    assert found.step_seconds == pytest.approx(0.35, rel=0.01)


def test_what_hides_is_bounded_by_the_step_it_hid_in() -> None:
    """Two thirds of the 0.25 s that a step of several ranks computes, not of one rank's 0.1 s."""
    link = Link(20e-6, 1e9)
    found = measure(link, 8, shared=0.25, exchange=0.02, engine=TORCH, horovod=0.15).workload
    assert found.overhead == pytest.approx(0.15, rel=0.02)


def test_hosts_sum_among_their_ranks_before_the_cable() -> None:
    """Of two hosts with a rank each nothing is known of links within one."""
    cable = Link(50e-6, 12e6)
    work = measure(cable, 2, hosts=2).workload
    by_hosts = replace(work, by_hosts=True)
    for ranks_per_host in (2, 4, 8):  # of which one crosses the cable, both ways at once
        one = predict(by_hosts, Cluster(ranks_per_host, 64, cable), 2 * ranks_per_host)
        assert one.transfer == pytest.approx(GRADIENTS / 12e6)
    # Where the ranks of a host cannot add up as fast, these set the pace.
    slow = replace(by_hosts, inside=Link(1e-6, 6e6))
    assert predict(slow, Cluster(4, 64, cable), 8).transfer == pytest.approx(1.5 * GRADIENTS / 6e6)
    # Between more than two, one comes after the other.
    crossing, within = 4 / 3 * GRADIENTS / 12e6, 1.5 * GRADIENTS / 6e6
    assert predict(slow, Cluster(4, 64, cable), 12).transfer == pytest.approx(crossing + within)
    found = predict(work, Cluster(4, 64, cable), 8)
    assert found.transfer == pytest.approx(2 * 7 / 8 * GRADIENTS / 12e6)


def test_what_hides_on_a_fast_link_is_no_bound_on_a_slow_one() -> None:
    """A small exchange hides as a whole: of one ten times as long, two thirds of a step can."""
    work = measure(Link(2e-6, 10e9), 2, exchange=0.0, engine=TORCH).workload
    assert work.overlap == pytest.approx(1.0)
    slow = predict(work, Cluster(1, 64, Link(50e-6, 0.2e9)), 2)
    assert slow.latency + slow.transfer == pytest.approx(0.0)
    slower = predict(work, Cluster(1, 64, parse_link("100mbit")), 2)
    exchange = ring_seconds(2, GRADIENTS, parse_link("100mbit"))
    assert slower.latency + slower.transfer == pytest.approx(exchange - 0.1 * 2 / 3, rel=0.01)


def test_writing_all_rows_is_told_by_what_grows_with_them() -> None:
    """Ten seconds of looking, 15 once in a session, 2 of any job, 20 µs a row."""
    per_row = 20e-6
    found = _extrapolate_writing(
        100_000_000,
        10.0,
        15 + 2 + 25_000 * per_row,
        2 + 25_000 * per_row,
        2 + 100_000 * per_row,
        few=25_000,
        known=100_000,
    )
    assert found == pytest.approx(10 + 15 + 2 + 100_000_000 * per_row)
    # Noise makes no row write itself.
    assert _extrapolate_writing(1000, 1.0, 3.0, 2.0, 1.5, few=25, known=100) == 4.0


def test_rows_that_are_kept_are_read_once() -> None:
    cluster = Cluster(4, 64, FAST)
    read = workload(reader_rows={1: 100.0}, epochs=10)
    kept = replace(read, cached=True)
    alone, again = predict(read, cluster, 1), predict(kept, cluster, 1)
    first_epoch = alone.epoch_seconds
    others = first_epoch * (again.step_seconds - again.reading) / alone.step_seconds
    assert again.training_seconds == pytest.approx(first_epoch + 9 * others)
    assert alone.limit == "reader"
    # Ranks are dealt other rows in the next epochs, until they have had all.
    one, four = predict(kept, cluster, 1), predict(kept, cluster, 4)
    assert one.reading < four.reading < predict(read, cluster, 4).reading
    only = replace(kept, epochs=1, passes=1.0)
    assert predict(only, cluster, 4) == predict(replace(only, cached=False), cluster, 4)
    # Nor is the processor time of reading paid again: by one rank alone in one epoch of ten.
    costly = replace(kept, reader_rows={1: 1e12}, reader_cpu_seconds=1.0)
    small = Cluster(1, 1, cluster.between)
    single, always = (predict(work, small, 1) for work in (costly, replace(costly, cached=False)))
    assert single.step_seconds == pytest.approx(0.1 * always.step_seconds, rel=0.1)


def test_the_first_launch_takes_no_longer_for_being_that_of_one_rank() -> None:
    """It imports the framework, which a training's launch may have to do, too."""
    far = Cluster(2, 64, Link(0.0, 1e15))
    first = measure(Link(0.0, 1e9), 2, launches=(5.0, 1.0)).workload
    assert predict(first, far, 2).total_seconds - predict(first, far, 2).training_seconds == (
        pytest.approx(first.materialize + first.build + 5.0)
    )
    later = measure(Link(0.0, 1e9), 2, launches=(2.0, 3.0)).workload
    assert later.launch == {1: 2.0, 2: 3.0}


def test_what_pays_is_chosen_where_what_is_almost_as_good_does_not() -> None:
    """One process takes 240 s, 6 ranks 221, 8 ranks 211 and 12, the fastest, 201."""
    step = StepTime(1.0, 1.0, 0.0)
    work = workload(
        rows=24_000,
        epochs=1,
        passes=1.0,
        steps={1: step},
        gradient_bytes=1,
        overhead=0.0,
        reader_rows={1: 1e12},
        build=0.0,
        launch={1: 1.0},
        materialize=180.0,
        inside=Link(0.0, 1e15),
    )
    found = _advise("x", work, Cluster(64, 64, Link(0.0, 1e15)), [1, 2, 4, 6, 8, 12])
    fastest = min(one.total_seconds for one in found.predictions)
    least = next(one for one in found.predictions if one.total_seconds <= 1.1 * fastest)
    assert least.total_seconds > 0.9 * found.alone >= fastest
    assert found.pays
    assert (least.ranks, found.best.ranks) == (6, 8)
    assert found.verdict.startswith(f"{found.best.ranks} ranks")


@pytest.mark.parametrize("error", [RunFailedError("a rank is lost"), KeyboardInterrupt(), None])
def test_a_plan_that_fails_leaves_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    """A training keeps them for the next call; the folder of a plan may be the user's run."""

    @contextlib.contextmanager
    def kept(run: object, folder: Location) -> Iterator[Any]:
        folder.join("rows-1", "part").parent.make_folder()
        folder.join("rows-1", "part").write_text("1")
        yield SimpleNamespace(train=None, reused=False)

    monkeypatch.setattr(measuring, "prepare_data", kept)
    monkeypatch.setattr(measuring, "show_preparation", lambda run, console, shown: shown)
    run: Any = SimpleNamespace(config=None, df=None, console=None)
    theirs = tmp_path / "before" / "rows"
    theirs.mkdir(parents=True)
    for run_dir in (tmp_path / "new", tmp_path / "before"):
        expects = contextlib.nullcontext() if error is None else pytest.raises(type(error))
        with expects, measuring._written_sample(run, Location(run_dir / "rows"), 10, 100):
            assert (run_dir / "rows" / "rows-1" / "part").exists()
            if error is not None:
                raise error
    # Nor does one that has kept none leave their folder.
    with measuring._written_sample(run, Location(tmp_path / "empty"), 10, 100):
        (tmp_path / "empty" / "rows-1" / "part").unlink()
        (tmp_path / "empty" / "rows-1").rmdir()
    assert not (tmp_path / "empty").exists()
    assert (tmp_path / "new" / "rows").exists() == (error is None)
    assert (theirs / "rows-1" / "part").exists(), "it was there: what is in it may be another's"


@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_an_exchange_that_is_faster_than_larger_sums_tell_is_predicted_as_it_was(
    spread: float,
) -> None:
    """Where it cannot hide: as a link is shaped that lets small bursts through."""
    link = Link(50e-6, 12e6)
    ring = ring_seconds(2, GRADIENTS, link)
    work = measure(link, 2, exchange=0.7 * ring, cores=2, spread=spread).workload
    two = predict(work, Cluster(2, 2, FAST), 2)
    assert two.waiting + two.latency + two.transfer == pytest.approx(0.7 * ring, rel=0.02)


@pytest.mark.parametrize("spread", [0.001, 0.01, 0.03])
def test_steps_that_vary_make_no_link_faster(spread: float) -> None:
    """What waits for slower ranks by chance is taken for no part of the exchange."""
    link = Link(20e-6, 1e9)
    inside = measure(link, 2, spread=spread, cores=2).workload.inside
    assert inside is not None
    assert inside.bandwidth == pytest.approx(link.bandwidth, rel=0.1)


def test_a_reader_is_waited_for_in_each_pass_by_itself() -> None:
    """Two ranks that cache rows read half as many in the second pass."""

    def waited(passes: float, *, cached: bool = True) -> float:
        work = workload(
            steps={1: StepTime(1.0, 0.0, 0.0)}, reader_rows={1: 100 / 3.0}, cached=cached,
            gradient_bytes=0, overhead=0.0, inside=Link(0.0, 1e15), passes=passes,
        )  # fmt: skip
        return predict(work, Cluster(2, 2, FAST), 2).reading

    assert waited(1) == pytest.approx(2.0)
    assert waited(2) == pytest.approx((2.0 + 0.5) / 2)
    assert waited(1.5) == pytest.approx((2.0 + 0.25) / 1.5)
    assert waited(2, cached=False) == pytest.approx(2.0)


def test_passes_over_the_rows_are_not_epochs() -> None:
    """Ten epochs of a tenth of the rows are one pass."""
    measured = measure(Link(20e-6, 1e9), 2, steps_per_epoch=100, rows=10 * 100 * 2 * BATCH)
    assert measured.workload.rows == 100 * 2 * BATCH
    assert measured.workload.passes == pytest.approx(1.0)
    assert measure(Link(20e-6, 1e9), 2, rows=20_000).workload.passes == 10
