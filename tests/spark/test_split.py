"""Split into training and validation rows, where rows repeat."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from horovod_spark_runner.data.prepare.schema import Roles
from horovod_spark_runner.data.prepare.split import split_rows

pytestmark = pytest.mark.spark

ROLES = Roles(("a", "b", "c"), ("y",))
# Three yes/no features, 250 rows of each combination: an eighth of the labels are positive.
ROWS = [(n & 1, n >> 1 & 1, n >> 2 & 1, int(n % 8 == 7)) for n in range(2000)]


def _split(
    frame: Any, fraction: float, seed: int, stratify: str | None = None, roles: Roles = ROLES
) -> tuple[Counter[Any], Counter[Any]]:
    with split_rows(frame, fraction, roles, seed, stratify) as (train, held_out):
        assert held_out is not None
        assert train.columns == held_out.columns == frame.columns
        return Counter(map(tuple, train.collect())), Counter(map(tuple, held_out.collect()))


@pytest.mark.parametrize("stratify", [None, "y"])
@pytest.mark.parametrize("fraction", [0.1, 0.013])
def test_of_equal_rows_the_fraction_is_taken_in_any_partitioning(
    spark: Any, stratify: str | None, fraction: float
) -> None:
    frame = spark.createDataFrame(ROWS, "a int, b int, c int, y int")
    for seed in range(2):
        train, held_out = _split(frame.repartition(1), fraction, seed, stratify)
        assert train + held_out == Counter(ROWS)
        for row in set(ROWS):
            assert abs(held_out[row] - 250 * fraction) <= 1, (seed, row)
        if stratify:
            assert sum(count for row, count in held_out.items() if row[3]) == round(250 * fraction)
            assert held_out.total() - held_out[(1, 1, 1, 1)] == round(1750 * fraction)
        for other in (frame.repartition(3), frame.orderBy("c", "a").coalesce(2)):
            assert _split(other, fraction, seed, stratify) == (train, held_out)


def test_classes_of_repeated_and_of_single_rows_keep_their_proportions(spark: Any) -> None:
    rows = [
        *((0.0, 0.0, 0.0, 1),) * 300,
        *((1.0, 0.0, 0.0, kind) for kind in (1, 2) for _ in range(150)),  # equal but for the class
        *((float(n), 1.0, 0.0, 2) for n in range(77)),
        *((float(n // 3), 2.0, 0.0, 3) for n in range(19)),
    ]
    frame = spark.createDataFrame(rows, "a double, b double, c double, kind int")
    roles = Roles(("a", "b"), ("c",))
    for seed in range(2):
        train, held_out = _split(frame.repartition(4), 0.25, seed, "kind", roles)
        assert train + held_out == Counter(rows)
        counts: Counter[int] = Counter()
        for row, count in held_out.items():
            counts[row[3]] += count
        assert counts == {1: 113, 2: 57, 3: 5}  # 112.5, 56.75 and 4.75
        assert (train, held_out) == _split(frame.coalesce(1), 0.25, seed, "kind", roles)


def test_a_row_that_repeats_seldom_stays_on_one_side(spark: Any) -> None:
    frame = spark.range(3000).selectExpr("id % 1500 as a", "0 as b", "0 as c", "0 as y")
    train, held_out = _split(
        frame.union(spark.range(9000).selectExpr("id + 5000", "0", "0", "0")), 0.2, 0
    )
    assert not set(train) & set(held_out)
    assert 0.18 < held_out.total() / 12000 < 0.22
