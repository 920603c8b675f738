"""Row groups to NumPy batches.

One thread gathers batches ahead, from row groups that others read (`row_groups`). Its memory is
bounded by one block per lane (the shuffle window) and four chunks of batches: two that wait, one in
preparation and one in use.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...config.data import Transform
from ...errors import DataError
from ...storage.arrays import Arrays
from ..manifest import Column, Manifest
from .arrow_to_numpy import empty_rows
from .decode import RowDecoder, UndecodableRow, no_generator
from .row_groups import RowGroupReader
from .sharding import Block, EpochPlan, LaneSlice, Piece, contiguous_share

# Rows gathered at once, unless they take more than _CHUNK_BYTES: batches are views into such a
# chunk, so that the cost per batch is small.
CHUNK_ROWS = 4096
_CHUNK_BYTES = 8 * 1024 * 1024
# Chunks the reading thread may be ahead.
_PREFETCH_CHUNKS = 2


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        step: global batch in the pass over the rows, from 0.
        rows: rows in this part; 0 if the last global batch has fewer rows than there are ranks.
        arrays: values by column name, each of shape ``(rows, *column.shape)``.
    """

    step: int
    rows: int
    arrays: Arrays


@dataclass(frozen=True)
class _Chunk:
    """Batches of one rank, laid end to end.

    Attributes:
        steps: step of each batch.
        counts: rows of each batch.
        arrays: values by column name, of all batches.
    """

    steps: range
    counts: Sequence[int]
    arrays: Arrays

    def batches(self) -> Iterator[Batch]:
        """Yield the batches, as views."""
        offset = 0
        for step, rows in zip(self.steps, self.counts, strict=True):
            values = {name: array[offset : offset + rows] for name, array in self.arrays.items()}
            yield Batch(step, rows, values)
            offset += rows


class DatasetReader:
    """Reads a materialized dataset.

    Args:
        manifest: the dataset.
        columns: names of the columns to read; all by default.
        transforms: functions of each row's value, by column.
        keep_bytes: a dataset that takes no more memory than this, undecoded, is read from storage
            only once.
        augment: whether transforms get a random generator in epochs; not those of validation.
    """

    def __init__(
        self,
        manifest: Manifest,
        columns: Sequence[str] | None = None,
        transforms: Mapping[str, Transform] | None = None,
        keep_bytes: int = 0,
        *,
        augment: bool = True,
    ) -> None:
        self._manifest = manifest
        self._augment = augment
        names = [c.name for c in manifest.columns] if columns is None else list(columns)
        self._columns = [manifest.column(name) for name in dict.fromkeys(names)]
        self._pieces = RowGroupReader(manifest, self._columns, keep_bytes)
        self._decode = RowDecoder(self._columns, transforms or {}, manifest.allow_nan)
        row_bytes = max(1, sum(column.size for column in self._columns))
        self._chunk_rows = max(1, min(CHUNK_ROWS, _CHUNK_BYTES // row_bytes))

    def epoch(
        self, plan: EpochPlan, rank: int, world: int, first_step: int = 0, every: int = 1
    ) -> Generator[Batch, None, None]:
        """Yield the batches of ``rank`` from ``first_step`` on, read ahead by a thread.

        Args:
            plan: order of the epoch.
            rank: the rank, from 0.
            world: number of ranks.
            first_step: first step.
            every: read each ``every``-th step only, for processes that read in turn.
        """
        return _split(_read_ahead(lambda: self._epoch_chunks(plan, rank, world, first_step, every)))

    def passes(
        self, plans: Iterable[EpochPlan], rank: int, world: int, first_step: int = 0
    ) -> Generator[Batch, None, None]:
        """Yield the batches of consecutive epochs, the first from ``first_step`` on.

        The thread that reads ahead continues from each epoch into the next.
        """

        def chunks() -> Iterator[_Chunk]:
            begin = first_step
            for plan in plans:
                yield from self._epoch_chunks(plan, rank, world, begin)
                begin = 0

        return _split(_read_ahead(chunks))

    def chunks(
        self, plan: EpochPlan, rank: int, world: int, first_step: int = 0
    ) -> Generator[_Chunk, None, None]:
        """Yield the same as `epoch`, in chunks; the epoch's last step is a separate chunk."""
        return _read_ahead(lambda: self._epoch_chunks(plan, rank, world, first_step))

    def share(self, rank: int, world: int, batch_size: int) -> Generator[Batch, None, None]:
        """Yield this rank's contiguous share of all rows, in file order, for evaluation."""
        groups = [group.rows for group in self._manifest.row_groups]
        pieces = contiguous_share(groups, rank, world)
        return _split(_read_ahead(lambda: self._share_chunks(pieces, batch_size)))

    def first_rows(self, count: int, seed: int) -> Arrays:
        """Return the first rows, at most ``count``, decoded and transformed."""
        numbers = range(len(self._manifest.row_groups))
        number = next(n for n in numbers if self._manifest.row_groups[n].rows)
        piece = Piece(number, 0, min(count, self._manifest.row_groups[number].rows))
        random = functools.partial(_generator, seed, 0, np.arange(count))
        try:
            return self._decode(self._pieces.read(piece), random)
        except UndecodableRow as error:
            raise self._row_error(error, piece, error.row) from error

    def close(self) -> None:
        self._pieces.close()
        self._decode.close()

    def _epoch_chunks(
        self, plan: EpochPlan, rank: int, world: int, first_step: int, every: int = 1
    ) -> Iterator[_Chunk]:
        lanes: dict[int, _Lane] = {}
        self._pieces.announce(plan.pieces(first_step, rank, world))
        chunk = max(1, self._chunk_rows * world // plan.global_batch) * every
        last = plan.steps - 1  # it may be partial, and is read separately
        for begin in range(first_step, last, chunk):
            steps = range(begin, min(begin + chunk, last), every)
            yield self._gather(plan, lanes, rank, world, steps)
        if first_step <= last and (last - first_step) % every == 0:
            yield self._gather(plan, lanes, rank, world, range(last, plan.steps))

    def _gather(
        self, plan: EpochPlan, lanes: dict[int, _Lane], rank: int, world: int, steps: range
    ) -> _Chunk:
        counts, wanted = plan.chunk(steps, rank, world)
        chunk = {c.name: _room(sum(counts), c) for c in self._columns}
        for lane, (positions, at) in wanted.items():
            if lane not in lanes:
                lanes[lane] = _Lane(plan.lane_blocks(lane), self._read_block)
            lanes[lane].copy_rows(positions, chunk, at)
        samples = np.concatenate([_sample_numbers(plan, s, rank, world) for s in steps])
        random = functools.partial(_generator, plan.seed, plan.epoch, samples)
        try:
            chunk = self._decode(chunk, random if self._augment else no_generator)
        except UndecodableRow as error:
            slices = plan.rank_slices(steps[error.row // counts[0]], rank, world)
            raise self._name_row(error, plan, slices, error.row % counts[0]) from error
        return _Chunk(steps, counts, chunk)

    def _share_chunks(self, pieces: list[Piece], batch_size: int) -> Iterator[_Chunk]:
        step = 0
        self._pieces.announce(pieces)
        chunk_rows = max(1, self._chunk_rows // batch_size) * batch_size
        for piece in pieces:
            arrays = self._pieces.read(piece)
            rows = piece.stop - piece.start
            for first in range(0, rows, chunk_rows):
                last = min(first + chunk_rows, rows)
                part = {name: values[first:last] for name, values in arrays.items()}
                try:
                    part = self._decode(part)
                except UndecodableRow as error:
                    raise self._row_error(error, piece, first + error.row) from error
                whole, rest = divmod(last - first, batch_size)
                counts = [batch_size] * whole + [rest] * bool(rest)
                yield _Chunk(range(step, step + len(counts)), counts, part)
                step += len(counts)

    def _name_row(
        self, error: UndecodableRow, plan: EpochPlan, slices: Sequence[LaneSlice], number: int
    ) -> DataError:
        for part in slices:
            if number < part.stop - part.start:
                piece, row = plan.locate(part.lane, part.start + number)
                return self._row_error(error, piece, row)
            number -= part.stop - part.start
        raise AssertionError("a row that was not requested") from error

    def _row_error(self, error: UndecodableRow, piece: Piece, row: int) -> DataError:
        located = DataError(f"{error.cause} ({self._pieces.describe(piece, row)})")
        at = piece.start + row
        stored = self._pieces.read(Piece(piece.row_group, at, at + 1))
        located.row = {
            column.name: hashlib.md5(stored[column.name][0], usedforsecurity=False).hexdigest()
            if column.is_encoded
            else np.asarray(stored[column.name][0]).tolist()
            for column in self._columns
        }
        return located

    def _read_block(self, block: Block) -> Arrays:
        """Return the rows of a block, undecoded."""
        if len(block.pieces) == 1:
            arrays = self._pieces.read(block.pieces[0])
            if block.rows == self._manifest.row_groups[block.pieces[0].row_group].rows:
                return arrays
            # A view of a part would keep the whole row group in memory.
            return {name: values.copy() for name, values in arrays.items()}
        arrays = {c.name: _room(block.rows, c) for c in self._columns}
        offset = 0
        for piece in block.pieces:
            rows = piece.stop - piece.start
            for name, values in self._pieces.read(piece).items():
                arrays[name][offset : offset + rows] = values
            offset += rows
        return arrays


class _Lane:
    """Reads one lane front to back, one block at a time."""

    def __init__(self, blocks: Sequence[Block], read: Callable[[Block], Arrays]) -> None:
        self._blocks = blocks
        self._read = read
        self._number = -1
        self._arrays: Arrays = {}
        self._order = np.empty(0, np.int32)

    def copy_rows(self, positions: np.ndarray, target: Arrays, at: np.ndarray) -> None:
        """Copy the rows at ascending lane ``positions`` to the rows ``at`` of ``target``."""
        done = 0
        while done < len(positions):
            block = self._load(int(positions[done]))
            end = int(np.searchsorted(positions, block.first + block.rows))
            # The shuffle happens here: a row is moved once from where it was read.
            rows = self._order[positions[done:end] - block.first]
            for name, values in target.items():
                values[at[done:end]] = np.take(self._arrays[name], rows, axis=0)
            done = end

    def _load(self, position: int) -> Block:
        number = max(self._number, 0)
        while position >= self._blocks[number].first + self._blocks[number].rows:
            number += 1
        block = self._blocks[number]
        if number != self._number:
            self._arrays = {}  # released before the next is read
            self._arrays = self._read(block)
            self._order = block.order().astype(np.int32)
            self._number = number
        return block


def _room(rows: int, column: Column) -> np.ndarray:
    """Return an empty array for undecoded values of ``column``."""
    if column.is_encoded:
        return np.empty(rows, object)
    return empty_rows(rows, column)


def _sample_numbers(plan: EpochPlan, step: int, rank: int, world: int) -> np.ndarray:
    """Return the numbers, in the whole epoch, of the samples that ``rank`` takes at ``step``."""
    total = plan.batch_rows(step)
    first = step * plan.global_batch
    return np.arange(first + total * rank // world, first + total * (rank + 1) // world)


def _generator(seed: int, epoch: int, samples: np.ndarray, row: int) -> np.random.Generator:
    """Return the random generator of one sample: the same on any number of ranks."""
    entropy = np.random.SeedSequence((seed, epoch, int(samples[row])))
    return np.random.Generator(np.random.Philox(entropy))


_END = object()


def _split(chunks: Generator[_Chunk, None, None]) -> Generator[Batch, None, None]:
    with contextlib.closing(chunks):
        for chunk in chunks:
            yield from chunk.batches()


def _read_ahead(chunks: Callable[[], Iterator[_Chunk]]) -> Generator[_Chunk, None, None]:
    """Yield ``chunks()``, which runs in a separate thread."""
    ready: queue.Queue[Any] = queue.Queue(_PREFETCH_CHUNKS)
    stop = threading.Event()
    thread = threading.Thread(
        target=_produce, args=(chunks, ready, stop), name="hsr-reader", daemon=True
    )
    thread.start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        while thread.is_alive():  # the queue may be full
            try:
                ready.get_nowait()
            except queue.Empty:
                thread.join(0.01)


def _produce(
    chunks: Callable[[], Iterator[_Chunk]], ready: queue.Queue[object], stop: threading.Event
) -> None:
    try:
        for chunk in chunks():
            ready.put(chunk)
            if stop.is_set():
                return
        ready.put(_END)
    except BaseException as error:  # raised where the batches are used
        ready.put(error)
