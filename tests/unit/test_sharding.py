"""The order of samples: exactly once, equal steps, the same for every world size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_spark_runner.data.read.sharding import (
    EpochPlan,
    contiguous_share,
    plan_epoch,
)

groups = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(lambda g: sum(g) > 0)


def make_plan(sizes: list[int], global_batch: int, seed: int = 0, epoch: int = 0) -> EpochPlan:
    return plan_epoch(
        [(rows, rows * 8) for rows in sizes],
        global_batch=global_batch,
        seed=seed,
        epoch=epoch,
        window_bytes=1024,
    )


def lane_rows(plan: EpochPlan) -> list[list[int]]:
    """Return the global row numbers of every lane in reading order."""
    starts = np.concatenate([[0], np.cumsum(plan.row_groups)])
    lanes = []
    for lane in range(plan.lanes):
        rows: list[int] = []
        for block in plan.lane_blocks(lane):
            source = [
                int(starts[piece.row_group]) + row
                for piece in block.pieces
                for row in range(piece.start, piece.stop)
            ]
            assert block.first == len(rows)
            assert len(source) == block.rows
            rows += [source[i] for i in block.order()]
        assert len(rows) == plan.lane_rows(lane)
        lanes.append(rows)
    return lanes


def rank_batches(plan: EpochPlan, lanes: list[list[int]], rank: int, world: int) -> list[list[int]]:
    return [
        [
            row
            for s in plan.rank_slices(step, rank, world)
            for row in lanes[s.lane][s.start : s.stop]
        ]
        for step in range(plan.steps)
    ]


def global_batches(plan: EpochPlan, world: int) -> list[list[int]]:
    lanes = lane_rows(plan)
    ranks = [rank_batches(plan, lanes, rank, world) for rank in range(world)]
    return [[row for rank in ranks for row in rank[step]] for step in range(plan.steps)]


@settings(max_examples=150, deadline=None)
@given(groups, st.integers(1, 6), st.integers(1, 8), st.integers(0, 3))
def test_every_row_once_on_every_world_in_one_order(
    sizes: list[int], per_rank: int, world: int, epoch: int
) -> None:
    plan = make_plan(sizes, per_rank * world, epoch=epoch)
    batches = global_batches(plan, world)
    assert sorted(row for batch in batches for row in batch) == list(range(sum(sizes)))
    assert batches == global_batches(plan, 1)
    for divisor in range(1, per_rank * world + 1):
        if (per_rank * world) % divisor == 0:
            assert global_batches(plan, divisor) == batches


@settings(max_examples=100, deadline=None)
@given(groups, st.integers(1, 6), st.integers(1, 8))
def test_ranks_get_equal_parts(sizes: list[int], per_rank: int, world: int) -> None:
    plan = make_plan(sizes, per_rank * world)
    for step in range(plan.steps):
        counts = [
            sum(s.stop - s.start for s in plan.rank_slices(step, rank, world))
            for rank in range(world)
        ]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == plan.batch_rows(step)
        if step < plan.steps - 1:
            assert counts == [per_rank] * world


def test_1024_ranks_read_about_their_share() -> None:
    plan = plan_epoch(
        [(1000, 1 << 20)] * 4096, global_batch=1024 * 8, seed=0, epoch=0, window_bytes=256 << 20
    )
    assert plan.lanes == 64
    seen = np.zeros(plan.lanes, dtype=int)
    for rank in range(1024):
        lanes = {s.lane for s in plan.rank_slices(3, rank, 1024)}
        assert len(lanes) == 1
        seen[list(lanes)] += 1
    assert set(seen) == {16}


def test_a_rank_reads_its_own_lanes_only() -> None:
    plan = plan_epoch([(100, 1000)] * 64, global_batch=32, seed=0, epoch=0, window_bytes=1 << 20)
    assert plan.lanes == 32
    for step in (0, 7, plan.steps - 2):
        assert {s.lane for s in plan.rank_slices(step, 1, 4)} == set(range(8, 16))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    sizes = [40, 30, 50]
    orders = {
        (seed, epoch): tuple(map(tuple, global_batches(make_plan(sizes, 10, seed, epoch), 1)))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == 9
    again = global_batches(make_plan(sizes, 10, 2, 1), 1)
    assert orders[2, 1] == tuple(map(tuple, again))


def test_without_shuffle_rows_come_in_file_order() -> None:
    plan = plan_epoch(
        [(7, 56), (5, 40)], global_batch=4, seed=0, epoch=0, window_bytes=1024, shuffle=False
    )
    assert [row for batch in global_batches(plan, 2) for row in batch] == list(range(12))


def test_batches_mix_rows_from_all_over() -> None:
    sizes = [(100, 800)] * 10
    plan = plan_epoch(sizes, global_batch=50, seed=0, epoch=0, window_bytes=1 << 20)
    batch = global_batches(plan, 1)[0]
    assert len({row // 100 for row in batch}) >= 5


@pytest.mark.parametrize(
    ("row_groups", "global_batch", "window_row_groups", "lanes"),
    [
        (100, 64, 1000, 64),
        (100, 96, 1000, 48),
        (100, 64, 5, 4),
        (3, 64, 1000, 2),
        (1, 64, 1000, 1),
        (100, 7, 1000, 7),
    ],
)
def test_lanes_divide_the_batch_and_fit_the_window(
    row_groups: int, global_batch: int, window_row_groups: int, lanes: int
) -> None:
    plan = plan_epoch(
        [(1, 1)] * row_groups,
        global_batch=global_batch,
        seed=0,
        epoch=0,
        window_bytes=window_row_groups,
    )
    assert plan.lanes == lanes


def test_the_order_of_rows_never_changes() -> None:
    """Checkpoints rely on it: a position is a number in this order."""
    assert lane_rows(make_plan([8], 1)) == [[3, 2, 5, 7, 0, 4, 1, 6]]


@pytest.mark.parametrize("world", [1, 2, 3, 7, 20])
def test_evaluation_shares_cover_everything_once(world: int) -> None:
    sizes = [3, 0, 10, 1, 5]
    rows = [
        (piece.row_group, row)
        for rank in range(world)
        for piece in contiguous_share(sizes, rank, world)
        for row in range(piece.start, piece.stop)
    ]
    assert rows == [(g, r) for g, size in enumerate(sizes) for r in range(size)]


@settings(max_examples=60, deadline=None)
@given(groups, st.integers(1, 6), st.integers(1, 8), st.integers(0, 7))
def test_steps_at_once_are_the_steps_one_by_one(
    sizes: list[int], per_rank: int, world: int, rank: int
) -> None:
    plan, rank = make_plan(sizes, per_rank * world), rank % world
    one_by_one: dict[int, list[int]] = {}
    for step in range(plan.steps - 1):
        for part in plan.rank_slices(step, rank, world):
            one_by_one.setdefault(part.lane, []).extend(range(part.start, part.stop))
    if plan.steps > 1:
        counts, lanes = plan.chunk(range(plan.steps - 1), rank, world)
        assert {lane: list(positions) for lane, (positions, _) in lanes.items()} == one_by_one
        places = [place for _, places in lanes.values() for place in places]
        assert sorted(places) == list(range(sum(counts)))
