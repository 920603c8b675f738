"""Files scored into files: everything else stays as it was, every row once, or a clear refusal."""

from __future__ import annotations

import datetime
import glob
import os
import signal
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovod_spark_runner import (
    DataError,
    InvalidInputError,
    RunCancelledError,
    TFTransformer,
)
from horovod_spark_runner.cluster.spark import jobs
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.model import predict_files as files
from horovod_spark_runner.model.predict_files_task import stored_leaves

from ..counting_engine import line, save_line

pytestmark = pytest.mark.spark

SUM = [1.0, 10.0, 0.5]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    save_line(place, [Column("x", "float32", (2,))], SUM)
    return place


@pytest.fixture(scope="module")
def hostile(spark: Any) -> Any:
    """Rows of all types that Parquet keeps, with what is rarely thought of."""
    from pyspark.ml.linalg import Vectors

    second = datetime.timedelta(microseconds=1)
    rows = [
        (
            0, [1.0, 2.0], datetime.datetime(1, 1, 3), datetime.date(1, 1, 1), Decimal("1.10"),
            Decimal("-12345678901234567890123456789012345.678"), "", b"", {"a": None, "": 1},
            (1, (None, ["x", None])), -second, Vectors.dense(1.0, float("nan")), float("nan"),
            float("nan"), -(2**63), True,
        ),
        (
            1, [3.0, -4.0], datetime.datetime(9999, 12, 30, 1, 2, 3, 4), None, None, None,
            "é\0", b"\xff\0", {}, (None, ("y", [])), datetime.timedelta(days=3),
            Vectors.sparse(5, [1, 3], [2.0, -0.0]), -0.0, float("-inf"), 2**63 - 1, None,
        ),
        (2, [0.0, 0.0], *[None] * 14),
    ]  # fmt: skip
    schema = (
        "id int, x array<float>, at timestamp, day date, price decimal(5,2), large decimal(38,3), "
        "text string, bytes binary, tags map<string,int>, "
        "nested struct<a:int,b:struct<c:string,d:array<string>>>, lasts interval day to second, "
        "vector {vector}, single float, double double, long bigint, flag boolean"
    )
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import StructField, StructType

    fields = StructType.fromDDL(schema.replace("vector {vector}, ", "")).fields
    fields.insert(11, StructField("vector", VectorUDT()))
    frame = spark.createDataFrame(rows, StructType(fields)).coalesce(1)
    return frame.withMetadata("text", {"ml_attr": {"vals": ["a", "b"]}, "comment": "words"})


def write(frame: Any, place: Path, **options: Any) -> str:
    frame.write.options(**options).parquet(str(place))
    return str(place)


def rows_of(frame: Any) -> list[str]:
    return sorted(repr(row) for row in frame.collect())


def left(place: Path) -> list[str]:
    """Return the files of a folder, but for Parquet files in place and the guard of the lease."""
    files = [path for path in place.rglob("*") if path.is_file() and path.name != "._lease"]
    staged = [path for path in files if path.parent.name.startswith("_temporary")]
    return sorted(path.name for path in files if path.suffix != ".parquet" or path in staged)


@pytest.mark.thorough
def test_other_columns_are_what_they_were(
    run: Path, hostile: Any, spark: Any, tmp_path: Path
) -> None:
    frame = hostile.selectExpr("*", "cast(at as timestamp_ntz) as local")
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    try:
        source = write(frame, tmp_path / "source")
    finally:
        spark.conf.unset("spark.sql.parquet.outputTimestampType")
    assert line(run).predict_files(source, tmp_path / "scored") == 3
    read = spark.read.parquet(str(tmp_path / "scored"))
    assert read.drop("prediction").schema == spark.read.parquet(source).schema
    assert read.schema["text"].metadata == {"ml_attr": {"vals": ["a", "b"]}, "comment": "words"}
    assert rows_of(read.drop("prediction")) == rows_of(spark.read.parquet(source))
    predicted = {row.id: row.prediction for row in read.collect()}
    assert predicted == {0: 21.5, 1: -36.5, 2: 0.5}
    # transform gives the same, in the same types.
    transformed = line(run).transform(spark.read.parquet(source))
    assert transformed.schema == read.schema
    assert rows_of(transformed) == rows_of(read)


@pytest.mark.thorough
def test_types_that_would_change_are_refused_by_name(run: Path, spark: Any, tmp_path: Path) -> None:
    frame = spark.sql("select array(1f, 2f) as x, timestamp '2024-01-01' as at, "
                      "timestamp_ntz '2024-01-01' as local")  # fmt: skip
    source = write(frame, tmp_path / "source")  # instants of 96 bits, local times of 64
    told = r"'at'.*\.parquet .*INT96.*outputTimestampType=TIMESTAMP_MICROS.*columns.*transform"
    for columns in (None, ["at", "local"]):
        with pytest.raises(DataError, match=told):
            line(run).predict_files(source, tmp_path / "scored", columns=columns)
    assert not (tmp_path / "scored").exists()
    assert line(run).predict_files(source, tmp_path / "scored", columns=["local"]) == 1
    kept = spark.read.parquet(str(tmp_path / "scored"))
    assert rows_of(kept.drop("prediction")) == rows_of(frame.select("local"))


@pytest.mark.thorough
def test_partitions_and_row_groups(run: Path, spark: Any, tmp_path: Path) -> None:
    """Many row groups, folders in folders with odd names, an empty file: every row once."""
    frame = spark.range(60_000).selectExpr(
        "id", "array(float(id % 1000), float(id % 7)) as x", "id % 2 as even",
        "case when id % 3 = 0 then 'a b=ü/%' else null end as day",
    )  # fmt: skip
    frame.coalesce(1).write.partitionBy("even", "day").option(
        "parquet.block.size", 16 * 1024
    ).option("parquet.block.size.row.check.min", 100).parquet(str(tmp_path / "source"))
    source = spark.read.parquet(str(tmp_path / "source"))
    write(frame.select("id", "x").limit(0).coalesce(1), tmp_path / "empty")
    (empty,) = glob.glob(f"{tmp_path}/empty/*.parquet")
    (folder,) = glob.glob(f"{tmp_path}/source/even=0/day=a*")
    Path(empty).rename(Path(folder, "empty.parquet"))
    target = tmp_path / "scored"
    transformer = line(run, prediction_col="p")
    assert transformer.predict_files(tmp_path / "source", target, columns=["id", "day"]) == 60_000
    assert left(target) == ["_SUCCESS"]
    found = spark.read.parquet(str(target))
    assert set(found.columns) == {"id", "p", "even", "day"}
    rows = {r.id: r for r in found.collect()}
    assert len(rows) == found.count() == 60_000
    for row in source.collect():
        same = rows[row.id]
        assert (same.even, same.day) == (row.even, row.day)
        assert same.p == row.x[0] + 10 * row.x[1] + 0.5


@pytest.mark.thorough
def test_files_of_many_row_groups_are_divided(run: Path, spark: Any, tmp_path: Path) -> None:
    """As pyarrow writes them, with no types of Spark's; the rows of a file stay in their order."""
    (tmp_path / "source").mkdir()
    ids = np.arange(300_000)
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 2).astype(np.float64)), 2)
    x = x.cast(pa.list_(pa.float64()))
    table = pa.table({"id": ids, "x": x, "kind": ids % 7, "text": np.char.mod("%d", ids % 3)})
    pq.write_table(table, tmp_path / "source" / "all.parquet", row_group_size=20_000)
    assert line(run).predict_files(tmp_path / "source", tmp_path / "scored") == len(ids)
    parts = sorted((tmp_path / "scored").glob("all-*.parquet"))
    assert len(parts) > 3
    scored = pa.concat_tables([pq.read_table(part) for part in parts])
    assert scored.drop(["x", "prediction"]).equals(table.drop(["x"]))
    # Dictionaries are kept, but for numbers with a fraction.
    chunks = [pq.read_metadata(parts[0]).row_group(0).column(number) for number in range(4)]
    assert [chunk.has_dictionary_page for chunk in chunks] == [True, False, True, True]
    np.testing.assert_allclose(scored.column("prediction"), 11.0 * ids + 0.5)
    assert spark.read.parquet(str(tmp_path / "scored")).count() == len(ids)


@pytest.mark.thorough
def test_invalid_rows(run: Path, spark: Any, tmp_path: Path) -> None:
    rows = [(0, [1.0, 1.0]), (1, None), (2, [1.0]), (3, [1.0, None]), (4, [2.0, 2.0])]
    source = write(
        spark.createDataFrame(rows, "id int, x array<double>").coalesce(1), tmp_path / "s"
    )
    with pytest.raises(DataError, match=r"\.parquet.*'x'.*null.*row 1\b.*batch.* 5"):
        line(run).predict_files(source, tmp_path / "error")
    assert left(tmp_path / "error") == []
    keep = line(run, handle_invalid="keep")
    assert keep.predict_files(source, tmp_path / "keep") == 5
    found = {r.id: r.prediction for r in spark.read.parquet(str(tmp_path / "keep")).collect()}
    assert found == {0: 11.5, 1: None, 2: None, 3: None, 4: 22.5}
    skip = line(run, handle_invalid="skip")
    assert skip.predict_files(source, tmp_path / "skip") == 2
    found = {r.id: r.prediction for r in spark.read.parquet(str(tmp_path / "skip")).collect()}
    assert found == {0: 11.5, 4: 22.5}


@pytest.mark.thorough
def test_features_of_other_types(spark: Any, tmp_path: Path) -> None:
    """Vectors of both kinds, whole numbers that are too large: as transform takes them."""
    from pyspark.ml.linalg import Vectors

    columns = [Column("v", "float32", (3,)), Column("n", "int32"), Column("b", "int8")]
    save_line(tmp_path, columns, [1.0, 2.0, 3.0, 100.0, 0.25, 0.5])
    dense, sparse = Vectors.dense(1.0, 2.0, 3.0), Vectors.sparse(3, [1], [5.0])
    rows = [
        (0, dense, 1, True), (1, sparse, 2, False), (2, None, 2, True), (3, sparse, 2**31, True),
        (4, Vectors.dense(1.0), 1, True), (5, dense, None, True), (6, dense, -(2**31), None),
        (7, dense, -7, False),
    ]  # fmt: skip
    frame = spark.createDataFrame(rows, ["id", "v", "n", "b"]).coalesce(1)
    source = write(frame, tmp_path / "source")
    transformer = line(tmp_path, handle_invalid="keep")
    transformer.predict_files(source, tmp_path / "scored")
    found = spark.read.parquet(str(tmp_path / "scored"))
    assert rows_of(found) == rows_of(transformer.transform(spark.read.parquet(source)))
    assert [r.id for r in found.collect() if r.prediction is None] == [2, 3, 4, 5, 6]


@pytest.mark.thorough
def test_nested_arrays_decimals_and_names_with_dots(spark: Any, tmp_path: Path) -> None:
    """As transform takes them, in what remains and in what is no row for the model."""
    columns = [
        Column("grid", "float32", (2, 2)),
        Column("flat", "float32", (4,)),
        Column("deep", "int32", (2, 1, 2)),
        Column("price.net", "float32"),
        Column("prices", "float64", (2,)),
    ]
    save_line(tmp_path, columns, [*range(1, 13), 0.25, 3.0, -7.0, 0.5])
    random = np.random.default_rng(0)

    def decimal(places: int, digits: int = 38) -> Decimal:
        shown = tuple(random.integers(0, 10, digits).tolist())
        return Decimal((int(random.integers(2)), shown, -places))

    good = ([[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]], [[[1, 2]], [[3, 4]]])
    hostile: list[Any] = [
        ([[1.0, 2.0, 3.0, 4.0]], *good[1:]), ([[1.0], [2.0, 3.0, 4.0]], *good[1:]),
        ([[1.0, 2.0], None], *good[1:]), ([[1.0, 2.0], [None, 4.0]], *good[1:]),
        ([], *good[1:]), (None, *good[1:]), ([[], []], *good[1:]),
        # As many numbers as the model takes, in arrays of one size: that is enough for a flat row.
        (good[0], [[5.0, 6.0, 7.0, 8.0]], good[2]), (good[0], [[5.0], [6.0, 7.0, 8.0]], good[2]),
        (*good[:2], [[[1, 2], [3, 4]]]), (*good[:2], [[[1, 2]], [[3], [4]]]),
        (*good[:2], [[[1, 2]], [None]]), (*good[:2], [[[1, 2]], None]),
        (*good[:2], [[[1, 2]], [[3, 2**31]]]),
    ]  # fmt: skip
    rows = [(n, *one, decimal(38), [decimal(4), decimal(4)]) for n, one in enumerate(hostile)]
    rows += [
        (n, *good, decimal(38 - n % 3, 38 - n % 3), [decimal(4, 1 + n % 38), decimal(4, 2)])
        for n in range(len(rows), 400)
    ]
    rows += [(400, *good, None, [decimal(4)] * 2), (401, *good, decimal(38), [decimal(4), None])]
    schema = (
        "id int, grid array<array<double>>, flat array<array<float>>, "
        "deep array<array<array<long>>>, `price.net` decimal(38,38), prices array<decimal(38,4)>"
    )
    frame = spark.createDataFrame(rows, schema).selectExpr(
        "*", "struct(id as net, 'x' as `net.0`) as price", "id * 2 as `price.net.0`",
        "map('k.v', array(`price.net`)) as `a.map`",
    )  # fmt: skip
    source = write(frame.coalesce(1), tmp_path / "source")
    transformer = line(tmp_path, handle_invalid="keep")
    assert transformer.predict_files(source, tmp_path / "scored") == 402
    found = spark.read.parquet(str(tmp_path / "scored"))
    expected = transformer.transform(spark.read.parquet(source))
    assert found.schema == expected.schema
    assert rows_of(found) == rows_of(expected)
    missing = [r.id for r in found.collect() if r.prediction is None]
    assert missing == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 400, 401]
    # Also where few are kept, of which one is called as a field of a struct.
    few = tmp_path / "few"
    transformer.predict_files(source, few, columns=["price.net", "a.map", "price.net.0"])
    kept = spark.read.parquet(str(few))
    assert kept.columns == ["price.net", "price.net.0", "a.map", "prediction"]
    assert rows_of(kept) == rows_of(expected.select(*(f"`{name}`" for name in kept.columns)))
    for path in (tmp_path / "scored").glob("*.parquet"):
        (given,) = Path(source).glob("*.parquet")
        before, after = (stored_leaves(pq.ParquetFile(file)) for file in (given, path))
        assert after[: len(before)] == before


@pytest.mark.thorough
def test_what_cannot_be_done_is_refused_on_the_driver(
    run: Path, spark: Any, tmp_path: Path
) -> None:
    transformer = line(run)
    good = write(spark.sql("select 1 as id, array(1f, 2f) as x").coalesce(1), tmp_path / "good")
    target = tmp_path / "target"
    for options, error, match in (
        (
            {"columns": ["idd"]},
            DataError,
            "'idd'.*'id'.*'x'",
        ),
        ({"columns": "id"}, InvalidInputError, "columns"),
        ({"mode": "append"}, InvalidInputError, "mode.*error.*overwrite"),
    ):
        with pytest.raises(error, match=match):
            transformer.predict_files(good, target, **options)
    for source, name, match in (
        ("select 1 as id", "less", "'x'.*'id'"),
        ("select struct(1f) as x", "struct", "'x'.*struct<"),
        ("select 1d as x", "scalar", "'x'.*scalar.*'x'"),
        ("select array(1f) as x, 1 as PREDICTION", "taken", "'PREDICTION'"),
    ):
        place = write(spark.sql(source), tmp_path / name)
        with pytest.raises(DataError, match=match):
            transformer.predict_files(place, target)
    folders = f"{tmp_path}/folders"
    spark.sql("select 1 as id, 2f as x").write.partitionBy("x").parquet(folders)
    with pytest.raises(DataError, match="'x'.*transform"):
        transformer.predict_files(folders, target)
    with pytest.raises(DataError, match="/none .*exist"):
        transformer.predict_files(tmp_path / "none", target)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="Parquet"):
        transformer.predict_files(tmp_path / "none", target)
    (tmp_path / "none" / "broken.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(DataError, match=r"broken\.parquet.*Parquet"):
        transformer.predict_files(tmp_path / "none", target)
    for inner in (good, f"{good}/scored", str(tmp_path)):
        with pytest.raises(InvalidInputError, match=r"\bother|inside|within|contain|overlap"):
            transformer.predict_files(good, inner)
    assert not target.exists()


@pytest.mark.thorough
def test_params_hold_for_files(run: Path, spark: Any, tmp_path: Path) -> None:
    rows = [(0, [1.0, 2.0], [0.0, 0.0]), (1, None, [0.0, 0.0])]
    frame = spark.createDataFrame(rows, "id int, other array<float>, x array<float>").coalesce(1)
    source = write(frame, tmp_path / "source")
    names: dict[str, Any] = {"predictionCol": "p", "handleInvalid": "keep", "predictBatchSize": 1}
    renamed: list[dict[str, Any]] = [
        {"featuresCol": "other"},
        {"featureCols": ["other"]},
        {"featureCols": {"x": "other"}},
    ]
    for number, columns in enumerate(renamed):
        transformer = line(run).copy()
        for name, value in {**names, **columns}.items():
            transformer.set(transformer.getParam(name), value)
        target = tmp_path / str(number)
        assert transformer.predict_files(source, target, columns=["id"]) == 2
        found = spark.read.parquet(str(target))
        assert {tuple(row) for row in found.collect()} == {(0, 21.5), (1, None)}
        expected = transformer.transform(spark.read.parquet(source)).select("id", "p")
        assert found.schema == expected.schema
        assert rows_of(found) == rows_of(expected)
    message = r"\.parquet.*'other'.*null.*row 1\b.*batch.* 2"
    with pytest.raises(DataError, match=message):
        line(run, feature_cols=["other"]).predict_files(source, tmp_path / "error")
    with pytest.raises(DataError, match="'X'.*'id'"):
        line(run, feature_cols=["X"]).predict_files(source, tmp_path / "error")
    with pytest.raises(InvalidInputError, match="feature_cols="):
        line(run, feature_cols=["id", "x"]).predict_files(source, tmp_path / "error")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"probability_col": "shares"}, "probability_col='shares'"),
        (
            {"raw_prediction_col": "scores", "output_form": "vector"},
            "raw_prediction_col='scores'.*output_form='vector'",
        ),
        ({"output_form": "struct"}, "output_form='struct'"),
    ],
)
def test_what_only_spark_makes_of_outputs_is_refused(
    settings: dict[str, Any], named: str, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=f"{named}.*transform"):
        line(run, **settings).predict_files(tmp_path / "source", tmp_path / "target")


def test_a_destination_that_is_not_empty(run: Path, spark: Any, tmp_path: Path) -> None:
    source = write(spark.sql("select 1 as id, array(1f, 2f) as x").coalesce(1), tmp_path / "source")
    target = tmp_path / "target"
    (target / "day=1").mkdir(parents=True)
    (target / "day=1" / "old.parquet").write_text("old")
    with pytest.raises(InvalidInputError, match="target.*mode='overwrite'"):
        line(run).predict_files(source, target)
    broken = line(run, prediction_col="id")
    with pytest.raises(DataError, match="'id'"):
        broken.predict_files(source, target, mode="overwrite")
    assert (target / "day=1" / "old.parquet").read_text() == "old"
    assert line(run).predict_files(source, target, mode="overwrite") == 1
    assert not (target / "day=1").exists()
    assert spark.read.parquet(str(target)).first().prediction == 21.5


def write_long(place: Path) -> Path:
    """Write two files that take many seconds to score by rows."""
    place.mkdir()
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(2_000_000, np.float32)), 2)
    for name in ("a", "b"):
        table = pa.table({"id": np.arange(1_000_000), "x": x.cast(pa.list_(pa.float32()))})
        pq.write_table(table, place / f"{name}.parquet")
    return place


def when_it_runs(place: Path, act: Callable[[], Any]) -> threading.Thread:
    """Do something once a task has begun to write for ``place``."""

    def wait() -> None:
        for _ in range(600):
            if list(place.glob("_temporary-*/*.parquet")):
                act()
                return
            time.sleep(0.05)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def active_tasks(spark: Any) -> int:
    executors = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
    return sum(executor.numRunningTasks() for executor in executors)


def test_ctrl_c_ends_the_tasks_first(
    run: Path, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CANCEL_GRACE", 120.0)  # for slow machines
    source, target = write_long(tmp_path / "source"), tmp_path / "target"
    slow = line(run, predict_batch_size=1)
    # Not PySpark's own handler, which cancels all jobs of the application.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        waiting = when_it_runs(target, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            slow.predict_files(source, target)
        assert active_tasks(spark) == 0
        waiting.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert left(target) == []


@pytest.mark.thorough
def test_a_job_that_was_cancelled_through_spark(run: Path, spark: Any, tmp_path: Path) -> None:
    source, target = write_long(tmp_path / "source"), tmp_path / "target"
    waiting = when_it_runs(target, spark.sparkContext.cancelAllJobs)
    with pytest.raises(RunCancelledError, match="target.*cancel"):
        line(run, predict_batch_size=1).predict_files(source, target)
    waiting.join()
    assert left(target) == []


@pytest.mark.thorough
def test_a_source_file_that_vanishes_is_named(
    run: Path, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    x = pa.array([[1.0, 2.0]], pa.list_(pa.float32()))
    for name in ("a", "b"):
        pq.write_table(pa.table({"x": x}), tmp_path / "source" / f"{name}.parquet")
    planned = files._plan_files

    def plan(*args: Any, **options: Any) -> Any:
        made = planned(*args, **options)
        (tmp_path / "source" / "b.parquet").unlink()
        return made

    monkeypatch.setattr(files, "_plan_files", plan)
    with pytest.raises(DataError, match=r"source/b\.parquet"):
        line(run).predict_files(tmp_path / "source", tmp_path / "target")
    assert left(tmp_path / "target") == []


@pytest.mark.thorough
def test_several_outputs_of_a_network(spark: Any, tmp_path: Path) -> None:
    import keras

    from ..runs import save_run

    x = keras.Input((2,), name="x")
    model = keras.Model({"x": x}, {"twice": x * 2, "total": keras.ops.sum(x, 1, keepdims=True)})
    model.compile("sgd", "mse")
    save_run(tmp_path / "run", model, [Column("x", "float32", (2,))])
    frame = spark.range(5000).selectExpr("id", "array(float(id), 1f) as x")
    source = write(frame.coalesce(2), tmp_path / "source")
    transformer = TFTransformer.from_run(tmp_path / "run")
    assert transformer.predict_files(source, tmp_path / "scored") == 5000
    found = spark.read.parquet(str(tmp_path / "scored"))
    transformed = transformer.transform(spark.read.parquet(source))
    assert found.schema == transformed.schema
    assert rows_of(found) == rows_of(transformed)
