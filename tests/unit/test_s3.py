"""Object storage, against moto's S3 server in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovod_spark_runner import Dataset
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.data.manifest import Column, Manifest
from horovod_spark_runner.data.prepare.parquet import read_footers
from horovod_spark_runner.data.store import (
    clear_datasets,
    delete_dataset,
    find_datasets,
    list_datasets,
    new_folder,
    publish,
)
from horovod_spark_runner.engines.keras import saved
from horovod_spark_runner.storage.filesystem import Location

from ..object_store import empty_folder, s3_server

BUCKET = "s3://bucket"
HOSTILE = "a b'c é%20#+"
KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Location:
    return empty_folder(server, f"{BUCKET}/{HOSTILE}", monkeypatch)


def test_files_and_folders(bucket: Location) -> None:
    assert bucket.spark_url == f"s3a://bucket/{HOSTILE}"
    assert not bucket.exists()
    assert bucket.list() == []
    bucket.join("x", "é.txt").write_text("é")
    assert bucket.join("x", "é.txt").read_text() == "é"
    assert Location(f"s3a://bucket/{HOSTILE}/x/é.txt").read_text() == "é"
    assert [str(place) for place in bucket.list()] == [f"{BUCKET}/{HOSTILE}/x"]
    (stat,) = bucket.files()
    assert (stat.name, stat.size) == ("x/é.txt", 2)
    assert stat.changed > 10**18
    bucket.delete_folder()
    assert not bucket.exists()


def test_places_that_are_joined_share_a_client(bucket: Location) -> None:
    """Making one takes longer than asking a distant store twice."""
    file = bucket.join("a").join(HOSTILE, "b")
    assert file._resolved[0] is bucket._resolved[0]
    assert file._resolved[1] == Location(str(file))._resolved[1]


def test_run_directories(bucket: Location) -> None:
    directory = RunDirectory(bucket)
    directory.check_writable()
    directory.write_config({"a": 1})
    assert directory.config.exists()


def make_dataset(bucket: Location) -> Manifest:
    place = new_folder(bucket, KEY)
    filesystem, path = place._resolved
    for part in range(3):
        tags = np.arange(part * 40, part * 40 + 40)
        table = pa.table({"id": tags, "v": [[float(t), 1.0] for t in tags]})
        pq.write_table(
            table, f"{path}/rows/part-{part}.parquet", row_group_size=15, filesystem=filesystem
        )
    facts = read_footers(place)
    manifest = Manifest(
        str(place),
        tuple(file.name for file in facts.files),
        (Column("id", "int64"), Column("v", "float32", (2,))),
        facts.row_groups,
        "c",
        tuple(file.size for file in facts.files),
    )
    publish(manifest)
    return manifest


def test_datasets_are_found_read_and_cleared(bucket: Location) -> None:
    manifest = make_dataset(bucket)
    assert list(find_datasets(bucket, KEY)) == [manifest]
    data = Dataset(manifest)
    seen = [
        int(tag)
        for rank in range(3)
        for batch in data.epoch(1, rank=rank, size=3, batch_size=4)
        for tag in batch["id"]
    ]
    assert sorted(seen) == list(range(120))
    make_dataset(bucket)
    assert len(list_datasets(bucket)) == 2
    delete_dataset(manifest)
    (left,) = list_datasets(bucket)
    (cleared,) = clear_datasets(bucket, 0, left.used + 1)
    assert cleared.manifest == left.manifest
    assert list_datasets(bucket) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("hsr-")]


def test_an_export_is_there_once_it_is_whole(
    bucket: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "variables").mkdir()
    files = {"saved_model.pb": b"graph", "variables/a": b"1", "variables/b": b"2"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    columns = [Column("x", "float32", (3,))]
    saved.publish(tmp_path, bucket, columns)
    assert {file.name for file in bucket.files()} == {*files, "columns.json"}
    export = saved.read_exported(bucket)
    assert export is not None
    assert export.columns == tuple(columns)
    assert set(export.sums) == set(files)
    (tmp_path / "variables" / "a").unlink()
    saved.publish(tmp_path, bucket, columns)
    assert {file.name for file in bucket.files()} == {*files, "columns.json"} - {"variables/a"}
    copy = Location.copy_to

    def failing(source: Location, target: Location, seen: object) -> None:
        if source.name == "b":
            raise OSError("storage is away")
        copy(source, target, seen)  # type: ignore[arg-type]

    monkeypatch.setattr(Location, "copy_to", failing)
    with pytest.raises(OSError, match="storage is away"):
        saved.publish(tmp_path, bucket, columns)
    assert not bucket.join("saved_model.pb").exists()  # so no reader takes it for whole
