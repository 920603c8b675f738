"""Columns as the stages of a pipeline compute with them, and their conversion from input. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

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


# Spark's types of numbers -> NumPy's.
DTYPES = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
}
# Whole numbers of Python's beyond it are none of float64.
_LARGEST = int(np.finfo(np.float64).max)
TEXT, WORDS, VECTOR, ARRAY = "string", "array<string>", "vector", "array"


@dataclass(frozen=True)
class Input:
    """A column that a pipeline takes.

    Attributes:
        name: its name.
        kind: Spark's type of it, ``"vector"``, or ``"array"`` for one of numbers.
        size: elements of a vector or array; 0 for other kinds.
        needed: whether there is no score without it.
    """

    name: str
    kind: str
    size: int = 0
    needed: bool = True

    def convert(self, source: object) -> Column:
        """Convert a user's column of values.

        Args:
            source: a sequence, NumPy array, pandas series or Arrow array.

        Raises:
            DataError: a value does not fit; the message names column, row and value.
        """
        values, valid = _plain(source, real=self.kind in ("float", "double"))
        if self.kind in (TEXT, WORDS):
            return self._words(values, valid)
        if self.kind in (VECTOR, ARRAY):
            return self._vectors(values, valid)
        return self._numbers(values, valid)

    def _words(self, values: Sequence[object], valid: Mask) -> Words:
        lists = self.kind == WORDS
        words: list[Any] = []
        for row, value in enumerate(values):
            value = value.tolist() if isinstance(value, np.ma.MaskedArray) else value
            if _is_null(value) or (valid is not None and not valid[row]):
                words.append(None)
            elif not lists and isinstance(value, str):
                words.append(str(value))
            elif lists and isinstance(value, list | tuple | np.ndarray):
                if not all(isinstance(word, str) for word in value):
                    raise self._misfit(row, value, "it must be a list of strings")
                words.append([str(word) for word in value])
            else:
                raise self._misfit(row, value, f"it must be {self._described()} or None")
        return Words(words, lists)

    def _vectors(self, values: Any, valid: Mask) -> Vectors:
        if isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype.kind in "iuf":
            if self.kind == VECTOR:
                self._check_size(0, values.shape[1], values)
            if values.shape[1] != self.size:  # as in a list of arrays, each of them is null
                none = np.zeros(len(values), bool)
                return Vectors(self.size, np.zeros((len(values), self.size)), none)
            return Vectors(self.size, values.astype(np.float64), valid)
        data = np.zeros((len(values), self.size))
        there = np.ones(len(values), bool) if valid is None else valid.copy()
        for row, value in enumerate(values):
            if not there[row] or _is_null(value):
                there[row] = False
                continue
            value = value.toArray() if hasattr(value, "toArray") else value
            value = value.tolist() if isinstance(value, np.ma.MaskedArray) else value
            try:
                one = np.asarray(value, np.float64)
            except (TypeError, ValueError):
                one = np.zeros(())
            nulls = not isinstance(value, np.ndarray) and None in value if one.ndim else False
            if one.ndim != 1 or (self.kind == VECTOR and nulls):
                raise self._misfit(row, value, f"it must be {self._described()} or None")
            if self.kind == VECTOR:
                self._check_size(row, len(one), value)
            if len(one) != self.size or nulls:
                there[row] = False
            else:
                data[row] = one
        return Vectors(self.size, data, None if there.all() else there)

    def _check_size(self, row: int, size: int, value: object) -> None:
        if size != self.size:
            raise self._misfit(row, value, f"it has {size} elements, not {self.size}")

    def _numbers(self, values: Any, valid: Mask) -> Numbers:
        dtype = np.dtype(DTYPES[self.kind])
        if isinstance(values, np.ndarray) and values.ndim > 1:
            if values.size != len(values):
                raise self._misfit(0, values[0], f"it must be {self._described()} or None")
            values = values.reshape(len(values))
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
            values, valid = self._from_objects(values, valid, whole=dtype.kind == "i")
        if (values.dtype.kind == "b") != (dtype.kind == "b") and len(values):
            row = 0 if valid is None or not valid.any() else int(np.argmax(valid))
            if valid is None or valid.any():
                raise self._misfit(row, values[row], f"it must be {self._described()} or None")
            values = np.zeros(len(values), dtype)
        if dtype.kind == "i":
            values, valid = self._whole(values, valid, dtype)
        if values.dtype == dtype:
            return Numbers(values, valid)
        with np.errstate(over="ignore"):
            return Numbers(values.astype(dtype), valid)

    def _from_objects(
        self, values: Sequence[object], valid: Mask, *, whole: bool
    ) -> tuple[np.ndarray, Mask]:
        there = np.ones(len(values), bool) if valid is None else valid.copy()
        items: list[Any] = []
        for row, value in enumerate(values):
            if not there[row] or value is None or type(value).__name__ == "NAType":
                there[row] = False
                items.append(None)
            elif isinstance(value, bool | np.bool_) != (self.kind == "boolean") or not isinstance(
                value, bool | int | float | np.bool_ | np.integer | np.floating
            ):
                raise self._misfit(row, value, f"it must be {self._described()} or None")
            elif whole and isinstance(value, float | np.floating):
                if np.isnan(value):  # as pandas tells null; as a float it would round the others
                    there[row] = False
                    items.append(None)
                    continue
                if not float(value).is_integer():
                    raise self._misfit(row, value, f"it must be {self._described()} or None")
                items.append(int(value))
            else:
                items.append(value)
        mask = None if there.all() else there
        blank = False if self.kind == "boolean" else 0
        plain = [blank if one is None else one for one in items]
        if self.kind == "boolean":
            return np.array(plain, bool), mask
        if whole:
            for row, one in enumerate(plain):
                if not -(2**63) <= one < 2**63:
                    raise self._misfit(row, one, f"it does not fit {self.kind}")
            return np.array(plain, np.int64), mask
        for row, one in enumerate(plain):
            if isinstance(one, int) and not -_LARGEST <= one <= _LARGEST:
                raise self._misfit(row, one, f"it does not fit {self.kind}")
        return np.array(plain, np.float64), mask

    def _whole(self, values: np.ndarray, valid: Mask, dtype: np.dtype) -> tuple[np.ndarray, Mask]:
        if values.dtype.kind == "f":
            # pandas has NaN where whole numbers are null.
            nan = np.isnan(values)
            if nan.any():
                valid = ~nan if valid is None else valid & ~nan
                values = np.where(nan, 0, values)
            cut = (values != np.trunc(values)) | np.isinf(values)
            if cut.any():
                row = int(np.argmax(cut))
                raise self._misfit(row, values[row], f"it must be {self._described()} or None")
        bounds = np.iinfo(dtype)
        ends = (int(values.argmin()), int(values.argmax())) if len(values) else ()
        for row in ends:
            # Compared as Python's own number: the largest of 64 bits is no float64.
            if not bounds.min <= int(values[row]) <= bounds.max:
                raise self._misfit(row, values[row], f"it does not fit {self.kind}")
        return values, valid

    def _described(self) -> str:
        if self.kind in (VECTOR, ARRAY):
            return f"{self.size} numbers"
        names = {TEXT: "a string", WORDS: "a list of strings", "boolean": "a boolean"}
        whole = "a number" if self.kind in ("float", "double") else "a whole number"
        return names.get(self.kind, whole)

    def _misfit(self, row: int, value: object, advice: str) -> DataError:
        value = value.item() if isinstance(value, np.generic) else value
        return DataError(
            f"column {self.name!r} is {value!r:.200} in row {row} (counted from 0); {advice}"
        )


def _is_null(value: object) -> bool:
    if value is None or type(value).__name__ == "NAType":
        return True
    return isinstance(value, float) and value != value  # pandas' null among objects


def _plain(source: Any, *, real: bool) -> tuple[Any, Mask]:
    """Return a NumPy array or list of the values, and which of them are not null.

    Args:
        source: a column.
        real: whether it holds real numbers, of which NaN is one.
    """
    if isinstance(source, np.ma.MaskedArray):
        return _masked(source)
    if isinstance(source, np.ndarray):
        return (source if source.dtype.kind in "biuf" else source.tolist()), None
    if hasattr(source, "to_pylist"):  # Arrow's
        kind = str(source.type)
        if kind == "bool" or kind.startswith(("int", "uint", "float", "double")):
            if not source.null_count:
                return _arrow_numbers(source), None
            there = np.asarray(source.is_valid().to_pylist(), bool)
            return _arrow_numbers(source.fill_null(False if kind == "bool" else 0)), there
        return source.to_pylist(), None
    if hasattr(source, "iloc"):  # pandas'
        if isinstance(source.dtype, np.dtype) and source.dtype.kind in "biuf":
            return source.to_numpy(), None
        if real and source.dtype == object:
            return source.tolist(), None
        there = ~np.asarray(source.isna(), bool)
        return source.tolist(), None if there.all() else there
    if isinstance(source, str | bytes) or not isinstance(source, Sequence):
        raise DataError(f"a column must be a sequence of values, got {source!r:.200}")
    return source, None


def _masked(array: np.ma.MaskedArray) -> tuple[Any, Mask]:
    """Return the values of an array whose masked elements are null, and which rows are not."""
    if array.ndim > 1:  # of which a row may be null in part
        return array.tolist(), None
    there = ~np.ma.getmaskarray(array)
    if array.dtype.kind not in "biuf":
        return array.tolist(), None
    values = array.filled(False if array.dtype.kind == "b" else 0)
    return values, None if there.all() else there


def _arrow_numbers(array: Any) -> np.ndarray:
    """Return Arrow's numbers, which a table has in pieces and a record batch has not."""
    whole: np.ndarray = (
        array.to_numpy() if hasattr(array, "chunks") else array.to_numpy(zero_copy_only=False)
    )
    return whole


# What becomes of rows with invalid values: an error, no row, or a place of their own.
ERROR, SKIP, KEEP = "error", "skip", "keep"


class Stage(Protocol):
    """One fitted stage: a frozen dataclass of plain values and arrays."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __call__(self, batch: Batch) -> None:
        """Add the stage's columns to a batch, or leave rows of it out.

        Raises:
            DataError: where Spark's stage raises an error; the message names column and value.
        """
        ...

    @property
    def adds(self) -> tuple[str, ...]:
        """The columns it adds."""
        ...


def inputs_of(stage: Stage) -> tuple[str, ...]:
    """Return the columns a stage takes: its field ``input``, or ``inputs`` where it has several."""
    several = getattr(stage, "inputs", None)
    return (stage.input,) if several is None else tuple(several)  # type: ignore[attr-defined]
