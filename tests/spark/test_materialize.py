"""DataFrames as datasets: all types are preserved, and the same data are written once."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import DataError, prepare_dataset
from horovod_spark_runner.cluster.spark.jobs import watch_jobs
from horovod_spark_runner.config.data import Materializer
from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.prepare.columns import DataRequest
from horovod_spark_runner.data.prepare.datasets import frame_of, rows_to_write
from horovod_spark_runner.data.prepare.fingerprint import source_fingerprint
from horovod_spark_runner.data.prepare.materialize import RowsIdentity, materialize
from horovod_spark_runner.data.prepare.parquet import open_parquet, read_footers
from horovod_spark_runner.data.prepare.schema import Roles
from horovod_spark_runner.data.read.reader import DatasetReader
from horovod_spark_runner.machine import repeat_in_thread
from horovod_spark_runner.storage.filesystem import Location
from tests.jobs import descriptions

pytestmark = pytest.mark.spark
HOSTILE = "a b'c\"d\né%20#?"


def request_for(*columns: str, **options: Any) -> DataRequest:
    return DataRequest(Roles(columns[:-1], columns[-1:]), **options)


def read(manifest: Manifest | None) -> dict[str, np.ndarray]:
    """Return all rows, in the order of the last column, which is a number."""
    assert manifest is not None
    with contextlib.closing(DatasetReader(manifest)) as reader:
        batches = list(reader.share(0, 1, 7))
    arrays = {c.name: np.concatenate([b.arrays[c.name] for b in batches]) for c in manifest.columns}
    order = np.argsort(arrays[manifest.columns[-1].name], kind="stable")
    return {name: values[order] for name, values in arrays.items()}


def png(array: np.ndarray, kind: str = "PNG") -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind)
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def npz(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, arr=array)
    return buffer.getvalue()


@pytest.mark.thorough
@pytest.mark.parametrize("materializer", ["petastorm", "spark"])
def test_every_type_comes_back(spark: Any, tmp_path: Path, materializer: Materializer) -> None:
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql import types as T

    fields = [
        ("b", T.BooleanType()),
        ("i8", T.ByteType()),
        ("i16", T.ShortType()),
        ("i32", T.IntegerType()),
        ("f32", T.FloatType()),
        ("f64", T.DoubleType()),
        ("kept", T.DoubleType()),
        ("dec", T.DecimalType(20, 4)),
        ("vec", VectorUDT()),
        ("arr", T.ArrayType(T.DoubleType())),
        ("flags", T.ArrayType(T.BooleanType())),
        ("deep", T.ArrayType(T.ArrayType(T.ArrayType(T.IntegerType())))),
        ("raw", T.BinaryType()),
        ("name with. `odd` é", T.FloatType()),
        ("i64", T.LongType()),
    ]
    deep = np.arange(12).reshape(2, 3, 2)
    rows = [
        (
            n % 2 == 0,
            n - 100,
            n * 100,
            n * 10**6,
            n / 3,
            n / 7,
            n / 7,
            Decimal(n) / 4,
            Vectors.dense([n, 0.0, 1.0]) if n % 2 else Vectors.sparse(3, {0: float(n), 2: 1.0}),
            [n / 3, 1.0],
            [True, n % 2 == 1],
            (deep + n).tolist(),
            np.array([n, n + 0.5, -n], np.float32).tobytes(),
            float(n),
            2**40 + n,
        )
        for n in range(100)
    ]
    schema = T.StructType([T.StructField(name, kind) for name, kind in fields])
    frame = spark.createDataFrame(rows, schema).repartition(3)
    request = request_for(
        *(name for name, _ in fields),
        dtypes={"kept": "float64", "raw": "float32"},
        shapes={"arr": (2, 1), "raw": (3,)},
        materializer=materializer,
    )
    manifest = materialize(frame, request, Location(tmp_path / HOSTILE)).manifest
    values = read(manifest)
    n = np.arange(100)
    expected: dict[str, Any] = {
        "b": (n % 2 == 0).astype(np.int8),
        "i8": (n - 100).astype(np.int8),
        "i16": (n * 100).astype(np.int16),
        "i32": (n * 10**6).astype(np.int32),
        "f32": (n / 3).astype(np.float32),
        "f64": (n / 7).astype(np.float32),
        "kept": n / 7,
        "dec": (n / 4).astype(np.float32),
        "vec": np.stack([n, 0 * n, 0 * n + 1], 1).astype(np.float32),
        "arr": np.stack([n / 3, 0 * n + 1], 1).astype(np.float32)[..., None],
        "flags": np.stack([n >= 0, n % 2 == 1], 1).astype(np.int8),
        "deep": (deep[None] + n[:, None, None, None]).astype(np.int32),
        "raw": np.stack([n, n + 0.5, -n], 1).astype(np.float32),
        "name with. `odd` é": n.astype(np.float32),
        "i64": 2**40 + n,
    }
    for name, array in expected.items():
        assert values[name].dtype == array.dtype, name
        np.testing.assert_array_equal(values[name], array, err_msg=name)


def test_encoded_images_and_arrays(spark: Any, tmp_path: Path) -> None:
    from PIL import Image

    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (20, 6, 5, 3), dtype=np.uint8)
    arrays = generator.normal(size=(20, 2, 3))
    rows = [
        (png(image), png(image[:, :, 0]), npy(array), npz(array.astype(np.int16)), number)
        for number, (image, array) in enumerate(zip(images, arrays, strict=True))
    ]
    schema = "image binary, grey binary, npy binary, npz binary, id int"
    frame = spark.createDataFrame(rows, schema)
    request = request_for(
        "image", "grey", "npy", "npz", "id", shapes={"image": (6, 5, 3), "grey": (3, 5, 1)}
    )
    manifest = materialize(frame, request, Location(tmp_path)).manifest
    values = read(manifest)
    np.testing.assert_array_equal(values["image"], images)
    assert values["grey"].shape == (20, 3, 5, 1)
    for value, image in zip(values["grey"], images, strict=True):
        resized = Image.fromarray(image[:, :, 0]).resize((5, 3), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(value[..., 0], np.asarray(resized))
    np.testing.assert_array_equal(values["npy"], arrays.astype(np.float32))
    np.testing.assert_array_equal(values["npz"], arrays.astype(np.int16))


def test_formats_of_images_may_be_mixed(spark: Any, tmp_path: Path) -> None:
    smooth = np.linspace(0, 255, 16 * 16, dtype=np.uint8).reshape(16, 16)
    kinds = ("PNG", "JPEG", "GIF")
    rows = [(png(np.roll(smooth, 5 * n, 1), kinds[n % 3]), n) for n in range(12)]
    frame = spark.createDataFrame(rows, "image binary, id int")
    request = request_for("image", "id", shapes={"image": (16, 16, 3)})
    values = read(materialize(frame, request, Location(tmp_path)).manifest)
    assert values["id"].tolist() == list(range(12))
    for number, image in zip(values["id"], values["image"], strict=True):
        expected = np.roll(smooth, 5 * number, 1)[..., None].astype(int)
        assert abs(image - expected).mean() < (4 if number % 3 == 1 else 1e-9)  # JPEG loses some


def test_other_formats_of_images_are_no_raw_elements(spark: Any, tmp_path: Path) -> None:
    smooth = np.linspace(0, 255, 16 * 16, dtype=np.uint8).reshape(16, 16)
    kinds = ("WEBP", "BMP", "TIFF", "PNG")
    rows = [(png(smooth, kinds[n % 4]), png(smooth.astype(np.uint16) * 257), n) for n in range(8)]
    frame = spark.createDataFrame(rows, "image binary, deep binary, id int").coalesce(1)
    request = request_for(
        "image", "deep", "id", shapes={"image": (16, 16, 1), "deep": (16, 16)}, materializer="spark"
    )
    manifest = materialize(frame, request, Location(tmp_path)).manifest
    assert manifest.column("image").dtype == "uint8"
    assert manifest.column("deep").dtype == "uint16"
    values = read(manifest)
    assert abs(values["image"].astype(int) - smooth[..., None]).max() < 20
    assert (values["deep"] == smooth.astype(np.uint16) * 257).all()
    heic = spark.createDataFrame([(b"\0\0\0\x18ftypheic" + bytes(9), 1)], "image binary, id int")
    request = request_for("image", "id", shapes={"image": (4, 4, 3)}, materializer="spark")
    with pytest.raises(DataError, match="'image'.*decode"):
        materialize(heic, request, Location(tmp_path))


@pytest.mark.parametrize("materializer", ["petastorm", "spark"])
def test_strings_come_back(spark: Any, tmp_path: Path, materializer: Materializer) -> None:
    rows = [
        (f"wörd {n}" if n % 3 else "", ["a", str(n)], [[str(n)], ["b"]], n % 4 / 2, n)
        for n in range(50)
    ]
    schema = "s string, words array<string>, deep array<array<string>>, w double, id int"
    frame = spark.createDataFrame(rows, schema).repartition(3)
    roles = Roles(("s", "words", "deep"), ("id", "w", "id"), "w")
    request = DataRequest(
        roles, dtypes={"s": "string"}, shapes={"words": (2, 1)}, materializer=materializer
    )
    manifest = materialize(frame, request, Location(tmp_path / "data")).manifest
    assert [c.name for c in manifest.columns] == ["s", "words", "deep", "id", "w"]
    with contextlib.closing(DatasetReader(manifest)) as reader:
        batches = list(reader.share(0, 1, 100))
    arrays = {c.name: np.concatenate([b.arrays[c.name] for b in batches]) for c in manifest.columns}
    seen = sorted(
        zip(*(arrays[name].tolist() for name in ("id", "s", "words", "deep", "w")), strict=True)
    )
    assert seen == [(n, s, [["a"], [str(n)]], deep, w) for s, _, deep, w, n in rows]
    # As files of their own, they are read as they are.
    frame.write.parquet(str(tmp_path / "files"))
    direct = open_parquet(Location(tmp_path / "files"), request_for("s", "words", "id"))
    assert direct is not None
    assert direct.column("words").shape == (2,)
    assert read(direct)["s"].tolist() == [row[0] for row in rows]


def test_one_file_is_a_dataset(spark: Any, source: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    from horovod_spark_runner import prepare_dataset

    for name in ("part.parquet", "without an ending"):
        file = tmp_path / name
        file.write_bytes(next(Path(source).glob("*.parquet")).read_bytes())
        data = prepare_dataset(file, ["a", "id"])
        assert data.manifest.files == (name,)
        rows = pq.read_table(file, columns=["id"])["id"].to_pylist()
        assert 0 < len(rows) < 1000
        assert read(data.manifest)["a"].tolist() == pytest.approx([n / 3 for n in rows])
        assert data.rows == len(rows)
        data.delete()
        assert file.exists()
    again = prepare_dataset(str(file), ["a"], dtypes={"a": "float64"}, data_dir=str(tmp_path / "d"))
    assert again.rows == data.rows
    assert again.manifest.column("a").dtype == "float64"


def test_what_new_data_are_cast_to(spark: Any) -> None:
    from horovod_spark_runner.data.prepare.columns import expression, sources_of_features

    frame = spark.createDataFrame([(1, 0.5, "7", 1, 2)], "i int, f double, s string, q int, Q int")
    for name, dtype, message in (
        ("s", "float32", "'s'.*string.*float32"),
        ("i", "string", "'i'.*integer.*string"),
        ("f", "int64", "'f'.*double.*int64"),
    ):
        (column,) = sources_of_features(frame, [name])
        with pytest.raises(DataError, match=message):
            expression(replace(column, dtype=dtype))
    for name, dtype, kind, value in (
        ("i", "float32", "float", 1.0),
        ("f", "float64", "double", 0.5),
        ("s", "string", "string", "7"),
        ("i", "int8", "tinyint", 1),
    ):
        (column,) = sources_of_features(frame, [name])
        cast = frame.select(expression(replace(column, dtype=dtype)))
        assert cast.dtypes == [(name, kind)]
        assert cast.first()[0] == value
    with pytest.raises(DataError, match="'q'.*'Q'"):
        sources_of_features(frame, ["q"])


def test_a_broken_image_is_named_by_its_row(spark: Any, tmp_path: Path) -> None:
    rows = [(png(np.zeros((4, 4, 3), np.uint8)), n) for n in range(9)]
    rows[5] = (rows[5][0][:30], 5)
    frame = spark.createDataFrame(rows, "image binary, id int").coalesce(1)
    request = request_for("image", "id", shapes={"image": (4, 4, 3)})
    manifest = materialize(frame, request, Location(tmp_path)).manifest
    message = r"'image'.*decode.*row 5\b.*row group 0\b.*parquet"
    with pytest.raises(DataError, match=message):
        read(manifest)


@pytest.fixture
def source(spark: Any, tmp_path: Path) -> str:
    folder = str(tmp_path / HOSTILE / "source")
    spark.range(1000).selectExpr("id", "id / 3 as a").write.parquet(folder)
    return folder


def test_the_same_files_are_written_once(spark: Any, source: str, tmp_path: Path) -> None:
    cache = Location(tmp_path / "cache")

    def run(query: str = "id >= 0", **options: Any) -> Any:
        frame = spark.read.parquet(source).filter(query)
        return materialize(frame, request_for("a", "id", **options), cache)

    first = run()
    assert not first.reused
    assert first.manifest.source
    again = run()
    assert again.reused
    assert again.manifest == first.manifest
    changes: list[dict[str, Any]] = [
        {"query": "id > 0"},
        {"dtypes": {"a": "float64"}},
        {"shapes": {}},
    ]
    for change in changes:
        assert run(**change).reused == (change == {"shapes": {}})
    # The same path with other rows: Petastorm's own cache would give the old ones.
    spark.range(1000, 1100).selectExpr("id", "id / 3 as a").write.mode("overwrite").parquet(source)
    changed = run()
    assert not changed.reused
    assert read(changed.manifest)["id"].tolist() == list(range(1000, 1100))
    assert run().reused
    # What input files do not tell: plans within expressions, and what was cached from files.
    stored = spark.read.parquet(source)
    for query in (
        "a - (SELECT avg(a) FROM {e}) AS a, id FROM {e}",
        "* FROM {e} WHERE id IN (SELECT id FROM {e})",
    ):
        assert source_fingerprint(spark.sql(f"SELECT {query}", e=stored)) == ""
    fingerprint = source_fingerprint(stored)
    assert fingerprint
    # What the same plan makes of the same files under other settings.
    for name, value in {
        "spark.sql.files.ignoreCorruptFiles": "true",
        "spark.sql.legacy.timeParserPolicy": "LEGACY",
    }.items():
        spark.conf.set(name, value)
        try:
            assert source_fingerprint(stored) not in ("", fingerprint), name
        finally:
            spark.conf.unset(name)
    assert source_fingerprint(stored) == fingerprint
    stored.cache()
    try:
        assert source_fingerprint(spark.read.parquet(source).select("a")) == ""
    finally:
        stored.unpersist()
    # A dataset of which a file was cut or lost is not used.
    file = Path(changed.manifest.url, changed.manifest.files[0])
    file.write_bytes(file.read_bytes()[:-1])
    written = run()
    assert not written.reused
    assert run().manifest == written.manifest
    Path(written.manifest.url, written.manifest.files[-1]).unlink()
    assert not run().reused


@pytest.mark.thorough
@pytest.mark.parametrize("difference", ["size", "time"])
def test_a_file_of_the_same_name_is_told_apart(
    spark: Any, source: str, tmp_path: Path, difference: str
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def run() -> Any:
        frame = spark.read.parquet(source)
        return materialize(frame, request_for("a", "id"), Location(tmp_path / "cache"))

    first = run()
    assert run().reused
    file = next(Path(source).glob("*.parquet"))
    before = file.stat()
    if difference == "size":
        table = pq.read_table(file).append_column("more", pa.array([0] * len(pq.read_table(file))))
        pq.write_table(table, file)
        (file.parent / f".{file.name}.crc").unlink()
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_size != before.st_size
    else:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    changed = run()
    assert not changed.reused
    assert changed.manifest.source != first.manifest.source
    np.testing.assert_array_equal(read(changed.manifest)["id"], np.arange(1000))


@pytest.mark.thorough
def test_rows_from_memory_and_user_functions_are_compared_by_content(
    spark: Any, tmp_path: Path
) -> None:
    from pyspark.sql import functions as F

    cache = Location(tmp_path)

    def run(add: int, partitions: int = 1) -> Any:
        frame = spark.createDataFrame([(float(n), n) for n in range(50)], "a double, id int")
        user = F.udf(lambda x: x + add, "double")
        frame = frame.repartition(partitions, "id").withColumn("a", user("a"))
        assert source_fingerprint(frame) == ""
        return materialize(frame, request_for("a", "id"), cache)

    assert not run(1).reused
    assert run(1).reused
    assert run(1, partitions=3).reused  # in another order
    # How elements are shared out among columns, and nested, is part of the contents.
    series = [float(n) for n in range(12)]

    def cut(at: int, rows: int) -> Any:
        nested = [series[n : n + 12 // rows] for n in range(0, 12, 12 // rows)]
        row = [(series[:at], series[at:], nested, 1)]
        schema = "past array<double>, future array<double>, m array<array<double>>, id int"
        request = request_for("past", "future", "m", "id")
        return materialize(spark.createDataFrame(row, schema), request, cache)

    for at, rows in ((10, 2), (8, 2), (8, 3)):
        dataset = cut(at, rows)
        assert not dataset.reused
        shapes = [column.shape for column in dataset.manifest.columns[:3]]
        assert shapes == [(at,), (12 - at,), (rows, 12 // rows)]
    assert cut(10, 2).reused
    changed = run(2)
    assert not changed.reused
    assert read(changed.manifest)["a"][0] == 2.0
    assert run(1).reused


def test_rows_are_known_by_their_identity_once_they_are_deleted(spark: Any, tmp_path: Path) -> None:
    rows = spark.range(8).selectExpr("id / 8 as a", "id")
    rows.write.parquet(str(tmp_path / "files"))
    files = spark.read.parquet(str(tmp_path / "files"))
    request, said = request_for("a", "id"), list[str]()

    def identity(frame: Any) -> RowsIdentity:
        return RowsIdentity.of(materialize(frame, request, Location(tmp_path / "data")).manifest)

    def fits(identity: RowsIdentity, frame: Any, request: DataRequest = request) -> bool:
        return identity.fits(frame, request, said.append)

    assert fits(identity(files), spark.read.parquet(str(tmp_path / "files")))
    assert not said, "no pass over the rows"
    computed = spark.createDataFrame(rows.collect(), rows.schema)
    assert fits(identity(files), computed.orderBy("id", ascending=False))
    assert not fits(identity(files), rows.filter("id < 7"))
    assert not fits(identity(files), rows.union(rows.filter("id < 2")))
    assert not fits(identity(files), rows, request_for("a", "id", dtypes={"a": "float64"}))
    assert any("1 pass" in line for line in said)
    nested = rows.selectExpr("array(array(a)) as a", "id")
    assert not fits(identity(nested), nested), "whose sizes are not kept"


def test_passes_are_reported_as_they_are(spark: Any, tmp_path: Path) -> None:
    from horovod_spark_runner import DataOptions
    from horovod_spark_runner.data.prepare.datasets import prepare_datasets

    computed = spark.sparkContext.accumulator(0)

    def prepare(frame: Any, place: str, validation: float | None = None) -> tuple[int, list[str]]:
        """Return how often the rows were computed, and what was reported."""
        before, lines = computed.value, list[str]()
        with prepare_datasets(
            frame,
            Roles(("a",), ("id",)),
            DataOptions(data_dir=str(tmp_path / place)),
            validation,
            Location(tmp_path / "own"),
            0,
            lines.append,
        ):
            pass
        return (computed.value - before) // 200, lines

    def rows(add: int) -> Any:
        def make(number: int) -> tuple[float, int]:
            computed.add(1)
            return float(number + add), number

        return spark.createDataFrame(spark.sparkContext.range(200).map(make), "a double, id long")

    assert prepare(rows(0), "data") == (1, [])
    assert prepare(rows(0), "split", 0.25) == (1, []), "Spark caches them"
    passes, (line,) = prepare(rows(0), "data")
    assert passes == 1
    assert str(tmp_path / "data") in line
    assert ".cache()" in line
    passes, (line,) = prepare(rows(1), "data")
    assert passes == 2
    cached = rows(2).cache()
    try:
        assert prepare(cached.withColumn("a", cached["a"]), "data") == (1, [])
    finally:
        cached.unpersist()


def test_threads_write_the_same_rows_once(spark: Any, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    cache, frame = Location(tmp_path), spark.range(500).selectExpr("double(id) AS a", "id")

    def run(number: int) -> bool:
        column = "a" if number < 3 else "b"
        columns = frame.withColumnRenamed("a", column)
        return materialize(columns, request_for(column, "id"), cache).reused

    with ThreadPoolExecutor(4) as threads:
        reused = list(threads.map(run, range(4)))
    assert sorted(reused[:3]) == [False, True, True]
    assert reused[3] is False
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.thorough
def test_another_process_reuses(spark: Any, source: str, tmp_path: Path) -> None:
    cache = Location(tmp_path / "cache")
    frame = spark.read.parquet(source).filter("id < 500").withColumnRenamed("a", "x")
    first = materialize(frame, request_for("x", "id"), cache)
    assert first.manifest.source  # so its plan tells, not a look at its rows
    code = f"""
from pyspark.sql import SparkSession
from horovod_spark_runner.data.prepare.fingerprint import source_fingerprint
from horovod_spark_runner.data.prepare.columns import DataRequest
from horovod_spark_runner.data.prepare.materialize import materialize
from horovod_spark_runner.data.prepare.schema import Roles
from horovod_spark_runner.storage.filesystem import Location
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
frame = spark.read.parquet({source!r}).filter("id < 500").withColumnRenamed("a", "x")
found = materialize(frame, DataRequest(Roles(("x",), ("id",))), Location({str(cache)!r}))
print(found.reused, found.manifest.url == {first.manifest.url!r})
print(source_fingerprint(frame.select("x", "id")) == {first.manifest.source!r})
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert run.stdout.split() == ["True", "True", "True"]


def test_parquet_files_are_read_as_they_are(spark: Any, tmp_path: Path) -> None:
    folder = Location(tmp_path / HOSTILE)
    frame = spark.range(100).selectExpr(
        "id / 7 as a", "array(id, id + 1) as v", "encode(lpad(id, 4, '0'), 'utf-8') as raw",
        "id % 2 = 0 as even", "'text' as ignored", "id",
    )  # fmt: skip
    frame.repartition(3).write.parquet(folder.spark_url)
    manifest = open_parquet(folder, request_for("a", "v", "raw", "even", "id"))
    assert manifest is not None
    values = read(manifest)
    n = np.arange(100)
    np.testing.assert_array_equal(values["a"], (n / 7).astype(np.float32))
    np.testing.assert_array_equal(values["v"], np.stack([n, n + 1], 1))
    np.testing.assert_array_equal(values["even"], (n % 2 == 0).astype(np.int8))
    assert values["raw"][42].tobytes() == b"0042"
    assert list(tmp_path.iterdir()) == [tmp_path / HOSTILE]
    # What has to be converted is left to Spark.
    assert open_parquet(folder, request_for("a", "id", dtypes={"a": "float64"})) is None
    frame.selectExpr("cast(a as decimal(9, 2)) as a", "id").write.parquet(str(tmp_path / "d"))
    assert open_parquet(Location(tmp_path / "d"), request_for("a", "id")) is None
    frame.write.partitionBy("even").parquet(str(tmp_path / "p"))
    assert open_parquet(Location(tmp_path / "p"), request_for("a", "even")) is None
    # Spark reads the files that are read without it: also in folders of any name.
    (tmp_path / "p" / "2").write_bytes(next((tmp_path / "p").rglob("*.parquet")).read_bytes())
    assert frame_of(tmp_path / "p").count() == sum(
        g.rows for g in read_footers(Location(tmp_path / "p")).row_groups
    )
    # Of a stream's files those that its log tells of.
    schema = spark.read.parquet(str(tmp_path / "d")).schema
    stream = spark.readStream.schema(schema).parquet(str(tmp_path / "d"))
    sink = stream.writeStream.format("parquet").trigger(availableNow=True)
    sink = sink.option("checkpointLocation", str(tmp_path / "c"))
    sink.start(str(tmp_path / "s")).awaitTermination()
    (tmp_path / "s" / "half.parquet").write_bytes(b"of an attempt that failed")
    assert open_parquet(Location(tmp_path / "s"), request_for("a", "id")) is None
    assert frame_of(tmp_path / "s").count() == 100


def test_faults_in_parquet_files_are_named(spark: Any, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(name: str, **columns: Any) -> Location:
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({**columns, "id": [0, 1, 2]}), tmp_path / name / "f.parquet")
        return Location(tmp_path / name)

    ragged = write("ragged", v=[[1.0, 2.0], [1.0], [1.0, 2.0]])
    with pytest.raises(DataError, match=r"'v'.*length.*\b2\b"):
        open_parquet(ragged, request_for("v", "id"))
    # Equal in sum, and NaN, which pyarrow's footers do not tell: the reader finds them.
    ragged = write("even", v=[[1.0, 2.0], [1.0], [1.0, 2.0, 3.0]])
    manifest = open_parquet(ragged, request_for("v", "id"))
    with pytest.raises(DataError, match=r"'v'.*array.*\b2\b"):
        read(manifest)
    nan = write("nan", v=[1.0, 2.0, float("nan")])
    with pytest.raises(DataError, match=r"'v'.*NaN.* row 2\b.*row group 0"):
        read(open_parquet(nan, request_for("v", "id")))
    assert np.isnan(read(open_parquet(nan, request_for("v", "id", allow_nan=True)))["v"]).any()
    large = write("large", v=[1.0, 2.0, 1e300])
    with pytest.raises(DataError, match="'v'.*float32"):
        read(open_parquet(large, request_for("v", "id")))


def test_a_petastorm_dataset_is_read_without_its_unischema(spark: Any, tmp_path: Path) -> None:
    """Rows as Petastorm's codecs encode them; the schema, a pickle, is left alone."""
    from horovod_spark_runner.data.prepare import petastorm_compat

    with petastorm_compat._missing_names():
        from petastorm.codecs import CompressedNdarrayCodec, NdarrayCodec
        from petastorm.unischema import UnischemaField

    arrays = np.random.default_rng(1).normal(size=(30, 2, 3)).astype(np.float32)
    images = np.random.default_rng(1).integers(0, 256, (30, 4, 4, 3), dtype=np.uint8)
    field = UnischemaField("m", np.float32, (2, 3), NdarrayCodec(), False)
    rows = [
        (
            bytearray(NdarrayCodec().encode(field, array)),
            bytearray(CompressedNdarrayCodec().encode(field, array)),
            bytearray(png(image)),  # what CompressedImageCodec("png") makes with OpenCV
            number,
        )
        for number, (array, image) in enumerate(zip(arrays, images, strict=True))
    ]
    folder = Location(tmp_path / "dataset")
    frame = spark.createDataFrame(rows, "matrix binary, packed binary, image binary, id int")
    frame.write.parquet(folder.spark_url)
    Path(str(folder), "_common_metadata").write_bytes(b"a pickle")
    request = request_for("matrix", "packed", "image", "id", shapes={"image": (4, 4, 3)})
    manifest = open_parquet(folder, request)
    assert manifest is not None
    values = read(manifest)
    np.testing.assert_array_equal(values["matrix"], arrays)
    np.testing.assert_array_equal(values["packed"], arrays)
    np.testing.assert_array_equal(values["image"], images)


def test_jobs_say_in_spark_what_they_are(spark: Any, source: str, tmp_path: Path) -> None:
    from horovod_spark_runner import DataOptions
    from horovod_spark_runner.data.prepare.datasets import prepare_datasets

    context = spark.sparkContext
    context.setJobDescription("the user's own")
    try:
        frame, run_folder = spark.read.parquet(source), Location(tmp_path / "own")
        with prepare_datasets(frame, Roles(("a",), ("id",)), DataOptions(), None, run_folder, 0):
            assert context.getLocalProperty("spark.job.description") == "the user's own"
    finally:
        context.setLocalProperty("spark.job.description", None)
    expected = f"the user's own: Horovod: writing rows to train on to {run_folder}"
    assert expected in descriptions(spark)


def test_what_takes_long_is_told_while_it_lasts(spark: Any, tmp_path: Path) -> None:
    def slow(batches: Any) -> Any:
        for batch in batches:
            time.sleep(0.3)
            yield batch

    frame = spark.range(1000).repartition(12).mapInArrow(slow, "id long")
    lines: list[str] = []
    with (
        watch_jobs(spark, expected=1012) as progress_of_jobs,
        repeat_in_thread(lambda: lines.append(progress_of_jobs()), "looks", every=0.1),
    ):
        spark.range(12).write.parquet(str(tmp_path / "first"))
        frame.write.parquet(str(tmp_path / "rows"))
    spark.range(10).count()
    pattern = r"([\d,]+)\D+1,012\D+(\d+)\D+12\b.*"
    matches = [re.fullmatch(pattern, line) for line in lines]
    progress = [(int(one[1].replace(",", "")), int(one[2])) for one in matches if one is not None]
    assert len(progress) >= 3, lines
    assert progress == sorted(progress)
    assert 12 < progress[-1][0] <= 1012, "those of both jobs"
    assert 0 < progress[-1][1] < 12
    assert not [tag for tag in spark.sparkContext.getJobTags() if "told" in tag]


def test_rows_are_counted_ahead_where_that_costs_nothing(spark: Any, tmp_path: Path) -> None:
    place = str(tmp_path / "rows")
    spark.range(1000).repartition(3).write.parquet(place)
    stored = spark.read.parquet(place)
    assert rows_to_write(place, None) == 1000
    assert rows_to_write(stored.selectExpr("id + 1 AS id").orderBy("id"), 0.2) == 1000
    assert rows_to_write(stored, stored) == 2000
    for frame in (stored.filter("id > 3"), stored.limit(9), stored.union(stored)):
        assert rows_to_write(frame, None) is None


@pytest.mark.thorough
def test_where_data_are_kept_and_for_how_long(spark: Any, source: str, tmp_path: Path) -> None:
    from horovod_spark_runner import DataOptions, RankFailedError, prepare_dataset
    from horovod_spark_runner.data.prepare.datasets import DATA_DIR_SETTING, prepare_datasets
    from horovod_spark_runner.errors import RunDirectoryError

    frame = spark.read.parquet(source)
    cache, run_folder = tmp_path / "cache é", Location(tmp_path / "run" / "data")
    roles = Roles(("a",), ("id",))

    def run(fail: BaseException | None = None, validation: Any = None, **options: Any) -> bool:
        with prepare_datasets(
            frame, roles, DataOptions(**options), validation, run_folder, 0
        ) as data:
            if fail is not None:
                raise fail
            return data.reused

    def count(folder: Any) -> int:
        return len(list(Path(str(folder)).glob("data-*")))

    assert not run()
    assert count(run_folder) == 0
    for error in (
        RankFailedError("boom", rank=0, host="h"),
        RunDirectoryError("another batch_size within an epoch"),
        DataError("an image is damaged"),
        SystemExit(),
    ):
        with pytest.raises(type(error)):
            run(fail=error)
        assert count(run_folder) == 1
    with pytest.raises(DataError, match="no rows.*validat"):
        run(validation=frame.filter("id < 0"))  # refused, so that none are written anew
    assert count(run_folder) == 1
    assert run()  # what the failed runs left
    assert count(run_folder) == 0
    with pytest.raises(DataError, match="no rows.*validat"):
        run(validation=frame.filter("id < 0"))
    assert count(run_folder) == 0
    run(keep_data=True)
    assert count(run_folder) == 1
    # A cache directory, by Spark's setting or by argument.
    spark.conf.set(DATA_DIR_SETTING, str(cache))
    try:
        assert not run(keep_data=False)
        assert count(cache) == 0
        assert not run()
        assert prepare_dataset(frame, ["a", "id"]).rows == 1000
    finally:
        spark.conf.unset(DATA_DIR_SETTING)
    assert count(cache) == 1  # both have the same columns
    assert run(data_dir=str(cache))
    assert not run(data_dir=str(cache), keep_data=False)
    assert count(cache) == 1
    # Files of the user's own are never deleted.
    data = prepare_dataset(source, ["id"], data_dir=str(cache))
    assert data.manifest.url == source
    data.delete()
    assert data.rows == sum(len(b["id"]) for b in data.share(rank=0, size=1, batch_size=10))


@pytest.mark.thorough
def test_a_stratified_split_keeps_proportions(spark: Any) -> None:
    from horovod_spark_runner.data.prepare.split import split_rows

    rows = [(float(n), "abc"[min(n % 10, 2)], n % 4) for n in range(1000)]
    frame = spark.createDataFrame(rows, "a double, kind string, y int").repartition(5)

    def split(seed: int, stratify: str | None) -> tuple[list[float], dict[str, int]]:
        with split_rows(frame, 0.2, Roles(("a",), ("y",)), seed, stratify) as (train, held):
            assert held is not None
            assert train.columns == held.columns == ["a", "kind", "y"]
            held_rows, left = held.collect(), train.collect()
        assert len(held_rows) + len(left) == 1000
        assert not {row.a for row in held_rows} & {row.a for row in left}
        kinds = [row.kind for row in held_rows]
        return sorted(row.a for row in held_rows), {kind: kinds.count(kind) for kind in "abc"}

    chosen, counts = split(0, "kind")
    assert counts == {"a": 20, "b": 20, "c": 160}
    assert split(0, "kind")[0] == chosen != split(1, "kind")[0]
    # Which takes some doing: by their hashes alone, about as many are chosen of each.
    plain = [split(seed, None)[1] for seed in range(3)]
    assert all(160 < sum(by_chance.values()) < 240 for by_chance in plain)
    assert counts not in plain


def test_null_in_a_validation_column_is_an_error(spark: Any) -> None:
    from horovod_spark_runner.data.prepare.split import split_rows

    frame = spark.createDataFrame([(1.0, 0, 1), (2.0, 1, None)], "a double, y int, held int")
    with (
        pytest.raises(DataError, match="validation.*'held'.* 1 null"),
        split_rows(frame, "held", Roles(("a",), ("y",)), 0),
    ):
        pass


@pytest.mark.parametrize("materializer", ["petastorm", "spark"])
def test_a_byte_that_has_changed_in_the_rows_is_noticed(
    spark: Any, materializer: Materializer, tmp_path: Path
) -> None:
    frame = spark.range(500).selectExpr("array(float(rand(1)), float(rand(2))) as x")
    data = prepare_dataset(frame, ["x"], data_dir=str(tmp_path), materializer=materializer)
    part = max(tmp_path.rglob("*.parquet"))
    contents = bytearray(part.read_bytes())
    contents[len(contents) // 3] ^= 1
    part.write_bytes(contents)
    with pytest.raises(DataError, match="CRC") as caught:
        list(data.epoch(0, rank=0, size=1, batch_size=64))
    assert part.name in str(caught.value)
