"""A folder that replaces another: the old one stays until the new one is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_spark_runner.ml.stage_files import read_metadata, write_metadata
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.storage.folders import replace_folder


def folder(path: Path, text: str) -> Location:
    path.mkdir()
    (path / "file").write_text(text)
    return Location(path)


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


def test_metadata_of_another_stage_do_not_stay(tmp_path: Path) -> None:
    """In an object store nothing is renamed, and Spark's own stages call their parts otherwise."""
    stage = Location(tmp_path)
    stage.join("metadata").make_folder()
    stage.join("metadata", "part-00000-4e-c000.txt").write_text("of another")
    write_metadata(stage, "{}")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "_SUCCESS", "metadata", "part-00000"
    ]  # fmt: skip
    assert read_metadata(stage) == "{}\n"
