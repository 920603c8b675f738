"""Batches for the model, cut from Arrow batches of any sizes and across them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Piece:
    """Rows of one Arrow batch.

    Attributes:
        arrays: the feature columns.
        valid: which of the rows can be predicted on; ``None`` if all can.
        begin: where they begin in the Arrow batch.
        whole: rows of the Arrow batch.
    """

    arrays: tuple[pa.Array, ...]
    valid: np.ndarray | None
    begin: int
    whole: int

    @property
    def rows(self) -> int:
        return len(self.arrays[0])

    def part(self, begin: int, end: int) -> Piece:
        """Return some of the rows, without a copy."""
        arrays = tuple(array.slice(begin, end - begin) for array in self.arrays)
        valid = None if self.valid is None else self.valid[begin:end]
        return replace(self, arrays=arrays, valid=valid, begin=self.begin + begin)


@dataclass(frozen=True)
class Batch:
    """Rows for one call of the model.

    Attributes:
        pieces: what they are made of; one, unless Arrow's batches end within.
    """

    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def valid(self) -> np.ndarray | None:
        """Which rows can be predicted on; ``None`` if all can."""
        if all(piece.valid is None for piece in self.pieces):
            return None
        masks = [np.ones(p.rows, bool) if p.valid is None else p.valid for p in self.pieces]
        return np.concatenate(masks)

    def arrays(self) -> tuple[pa.Array, ...]:
        """Return the feature columns of the rows that can be predicted on."""
        pairs = zip(*(piece.arrays for piece in self.pieces), strict=True)
        joined = tuple(p[0] if len(p) == 1 else pa.concat_arrays(p) for p in pairs)
        valid = self.valid
        return joined if valid is None else tuple(a.filter(pa.array(valid)) for a in joined)

    def place(self, row: int) -> str:
        """Say where a row of `arrays` came from."""
        valid = self.valid
        number = row if valid is None else int(np.flatnonzero(valid)[row])
        for piece in self.pieces:
            if number < piece.rows:
                break
            number -= piece.rows
        return f"row {piece.begin + number} of a batch of {piece.whole} (counted from 0)"


def cut(pieces: Iterator[Piece], size: int) -> Iterator[list[Batch]]:
    """Yield batches of ``size`` rows; only the very last one may have fewer.

    All batches that an Arrow batch makes full come together, as soon as it has come: nothing is
    asked for that is not needed.
    """
    open_pieces: list[Piece] = []
    wanted = size
    for piece in pieces:
        full: list[Batch] = []
        begin = 0
        while begin < piece.rows:
            end = min(begin + wanted, piece.rows)
            open_pieces.append(piece.part(begin, end))
            wanted -= end - begin
            begin = end
            if not wanted:
                full.append(Batch(tuple(open_pieces)))
                open_pieces, wanted = [], size
        if full:
            yield full
    if open_pieces:
        yield [Batch(tuple(open_pieces))]
