"""Locations, run directories and checkpoints on local storage."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path

import numpy as np
import pytest

from horovod_spark_runner.errors import InvalidInputError, RunDirectoryError
from horovod_spark_runner.storage.arrays import dump_arrays, load_arrays
from horovod_spark_runner.storage.checkpoint import (
    CheckpointInfo,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.storage.run_directory import RunDirectory

HOSTILE = "a b'c\"d\né%20#?"


def test_locations_name_one_place_for_both_sides(tmp_path: Path) -> None:
    place = Location(tmp_path / HOSTILE)
    place.make_folder()
    place.join("x.txt").write_text("é")
    assert (tmp_path / HOSTILE / "x.txt").read_text() == "é"
    assert place.spark_url == f"file://{tmp_path / HOSTILE}"
    assert [str(p) for p in place.list()] == [str(tmp_path / HOSTILE / "x.txt")]
    assert pickle.loads(pickle.dumps(place)).join("x.txt").read_text() == "é"


def test_file_urls_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(Location("runs/1")) == str(tmp_path / "runs/1")
    assert str(Location(f"file://{tmp_path}/a%20b")) == f"{tmp_path}/a b"


def test_object_store_urls() -> None:
    assert Location("s3://bucket/run").spark_url == "s3a://bucket/run"
    assert Location("hdfs://name/run").join("x").spark_url == "hdfs://name/run/x"
    assert not Location("s3a://bucket/run").is_local


def test_an_unknown_file_system_is_named() -> None:
    with pytest.raises(InvalidInputError, match="nosuch://x/y"):
        Location("nosuch://x/y").exists()


def test_a_rewritten_file_leaves_no_part_behind(tmp_path: Path) -> None:
    place = Location(tmp_path / "f")
    place.write_text("one")
    place.write_text("two")
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert place.read_text() == "two"


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"file/run is not writable"):
        RunDirectory(str(tmp_path / "file" / "run")).check_writable()


def test_writability_probe_leaves_nothing(tmp_path: Path) -> None:
    RunDirectory(str(tmp_path / "run")).check_writable()
    assert list((tmp_path / "run").iterdir()) == []


def test_arrays_survive_with_their_types() -> None:
    import ml_dtypes

    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(3, dtype=np.int64),
        "c": np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16),
        "d": np.zeros((0, 4), dtype=np.uint32),
    }
    loaded = load_arrays(dump_arrays(arrays))
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_nothing_is_unpickled() -> None:
    import io

    buffer = io.BytesIO()
    np.savez(buffer, a=np.array([{"x": 1}], dtype=object))
    with pytest.raises(ValueError, match="pickle"):
        load_arrays(buffer.getvalue())


def info(step: int) -> CheckpointInfo:
    return CheckpointInfo(step, step // 10, [{"loss": 0.5}], "abc", [["model/0", "w", [2], "f"]])


def save(directory: RunDirectory, step: int, keep: int = 3) -> Path:
    arrays = {"model/0": np.full(1000, step, dtype=np.float32)}
    return Path(str(save_checkpoint(directory, info(step), arrays, keep)))


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(str(tmp_path / HOSTILE))


def test_checkpoints_come_back(directory: RunDirectory) -> None:
    folder = save(directory, 10)
    loaded, arrays = load_checkpoint(Location(folder))
    assert loaded == info(10)
    assert arrays["model/0"][0] == 10


def test_the_newest_are_kept(directory: RunDirectory) -> None:
    for step in (10, 20, 30, 40):
        save(directory, step, keep=2)
    assert directory.checkpoint_steps() == [40, 30]


def test_none_is_found_where_none_is(directory: RunDirectory) -> None:
    assert newest_checkpoint(directory) is None


@pytest.mark.parametrize("file", ["variables.npz", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "empty"])
def test_a_damaged_checkpoint_is_skipped_loudly(
    directory: RunDirectory, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(directory, 10)
    path = save(directory, 20) / file
    data = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        # In the manifest, a flipped digit of the sum; elsewhere the middle byte.
        place = data.index(b'npz": "') + 8 if file.endswith("json") else len(data) // 2
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        found = newest_checkpoint(directory)
    assert found is not None
    assert found.name == "step-00000010"
    assert "step-00000020 is skipped" in caplog.text


def test_metrics_are_one_object_per_epoch(directory: RunDirectory) -> None:
    directory.check_writable()
    directory.write_metrics([{"loss": 1.0}, {"loss": 0.5}])
    lines = directory.metrics.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"epoch": 0, "loss": 1.0},
        {"epoch": 1, "loss": 0.5},
    ]
