"""Attachments: contents too large for a call, in the run directory while the call trains."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from horovod_spark_runner.checkpoint.attachments import AttachedFile, contents_of, open_attachments
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.errors import CheckpointError
from horovod_spark_runner.storage.checksums import compute_checksum
from horovod_spark_runner.storage.contents import SMALL_BYTES, Contents, FilePart


def test_large_contents_go_by_the_run_directory_and_small_ones_along(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    (tmp_path / "handed").mkdir()
    (tmp_path / "handed" / "0003").write_bytes(b"of a call that was killed")
    small, large = Contents(b"small"), Contents(bytes(SMALL_BYTES), b"end")
    with open_attachments(directory) as attach:
        assert not (tmp_path / "handed").exists()
        assert attach(small) is small
        first, second = attach(large), attach(Contents(bytes(SMALL_BYTES + 1)))
        assert isinstance(first, AttachedFile)
        assert len(pickle.dumps((first, second))) < 1000
        assert attach(first) is first
        contents = contents_of(pickle.loads(pickle.dumps(first)))
        assert contents.size == large.size
        assert contents.read() == large.read()
        (folder,) = (tmp_path / "handed").iterdir()
        assert {path.name for path in folder.iterdir()} == {"0000", "0001"}
        with (folder / "0000").open("r+b") as file:
            file.write(b"x")
        with pytest.raises(CheckpointError, match="0000.*damaged"):
            contents_of(first)
        (folder / "0001").unlink()
        with pytest.raises(CheckpointError, match="0001.*missing.*run directory"):
            contents_of(second)
        (tmp_path / "handed" / "other").mkdir()  # of a call that has taken over the lock
    assert [path.name for path in (tmp_path / "handed").iterdir()] == ["other"]
    with open_attachments(directory) as attach:
        attach(large)
    assert not (tmp_path / "handed").exists()


def test_a_file_that_was_cut_meanwhile_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    contents = Contents(b"head", FilePart(str(tmp_path / "file"), 2, 8))
    assert contents.read() == contents.open().read() == b"head23456789"
    (tmp_path / "file").write_bytes(b"0123456")
    for read in (contents.read, lambda: compute_checksum(contents), lambda: contents.open().read()):
        with pytest.raises(OSError, match="shorter"):
            read()


def test_a_run_directory_that_does_not_take_them(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with (
        open_attachments(RunDirectory(str(tmp_path / "run"))) as attach,
        pytest.raises(CheckpointError, match="16,777,217 bytes"),
    ):
        attach(Contents(bytes(SMALL_BYTES + 1)))
