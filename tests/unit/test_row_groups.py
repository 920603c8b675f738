"""Row groups read ahead: any requests, in any order, return the contents of the files."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.data.prepare.parquet import manifest_of, read_footers
from horovod_spark_runner.data.read.decode import absent_classes
from horovod_spark_runner.data.read.row_groups import (
    IDLE_FILES,
    RowGroupReader,
    _ReadAhead,
    read_footer,
)
from horovod_spark_runner.data.read.sharding import Piece, plan_epoch
from horovod_spark_runner.errors import CheckpointError, DataError
from horovod_spark_runner.storage import retries
from horovod_spark_runner.storage.filesystem import Location

from .test_reader import dataset

SIZES = [[5, 3], [7, 1, 4], [6]]


@pytest.fixture
def reader(tmp_path: Path) -> RowGroupReader:
    manifest = dataset(tmp_path, SIZES).manifest
    return RowGroupReader(manifest, manifest.columns)


def all_pieces() -> list[Piece]:
    sizes = [rows for file in SIZES for rows in file]
    halves = [(Piece(i, 0, rows // 2), Piece(i, rows // 2, rows)) for i, rows in enumerate(sizes)]
    return [piece for pair in halves for piece in pair if piece.stop > piece.start]


def expected(piece: Piece) -> list[int]:
    starts = np.cumsum([0] + [rows for file in SIZES for rows in file])
    first = int(starts[piece.row_group])
    return list(range(first + piece.start, first + piece.stop))


def test_classes_that_no_row_has(tmp_path: Path) -> None:
    made = dataset(tmp_path, SIZES)  # the rows are numbered
    rows = sum(map(sum, SIZES))
    assert absent_classes(made.manifest, "id", [0, 3, rows - 1]) == []
    assert absent_classes(made.manifest, "id", [rows, 5, -1]) == [-1, rows]
    assert absent_classes(made.manifest, "id", []) == []
    assert not _open_in(tmp_path)


def test_files_that_have_changed_places_are_told(tmp_path: Path) -> None:
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    for path, label in ((first, 1.0), (second, 2.0)):
        pq.write_table(pa.table({"y": [label] * 5}), path, compression="none")
    facts = read_footers(Location(tmp_path))
    manifest = manifest_of(facts, [Column("y", "float64")], "c")
    assert first.stat().st_size == second.stat().st_size
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    reader = RowGroupReader(manifest, manifest.columns)
    with pytest.raises(DataError, match=f"{first}.*dataset"):
        reader.read(Piece(0, 0, 5))
    first.write_bytes(b"no Parquet")
    with pytest.raises(DataError, match=f"{first}.*Parquet"):
        reader.read(Piece(0, 0, 5))
    reader.close()


@pytest.mark.parametrize("announced", [True, False])
def test_storage_that_fails_for_a_moment_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    manifest = dataset(tmp_path, [[3]]).manifest
    reader = RowGroupReader(manifest, manifest.columns)
    read, failures, answers = reader._read_group, [5, 5], threading.Event()

    def fail(number: int) -> pa.Table:
        if failures:
            raise OSError(failures.pop(), "Input/output error")
        return read(number)

    def hang(number: int) -> pa.Table:
        answers.wait()
        return read(number)

    monkeypatch.setattr(retries, "PAUSES", (0.0, 0.0))
    piece = Piece(0, 0, 3)
    for act in (fail, hang):
        monkeypatch.setattr(reader, "_read_group", act)
        reader.announce([piece] if announced else [])
        if act is fail:
            assert reader.read(piece)["id"].tolist() == [0, 1, 2]
            failures += [5, 5, 5]
            reader.announce([piece] if announced else [])
            with pytest.raises(CheckpointError, match="parquet.*Input/output"):
                reader.read(piece)
    monkeypatch.setenv(retries.TIMEOUT_VARIABLE, "0.1")
    with pytest.raises(CheckpointError, match=r"parquet.*\b0\.1 s"):
        reader.read(piece)
    reader.close()  # which does not wait for it, either
    answers.set()


def test_a_page_that_does_not_decompress_is_told(tmp_path: Path) -> None:
    """Of a user's own file, without checksums: Arrow does not say which one it is."""
    path = tmp_path / "theirs.parquet"
    pq.write_table(pa.table({"y": np.arange(500.0)}), path, use_dictionary=False)
    manifest = manifest_of(read_footers(Location(tmp_path)), [Column("y", "float64")], "c")
    page = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    whole = path.read_bytes()
    for bit in range(800):
        changed = bytearray(whole)
        changed[page + bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            pq.ParquetFile(path).read_row_group(0)
        except pa.ArrowInvalid:
            break
        except Exception:  # told otherwise
            pass
    else:
        pytest.skip("this Arrow tells every damage otherwise")
    reader = RowGroupReader(manifest, manifest.columns)
    with pytest.raises(DataError, match=f"{path}.*damaged"):
        reader.read(Piece(0, 0, 5))
    reader.close()


def test_files_that_are_gone_are_told(tmp_path: Path) -> None:
    manifest = dataset(tmp_path, [[3]]).manifest
    next(tmp_path.iterdir()).unlink()
    reader = RowGroupReader(manifest, manifest.columns)
    with pytest.raises(DataError, match="parquet(?!.*footer).*dataset"):
        reader.read(Piece(0, 0, 3))
    reader.close()


@pytest.mark.parametrize("groups", [1, 2000])
def test_a_footer_of_any_size_is_read_as_pyarrow_reads_it(tmp_path: Path, groups: int) -> None:
    dataset(tmp_path, [[1] * groups])
    (path,) = tmp_path.iterdir()
    with pa.OSFile(str(path)) as file:
        footer, checksum = read_footer(file)
    assert footer.equals(pq.read_metadata(path))
    assert footer.num_row_groups == groups
    assert len(checksum) == 16
    assert (footer.serialized_size > 64 * 1024) == (groups > 1)


def _open_in(folder: Path) -> list[str]:
    """Return the files below ``folder`` that this process has open."""
    files = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            files.append(str(link.readlink()))
    return [path for path in files if path.startswith(str(folder))]


def test_a_dataset_of_many_files_keeps_few_of_them_open(tmp_path: Path) -> None:
    manifest = dataset(tmp_path, [[1]] * (3 * IDLE_FILES)).manifest
    reader = RowGroupReader(manifest, manifest.columns)
    pieces = [Piece(number, 0, 1) for number in range(len(manifest.row_groups))]
    for _ in range(2):
        reader.announce(pieces)
        assert [int(reader.read(piece)["id"][0]) for piece in pieces] == list(range(len(pieces)))
        assert 0 < len(_open_in(tmp_path)) <= IDLE_FILES + 4
    reader.close()
    assert not _open_in(tmp_path)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_asked_for_in_another_order_than_announced(
    reader: RowGroupReader, seed: int
) -> None:
    order = random.Random(seed)
    announced, requested = all_pieces(), all_pieces()
    order.shuffle(announced)
    order.shuffle(requested)
    reader.announce(announced[order.randrange(4) :])  # and some not announced at all
    for piece in requested:
        assert reader.read(piece)["id"].tolist() == expected(piece)
    reader.close()


def test_what_is_read_ahead_is_bounded_by_bytes(tmp_path: Path) -> None:
    manifest = dataset(tmp_path, SIZES).manifest
    size = max(group.size for group in manifest.row_groups)
    reader = RowGroupReader(manifest, manifest.columns, ahead=_ReadAhead(4, 2 * size))
    waiting = []
    reader.announce(all_pieces())
    for piece in all_pieces():
        reader.read(piece)
        waiting.append(sum(reader._group(number).size for number, _ in reader._ahead))
    assert 0 < max(waiting) <= 2 * size
    reader.close()


def test_a_row_group_larger_than_the_bound_is_still_read_ahead(tmp_path: Path) -> None:
    manifest = dataset(tmp_path, SIZES).manifest
    reader = RowGroupReader(manifest, manifest.columns, ahead=_ReadAhead(4, 1))
    reader.announce(all_pieces())
    reader.read(all_pieces()[0])
    assert len(reader._ahead) == 1
    reader.close()


def test_closing_ends_the_threads_and_closes_the_files(
    reader: RowGroupReader, tmp_path: Path
) -> None:
    reader.announce(all_pieces())
    reader.read(all_pieces()[0])
    assert [t for t in threading.enumerate() if t.name.startswith("hsr-row-groups")]
    assert _open_in(tmp_path)
    reader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("hsr-row-groups")]
    assert not _open_in(tmp_path)
    assert reader.read(all_pieces()[-1])["id"].tolist() == expected(all_pieces()[-1])
    reader.close()


def noting(read_group: Callable[[int], Any], read: list[int]) -> Callable[[int], Any]:
    """Return ``read_group`` so that ``read`` gets the numbers it is asked for."""

    def noted(number: int) -> Any:
        read.append(number)
        return read_group(number)

    return noted


def test_what_fits_is_read_from_storage_once(tmp_path: Path) -> None:
    manifest = dataset(tmp_path, SIZES).manifest
    size = sum(group.size for group in manifest.row_groups)
    for keep_bytes, again in [(size, False), (size - 1, True)]:
        reader = RowGroupReader(manifest, manifest.columns, keep_bytes)
        read: list[int] = []
        reader._read_group = noting(reader._read_group, read)  # type: ignore[assignment]
        for _ in range(3):
            reader.announce(all_pieces())
            for piece in all_pieces():
                assert reader.read(piece)["id"].tolist() == expected(piece)
        reader.close()
        groups = len(manifest.row_groups)
        assert sorted(read) == sorted([*range(groups)] * (3 if again else 1))


def test_a_row_group_that_is_kept_is_announced_once(tmp_path: Path) -> None:
    """Lanes share row groups: their parts are asked for at different times."""
    manifest = dataset(tmp_path, SIZES).manifest
    reader = RowGroupReader(manifest, manifest.columns, 1 << 30)
    read: list[int] = []
    reader._read_group = noting(reader._read_group, read)  # type: ignore[assignment]
    pieces = all_pieces()
    apart = pieces[::2] + pieces[1::2]
    reader.announce(apart)
    for piece in apart:
        assert reader.read(piece)["id"].tolist() == expected(piece)
    waiting = list(reader._ahead)
    reader.close()
    assert sorted(read) == list(range(len(manifest.row_groups)))
    assert not waiting


def test_lanes_need_their_next_blocks_one_after_the_other() -> None:
    plan = plan_epoch([(100, 100)] * 640, global_batch=16, seed=0, epoch=0, window_bytes=256 * 100)
    assert plan.lanes == 16
    begins = [block.first for lane in range(16) for block in plan.lane_blocks(lane)[1:2]]
    assert len(set(begins)) == 16
    announced = plan.pieces(0, 0, 1)
    assert sum(piece.stop - piece.start for piece in announced) == plan.rows
    later = plan.pieces(plan.steps // 2, 0, 1)
    assert plan.rows // 2 < sum(p.stop - p.start for p in later) < 0.75 * plan.rows
