"""Sample rows of a trained model, saved with its outputs for them.

They are rows of its training where there are some: a model need not take others, and may give no
number for them. They describe it, and serve to compare a rebuilt model and an export with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..data.manifest import Column
from ..errors import ModelError
from ..storage.arrays import Arrays, dump_arrays, load_arrays
from ..storage.contents import Contents

# Tolerance between different hardware, relative to the largest value.
_ELSEWHERE = 0.02


def check_close(value: np.ndarray, other: np.ndarray) -> None:
    """Check that two outputs of one model on one machine are equal, but for rounding.

    Raises:
        AssertionError: the outputs differ by more than rounding.
    """
    if value.dtype.kind in "iubOS":
        np.testing.assert_array_equal(value, other, "its outputs differ")
    else:
        exact = value.dtype in (np.float32, np.float64)
        tolerance = 1e-4 if exact else 2e-2
        value, other = value.astype(np.float64), other.astype(np.float64)
        np.testing.assert_allclose(
            other, value, rtol=tolerance, atol=tolerance, err_msg="its outputs differ"
        )


def _check_like(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> None:
    """Check that a rebuilt model gives the trained model's outputs, perhaps on another machine.

    Args:
        expected: the outputs of the trained model.
        actual: those of this one, for the same inputs.

    Raises:
        ModelError: it gives something else.
    """
    for number, (value, other) in enumerate(zip(expected, actual, strict=False)):
        if value.shape != other.shape or not _is_near(value, other):
            raise ModelError(
                "model_fn builds another model than was trained, although its weights fit: for "
                f"the same inputs output {number} is {_some(other)}, that of the trained one was "
                f"{_some(value)}"
            )


def _is_near(value: np.ndarray, other: np.ndarray) -> bool:
    if value.dtype.kind not in "iubO":
        value, other = value.astype(np.float64), other.astype(np.float64)
        finite = np.abs(value[np.isfinite(value)])
        limit = _ELSEWHERE * max(1e-3, finite.max(initial=0.0))
        return bool(np.allclose(other, value, rtol=_ELSEWHERE, atol=limit, equal_nan=True))
    # The predicted class may differ where two are about equally likely.
    return bool(np.mean(value == other) >= 0.5)


def _some(array: np.ndarray) -> str:
    return np.array2string(array.reshape(-1)[:3], precision=4, separator=", ")


SAMPLE_FILE = "sample.npz"
# Most rows that are kept, and their bytes; a single row may exceed them.
SAMPLE_COUNT, _MOST_BYTES = 8, 4 * 1024 * 1024
# Values of made-up columns of strings.
_TEXTS = ("", "a", "b c", "Ä")
_INPUT, _OUTPUT = "input/", "output/"

# Computes outputs from columns; not necessarily those of a signature.
Call = Callable[[Arrays], Sequence[np.ndarray]]


@dataclass(frozen=True)
class SampleRows:
    """Rows that a model can be called with.

    Attributes:
        inputs: by feature column.
        outputs: what the model gives for them; none where that is something else each time.
    """

    inputs: Arrays
    outputs: Sequence[np.ndarray] = ()

    @classmethod
    def of(cls, call: Call, inputs: Arrays) -> SampleRows:
        """Return rows with a model's outputs for them; fewer where those are large."""
        once = call(inputs)
        if sum(output.nbytes for output in once) > _MOST_BYTES:
            inputs = {name: array[:2] for name, array in inputs.items()}
            once = call(inputs)
        again = call(inputs)
        try:
            for one, other in zip(once, again, strict=True):
                check_close(one, other)
        except AssertionError:
            return cls(inputs)
        return cls(inputs, once)

    def dump(self) -> memoryview:
        """Return the contents of a file."""
        inputs = {_INPUT + name: array for name, array in self.inputs.items()}
        outputs = {f"{_OUTPUT}{n:05d}": array for n, array in enumerate(self.outputs)}
        return dump_arrays({**inputs, **outputs})

    @classmethod
    def load(cls, data: bytes | memoryview | Contents) -> SampleRows:
        """Return the rows in a file.

        Raises:
            ValueError: it is no such file.
        """
        arrays = load_arrays(data)
        outputs = [arrays[name] for name in sorted(arrays) if name.startswith(_OUTPUT)]
        inputs = {n.removeprefix(_INPUT): a for n, a in arrays.items() if n.startswith(_INPUT)}
        return cls(inputs, outputs)

    def check(self, call: Call) -> None:
        """Check that a rebuilt model gives the trained model's outputs.

        Raises:
            ModelError: it gives something else.
        """
        if self.outputs:
            _check_like(self.outputs, call(self.inputs))

    def fits(self, columns: Sequence[Column]) -> bool:
        """Return whether the rows are of these columns."""
        wanted = {column.name: (column.shape, column.numpy_dtype) for column in columns}
        return {n: (a.shape[1:], a.dtype) for n, a in self.inputs.items()} == wanted


def few_rows(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Return copies of the first rows: few enough to keep."""
    first = {name: array[:SAMPLE_COUNT] for name, array in arrays.items()}
    sizes = [sum(map(_bytes_of, row)) for row in zip(*first.values(), strict=True)]
    count = max(1, np.count_nonzero(np.cumsum(sizes) <= _MOST_BYTES))
    return {name: np.array(array[:count]) for name, array in first.items()}


def _bytes_of(value: object) -> int:
    array = np.asarray(value)
    return sum(map(len, array.reshape(-1).tolist())) if array.dtype.kind in "OU" else array.nbytes


def repeat_rows(arrays: Mapping[str, np.ndarray], count: int) -> Arrays:
    """Return so many rows, those given by turns."""
    return {n: np.take(a, np.arange(count) % len(a), axis=0) for n, a in arrays.items()}


def finite_rows(arrays: Mapping[str, np.ndarray], count: int, call: Call) -> Arrays:
    """Return those rows that a model gives finite numbers for.

    Args:
        arrays: the rows.
        count: how many the model is called with.
        call: the model.

    Raises:
        ModelError: it gives none for any.
    """
    rows = repeat_rows(arrays, count)
    finite = np.ones(count, bool)
    for output in call(rows):
        if output.dtype.kind == "f":
            finite &= np.isfinite(output.reshape(count, -1)).all(axis=1)
    if not finite.any():
        raise ModelError("its outputs are NaN or infinite for all rows that it is tried with")
    return {name: array[finite] for name, array in rows.items()}


def choose_rows(columns: Sequence[Column], real_rows: Arrays | None, call: Call) -> Arrays:
    """Return rows that distinguish models: real ones, or made-up ones where there are none.

    If the rows given are all equal, which tell little, made-up ones come first.

    Args:
        columns: what the model takes.
        real_rows: real rows.
        call: the model, which may take some rows only: the first that it gives finite numbers for
            are chosen, else the last that it takes.

    Raises:
        Exception: the model takes none of them; whatever it raised.
    """
    chosen, problem = None, None
    for rows in _candidates(columns, real_rows):
        try:
            outputs = call(rows)
        except Exception as error:  # the user's own call may fail in any way
            problem = error
            continue
        chosen = rows
        if rows is real_rows or all(map(_is_finite, outputs)):
            return rows
    if chosen is None:
        assert problem is not None
        raise problem
    return chosen


def _is_finite(array: np.ndarray) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _candidates(columns: Sequence[Column], real_rows: Arrays | None) -> Iterator[Arrays]:
    if real_rows is None or all((array == array[:1]).all() for array in real_rows.values()):
        yield made_up_rows(columns)
        random = np.random.default_rng(0)
        yield made_up_rows(columns, random.random)
    yield {c.name: c.blank().repeat(2, 0) for c in columns} if real_rows is None else real_rows


def made_up_rows(
    columns: Sequence[Column], numbers: Callable[..., np.ndarray] | None = None
) -> Arrays:
    """Return rows that differ in all columns.

    Args:
        columns: the columns.
        numbers: draws real numbers of a shape; by default, normally distributed ones.
    """
    random = np.random.default_rng(0)

    def values(column: Column) -> np.ndarray:
        shape = (SAMPLE_COUNT, *column.shape)
        if column.is_text:
            return random.choice(np.array(_TEXTS, object), shape)
        dtype = column.numpy_dtype
        if dtype.kind in "iub":  # small enough for the smallest vocabulary
            return random.integers(0, 2, shape).astype(dtype)
        drawn: np.ndarray = (numbers or random.standard_normal)(shape)
        return drawn.astype(dtype)

    return {column.name: values(column) for column in columns}
