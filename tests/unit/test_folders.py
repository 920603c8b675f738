"""Replacement of folders: the old one stays until the new one is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_spark_runner.model.persistence import _write_metadata, read_metadata
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.storage.folders import replace_folder, write_aside


def folder(path: Path, text: str) -> Location:
    path.mkdir()
    (path / "file").write_text(text)
    return Location(path)


def write_new(aside: Location) -> None:
    aside.make_folder()
    aside.join("file").write_text("new")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_takes_its_place(tmp_path: Path, replaced: bool) -> None:
    if replaced:
        folder(tmp_path / "stage", "old")
    replace_folder(Location(tmp_path / "stage"), folder(tmp_path / ".stage.new", "new"))
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]
    assert (tmp_path / "stage" / "file").read_text() == "new"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("storage fails")], ids=repr)
def test_the_old_one_is_there_again_if_the_new_one_cannot_be_moved(
    tmp_path: Path, error: BaseException
) -> None:
    class Stuck(Location):
        def exchange_with(self, other: Location) -> bool:
            return False

        def move_to(self, target: Location) -> None:
            raise error

    stage = folder(tmp_path / "stage", "old")
    folder(tmp_path / ".stage.new", "new")
    with pytest.raises(type(error)):
        replace_folder(stage, Stuck(tmp_path / ".stage.new"))
    assert (tmp_path / "stage" / "file").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"stage", ".stage.new"}


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_is_in_place_is_not_told_as_unwritten(
    tmp_path: Path,
    exchanges: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where another process has a file of the old one open on NFS."""

    def fail(place: Location) -> None:
        raise OSError(39, "Directory not empty", str(place))

    if not exchanges:
        monkeypatch.setattr(Location, "exchange_with", lambda self, other: False)
    monkeypatch.setattr(Location, "delete_folder", fail)
    stage = folder(tmp_path / "stage", "old")
    write_aside(stage, write_new)
    assert (tmp_path / "stage" / "file").read_text() == "new"
    assert "[Errno 39] Directory not empty" in caplog.text


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    folder(tmp_path / "v3", "old")
    (tmp_path / "latest").symlink_to("v3")
    latest = Location(tmp_path / "latest")
    write_aside(latest, write_new)
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "v3" / "file").read_text() == "new"
    latest.delete_folder()  # what it leads to is another's
    assert [path.name for path in tmp_path.iterdir()] == ["v3"]
    assert (tmp_path / "v3" / "file").read_text() == "new"


def test_metadata_of_another_stage_do_not_stay(tmp_path: Path) -> None:
    """In an object store nothing is renamed, and Spark's own stages call their parts otherwise."""
    stage = Location(tmp_path)
    stage.join("metadata").make_folder()
    stage.join("metadata", "part-00000-4e-c000.txt").write_text("of another")
    _write_metadata(stage, "{}")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "_SUCCESS", "metadata", "part-00000"
    ]  # fmt: skip
    assert read_metadata(stage) == "{}\n"
