"""Delta Lake tables as data of a training, and as the place of predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import DataError
from horovod_spark_runner.data.prepare import materialize

from .conftest import train
from .versions import check_resume, check_reuse, datasets, ids, prepared_ids


def read(lake: Any, place: str | Path, version: str | None = None) -> Any:
    reader = lake.read.format("delta")
    return (reader if version is None else reader.option("versionAsOf", version)).load(str(place))


def newest(lake: Any, place: str | Path) -> str:
    history = lake.sql(f"DESCRIBE HISTORY delta.`{place}`")
    return str(history.agg({"version": "max"}).first()[0])


def test_a_training_from_tables_to_a_table(lake: Any, points: Any, tmp_path: Path) -> None:
    table, out = tmp_path / "table", tmp_path / "predictions"
    points.write.format("delta").partitionBy("half").save(str(table))
    points.filter("id < 40").write.format("delta").saveAsTable("held_out")
    run = train(read(lake, table), tmp_path / "run", validation=lake.table("held_out"), epochs=2)
    assert {"loss", "val_loss"} <= run.summary.history[-1].keys()
    predicted = run.transform(read(lake, table))
    for _ in range(2):
        predicted.write.format("delta").mode("append").save(str(out))
    column = predicted.columns[-1]
    stored = read(lake, out).orderBy("id").toPandas()[column]
    expected = predicted.orderBy("id").toPandas()[column]
    assert len(stored) == 320
    np.testing.assert_array_equal(stored.to_numpy()[::2], expected.to_numpy())

    # A stream from the table, to another one.
    stream = lake.readStream.format("delta").load(str(table))
    writer = run.transform(stream).writeStream.format("delta").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "c")).start(str(tmp_path / "s"))
    try:
        assert query.awaitTermination(120)
    finally:
        query.stop()
    streamed = read(lake, tmp_path / "s").orderBy("id").toPandas()[column]
    np.testing.assert_array_equal(streamed.to_numpy(), expected.to_numpy())


def test_rows_are_reused_by_version(
    lake: Any, points: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table, data = tmp_path / "table", tmp_path / "data"
    points.write.format("delta").save(str(table))

    def change() -> None:
        points.selectExpr("id + 1000 as id", "x", "y", "half").write.format("delta").mode(
            "append"
        ).save(str(table))

    check_reuse(lambda: read(lake, table), change, data, caplog)
    known = datasets(data)
    assert len(prepared_ids(read(lake, table, "0"), data)) == 160
    assert datasets(data) == known


def test_a_table_that_changes_while_its_rows_are_written(
    lake: Any, points: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, data, write = tmp_path / "table", tmp_path / "data", materialize._write
    points.write.format("delta").save(str(table))

    def append_and_write(*arguments: Any) -> None:
        points.write.format("delta").mode("append").save(str(table))
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(materialize, "_write", append_and_write)
        assert len(prepared_ids(read(lake, table), data)) == 320
    assert len(prepared_ids(read(lake, table, "0"), data)) == 160
    assert len(prepared_ids(read(lake, table), data)) == 320


def test_another_table_of_the_same_name_and_version(lake: Any, points: Any, tmp_path: Path) -> None:
    for part in ("half = 0", "half = 1"):
        lake.sql("DROP TABLE IF EXISTS named_again")
        points.filter(part).write.format("delta").saveAsTable("named_again")
        table = lake.table("named_again")
        assert prepared_ids(table, tmp_path / "data") == ids(table) == ids(points.filter(part))


def test_resume_after_the_table_has_moved_on(lake: Any, points: Any, tmp_path: Path) -> None:
    table = tmp_path / "table"
    points.write.format("delta").save(str(table))
    check_resume(
        lambda version: read(lake, table, version),
        lambda: newest(lake, table),
        lambda: points.write.format("delta").mode("append").save(str(table)),
        tmp_path / "run",
    )


def test_deletion_vectors_and_mapped_columns(lake: Any, points: Any, tmp_path: Path) -> None:
    table, data = tmp_path / "table", tmp_path / "data"
    nested = points.selectExpr("id", "named_struct('a', x, 'b', half) as s", "y as `the label`")
    name = f"delta.`{table}`"
    lake.sql(
        f"CREATE TABLE {name} (id INT, s STRUCT<a: ARRAY<FLOAT>, b: INT>, `the label` FLOAT) USING "
        "delta TBLPROPERTIES ('delta.enableDeletionVectors' = true, 'delta.columnMapping.mode' = "
        "'name')"
    )
    nested.coalesce(1).write.format("delta").mode("append").save(str(table))
    frame = read(lake, table).selectExpr("id", "s.a as x")
    assert len(prepared_ids(frame, data)) == 160
    lake.sql(f"DELETE FROM {name} WHERE id % 3 = 0")
    assert list(table.rglob("deletion_vector*")) != []
    left = [i for i in range(160) if i % 3]
    assert prepared_ids(read(lake, table).selectExpr("id", "s.a as x"), data) == left
    lake.sql(f"ALTER TABLE {name} RENAME COLUMN s.a TO features")
    lake.sql(f"ALTER TABLE {name} RENAME COLUMN `the label` TO y")
    renamed = read(lake, table)
    assert prepared_ids(renamed.selectExpr("id", "s.features as x"), data) == left
    run = train(renamed.selectExpr("s.features as x", "y"), tmp_path / "run")
    assert len(run.summary.history) == 1
    # Its files hold the deleted rows.
    for place in (table, str(table)):
        with pytest.raises(DataError, match=r"Delta Lake.*_delta_log"):
            train(place, tmp_path / "other")


def test_a_folder_of_a_partition_is_no_table(lake: Any, points: Any, tmp_path: Path) -> None:
    table = tmp_path / "table"
    points.write.format("delta").partitionBy("half").save(str(table))
    lake.sql(f"DELETE FROM delta.`{table}` WHERE id % 3 = 0")
    with pytest.raises(DataError, match=r"Delta Lake.*_delta_log"):
        train(table / "half=0", tmp_path / "run")
