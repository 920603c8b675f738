"""Stages of Spark ML on vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..errors import DataError
from .columns import ERROR, KEEP, SKIP, Batch, Numbers, Vectors, joined
from .values import drop_missing


@dataclass(frozen=True)
class VectorAssembler:
    """Numbers and vectors joined into one vector; see `pyspark.ml.feature.VectorAssembler`.

    Attributes:
        inputs: columns of numbers, booleans or vectors.
        output: the column to add.
        handle_invalid: what becomes of null, and of NaN among numbers: ``"error"``, ``"skip"`` the
            row, or ``"keep"`` it as NaN.
    """

    inputs: tuple[str, ...]
    output: str
    handle_invalid: str

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    def __call__(self, batch: Batch) -> None:
        if self.handle_invalid == SKIP:
            drop_missing(batch, self.inputs)
        parts = [self._part(batch, name) for name in self.inputs]
        whole = joined(parts)
        # Zeros are not kept, so the sign of one is lost.
        batch.columns[self.output] = replace(whole, data=whole.data + 0.0)

    def _part(self, batch: Batch, name: str) -> Vectors:
        column = batch.column(name)
        if isinstance(column, Vectors):
            data, valid = column.data, column.valid
            if valid is None:
                return column
            rows = column.dense()
        else:
            data, valid = batch.numbers(name)
            rows = data[:, None]
        if self.handle_invalid == ERROR:
            right = np.ones(len(rows), bool) if valid is None else valid
            if isinstance(column, Numbers):
                right = right & ~np.isnan(data)
            batch.check(name, right, "handleInvalid of the VectorAssembler is 'error'")
        if valid is not None and self.handle_invalid == KEEP:
            rows = np.where(valid[:, None], rows, np.nan)
        return Vectors(rows.shape[1], rows)


@dataclass(frozen=True)
class VectorSlicer:
    """Some elements of a vector; see `pyspark.ml.feature.VectorSlicer`.

    Attributes:
        input: column of vectors.
        output: the column to add.
        indices: places of the elements, in the order in which they are taken.
    """

    input: str
    output: str
    indices: np.ndarray

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    def __call__(self, batch: Batch) -> None:
        vectors = batch.vectors(self.input)
        beyond = self.indices[self.indices >= vectors.size]
        if len(beyond):
            raise DataError(
                f"column {self.input!r} holds vectors of {vectors.size} elements, and element "
                f"{beyond[0]} (counted from 0) is taken"
            )
        if vectors.starts is None:
            data = vectors.data[:, self.indices]
        else:
            # One row with its zeros at a time fits in memory.
            rows = [vectors.value(row)[self.indices] for row in range(len(vectors))]
            data = np.array(rows).reshape(len(rows), len(self.indices))
        batch.columns[self.output] = Vectors(len(self.indices), data)


@dataclass(frozen=True)
class Scaler:
    """Elements moved and multiplied: Spark's StandardScaler, MaxAbsScaler and RobustScaler.

    Attributes:
        input: column of vectors.
        output: the column to add.
        size: elements of a vector.
        shift: what is taken away from each element; empty for nothing.
        factors: what each is multiplied by; empty for nothing.
    """

    input: str
    output: str
    size: int
    shift: np.ndarray
    factors: np.ndarray

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    def __call__(self, batch: Batch) -> None:
        vectors = batch.vectors(self.input, self.size)
        if len(self.shift):
            vectors = Vectors(self.size, vectors.dense() - self.shift)
        if len(self.factors):
            vectors = vectors.scaled(self.factors)
        batch.columns[self.output] = vectors


@dataclass(frozen=True)
class MinMaxScaler:
    """Elements brought into a range; see `pyspark.ml.feature.MinMaxScalerModel`.

    Attributes:
        input: column of vectors.
        output: the column to add.
        lows: the smallest value of each element in the fitted data.
        factors: what each is multiplied by; 0 for those that were constant.
        lower: where the range begins.
        middle: its middle, for what was constant.
    """

    input: str
    output: str
    lows: np.ndarray
    factors: np.ndarray
    lower: float
    middle: float

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    def __call__(self, batch: Batch) -> None:
        data = batch.vectors(self.input, len(self.lows)).dense()
        moved = (data - self.lows) * self.factors + self.lower
        moved = np.where(self.factors == 0, self.middle, moved)
        batch.columns[self.output] = Vectors(len(self.lows), np.where(np.isnan(data), data, moved))


@dataclass(frozen=True)
class Normalizer:
    """Vectors divided by their norms; see `pyspark.ml.feature.Normalizer`.

    Attributes:
        input: column of vectors.
        output: the column to add.
        p: which norm.
    """

    input: str
    output: str
    p: float

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    def __call__(self, batch: Batch) -> None:
        vectors = batch.vectors(self.input)
        count = len(vectors)
        if vectors.starts is None:
            norms = self._norms(vectors.data) if vectors.size else np.zeros(count)
            divisors = np.where(norms == 0, 1.0, norms)[:, None]
        else:
            starts, data = vectors.starts, vectors.data
            pairs = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
            rows = [data[None, begin:end] for begin, end in pairs]
            norms = np.array([self._norms(row)[0] if row.size else 0.0 for row in rows])
            divisors = np.where(norms == 0, 1.0, norms)[vectors.entry_rows()]
        batch.columns[self.output] = replace(vectors, data=vectors.data / divisors)

    def _norms(self, data: np.ndarray) -> np.ndarray:
        sizes = np.abs(data)
        if self.p == math.inf:
            largest: np.ndarray = np.fmax.reduce(sizes, axis=1, initial=0.0)
            return largest
        # One after the other, as Spark adds; NumPy's sum adds in pairs.
        if self.p == 1:
            powers, root = sizes, 1.0
        elif self.p == 2:
            return np.sqrt(np.add.accumulate(data * data, axis=1)[:, -1])
        else:
            powers, root = np.power(sizes, self.p), 1.0 / self.p
        total = np.add.accumulate(powers, axis=1)[:, -1]
        return total if root == 1.0 else np.power(total, root)


@dataclass(frozen=True)
class Projection:
    """Vectors times a matrix: Spark's PCA and DCT.

    Attributes:
        input: column of vectors.
        output: the column to add.
        components: what each element of the result is made with, one per column.
    """

    input: str
    output: str
    components: np.ndarray

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    def __call__(self, batch: Batch) -> None:
        size, count = self.components.shape
        data = batch.vectors(self.input, size).dense()
        batch.columns[self.output] = Vectors(count, data @ self.components)


@dataclass(frozen=True)
class PolynomialExpansion:
    """Products of elements; see `pyspark.ml.feature.PolynomialExpansion`.

    Attributes:
        input: column of vectors.
        output: the column to add.
        degree: how many elements a product has at most.
    """

    input: str
    output: str
    degree: int

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    def __call__(self, batch: Batch) -> None:
        vectors = batch.vectors(self.input)
        data = vectors.dense()
        made: list[np.ndarray] = []
        self._expand(data, vectors.size - 1, self.degree, np.ones(len(data)), made)
        products = np.stack(made[1:], axis=1) if made[1:] else np.zeros((len(data), 0))
        batch.columns[self.output] = Vectors(products.shape[1], products)

    def _expand(
        self, data: np.ndarray, last: int, degree: int, so_far: np.ndarray, made: list[np.ndarray]
    ) -> None:
        """Add the products of ``so_far`` and the elements up to ``last``, in Spark's order."""
        if degree == 0 or last < 0:
            made.append(so_far)
            return
        for left in range(degree, -1, -1):
            self._expand(data, last - 1, left, so_far, made)
            # A product that is zero stays so, also times infinity; it has no sign.
            so_far = np.where(so_far == 0, 0.0, so_far * data[:, last]) + 0.0


@dataclass(frozen=True)
class Interaction:
    """Products of the elements of several columns; see `pyspark.ml.feature.Interaction`.

    Attributes:
        inputs: columns of numbers, booleans or vectors.
        output: the column to add.
        categories: for each element of each, how many categories it is one of; 0 for a number.
    """

    inputs: tuple[str, ...]
    output: str
    categories: tuple[tuple[int, ...], ...]

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    @cached_property
    def _widths(self) -> list[int]:
        return [sum(max(count, 1) for count in counts) for counts in self.categories]

    def __call__(self, batch: Batch) -> None:
        rows = len(batch)
        product, active = np.ones((rows, 1)), np.ones((rows, 1), bool)
        for number in reversed(range(len(self.inputs))):
            values, there = self._encoded(batch, number)
            both = there[:, :, None] & active[:, None, :]
            times = np.where(both, values[:, :, None] * product[:, None, :], 0.0)
            shape = rows, times.shape[1] * times.shape[2]
            product, active = times.reshape(shape), both.reshape(shape)
        batch.columns[self.output] = Vectors(product.shape[1], product)

    def _encoded(self, batch: Batch, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a column's elements, categories as ones, and which of them count."""
        name, counts = self.inputs[number], self.categories[number]
        if isinstance(batch.column(name), Vectors):
            data = batch.vectors(name, len(counts)).dense()
        else:
            single, valid = batch.numbers(name)
            batch.check(name, valid, "what interacts cannot be null")
            data = single[:, None]
        values = np.zeros((len(data), self._widths[number]))
        there, offset = np.zeros(values.shape, bool), 0
        for place, count in enumerate(counts):
            one = data[:, place]
            if not count:
                values[:, offset], there[:, offset] = one, True
                offset += 1
                continue
            right = (one >= 0) & (one < count) & (one == np.trunc(one))
            batch.check(name, right, f"it must be one of {count} categories")
            at = (np.arange(len(data)), offset + one.astype(np.int64))
            values[at], there[at] = 1.0, True
            offset += count
        return values, there
