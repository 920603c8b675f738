"""Folders of Parquet files: the files that count, and whether they have the same columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovod_spark_runner.config.prediction import PredictionSettings
from horovod_spark_runner.data.manifest import Column, Manifest
from horovod_spark_runner.data.prepare.columns import DataRequest
from horovod_spark_runner.data.prepare.datasets import match_columns
from horovod_spark_runner.data.prepare.parquet import open_parquet, parquet_files, read_footers
from horovod_spark_runner.data.prepare.schema import Roles
from horovod_spark_runner.errors import DataError
from horovod_spark_runner.model.predict_files import FilesRequest, _plan_files
from horovod_spark_runner.storage.filesystem import Location

REQUEST = DataRequest(Roles(("x",), ("y",), "w"))


def write(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def rows(path: Path) -> None:
    write(path, x=[1.0, 2.0], w=[1.0, 2.0], y=[3.0, 4.0])


def test_every_file_counts_that_is_not_hidden(tmp_path: Path) -> None:
    place = Location(tmp_path)
    for name in ("1.parquet", "2.pq", "3"):
        rows(tmp_path / name)
    for name in ("_started", ".4.parquet", "5.parquet._COPYING_", "_temporary/0/6.parquet"):
        rows(tmp_path / name)
    (tmp_path / "mark").touch()
    manifest = open_parquet(place, REQUEST)
    assert manifest is not None
    assert manifest.files == ("1.parquet", "2.pq", "3")
    assert manifest.rows == 6
    (tmp_path / "notes").write_text("rows of May")
    with pytest.raises(DataError, match=r"notes\b.*Parquet.*\bname"):
        open_parquet(place, REQUEST)


def test_folders_of_columns_and_of_other_names(tmp_path: Path) -> None:
    place = Location(tmp_path)
    rows(tmp_path / "_k%20a=1" / "l=2" / "1")
    assert parquet_files(place).partitions == ("_k a", "l")
    assert open_parquet(place, REQUEST) is not None
    request = replace(REQUEST, roles=Roles(("x",), ("L",)))
    assert open_parquet(place, request) is None  # Spark takes it from the folder's name
    rows(tmp_path / "2.parquet")
    assert parquet_files(place).partitions is None
    assert read_footers(place).files[-1].name == "_k%20a=1/l=2/1"


@pytest.mark.parametrize(
    ("log", "below"),
    [
        ("_spark_metadata/0", ""),
        ("_delta_log/00.json", ""),
        (".hoodie/a.commit", ""),
        ("metadata/v1.metadata.json", ""),
        ("_delta_log/00.json", "k=1/l=2"),
        ("metadata/00-a.metadata.json", "data"),
        ("metadata/00-a.metadata.json", "data/k=1"),
    ],
)
def test_what_a_log_tells_of_files_is_not_passed_over(tmp_path: Path, log: str, below: str) -> None:
    table, source = tmp_path / "in", tmp_path / "in" / below
    rows(source / "1.parquet")
    (table / log).parent.mkdir()
    (table / log).write_text("v1")
    assert open_parquet(Location(source), REQUEST) is None
    target = Location(tmp_path / "out")
    request = FilesRequest(Location(source), target, None, "error", PredictionSettings())
    predictor: Any = None  # the files are looked at first
    with pytest.raises(DataError, match=rf"files.*{log.partition('/')[0]}\b"):
        _plan_files(request, predictor, 1, by_case=False)


def test_a_folder_that_is_named_as_one_of_a_table_is_none(tmp_path: Path) -> None:
    rows(tmp_path / "data" / "k=1" / "1.parquet")
    rows(tmp_path / "data" / "metadata" / "1.parquet")
    assert parquet_files(Location(tmp_path / "data")).log == ""
    assert parquet_files(Location(tmp_path / "data" / "k=1")).log == ""


@pytest.mark.parametrize(
    "second",
    [
        {"x": [5.0], "y": [6.0], "w": [-1.0]},  # w where y is in the first
        {"more": pa.array([None], pa.int64()), "x": [5.0], "w": [1.0], "y": [6.0]},
        {"x": [5.0], "w": [1.0]},
        {"x": pa.array([5], pa.date32()), "w": [1.0], "y": [6.0]},
    ],
    ids=["order", "more", "fewer", "type"],
)
def test_files_of_other_columns_are_left_to_spark(tmp_path: Path, second: dict[str, Any]) -> None:
    rows(tmp_path / "1.parquet")
    write(tmp_path / "0.parquet", x=pa.array([], pa.int64()))  # an empty one does not matter
    assert open_parquet(Location(tmp_path), REQUEST) is not None
    write(tmp_path / "2.parquet", **second)
    assert open_parquet(Location(tmp_path), REQUEST) is None


def test_names_that_could_be_a_fields_are_left_to_spark(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", x=[{"y": 1.0}], **{"x.y": [2.0]})
    request = DataRequest(Roles(("x.y",), (), labelled=False))
    assert open_parquet(Location(tmp_path), request) is None


def test_numbers_are_not_validated_as_strings() -> None:
    text = Manifest("u", (), (Column("x", "string"),), (), "c")
    numbers = replace(text, columns=(Column("x", "int32"),))
    for ours, theirs in ((numbers, text), (text, numbers)):
        with pytest.raises(DataError, match="validation.*'x'"):
            match_columns(ours, theirs)
    wider = replace(text, columns=(Column("x", "int64"),))
    assert match_columns(wider, numbers).columns == numbers.columns
