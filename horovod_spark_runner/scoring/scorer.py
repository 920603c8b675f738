"""Scoring rows with an exported pipeline: no Spark, no Java."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DataError, HorovodSparkError, InvalidInputError
from .bundle import Bundle, read_bundle
from .columns import Batch, Column, Numbers, Vectors, Words


def load_pipeline(path: str | os.PathLike[str]) -> Scorer:
    """Return the scorer of a pipeline that `export_pipeline` wrote.

    Args:
        path: folder; or a URL, which needs pyarrow.

    Raises:
        RunDirectoryError: there is none, or it is damaged, or of a newer format.
        InvalidInputError: ``path`` is none.
    """
    return Scorer(read_bundle(path))


class Scorer:
    """Computes the result of ``PipelineModel.transform`` in this process.

    TensorFlow is imported where the first row reaches a network.

    Args:
        bundle: the pipeline.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._inputs = {one.name: one for one in bundle.inputs}
        self._stages = bundle.stages
        self._last: dict[str, int] = {}
        for number, stage in enumerate(bundle.stages):
            self._last.update(dict.fromkeys(stage.adds, number + 1))

    @property
    def input_types(self) -> dict[str, str]:
        """The columns the pipeline takes, and Spark's types of them."""
        return {name: one.kind for name, one in self._inputs.items()}

    @property
    def output_columns(self) -> tuple[str, ...]:
        """The columns that the last stage adds."""
        return self._stages[-1].adds if self._stages else ()

    def score_row(
        self, row: Mapping[str, object], columns: Sequence[str] | None = None
    ) -> dict[str, Any] | None:
        """Score one row.

        Args:
            row: its values by column: numbers, strings, lists; ``None`` for null. Columns that the
                pipeline does not take may be there, too.
            columns: the columns to return; by default those that the last stage adds. Stages after
                the last one that is needed are not run.

        Returns:
            Python's own numbers and strings, and NumPy arrays for vectors; ``None`` for a row that
            a stage with ``handleInvalid="skip"`` leaves out.

        Raises:
            DataError: a column is missing or of another type, or Spark's pipeline would raise an
                error; the message names column and value.
            InvalidInputError: ``columns`` names what is not there.
        """
        if not isinstance(row, Mapping):
            raise InvalidInputError(f"score_row takes a dictionary, got {row!r:.200}")
        wanted = self._wanted(columns, row)
        batch = self._scored({name: [value] for name, value in row.items()}, 1, wanted)
        if not len(batch):
            return None
        return {
            name: batch.columns[name].value(0) if name in batch.columns else row[name]
            for name in wanted
        }

    def score(self, rows: Any, columns: Sequence[str] | None = None) -> Any:
        """Score many rows.

        Rows that a stage with ``handleInvalid="skip"`` leaves out are not among those returned; ask
        for a column of the rows' own, such as a key, to know which those are.

        Args:
            rows: a dictionary of columns (sequences or NumPy arrays, equally long), a pandas
                DataFrame, or an Arrow table.
            columns: the columns to return, also of ``rows``; by default those that the last stage
                adds. Stages after the last one that is needed are not run.

        Returns:
            What ``rows`` is: a dictionary of NumPy arrays (of two dimensions for vectors, of
            objects where there are nulls), a DataFrame with the index of the rows, or a table.

        Raises:
            DataError: a column is missing or of another type, or Spark's pipeline would raise an
                error; the message names column, row and value.
            InvalidInputError: ``rows`` is something else, or ``columns`` names what is not there.
        """
        frame, table = hasattr(rows, "iloc"), hasattr(rows, "column_names")
        if not (frame or table or isinstance(rows, Mapping)):
            raise InvalidInputError(
                "score takes a dictionary of columns, a pandas DataFrame or an Arrow table, got "
                f"{rows!r:.200}"
            )
        there: list[str] = list(rows.column_names if table else rows.keys())
        twice = sorted({str(name) for name in there if there.count(name) > 1})
        if twice:
            raise DataError(f"there are several columns called {twice[0]!r}; rename all but one")
        data = {name: rows[name] for name in there}
        wanted = self._wanted(columns, data)
        batch = self._scored(data, _count(data), wanted)
        left = np.arange(_count(data)) if batch.rows is None else batch.rows
        if frame:
            return _frame(rows, wanted, batch, left)
        if table:
            return _table(rows, wanted, batch, left)
        return {
            name: _array(batch.columns[name])
            if name in batch.columns
            else np.asanyarray(data[name])[left]  # masked arrays stay such
            for name in wanted
        }

    def _wanted(self, columns: Sequence[str] | None, data: Mapping[str, object]) -> list[str]:
        wanted = list(self.output_columns if columns is None else columns)
        unknown = [name for name in wanted if name not in self._last and name not in data]
        if isinstance(columns, str) or unknown:
            raise InvalidInputError(
                f"columns={columns!r}: there is no column {unknown or columns!r}; the pipeline "
                f"adds {sorted(self._last)}"
            )
        return wanted

    def _scored(self, data: Mapping[str, object], count: int, wanted: Sequence[str]) -> Batch:
        """Return the rows after all stages that are needed for the columns."""
        missing = [n for n, one in self._inputs.items() if one.needed and n not in data]
        if missing:
            raise DataError(
                f"column {missing[0]!r} is missing; the pipeline takes {self.input_types}, and "
                f"there is {sorted(map(str, data))}"
            )
        taken: dict[str, Column] = {}
        for name, one in self._inputs.items():
            if name in data:
                with _computing(f"input {name!r}"):
                    taken[name] = one.convert(data[name])
        batch = Batch(taken, count)
        with np.errstate(all="ignore"):  # infinities and NaN are as good as Spark's
            for stage in self._stages[: max((self._last.get(n, 0) for n in wanted), default=0)]:
                with _computing(f"stage {type(stage).__name__} of {', '.join(stage.adds)}"):
                    stage(batch)
        absent = [name for name in wanted if name not in batch.columns and name not in data]
        if absent:
            raise DataError(
                f"column {absent[0]!r} could not be made: what it is made of is missing"
            )
        return batch


@contextlib.contextmanager
def _computing(what: str) -> Iterator[None]:
    """Raise every failure as an error of this package: the bundle may come from a stranger."""
    try:
        yield
    except HorovodSparkError:
        raise
    except Exception as error:
        raise InvalidInputError(
            f"{what} of the pipeline cannot be computed: {type(error).__name__}: {error!s:.300}"
        ) from error


def _count(data: Mapping[str, Any]) -> int:
    for name, values in data.items():
        single = getattr(values, "shape", None) == ()
        if single or isinstance(values, str) or not hasattr(values, "__len__"):
            raise DataError(
                f"column {name!r} must be a sequence of values, got {values!r:.200}; one row is "
                "scored by score_row"
            )
    lengths = {len(values) for values in data.values()}
    if len(lengths) > 1:
        lengths_by_name = {name: len(values) for name, values in data.items()}
        raise DataError(f"the columns must be equally long, got {lengths_by_name}")
    return lengths.pop() if lengths else 0


def _array(column: Column) -> np.ndarray:
    """Return a column as a NumPy array."""
    if isinstance(column, Words) or column.valid is not None:
        array = np.empty(len(column), object)
        for row in range(len(column)):
            array[row] = column.value(row)
        return array
    return column.data if isinstance(column, Numbers) else column.dense()


def _frame(rows: Any, wanted: Sequence[str], batch: Batch, left: np.ndarray) -> Any:
    """Return the columns as a pandas DataFrame."""
    columns = {}
    for name in wanted:
        if name not in batch.columns:
            columns[name] = rows[name].iloc[left]
            continue
        column = batch.columns[name]
        array = _array(column)
        columns[name] = list(array) if isinstance(column, Vectors) else array
    return type(rows)(columns, index=rows.index[left], columns=list(wanted))


def _table(rows: Any, wanted: Sequence[str], batch: Batch, left: np.ndarray) -> Any:
    """Return the columns as an Arrow table."""
    import pyarrow as pa

    arrays = []
    for name in wanted:
        if name not in batch.columns:
            arrays.append(rows[name].take(pa.array(left)))
            continue
        column = batch.columns[name]
        if isinstance(column, Numbers):
            mask = None if column.valid is None else ~column.valid
            arrays.append(pa.array(column.data, mask=mask))
        elif isinstance(column, Words):
            kind = pa.list_(pa.string()) if column.lists else pa.string()
            arrays.append(pa.array(column.data, kind))
        else:
            flat = pa.from_numpy_dtype(column.data.dtype)
            values = [column.value(row) for row in range(len(column))]
            arrays.append(pa.array(values, pa.list_(flat)))
    return pa.table(arrays, names=list(wanted))
