"""Columns as the scorer computes with them: numbers, text, lists of words, vectors. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import DataError

# Vectors of up to so many elements are held with their zeros.
DENSE_SIZE = 4096
Mask = np.ndarray | None


@dataclass(frozen=True)
class Numbers:
    """Numbers, or booleans.

    Attributes:
        data: a value per row, in NumPy's type of the column; anything where it is null.
        valid: which rows are not null; ``None`` if all are not.
    """

    data: np.ndarray
    valid: Mask = None

    def __len__(self) -> int:
        return len(self.data)

    def take(self, rows: np.ndarray) -> Numbers:
        return Numbers(self.data[rows], None if self.valid is None else self.valid[rows])

    def value(self, row: int) -> Any:
        """Return one value as Python's own; ``None`` for null."""
        null = self.valid is not None and not self.valid[row]
        return None if null else self.data[row].item()


@dataclass(frozen=True)
class Words:
    """Text, or lists of words.

    Attributes:
        data: a string or list of strings per row; ``None`` for null.
        lists: whether it is lists.
    """

    data: list[Any]
    lists: bool = False

    @property
    def valid(self) -> Mask:
        """Mask of rows that are not null; ``None`` if no row is."""
        if None not in self.data:
            return None
        return np.fromiter((value is not None for value in self.data), bool, len(self.data))

    def __len__(self) -> int:
        return len(self.data)

    def take(self, rows: np.ndarray) -> Words:
        return Words([self.data[row] for row in rows], self.lists)

    def value(self, row: int) -> Any:
        """Return one value; ``None`` for null."""
        return self.data[row]


@dataclass(frozen=True)
class Vectors:
    """Vectors of one size, dense or sparse.

    Attributes:
        size: elements of each.
        data: an array (rows, size); or, where ``starts`` is there, the entries of all rows.
        valid: which rows are not null; ``None`` if all are not.
        starts: where each row's entries begin, and the last one's end.
        indices: places of the entries, ascending in each row.
    """

    size: int
    data: np.ndarray
    valid: Mask = None
    starts: np.ndarray | None = None
    indices: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.data) if self.starts is None else len(self.starts) - 1

    def dense(self) -> np.ndarray:
        """Return an array (rows, size)."""
        if self.starts is None:
            return self.data
        whole = np.zeros((len(self), self.size))
        whole[self.entry_rows(), self.indices] = self.data
        return whole

    def entry_rows(self) -> np.ndarray:
        """Return the row of each entry."""
        assert self.starts is not None
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def scaled(self, factors: np.ndarray) -> Vectors:
        """Return each element times its factor."""
        return replace(self, data=self.data * factors[self._places()])

    def mapped(self, function: Callable[[np.ndarray], np.ndarray]) -> Vectors:
        """Return ``function`` of all elements; it must give 0 for 0."""
        return replace(self, data=function(self.data))

    def _places(self) -> Any:
        return slice(None) if self.starts is None else self.indices

    def take(self, rows: np.ndarray) -> Vectors:
        valid = None if self.valid is None else self.valid[rows]
        if self.starts is None:
            return Vectors(self.size, self.data[rows], valid)
        assert self.indices is not None
        counts = np.diff(self.starts)[rows]
        starts = np.concatenate(([0], np.cumsum(counts)))
        places = np.arange(starts[-1]) + np.repeat(self.starts[rows] - starts[:-1], counts)
        return Vectors(self.size, self.data[places], valid, starts, self.indices[places])

    def value(self, row: int) -> Any:
        """Return one vector as an array; ``None`` for null."""
        null = self.valid is not None and not self.valid[row]
        return None if null else self.take(np.array([row])).dense()[0]


Column = Numbers | Words | Vectors


def vectors_of(
    size: int,
    count: int,
    rows: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    valid: Mask = None,
) -> Vectors:
    """Return vectors from their entries, each index once.

    Args:
        size: elements of each.
        count: how many vectors.
        rows: the row of each entry.
        indices: its place in the row.
        data: its value.
        valid: which vectors are not null.
    """
    if size <= DENSE_SIZE:
        whole = np.zeros((count, size))
        whole[rows, indices] = data
        return Vectors(size, whole, valid)
    order = np.lexsort((indices, rows))
    starts = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=count))))
    return Vectors(size, data[order], valid, starts, indices[order])


def joined(parts: Sequence[Vectors]) -> Vectors:
    """Return vectors of the elements of several, one after the other; none may be null."""
    size, count = sum(part.size for part in parts), len(parts[0])
    if size <= DENSE_SIZE:
        return Vectors(size, np.concatenate([part.dense() for part in parts], axis=1))
    rows, indices, data, offset = [], [], [], 0
    for part in parts:
        if part.starts is None:
            row, place = np.nonzero(part.data)
            rows.append(row)
            indices.append(place + offset)
            data.append(part.data[row, place])
        else:
            assert part.indices is not None
            rows.append(part.entry_rows())
            indices.append(part.indices + offset)
            data.append(part.data)
        offset += part.size
    return vectors_of(size, count, *map(np.concatenate, (rows, indices, data)))


class Batch:
    """Rows on their way through the stages.

    Args:
        columns: the columns by name, equally long.
        count: how many rows.

    Attributes:
        columns: the columns there are now.
        rows: for each row that is left, its number among those that came; ``None`` if all are left.
    """

    def __init__(self, columns: dict[str, Column], count: int) -> None:
        self.columns = columns
        self.rows: np.ndarray | None = None
        self._count = count

    def __len__(self) -> int:
        return self._count if self.rows is None else len(self.rows)

    def keep(self, mask: Mask) -> None:
        """Leave out all rows but those of ``mask``; ``None`` keeps all."""
        if mask is None or mask.all():
            return
        rows = np.flatnonzero(mask)
        self.columns = {name: column.take(rows) for name, column in self.columns.items()}
        self.rows = rows if self.rows is None else self.rows[rows]

    def column(self, name: str) -> Column:
        """Return a column.

        Raises:
            DataError: it is not there.
        """
        if name not in self.columns:
            raise DataError(f"there is no column {name!r}; there is {sorted(self.columns)}")
        return self.columns[name]

    def numbers(self, name: str) -> tuple[np.ndarray, Mask]:
        """Return a column of numbers as float64, and which of them are not null."""
        column = self.column(name)
        if not isinstance(column, Numbers):
            raise DataError(f"column {name!r} holds no numbers")
        return column.data.astype(np.float64), column.valid

    def words(self, name: str, *, lists: bool) -> Words:
        """Return a column of text, or of lists of words."""
        column = self.column(name)
        if not isinstance(column, Words) or column.lists != lists:
            raise DataError(f"column {name!r} holds no {'lists of words' if lists else 'text'}")
        return column

    def vectors(self, name: str, size: int | None = None) -> Vectors:
        """Return a column of vectors, none of which is null.

        Args:
            name: the column.
            size: elements each must have.

        Raises:
            DataError: it holds something else; the message names column, row and value.
        """
        column = self.column(name)
        if not isinstance(column, Vectors):
            raise DataError(f"column {name!r} holds no vectors")
        if size is not None and column.size != size:
            raise DataError(
                f"column {name!r} holds vectors of {column.size} elements, not {size}, which the "
                "stage was fitted on"
            )
        self.check(name, column.valid, "it must be a vector")
        return column

    def check(self, name: str, right: Mask, advice: str) -> None:
        """Check that all rows are right.

        Args:
            name: the column whose value the message shows.
            right: a boolean per row; ``None`` if all are.
            advice: what is wrong, or to be done.

        Raises:
            DataError: one is not; the message names column, row and value.
        """
        if right is None or right.all():
            return
        row = int(np.argmin(right))
        value = self.column(name).value(row)
        shown = "null" if value is None else f"{value!r:.200}"
        number = row if self.rows is None else int(self.rows[row])
        raise DataError(f"column {name!r} is {shown} in row {number} (counted from 0); {advice}")
