"""Assign rows to ranks and steps. Pure.

The order of samples in an epoch is a function of (row groups, seed, epoch, global batch size)
only, never of the number of ranks, so any world size reads the same global batches, every row
exactly once per epoch, in equally many steps.

How: the row groups are permuted and laid end to end; that sequence is cut into equally long
*lanes*; each lane is read in *blocks* of consecutive row groups whose rows are permuted. A global
batch takes equally many rows of every lane, lane after lane, and a rank takes its slice of the
global batch, which is its own lanes: up to 64 ranks read about 1/N of the data each, and memory is
bounded by one block per lane that is read. (The lanes serve the purpose of the canonical nodes of
mosaicml/streaming, but follow from the global batch, so that no number of nodes needs to be
remembered.)
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_MAX_LANES = 64


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` of one row group."""

    row_group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a lane that are shuffled together.

    Attributes:
        first: position in the lane of its first row.
        rows: number of rows.
        pieces: where they come from.
        key: seeds the permutation of its rows.
        shuffle: whether they are permuted.
    """

    first: int
    rows: int
    pieces: tuple[Piece, ...]
    key: tuple[int, ...]
    shuffle: bool

    def order(self) -> np.ndarray:
        """Return which row of the pieces, laid end to end, comes where."""
        if not self.shuffle:
            return np.arange(self.rows)
        return _permutation(self.rows, *self.key)


@dataclass(frozen=True)
class LaneSlice:
    """Positions ``start`` to ``stop`` of one lane."""

    lane: int
    start: int
    stop: int


# By lane: positions to read, and the rows of the batch they become.
_LaneRows = dict[int, tuple[np.ndarray, np.ndarray]]


def _permutation(size: int, *key: int) -> np.ndarray:
    """Return a permutation of ``range(size)`` that depends on ``key`` only.

    Sorts the raw output of the counter-based Philox generator (Salmon et al., 2011), whose stream
    NumPy keeps the same in all versions, as it does not for ``Generator.permutation``.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    generator = np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64))
    # With its index as its lowest bits, no number comes twice: every sort gives the same order, and
    # the fastest will do.
    bits = np.uint64(max(0, size - 1).bit_length())
    numbers: np.ndarray = generator.random_raw(size) >> bits << bits
    numbers |= np.arange(size, dtype=np.uint64)
    numbers.sort()
    numbers &= np.uint64((1 << int(bits)) - 1)
    return numbers.astype(np.int64)


def _lane_count(row_groups: Sequence[int], global_batch: int, window_row_groups: int) -> int:
    """Return the number of lanes: the largest divisor of the global batch that is affordable.

    Args:
        row_groups: rows of each row group.
        global_batch: rows of a global batch.
        window_row_groups: row groups that fit the shuffle window of one rank, for the case that
            a single rank has to read all lanes.
    """
    limit = max(1, min(_MAX_LANES, len(row_groups), window_row_groups, global_batch))
    return next(lanes for lanes in range(limit, 0, -1) if global_batch % lanes == 0)


def _groups_in_window(sizes: Sequence[int], window_bytes: int) -> int:
    """Return how many row groups of these bytes a window holds, by the largest; 1 or more."""
    return max(1, window_bytes // max(1, *sizes)) if sizes else 1


def epoch_steps(rows: int, global_batch: int) -> int:
    """Return the global batches of an epoch; the last one may be partial."""
    return -(-rows // global_batch)


def batch_rows(rows: int, global_batch: int, step: int) -> int:
    """Return the rows of a global batch; the last one may be partial."""
    return min(global_batch, rows - step * global_batch)


@dataclass(frozen=True)
class EpochPlan:
    """The order of one pass over the rows: an epoch, without ``steps_per_epoch``.

    Attributes:
        row_groups: rows of each row group of the dataset.
        global_batch: rows of a global batch, all ranks together.
        seed: seed of the run.
        epoch: epoch, from 0.
        lanes: see `_lane_count`; must divide ``global_batch``.
        block_rows: rows a block has at least, unless its lane ends.
        shuffle: ``False`` keeps the order of the files.
    """

    row_groups: tuple[int, ...]
    global_batch: int
    seed: int
    epoch: int
    lanes: int = 1
    block_rows: int = 1
    shuffle: bool = True

    @cached_property
    def rows(self) -> int:
        return sum(self.row_groups)

    @cached_property
    def steps(self) -> int:
        """Global batches of the epoch; the last may be partial."""
        return epoch_steps(self.rows, self.global_batch)

    def batch_rows(self, step: int) -> int:
        """Rows of the global batch of ``step``."""
        return batch_rows(self.rows, self.global_batch, step)

    def lane_rows(self, lane: int) -> int:
        return self.rows // self.lanes + (lane < self.rows % self.lanes)

    def rank_slices(self, step: int, rank: int, world: int) -> tuple[LaneSlice, ...]:
        """Return what ``rank`` of ``world`` reads at ``step``; nothing if there are fewer rows.

        A full global batch gives every rank the same number of rows if ``world`` divides it; the
        rows of a partial one are spread as evenly as can be.
        """
        total = self.batch_rows(step)
        begin, end = total * rank // world, total * (rank + 1) // world
        per_lane = self.global_batch // self.lanes
        slices = []
        offset = 0
        for lane in range(self.lanes):
            first = step * per_lane
            count = min(per_lane, self.lane_rows(lane) - first)
            low, high = max(begin, offset), min(end, offset + count)
            if low < high:
                slices.append(LaneSlice(lane, first + low - offset, first + high - offset))
            offset += count
        return tuple(slices)

    def chunk(self, steps: range, rank: int, world: int) -> tuple[list[int], _LaneRows]:
        """Return what ``rank`` reads at several steps at once.

        Args:
            steps: the steps; the last step of the epoch only by itself, unless it is full.
            rank: the rank.
            world: number of ranks.

        Returns:
            The rows of each step, and by lane the positions to read and the rows they become, of
            those of all these steps laid end to end.
        """
        slices = self.rank_slices(steps.start, rank, world)
        count = sum(part.stop - part.start for part in slices)
        # Every full step takes the same part of every lane, further on.
        number, ahead = np.arange(len(steps))[:, None], steps.step * self.global_batch // self.lanes
        rows_by_lane: _LaneRows = {}
        offset = 0
        for part in slices:
            rows = np.arange(part.stop - part.start)
            positions = part.start + number * ahead + rows
            rows_by_lane[part.lane] = positions.ravel(), (offset + number * count + rows).ravel()
            offset += len(rows)
        return [count] * len(steps), rows_by_lane

    def lane_blocks(self, lane: int) -> tuple[Block, ...]:
        """Return the blocks of ``lane``, in the order they are read."""
        if lane not in self._blocks:
            self._blocks[lane] = self._make_blocks(lane)
        return self._blocks[lane]

    @cached_property
    def _blocks(self) -> dict[int, tuple[Block, ...]]:
        """Cached blocks of lanes."""
        return {}

    def _make_blocks(self, lane: int) -> tuple[Block, ...]:
        blocks: list[Block] = []
        pieces: list[Piece] = []
        first = rows = 0
        wanted = self.block_rows
        if self.lane_rows(lane) > wanted:
            # Lanes advance at the same pace. With first blocks of different lengths they need their
            # next blocks one after the other, not all at once.
            wanted = max(1, wanted * (lane + 1) // self.lanes)
        for piece in self._lane_pieces(lane):
            pieces.append(piece)
            rows += piece.stop - piece.start
            if rows >= wanted:
                wanted = self.block_rows
                blocks.append(self._block(lane, len(blocks), first, rows, pieces))
                first, rows, pieces = first + rows, 0, []
        if pieces:
            blocks.append(self._block(lane, len(blocks), first, rows, pieces))
        return tuple(blocks)

    def pieces(self, first_step: int, rank: int, world: int) -> list[Piece]:
        """Return the pieces that ``rank`` reads from ``first_step`` on, in about their order.

        The last step may take a few rows of other lanes, whose pieces are not among them.
        """
        if first_step >= self.steps:
            return []
        wanted: list[tuple[int, int, Block]] = []
        for part in self.rank_slices(first_step, rank, world):
            blocks = self.lane_blocks(part.lane)
            wanted += [(b.first, part.lane, b) for b in blocks if b.first + b.rows > part.start]
        # All lanes advance at the same pace; started blocks come first.
        wanted.sort(key=lambda entry: entry[:2])
        return [piece for _, _, block in wanted for piece in block.pieces]

    def locate(self, lane: int, position: int) -> tuple[Piece, int]:
        """Return the piece with the row at ``position`` of ``lane``, and the row in it."""
        block = next(b for b in self.lane_blocks(lane) if position < b.first + b.rows)
        row = int(block.order()[position - block.first])
        for piece in block.pieces:
            if row < piece.stop - piece.start:
                return piece, row
            row -= piece.stop - piece.start
        raise IndexError(f"lane {lane} has no position {position}")

    def _block(self, lane: int, number: int, first: int, rows: int, pieces: list[Piece]) -> Block:
        key = (self.seed, self.epoch, lane, number)
        return Block(first, rows, tuple(pieces), key, self.shuffle)

    @cached_property
    def _sequence(self) -> tuple[list[int], list[int]]:
        """The row groups in reading order, and where each begins in the whole sequence."""
        if self.shuffle:
            order = _permutation(len(self.row_groups), self.seed, self.epoch).tolist()
        else:
            order = list(range(len(self.row_groups)))
        starts, position = [], 0
        for group in order:
            starts.append(position)
            position += self.row_groups[group]
        return order, starts

    def _lane_pieces(self, lane: int) -> list[Piece]:
        longer = self.rows % self.lanes
        begin = lane * (self.rows // self.lanes) + min(lane, longer)
        return self._pieces(begin, begin + self.lane_rows(lane))

    def _pieces(self, begin: int, end: int) -> list[Piece]:
        order, starts = self._sequence
        pieces = []
        index = max(0, bisect.bisect_right(starts, begin) - 1)
        while begin < end:
            group, start = order[index], starts[index]
            stop = min(end, start + self.row_groups[group])
            if stop > begin:
                pieces.append(Piece(group, begin - start, stop - start))
                begin = stop
            index += 1
        return pieces


def plan_epoch(
    row_groups: Sequence[tuple[int, int]],
    *,
    global_batch: int,
    seed: int,
    epoch: int,
    window_bytes: int,
    shuffle: bool = True,
) -> EpochPlan:
    """Return the plan of an epoch whose shuffle window takes about ``window_bytes`` in all.

    Args:
        row_groups: (rows, bytes) of each row group.
        global_batch: rows of a global batch.
        seed: seed of the run.
        epoch: epoch, from 0.
        window_bytes: memory a single rank may use if it has to read all lanes.
        shuffle: whether to take the rows in another order every epoch.
    """
    sizes = [size for _, size in row_groups]
    rows = tuple(count for count, _ in row_groups)
    affordable = _groups_in_window(sizes, window_bytes)
    lanes = _lane_count(rows, global_batch, affordable) if shuffle else 1
    row_bytes = max(1.0, sum(sizes) / max(1, sum(rows)))
    block_rows = max(1, int(window_bytes / lanes / row_bytes)) if shuffle else 1
    return EpochPlan(rows, global_batch, seed, epoch, lanes, block_rows, shuffle)


def contiguous_share(row_groups: Sequence[int], rank: int, world: int) -> list[Piece]:
    """Return the rows ``rank`` of ``world`` reads when order does not matter (evaluation)."""
    plan = EpochPlan(tuple(row_groups), 1, 0, 0, shuffle=False)
    total = plan.rows
    return plan._pieces(total * rank // world, total * (rank + 1) // world)
