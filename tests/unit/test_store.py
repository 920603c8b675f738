"""Store of materialized datasets: found, listed, cleared by age and never by accident."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from horovod_spark_runner.commands.cli import main
from horovod_spark_runner.data.manifest import FORMAT, Column, Manifest, RowGroup
from horovod_spark_runner.data.store import (
    clear_datasets,
    delete_dataset,
    discard_datasets,
    find_datasets,
    list_datasets,
    mark_used,
    new_folder,
    publish,
    sweep_incomplete,
)
from horovod_spark_runner.errors import CheckpointError
from horovod_spark_runner.storage import retries
from horovod_spark_runner.storage.checksums import seal
from horovod_spark_runner.storage.filesystem import Location

KEY, OTHER = "0123456789abcdef", "f" * 16
DAY = 86400.0


def store(folder: Location, key: str = KEY, *, age: float = 0, complete: bool = True) -> Path:
    place = new_folder(folder, key)
    place.join("rows").make_folder()
    place.join("rows", "part-0.parquet").write_text("12345")
    if complete:
        columns = (Column("x", "float32", (2,)),)
        groups = (RowGroup(0, 0, 3, 5),)
        files = ("rows/part-0.parquet",)
        publish(Manifest(str(place), files, columns, groups, "c", (5,)))
    then = time.time() - age
    for file in Path(str(place)).rglob("*"):
        os.utime(file, (then, then))
    return Path(str(place))


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    place = Location(tmp_path / "a b'c\"d\né%20#?")
    place.make_folder()
    return place


def test_manifests_survive(folder: Location) -> None:
    place = store(folder)
    (dataset,) = find_datasets(folder, KEY)
    assert Manifest.from_json(dataset.to_json()) == dataset
    assert dataset.url == str(place)
    with pytest.raises(ValueError, match="format"):
        Manifest.from_json(seal(json.dumps({"format": FORMAT - 1})))


def test_a_manifest_in_which_anything_has_changed_is_none(folder: Location) -> None:
    place = store(folder)
    path = Path(str(place)) / "manifest.json"
    data = path.read_bytes()
    for changed in range(len(data)):
        path.write_bytes(data[:changed] + bytes([data[changed] ^ 1]) + data[changed + 1 :])
        assert list(find_datasets(folder, KEY)) == []
    path.write_bytes(data)
    assert len(list(find_datasets(folder, KEY))) == 1


def test_only_whole_datasets_for_the_same_request_are_found(folder: Location) -> None:
    store(folder, OTHER)
    store(folder, complete=False)
    cut = store(folder)
    (cut / "rows" / "part-0.parquet").write_text("1")
    lost = store(folder)
    (lost / "rows" / "part-0.parquet").unlink()
    garbled = store(folder)
    (garbled / "manifest.json").write_text("{")
    good = store(folder)
    assert [manifest.url for manifest in find_datasets(folder, KEY)] == [str(good)]


def test_what_cannot_be_read_now_is_not_taken_for_incomplete(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = store(folder)

    def fail(place: Location, limit: int) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Location, "read_bytes", fail)
        broken.setattr(retries, "PAUSES", ())
        assert sweep_incomplete(folder, float("-inf"), time.time()) == []
        with pytest.raises(CheckpointError, match="Input/output error"):
            list(find_datasets(folder, KEY))
    assert [manifest.url for manifest in find_datasets(folder, KEY)] == [str(place)]


def test_what_killed_writers_left_is_swept_by_age(folder: Location) -> None:
    old, new = (store(folder, age=age, complete=False) for age in (8 * DAY, DAY))
    complete = store(folder, age=100 * DAY)
    swept = sweep_incomplete(folder, 7 * DAY, time.time())
    assert [str(dataset.location) for dataset in swept] == [str(old)]
    assert new.exists()
    assert complete.exists()


def test_cleaning_up_never_fails(
    folder: Location, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would take a finished training with it, or keep one from a cache of another user."""
    store(folder)
    store(folder, age=9 * DAY, complete=False)
    (dataset,) = find_datasets(folder, KEY)

    def refuse(place: Location, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(place))

    with monkeypatch.context() as patched:
        for name in ("delete_folder", "write_bytes"):
            patched.setattr(Location, name, refuse)
        mark_used(dataset)
        sweep_incomplete(folder, 7 * DAY, time.time())
        delete_dataset(dataset, quietly=True)
        discard_datasets(folder)
        with pytest.raises(PermissionError):
            delete_dataset(dataset)
        assert len([r for r in caplog.records if "Permission denied" in r.message]) == 5
        patched.setattr(Location, "list", refuse)
        discard_datasets(folder)
        sweep_incomplete(folder, 7 * DAY, time.time())
        monkeypatch.setattr(retries, "PAUSES", ())
        with pytest.raises(CheckpointError, match="Permission denied"):
            list(find_datasets(folder, KEY))
    discard_datasets(folder)
    assert folder.list() == []


def test_clearing_spares_what_is_younger_or_not_ours(folder: Location) -> None:
    old, new = store(folder, age=10 * DAY), store(folder, age=DAY)
    theirs = Path(str(folder)) / "data-of-mine"
    theirs.mkdir()
    (theirs / "precious").write_text("")
    os.utime(theirs / "precious", (0, 0))
    deleted = clear_datasets(folder, 5 * DAY, time.time())
    assert [str(dataset.location) for dataset in deleted] == [str(old)]
    assert [Path(str(d.location)) for d in list_datasets(folder)] == [new]
    clear_datasets(folder, 0, time.time() + 1)
    assert list(Path(str(folder)).iterdir()) == [theirs]


def test_the_command(folder: Location, capsys: pytest.CaptureFixture[str]) -> None:
    store(folder, age=10 * DAY)
    store(folder, age=3 * DAY, complete=False)
    assert main(["data", "list", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "  10d " in shown
    assert "3 rows of x" in shown
    assert "incomplete" in shown
    assert "2 datasets" in shown
    assert main(["data", "clear", str(folder), "--older-than", "5d"]) == 0
    assert "1 dataset," in capsys.readouterr().out
    assert len(list_datasets(folder)) == 1


@pytest.mark.parametrize("action", [["list"], ["clear", "--older-than", "1d"]])
def test_a_place_that_is_no_folder_is_an_error(
    action: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.parquet"
    file.touch()
    for place, why in ((file, "file"), (tmp_path / "typo", "exist")):
        assert main(["data", *action, str(place)]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert re.search(rf"error: .*{place}\b.*\b{why}\b.*folder", shown.err)


def test_storage_that_fails_is_an_error_without_a_traceback(
    folder: Location, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: Location) -> None:
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr(Location, "list", fail)
    assert main(["data", "list", str(folder)]) == 1
    assert "error: [Errno 13] Permission denied" in capsys.readouterr().err


def test_a_run_directory_is_recognised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    store(Location(tmp_path / "data"))
    assert main(["data", "list", str(tmp_path)]) == 0
    assert "1 dataset," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("older_than", "ages", "left"),
    [("90s", (80, 100), "1m"), ("1.5h", (5300, 5500), "1h"), ("1w", (6 * DAY, 8 * DAY), "6d")],
)
def test_ages(
    older_than: str,
    ages: tuple[float, float],
    left: str,
    folder: Location,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for age in ages:
        store(folder, age=age)
    assert main(["data", "clear", str(folder), "--older-than", older_than]) == 0
    assert "deleted 1 dataset," in capsys.readouterr().out
    assert main(["data", "list", str(folder)]) == 0
    assert f" {left} " in capsys.readouterr().out


@pytest.mark.parametrize("age", ["", "7", "d", "-1d", "7 days", "soon"])
def test_an_invalid_age(age: str, folder: Location, capsys: pytest.CaptureFixture[str]) -> None:
    store(folder, age=400 * DAY)
    assert main(["data", "clear", str(folder), f"--older-than={age}"]) == 1
    assert f"{age!r}" in capsys.readouterr().err
    assert len(list_datasets(folder)) == 1


@pytest.mark.parametrize(("size", "shown"), [(10, "10 B"), (1536, "1.5 KiB")])
def test_sizes(size: int, shown: str, folder: Location, capsys: pytest.CaptureFixture[str]) -> None:
    (store(folder, complete=False) / "rows" / "part-0.parquet").write_bytes(bytes(size))
    assert main(["data", "list", str(folder)]) == 0
    assert f" {shown} " in capsys.readouterr().out


def test_the_identity_of_data_is_not_its_place() -> None:
    column = Column("x", "float32", (2,))
    manifest = Manifest("/a", ("f",), (column,), (RowGroup(0, 0, 3, 5),), "c", (5,))
    assert manifest.fingerprint == replace(manifest, url="/b", files=("g",)).fingerprint
    assert manifest.fingerprint != replace(manifest, checksum="d").fingerprint
    flat = replace(manifest, columns=(replace(column, shape=(1, 2)),))
    assert manifest.fingerprint != flat.fingerprint
