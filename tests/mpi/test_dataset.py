"""`prepare_dataset`: the same reading contract in any function of a HorovodRunner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import DataError, Dataset, HorovodRunner, prepare_dataset

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def read_two_epochs(data: Dataset) -> list[list[list[int]]]:
    """Return the tags of every batch of this rank."""
    import horovod.tensorflow as hvd

    hvd.init()
    return [
        [
            batch["id"].tolist()
            for batch in data.epoch(epoch, rank=hvd.rank(), size=hvd.size(), batch_size=8)
            if batch["v"].shape == (len(batch["id"]), 2)
        ]
        for epoch in range(2)
    ]


def test_ranks_of_a_custom_loop_share_every_row(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(101).selectExpr("id", "array(id, id + 1) as v").repartition(5)
    data = prepare_dataset(frame, ["id", "v"], data_dir=str(tmp_path / "a b'c é"))
    assert data.rows == 101
    assert data.steps(8, 3) == 5
    run = HorovodRunner(num_workers=3, stream_logs=False).run(read_two_epochs, data)
    epochs = [[rank[epoch] for rank in run.results] for epoch in range(2)]
    for ranks in epochs:
        assert [len(steps) for steps in ranks] == [5, 5, 5]
        assert sorted(t for steps in ranks for batch in steps for t in batch) == list(range(101))
    assert epochs[0] != epochs[1]
    again = prepare_dataset(frame, ["id", "v"], data_dir=str(tmp_path / "a b'c é"))
    assert again.manifest == data.manifest
    data.delete()
    assert not list((tmp_path / "a b'c é").iterdir())


def test_wrong_columns_are_refused(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(3).selectExpr("id", "map(id, id) as m")
    with pytest.raises(DataError, match="'q'"):
        prepare_dataset(frame, ["q"], data_dir=str(tmp_path))
    with pytest.raises(DataError, match="columns"):
        prepare_dataset(frame, [], data_dir=str(tmp_path))
    with pytest.raises(DataError, match="'m'.*map"):
        prepare_dataset(frame, ["m"], data_dir=str(tmp_path))
