"""Row groups to NumPy batches.

One thread reads ahead; what it holds is bounded by one block per lane (the shuffle window) and
four chunks of batches: two that wait, the one in the making and the one in use. Values go from
Parquet to NumPy without a detour through Python objects.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DataError
from ..storage.filesystem import Location
from .decode import RowDecoder, Transform, UndecodableRow
from .manifest import Column, Manifest
from .sharding import Block, EpochPlan, LaneSlice, Piece, contiguous_share

# Rows gathered at once, unless they take more than CHUNK_BYTES: batches are views into such a
# chunk, so that the cost per batch is small.
CHUNK_ROWS = 4096
CHUNK_BYTES = 8 * 1024 * 1024
# Chunks the reading thread may be ahead.
PREFETCH_CHUNKS = 2

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        step: step in the epoch, from 0.
        rows: rows in this part; 0 if the last global batch has fewer rows than there are ranks.
        arrays: values by column name, each of shape ``(rows, *column.shape)``.
    """

    step: int
    rows: int
    arrays: Arrays


class DatasetReader:
    """Reads a materialized dataset.

    Args:
        manifest: the dataset.
        columns: names of the columns to read; all by default.
        transforms: what to do with decoded images, by column.
    """

    def __init__(
        self,
        manifest: Manifest,
        columns: Sequence[str] | None = None,
        transforms: Mapping[str, Transform] | None = None,
    ) -> None:
        self._manifest = manifest
        names = [c.name for c in manifest.columns] if columns is None else list(columns)
        self._columns = [manifest.column(name) for name in dict.fromkeys(names)]
        self._location = Location(manifest.url)
        self._files: dict[int, pq.ParquetFile] = {}
        self._last: tuple[int, pa.Table] | None = None
        self._decode = RowDecoder(self._columns, transforms or {})
        row_bytes = max(1, sum(column.size for column in self._columns))
        self._chunk_rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // row_bytes))

    def epoch(self, plan: EpochPlan, rank: int, world: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of ``rank`` from ``first_step`` on, read ahead by a thread."""
        return _read_ahead(lambda: self._epoch_chunks(plan, rank, world, first_step))

    def share(self, rank: int, world: int, batch_size: int) -> Iterator[Batch]:
        """Yield this rank's contiguous share of all rows, in file order, for evaluation."""
        groups = [group.rows for group in self._manifest.row_groups]
        pieces = contiguous_share(groups, rank, world)
        return _read_ahead(lambda: self._share_chunks(pieces, batch_size))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._last = None
        self._decode.close()

    def _epoch_chunks(
        self, plan: EpochPlan, rank: int, world: int, first_step: int
    ) -> Iterator[list[Batch]]:
        lanes: dict[int, _Lane] = {}
        steps = max(1, self._chunk_rows * world // plan.global_batch)
        last = plan.steps - 1  # it may be partial, and is read by itself
        for begin in range(first_step, last, steps):
            yield self._gather(plan, lanes, rank, world, range(begin, min(begin + steps, last)))
        if first_step <= last:
            yield self._gather(plan, lanes, rank, world, range(last, plan.steps))

    def _gather(
        self, plan: EpochPlan, lanes: dict[int, _Lane], rank: int, world: int, steps: range
    ) -> list[Batch]:
        counts, wanted = plan.chunk(steps, rank, world)
        chunk = {c.name: _room(sum(counts), c) for c in self._columns}
        for lane, (positions, places) in wanted.items():
            if lane not in lanes:
                lanes[lane] = _Lane(plan.lane_blocks(lane), self._read_block)
            lanes[lane].copy_rows(positions, chunk, places)
        samples = np.concatenate([_sample_numbers(plan, s, rank, world) for s in steps])
        random = functools.partial(_generator, plan.seed, plan.epoch, samples)
        try:
            chunk = self._decode(chunk, random)
        except UndecodableRow as error:
            slices = plan.rank_slices(steps[error.row // counts[0]], rank, world)
            raise self._name_row(error, plan, slices, error.row % counts[0]) from error
        batches, offset = [], 0
        for step, count in zip(steps, counts, strict=True):
            arrays = {name: values[offset : offset + count] for name, values in chunk.items()}
            batches.append(Batch(step, count, arrays))
            offset += count
        return batches

    def _share_chunks(self, pieces: list[Piece], batch_size: int) -> Iterator[list[Batch]]:
        step = 0
        chunk_rows = max(1, self._chunk_rows // batch_size) * batch_size
        for piece in pieces:
            arrays = self._read_piece(piece)
            rows = piece.stop - piece.start
            for first in range(0, rows, chunk_rows):
                last = min(first + chunk_rows, rows)
                part = {name: values[first:last] for name, values in arrays.items()}
                try:
                    part = self._decode(part, _no_generator)
                except UndecodableRow as error:
                    raise self._row_error(error, piece, first + error.row) from error
                batches = []
                for begin in range(0, last - first, batch_size):
                    batch = {n: values[begin : begin + batch_size] for n, values in part.items()}
                    batches.append(Batch(step, min(batch_size, last - first - begin), batch))
                    step += 1
                yield batches

    def _name_row(
        self, error: UndecodableRow, plan: EpochPlan, slices: Sequence[LaneSlice], place: int
    ) -> DataError:
        for part in slices:
            if place < part.stop - part.start:
                piece, row = plan.locate(part.lane, part.start + place)
                return self._row_error(error, piece, row)
            place -= part.stop - part.start
        raise AssertionError("a row that was not asked for") from error

    def _row_error(self, error: UndecodableRow, piece: Piece, row: int) -> DataError:
        group = self._manifest.row_groups[piece.row_group]
        file = self._location.join(self._manifest.files[group.file])
        return DataError(
            f"{error.cause} (row {piece.start + row} of row group {group.index} of {file})"
        )

    def _read_block(self, block: Block) -> Arrays:
        """Return the rows of a block in their shuffled order."""
        if not block.shuffle and len(block.pieces) == 1:
            return self._read_piece(block.pieces[0])
        places = np.empty(block.rows, np.int64)
        places[block.order()] = np.arange(block.rows)
        arrays = {c.name: _room(block.rows, c) for c in self._columns}
        offset = 0
        for piece in block.pieces:  # one after the other, each put straight where it belongs
            rows = places[offset : offset + piece.stop - piece.start]
            for name, values in self._read_piece(piece).items():
                arrays[name][rows] = values
            offset += len(rows)
        return arrays

    def _read_piece(self, piece: Piece) -> Arrays:
        group = self._manifest.row_groups[piece.row_group]
        file = self._files.get(group.file)
        if file is None:
            path = self._location.join(self._manifest.files[group.file])
            file = self._files[group.file] = pq.ParquetFile(path.open_input())
        if self._last is None or self._last[0] != piece.row_group:
            table = file.read_row_group(group.index, columns=[c.name for c in self._columns])
            # Lanes begin where others end: the next block often needs the same row group.
            self._last = (piece.row_group, table) if table.nbytes <= CHUNK_BYTES else None
        else:
            table = self._last[1]
        rows = table.slice(piece.start, piece.stop - piece.start)
        arrays = {c.name: column_to_numpy(rows.column(c.name), c) for c in self._columns}
        if not self._manifest.verified:
            for column in self._columns:
                self._check_finite(arrays[column.name], column, piece)
        return arrays

    def _check_finite(self, values: np.ndarray, column: Column, piece: Piece) -> None:
        if values.dtype.kind != "f" or np.isfinite(values).all():
            return
        rows = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
        group = self._manifest.row_groups[piece.row_group]
        file = self._location.join(self._manifest.files[group.file])
        raise DataError(
            f"column {column.name!r} has values that are NaN or infinite, first in row "
            f"{piece.start + int(rows[0])} of row group {group.index} of {file}; let them pass "
            "with allow_nan=True"
        )


class _Lane:
    """Reads one lane front to back, one block at a time."""

    def __init__(self, blocks: Sequence[Block], read: Callable[[Block], Arrays]) -> None:
        self._blocks = blocks
        self._read = read
        self._number = -1
        self._arrays: Arrays = {}

    def copy_rows(self, positions: np.ndarray, target: Arrays, places: np.ndarray) -> None:
        """Copy the rows at ascending lane ``positions`` to ``places`` of ``target``."""
        done = 0
        while done < len(positions):
            block = self._load(int(positions[done]))
            end = int(np.searchsorted(positions, block.first + block.rows))
            first, last = int(positions[done]) - block.first, int(positions[end - 1]) - block.first
            rows: Any = slice(first, last + 1)
            if last - first >= end - done:  # another rank takes the rows in between
                rows = positions[done:end] - block.first
            for name, values in target.items():
                values[places[done:end]] = self._arrays[name][rows]
            done = end

    def _load(self, position: int) -> Block:
        number = max(self._number, 0)
        while position >= self._blocks[number].first + self._blocks[number].rows:
            number += 1
        block = self._blocks[number]
        if number != self._number:
            self._arrays = {}  # released before the next is read
            self._arrays = self._read(block)
            self._number = number
        return block


def column_to_numpy(values: pa.ChunkedArray, column: Column) -> np.ndarray:
    """Return a Parquet column as one array of shape ``(rows, *column.shape)``.

    Raises:
        DataError: it holds nulls, or lists of another length.
    """
    array = values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
    rows = len(array)
    if array.null_count:
        raise DataError(f"column {column.name!r} holds {array.null_count} null values")
    if column.encoding == "raw":
        return _raw_to_numpy(array, column)
    if column.encoding:
        encoded: np.ndarray = array.to_numpy(zero_copy_only=False)
        return encoded
    if column.shape:
        if pa.types.is_fixed_size_list(array.type):
            width = array.type.list_size
            array = pa.ListArray.from_arrays(
                np.arange(rows + 1, dtype=np.int32) * width, array.flatten()
            )
        offsets = array.offsets.to_numpy(zero_copy_only=False)
        if rows and not np.array_equal(np.diff(offsets), np.full(rows, column.width)):
            raise DataError(
                f"column {column.name!r} holds arrays that have not {column.width} elements"
            )
        array = array.values.slice(offsets[0] if rows else 0, rows * column.width)
        if array.null_count:
            raise DataError(f"column {column.name!r} holds arrays with null elements")
    flat: np.ndarray = array.to_numpy(zero_copy_only=False)
    return _cast(flat, column).reshape(rows, *column.shape)


def _raw_to_numpy(array: pa.Array, column: Column) -> np.ndarray:
    """Return fixed-width bytes as the elements they are, without copying."""
    if not pa.types.is_binary(array.type):  # fixed-size or large binary
        array = array.cast(pa.binary())
    rows = len(array)
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int32)[array.offset : array.offset + rows + 1]
    if rows and not np.array_equal(np.diff(bounds), np.full(rows, column.size)):
        raise DataError(f"column {column.name!r} holds byte strings of other than {column.size}")
    flat = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[0] + rows * column.size]
    return flat.view(column.dtype).reshape(rows, *column.shape)


def _cast(values: np.ndarray, column: Column) -> np.ndarray:
    """Return ``values`` in the column's dtype, in which all of them must fit."""
    if values.dtype == column.dtype:
        return values
    if values.dtype.kind in "iu" and np.dtype(column.dtype).kind in "iu" and values.size:
        bounds = np.iinfo(column.dtype)
        if values.min() < bounds.min or values.max() > bounds.max:
            raise DataError(f"column {column.name!r} holds values too large for {column.dtype}")
    try:
        with np.errstate(over="raise"):
            return values.astype(column.dtype)
    except FloatingPointError as error:
        raise DataError(
            f"column {column.name!r} holds values too large for {column.dtype}"
        ) from error


def _room(rows: int, column: Column) -> np.ndarray:
    """Return an empty array for values of ``column`` as they are stored."""
    if column.encoding not in ("", "raw"):
        return np.empty(rows, object)
    return np.empty((rows, *column.shape), column.dtype)


def _sample_numbers(plan: EpochPlan, step: int, rank: int, world: int) -> np.ndarray:
    """Return the numbers, in the whole epoch, of the samples that ``rank`` takes at ``step``."""
    total = plan.batch_rows(step)
    first = step * plan.global_batch
    return np.arange(first + total * rank // world, first + total * (rank + 1) // world)


def _generator(seed: int, epoch: int, samples: np.ndarray, row: int) -> np.random.Generator:
    """Return the random generator of one sample: the same on any number of ranks."""
    entropy = np.random.SeedSequence((seed, epoch, int(samples[row])))
    return np.random.Generator(np.random.Philox(entropy))


def _no_generator(row: int) -> None:
    """Give no random generator: what is evaluated is not varied."""


_END = object()


def _read_ahead(chunks: Callable[[], Iterator[list[Batch]]]) -> Iterator[Batch]:
    """Yield the batches of ``chunks()``, which runs in a thread of its own."""
    ready: queue.Queue[Any] = queue.Queue(PREFETCH_CHUNKS)
    stop = threading.Event()
    thread = threading.Thread(
        target=_produce, args=(chunks, ready, stop), name="hsr-reader", daemon=True
    )
    thread.start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield from item
    finally:
        stop.set()
        while thread.is_alive():  # it may be waiting for room in the queue
            try:
                ready.get_nowait()
            except queue.Empty:
                thread.join(0.01)


def _produce(
    chunks: Callable[[], Iterator[list[Batch]]], ready: queue.Queue[Any], stop: threading.Event
) -> None:
    try:
        for chunk in chunks():
            ready.put(chunk)
            if stop.is_set():
                return
        ready.put(_END)
    except BaseException as error:  # raised where the batches are used
        ready.put(error)
