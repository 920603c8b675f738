"""Folds of one DataFrame: every row is written once, and each fold equals a separate split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import functions as F

from horovod_spark_runner import DataError, DataOptions
from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.prepare.datasets import prepare_datasets
from horovod_spark_runner.data.prepare.folds import prepare_folds
from horovod_spark_runner.data.prepare.schema import Roles
from horovod_spark_runner.data.prepare.split import cache_rows
from horovod_spark_runner.data.read.reader import DatasetReader
from horovod_spark_runner.storage.filesystem import Location

pytestmark = pytest.mark.spark

ROLES = Roles(("v", "a"), ("id",))
FOLDS = ["fold0", "fold1", "fold2"]


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    """Rows of three folds, and a fourth kind that is in none of them."""
    columns = [f"id % 4 = {number} AS fold{number}" for number in range(2)]
    return spark.range(200).selectExpr(
        "id", "id / 7 AS a", "array(float(id), float(id) / 2) AS v",
        "int(id % 4 = 2) AS fold2", *columns, "id < 0 AS none", "if(id = 3, null, true) AS some",
    ).repartition(3)  # fmt: skip


def ids(manifest: Manifest | None) -> list[int]:
    assert manifest is not None
    reader = DatasetReader(manifest)
    numbers = np.concatenate([batch.arrays["id"] for batch in reader.share(0, 1, 16)])
    reader.close()
    return sorted(numbers.tolist())


@pytest.mark.thorough
def test_each_split_is_as_if_it_were_alone(frame: Any, tmp_path: Path) -> None:
    together, alone = Location(tmp_path / "together"), Location(tmp_path / "alone")
    options = DataOptions(keep_data=True)
    with prepare_folds(frame, ROLES, options, FOLDS, together) as splits:
        assert list(splits) == FOLDS
        for number, name in enumerate(FOLDS):
            split = splits[name]
            assert ids(split.train) == [i for i in range(200) if i % 4 != number]
            assert ids(split.validation) == [i for i in range(200) if i % 4 == number]
            with prepare_datasets(frame, ROLES, options, name, alone, seed=0) as one:
                assert split.train.fingerprint == one.train.fingerprint
                assert split.validation is not None
                assert one.validation is not None
                assert split.validation.fingerprint == one.validation.fingerprint
                assert split.train.columns == one.train.columns
    written = list(Path(str(together)).glob("data-*"))
    assert len(written) == 4
    with prepare_folds(frame, ROLES, options, FOLDS, together) as splits:
        assert all(split.reused for split in splits.values())
    assert list(Path(str(together)).glob("data-*")) == written


@pytest.mark.thorough
def test_they_go_when_they_are_done_with(frame: Any, tmp_path: Path) -> None:
    with prepare_folds(frame, ROLES, DataOptions(), FOLDS[:2], Location(tmp_path)) as splits:
        assert len(list(tmp_path.glob("data-*"))) == 3
        assert not splits["fold0"].reused
    assert not list(tmp_path.glob("data-*"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["fold0", "none"], "validation='none'.*no rows"),
        (["fold0", "some"], "validation.*'some'.* 1 null"),
    ],
)
def test_splits_that_cannot_be_leave_nothing(
    frame: Any, tmp_path: Path, names: list[str], message: str
) -> None:
    with (
        pytest.raises(DataError, match=message),
        prepare_folds(frame, ROLES, DataOptions(), names, Location(tmp_path)),
    ):
        pass
    assert not list(tmp_path.glob("data-*"))


@pytest.mark.thorough
def test_what_spark_keeps_already_stays_kept(frame: Any, tmp_path: Path) -> None:
    cached = frame.filter("id < 50").cache()
    assert cached.count() == 50
    for place, validation in ((tmp_path / "a", 0.5), (tmp_path / "b", "fold0")):
        with prepare_datasets(cached, ROLES, DataOptions(), validation, Location(place), seed=0):
            pass
    with prepare_folds(cached, ROLES, DataOptions(), FOLDS, Location(tmp_path / "c")):
        pass
    assert cached.storageLevel.useMemory
    cached.unpersist()
    with prepare_datasets(cached, ROLES, DataOptions(), 0.5, Location(tmp_path / "d"), seed=0):
        pass
    assert not cached.storageLevel.useMemory


def test_calls_at_once_on_rows_that_come_otherwise_each_time(frame: Any, tmp_path: Path) -> None:
    """The first that is done leaves the others the rows that they are splitting."""
    from pyspark.sql import functions as F

    def drawn() -> Any:
        return frame.withColumn("drawn", F.rand(7))

    with cache_rows(drawn()) as one:
        with cache_rows(drawn()):
            pass
        assert one.storageLevel.useMemory
    assert not one.storageLevel.useMemory
    first, second = cache_rows(drawn()), cache_rows(drawn())
    first.__enter__()
    other = second.__enter__()
    first.__exit__(None, None, None)
    assert other.storageLevel.useMemory
    second.__exit__(None, None, None)
    assert not other.storageLevel.useMemory


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("long", "message"),
    [
        # The sides of a split are compared, as those of one that is alone are.
        ("id % 4 = 0", "validation='fold0'.*validation.*'v'.*train"),
        # What a side is put together of is of that side.
        ("id % 4 = 3", "train.*validation='fold0'.*'v'"),
    ],
)
def test_rows_of_other_sizes_are_told_on_the_driver(
    frame: Any, tmp_path: Path, long: str, message: str
) -> None:
    rows = frame.withColumn("v", F.expr(f"if({long}, array(1f, 2f, 3f), v)"))
    names = ["fold0", "rest"]
    if "0" in long:  # two folds, each of which is one side
        rows = rows.withColumn("rest", ~F.col("fold0"))
    else:
        rows = rows.withColumn("rest", F.expr("id % 4 = 3"))
    with (
        pytest.raises(DataError, match=message),
        prepare_folds(rows, ROLES, DataOptions(), names, Location(tmp_path)),
    ):
        pass
    assert not list(tmp_path.glob("data-*"))
