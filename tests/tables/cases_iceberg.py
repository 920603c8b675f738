"""Iceberg tables as data of a training, and as the place of predictions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import DataError

from .conftest import train
from .versions import check_resume, check_reuse, datasets, ids, prepared_ids

NAME = "ice.db.points"


@pytest.fixture
def table(lake: Any, points: Any) -> Iterator[str]:
    """A table of the points, in two files, of which rows are deleted when they are read."""
    lake.sql(
        f"CREATE TABLE {NAME} (id INT, x ARRAY<FLOAT>, y FLOAT, half INT) USING iceberg "
        "TBLPROPERTIES ('format-version' = '2', 'write.delete.mode' = 'merge-on-read')"
    )
    points.coalesce(2).writeTo(NAME).append()
    yield NAME
    lake.sql(f"DROP TABLE {NAME} PURGE")


def read(lake: Any, version: str | None = None) -> Any:
    return lake.read.option("versionAsOf", version).table(NAME) if version else lake.table(NAME)


def newest(lake: Any) -> str:
    return str(lake.sql(f"SELECT snapshot_id FROM {NAME}.refs WHERE name = 'main'").first()[0])


def test_a_training_from_tables_to_a_table(lake: Any, table: str, tmp_path: Path) -> None:
    frame = lake.table(table)
    run = train(frame, tmp_path / "run", validation=frame.filter("id < 40"))
    assert {"loss", "val_loss"} <= run.summary.history[-1].keys()
    predicted = run.transform(frame)
    column = predicted.columns[-1]
    predicted.writeTo("ice.db.predictions").create()
    predicted.writeTo("ice.db.predictions").append()
    stored = lake.table("ice.db.predictions").orderBy("id").toPandas()[column]
    assert stored.tolist()[1::2] == predicted.orderBy("id").toPandas()[column].tolist()
    lake.sql("DROP TABLE ice.db.predictions PURGE")


def test_rows_are_reused_by_version(
    lake: Any, table: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began, data = newest(lake), tmp_path / "data"
    check_reuse(
        lambda: read(lake), lambda: lake.sql(f"DELETE FROM {NAME} WHERE id % 3 = 0"), data, caplog
    )
    known = datasets(data)
    assert len(prepared_ids(read(lake, began), data)) == 160
    assert datasets(data) == known
    deletes = lake.sql(f"SELECT count(*) FROM {NAME}.delete_files").first()[0]
    assert deletes > 0


def test_resume_after_the_table_has_moved_on(
    lake: Any, points: Any, table: str, tmp_path: Path
) -> None:
    check_resume(
        lambda version: read(lake, version),
        lambda: newest(lake),
        lambda: points.writeTo(NAME).append(),
        tmp_path / "run",
    )


def test_partitions_and_columns_evolve(lake: Any, points: Any, table: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert len(prepared_ids(lake.table(table), data)) == 160
    lake.sql(f"ALTER TABLE {NAME} ADD PARTITION FIELD half")
    points.selectExpr("id + 160 as id", "x", "y", "half").writeTo(NAME).append()
    lake.sql(f"ALTER TABLE {NAME} ADD COLUMN s STRUCT<a: FLOAT>")
    lake.sql(f"ALTER TABLE {NAME} RENAME COLUMN s.a TO b")
    lake.sql(f"ALTER TABLE {NAME} RENAME COLUMN y TO target")
    lake.sql(f"DELETE FROM {NAME} WHERE half = 1 AND id > 200")
    frame = lake.table(table)
    assert (
        prepared_ids(frame, data) == ids(frame) == [i for i in range(320) if i < 201 or not i % 2]
    )
    run = train(frame, tmp_path / "run", label_cols=["target"])
    assert len(run.summary.history) == 1


def test_a_folder_of_a_table_is_no_data(lake: Any, table: str, tmp_path: Path) -> None:
    place = lake.sql(f"DESCRIBE EXTENDED {NAME}").filter("col_name = 'Location'").first()[1]
    for folder in (place, f"{place}/data"):
        with pytest.raises(DataError, match=r"Iceberg.*metadata"):
            train(folder, tmp_path / "run")
