"""Locations, run directories and checkpoints on local storage."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner.checkpoint.files import (
    CheckpointInfo,
    best_step,
    load_checkpoint,
    newest_checkpoint,
    newest_readable,
    prune_checkpoints,
    read_info,
    save_checkpoint,
    verify_checkpoint,
)
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.config.training import CheckpointOptions
from horovod_spark_runner.errors import CheckpointError, InvalidInputError, RunDirectoryError
from horovod_spark_runner.storage import retries
from horovod_spark_runner.storage.arrays import dump_arrays, load_arrays
from horovod_spark_runner.storage.checksums import seal, unseal
from horovod_spark_runner.storage.filesystem import Location

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
    # Hadoop's paths have neither queries nor fragments, and two runs may differ in these alone.
    for name in ("run#1", "run?1", "a?b=c#d", "a\nb", "half["):
        assert str(Location(f"file://{tmp_path}/{name}")) == f"{tmp_path}/{name}"
    assert str(Location((tmp_path / "run#1").as_uri())) == f"{tmp_path}/run#1"
    assert str(Location("file:runs/1")) == str(tmp_path / "runs/1")


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        (Path("s3://bucket/run"), "s3://bucket/run"),
        ("gs:/bucket/run", "gs://bucket/run"),
        ("hdfs:/runs/1", "hdfs:///runs/1"),
        ("dbfs:/runs/1", "/dbfs/runs/1"),
    ],
)
def test_half_a_url_is_no_local_folder(place: Any, hint: str) -> None:
    with pytest.raises(InvalidInputError, match=f"URL.*{hint}"):
        Location(place)


def test_the_home_folder_is_not_a_folder_called_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert str(Location("~/runs")) == str(Location(Path("~/runs"))) == f"{tmp_path}/runs"
    assert str(Location("~")) == str(tmp_path)
    assert str(Location("./~")) == f"{tmp_path}/~"
    assert str(Location(tmp_path).join("~")) == f"{tmp_path}/~"
    with pytest.raises(InvalidInputError, match=r"~nosuch/x.*~nosuch.*\./~nosuch"):
        Location("~nosuch/x")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (None, "path.*URL.*None"),
        ("", "path.*URL.*''"),
        (3, r"path.*URL.*\b3"),
        (b"/tmp", "path.*URL"),
        ("file://data/x", "'data'.*file:///path"),
        ("s3://half[/x", "URL.*Invalid IPv6"),
    ],
)
def test_what_is_no_place(place: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Location(place)


def test_the_folder_a_place_is_in(tmp_path: Path) -> None:
    assert str(Location(tmp_path / "a" / "b").parent) == str(tmp_path / "a")
    assert str(Location("s3://bucket/a/b").parent) == "s3://bucket/a"
    assert str(Location("s3://bucket/a/").parent) == "s3://bucket"
    assert str(Location("s3://bucket").parent) == "s3://bucket"
    # Without a name node, the default file system: what its paths begin with is no folder here.
    for place, above, beside in (
        ("hdfs:///a", "hdfs:///", "hdfs:///c"),
        ("hdfs:///a/b", "hdfs:///a", "hdfs:///a/c"),
        ("hdfs://name/a", "hdfs://name", "hdfs://name/c"),
    ):
        assert str(Location(place).parent) == above
        assert Location(place).parent.join("c").spark_url == beside


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


def test_what_cannot_be_appended_whole_is_not_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            if len(data) <= 2:
                raise OSError(28, "No space left on device")
            return super().write(bytes(data)[:2])  # what room there was

    place = Location(tmp_path / "log")
    place.append_bytes(b"one")
    with monkeypatch.context() as patched:
        module = "horovod_spark_runner.storage.filesystem.open"
        patched.setattr(module, lambda path, mode, **_: Full(path, mode), raising=False)
        with pytest.raises(OSError, match="No space left"):
            place.append_bytes(b"more")
    place.append_bytes(b"two")
    assert place.read_bytes() == b"onetwo"


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"^\S+file/run\b.*writ"):
        RunDirectory(str(tmp_path / "file" / "run")).check_writable()


def test_writability_probe_leaves_nothing(tmp_path: Path) -> None:
    RunDirectory(str(tmp_path / "run")).check_writable()
    assert list((tmp_path / "run").iterdir()) == []


def test_arrays_survive_with_their_types() -> None:
    import ml_dtypes

    arrays: dict[str, np.ndarray] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(3, dtype=np.int64),
        "c": np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16),
        "d": np.zeros((0, 4), dtype=np.uint32),
        "e": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "f": np.arange(10)[::2],
    }
    dumped = dump_arrays(arrays)
    with zipfile.ZipFile(io.BytesIO(dumped)) as archive:
        for name in "abdef":  # as NumPy writes them
            expected = io.BytesIO()
            np.save(expected, arrays[name])
            assert archive.read(f"{name}.npy") == expected.getvalue()
    loaded = load_arrays(dumped)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_nothing_is_unpickled() -> None:
    buffer = io.BytesIO()
    kinds = np.frombuffer(b"{}", np.uint8)
    np.savez(buffer, a=np.array([{"x": 1}], dtype=object), __dtypes__=kinds)
    with pytest.raises(ValueError, match="pickle"):
        load_arrays(buffer.getvalue())


def info(step: int, run_id: str = "r", **more: Any) -> CheckpointInfo:
    history = [{"loss": 1.0 / step}]
    return CheckpointInfo(
        step, step // 10, history, "abc", [("model/0", "w", [2], "f")], "e", run_id=run_id, **more
    )


def save(directory: RunDirectory, step: int, keep: int = 3, **more: Any) -> Path:
    files: dict[str, dict[str, np.ndarray]] = {
        "variables.npz": {"model/0": np.full(1000, step, dtype=np.float32)},
        "ranks.npz": {"00000/seed/00000": np.array([1, step], dtype=np.uint32)},
    }
    folder = save_checkpoint(directory, info(step, **more), files)
    prune_checkpoints(directory, step, CheckpointOptions(keep=keep))
    return Path(str(folder))


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(str(tmp_path / HOSTILE))


def test_checkpoints_come_back(directory: RunDirectory) -> None:
    folder = save(directory, 10)
    loaded, files = load_checkpoint(Location(folder))
    assert loaded == info(10)
    assert files["variables.npz"]["model/0"][0] == 10
    assert files["ranks.npz"]["00000/seed/00000"].tolist() == [1, 10]
    assert [p.name for p in folder.parent.iterdir()] == ["step-00000010"]


def test_checkpoints_of_before_say_nothing_of_the_model(directory: RunDirectory) -> None:
    folder = save(directory, 3)
    file = folder / "checkpoint.json"
    manifest = unseal(file.read_text())
    del manifest["model"]
    file.write_text(seal(json.dumps(manifest)))
    newest = newest_checkpoint(directory)
    assert newest is not None
    assert (newest[1].step, newest[1].model) == (3, {})


def test_the_newest_are_kept(directory: RunDirectory) -> None:
    for step in (10, 20, 30, 40):
        save(directory, step, keep=2)
    assert directory.checkpoint_steps() == [40, 30]


def test_the_best_is_kept_beside_the_newest(directory: RunDirectory) -> None:
    options = CheckpointOptions(keep=1, best_metric="val")
    for step, value in ((10, 3.0), (20, 1.0), (30, float("nan")), (40, 2.0)):
        checkpoint = replace(info(step), history=[{"val": value}])
        save_checkpoint(directory, checkpoint, {"variables.npz": {"a": np.zeros(1)}})
        prune_checkpoints(directory, step, options)
    assert directory.checkpoint_steps() == [40, 20]
    highest = CheckpointOptions(keep=1, best_metric="val", best_mode="max")
    infos = {step: read_info(directory.checkpoint(step)) for step in (20, 40)}
    assert best_step(infos, highest) == 40
    # Within an epoch there are no metrics of it yet.
    assert best_step({20: replace(infos[20], epoch_step=3), 40: infos[40]}, options) == 40


def test_a_step_saved_again_replaces_the_first(directory: RunDirectory) -> None:
    save(directory, 10, epoch_step=4)
    save(directory, 10)
    newest = newest_checkpoint(directory)
    assert newest is not None
    assert newest[1].epoch_step == 0


def test_what_was_damaged_does_not_push_out_what_is_whole(directory: RunDirectory) -> None:
    save(directory, 10)
    (save(directory, 40) / "variables.npz").write_bytes(b"")
    save(directory, 20, keep=1)  # went on from 10
    assert directory.checkpoint_steps() == [40, 20]
    (directory.checkpoints.join(".step-00000030.ab")).make_folder()  # of a killed writer
    (Path(str(directory.checkpoint(20))) / "checkpoint.json").unlink()
    save(directory, 30, keep=1)
    assert [place.name for place in directory.checkpoints.list()] == [
        "step-00000030",
        "step-00000040",
    ]


def test_none_is_found_where_none_is(directory: RunDirectory) -> None:
    assert newest_checkpoint(directory) is None


def damage_file(path: Path, damage: str) -> None:
    data = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        place = len(data) // 2
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(b"")


FILES = ["variables.npz", "ranks.npz", "checkpoint.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "empty"])
def test_a_damaged_checkpoint_is_skipped_loudly(
    directory: RunDirectory, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(directory, 10)
    damage_file(save(directory, 20) / file, damage)
    with caplog.at_level(logging.WARNING):
        newest = newest_readable(directory, load_checkpoint)
    assert newest is not None
    assert newest[0].name == "step-00000010"
    assert newest[2]["variables.npz"]["model/0"][0] == 10
    assert len(re.findall("step-00000020.*skipped", caplog.text)) == 1


def test_who_needs_no_arrays_reads_none(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(directory, 10)
    save(directory, 20)
    read = watch_reading(monkeypatch)
    newest = newest_checkpoint(directory)
    assert newest is not None
    assert newest[1] == info(20)
    assert read == ["step-00000020/checkpoint.json"]


def test_each_file_is_read_once(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    save(directory, 10)
    read = watch_reading(monkeypatch)
    assert newest_readable(directory, load_checkpoint) is not None
    assert sorted(read) == [f"step-00000010/{name}" for name in sorted(FILES)]


def watch_reading(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the files that are read from now on, as they are."""
    seen: list[str] = []

    def watch(how: str) -> None:
        read = getattr(Location, how)

        def reading(location: Location, *taken: Any) -> Any:
            seen.append(f"{location.parent.name}/{location.name}")
            return read(location, *taken)

        monkeypatch.setattr(Location, how, reading)

    for how in ("read_bytes", "spool", "scan"):
        watch(how)
    return seen


def test_one_that_is_newer_than_was_asked_for_does_not_count(directory: RunDirectory) -> None:
    save(directory, 10)
    save(directory, 20)
    newest_usable = newest_readable(directory, load_checkpoint, newest=19)
    assert newest_usable is not None
    assert newest_usable[1].step == 10


def test_any_flipped_byte_of_the_manifest_is_noticed(directory: RunDirectory) -> None:
    folder = save(directory, 10)
    path = folder / "checkpoint.json"
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match="."):
            verify_checkpoint(Location(folder))


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(
    directory: RunDirectory,
) -> None:
    damage_file(save(directory, 10) / "variables.npz", "flip")
    with pytest.raises(RunDirectoryError, match="resume.*step-00000010"):
        newest_readable(directory, load_checkpoint)


class Flaky:
    """Storage that fails for some files, a number of times each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: str, times: int) -> None:
        self.left = times
        for method in ("read_bytes", "read_text"):
            read = getattr(Location, method)
            monkeypatch.setattr(Location, method, self._failing(read, part))
        monkeypatch.setattr(retries, "PAUSES", (0.0, 0.0))

    def _failing(self, read: Callable[..., Any], part: str) -> Callable[..., Any]:
        def failing(location: Location, *arguments: Any) -> Any:
            if part in str(location) and self.left:
                self.left -= 1
                raise OSError(5, "503 Slow Down")
            return read(location, *arguments)

        return failing


@pytest.mark.parametrize("file", FILES)
def test_a_passing_read_error_skips_no_checkpoint(
    directory: RunDirectory, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(directory, 10)
    save(directory, 20)
    Flaky(monkeypatch, f"step-00000020/{file}", times=2)
    newest = newest_readable(directory, load_checkpoint)
    assert newest is not None
    assert newest[1].step == 20


def test_storage_that_stays_away_is_an_error(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(directory, 10)
    save(directory, 20)
    Flaky(monkeypatch, "step-00000020", times=1000)
    with pytest.raises(CheckpointError, match="step-00000020.*503 Slow Down"):
        newest_checkpoint(directory)
    assert directory.checkpoint_steps() == [20, 10]


def test_a_passing_read_error_deletes_no_checkpoint(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(directory, 10)
    save(directory, 20)
    options = CheckpointOptions(keep=1, best_metric="loss", best_mode="max")
    Flaky(monkeypatch, "step-00000010", times=1)
    prune_checkpoints(directory, 20, options)
    assert directory.checkpoint_steps() == [20, 10]
    prune_checkpoints(directory, 20, options)
    assert directory.checkpoint_steps() == [20, 10]  # it is the best


def test_a_foreign_checkpoint_is_passed_over(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    save(directory, 10, run_id="ours")
    save(directory, 20, run_id="theirs")
    with caplog.at_level(logging.WARNING):
        newest = newest_checkpoint(directory, "ours")
    assert newest is not None
    assert newest[1].step == 10
    assert re.search("theirs.*ours", caplog.text)


def test_metrics_are_one_object_per_epoch(directory: RunDirectory) -> None:
    directory.check_writable()
    directory.write_metrics([{"loss": 1.0}, {"loss": 0.5}])
    lines = directory.metrics.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"epoch": 0, "loss": 1.0},
        {"epoch": 1, "loss": 0.5},
    ]


def test_what_killed_writers_left_is_swept(tmp_path: Path) -> None:
    """Also folders, as of a SavedModel, and what lies beside them."""
    directory = RunDirectory(str(tmp_path))
    left = tmp_path / ".saved_model.0123abcd"
    (left / "variables").mkdir(parents=True)
    (left / "variables" / "half").write_bytes(b"half")
    (tmp_path / ".z.json.0123abcd").write_text("half")
    (tmp_path / ".saved_model.0123abcd.old").mkdir()
    (tmp_path / "saved_model").mkdir()
    directory.sweep()
    assert [path.name for path in tmp_path.iterdir()] == ["saved_model"]


def test_a_name_that_is_not_utf8_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    os.mkdir(os.fsencode(tmp_path) + b"/bad\xff")
    assert [place.name for place in Location(str(tmp_path)).list()] == ["whole"]
