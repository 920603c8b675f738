"""Stages of Spark ML on single values: numbers, and categories."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import DataError
from .columns import ERROR, KEEP, SKIP, Batch, Column, Numbers, Vectors, Words, vectors_of


@dataclass(frozen=True)
class Imputer:
    """A number in place of null and of a missing value; see `pyspark.ml.feature.ImputerModel`.

    Attributes:
        inputs: columns of numbers.
        outputs: the columns to add, of the same types.
        surrogates: the number for each.
        missing_value: what else counts as missing; NaN, say.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    surrogates: tuple[float, ...]
    missing_value: float

    @property
    def adds(self) -> tuple[str, ...]:
        return self.outputs

    def __call__(self, batch: Batch) -> None:
        added = {}  # together, as an output may have the name of another's input
        for name, output, surrogate in zip(self.inputs, self.outputs, self.surrogates, strict=True):
            data, valid = batch.numbers(name)
            is_nan = np.isnan(self.missing_value)
            missing = np.isnan(data) if is_nan else data == self.missing_value
            if valid is not None:
                missing |= ~valid
            column = batch.columns[name]
            assert isinstance(column, Numbers)
            dtype = column.data.dtype
            whole = np.where(missing, surrogate, data)
            if dtype.kind in "iu":
                whole = _as_whole(batch, name, whole, dtype)
            added[output] = Numbers(whole.astype(dtype))
        batch.columns.update(added)


def _as_whole(batch: Batch, name: str, data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return numbers as a whole type's; Spark, too, goes through float64, and cuts."""
    largest, cut = np.iinfo(dtype).max, np.trunc(data)
    bound = float(largest)  # of 64 bits the next one, which Spark takes for the largest
    fits = (cut >= -bound - 1) & (cut <= bound)
    batch.check(name, fits, f"imputed, it does not fit {dtype.name} any more")
    held = np.where(cut < bound, cut, 0.0).astype(dtype)
    return np.where(cut < bound, held, np.array(largest, dtype))


@dataclass(frozen=True)
class Bucketizer:
    """Buckets of numbers; see `pyspark.ml.feature.Bucketizer`.

    Attributes:
        inputs: columns of numbers.
        outputs: the columns to add.
        splits: the bounds of each one's buckets, ascending.
        handle_invalid: what becomes of NaN: ``"error"``, ``"skip"`` the row (one with null, too),
            or ``"keep"`` it in a bucket of its own.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    splits: tuple[tuple[float, ...], ...]
    handle_invalid: str

    @property
    def adds(self) -> tuple[str, ...]:
        return self.outputs

    def __call__(self, batch: Batch) -> None:
        if self.handle_invalid == SKIP:
            drop_missing(batch, self.inputs)
        for name, output, bounds in zip(self.inputs, self.outputs, self.splits, strict=True):
            data, valid = batch.numbers(name)
            splits = np.array(bounds)
            nan = np.isnan(data)
            buckets = np.searchsorted(_ordered(splits), _ordered(data), side="right") - 1
            buckets = np.where(data == splits[-1], len(splits) - 2, buckets)
            # -0.0 lies below a first bound of 0.0, and is equal to it.
            right = (buckets >= 0) & (data <= splits[-1])
            right |= nan if self.handle_invalid == KEEP else False
            batch.check(
                name,
                right if valid is None else right | ~valid,
                f"the buckets are from {bounds[0]} to {bounds[-1]}",
            )
            buckets = np.where(nan, len(splits) - 1, buckets)
            batch.columns[output] = Numbers(buckets.astype(np.float64), valid)


def _ordered(data: np.ndarray) -> np.ndarray:
    """Return integers in the order in which Java has float64: -0.0 before 0.0."""
    bits = np.ascontiguousarray(data).view(np.int64)
    return np.where(bits < 0, bits ^ np.int64(0x7FFFFFFFFFFFFFFF), bits)


@dataclass(frozen=True)
class Binarizer:
    """Binarization of numbers by a threshold; see `pyspark.ml.feature.Binarizer`.

    Attributes:
        inputs: columns of numbers or vectors.
        outputs: the columns to add.
        thresholds: the threshold of each.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    thresholds: tuple[float, ...]

    @property
    def adds(self) -> tuple[str, ...]:
        return self.outputs

    def __call__(self, batch: Batch) -> None:
        for name, output, threshold in zip(self.inputs, self.outputs, self.thresholds, strict=True):
            if isinstance(batch.column(name), Vectors):
                vectors = batch.vectors(name)
                if threshold >= 0:
                    made = vectors.mapped(lambda x, t=threshold: (x > t).astype(np.float64))  # type: ignore[misc]
                else:
                    dense = vectors.dense()
                    made = Vectors(vectors.size, 1.0 - (dense <= threshold))
                batch.columns[output] = made
                continue
            data, valid = batch.numbers(name)
            above = data > threshold
            above = above if valid is None else above & valid
            batch.columns[output] = Numbers(above.astype(np.float64))


def drop_missing(batch: Batch, names: tuple[str, ...]) -> None:
    """Leave out rows with a null or NaN, as ``DataFrame.na.drop`` does: not NaN in vectors."""
    complete = np.ones(len(batch), bool)
    for name in names:
        column = batch.column(name)
        if column.valid is not None:
            complete &= column.valid
        if isinstance(column, Numbers) and column.data.dtype.kind == "f":
            complete &= ~np.isnan(column.data)
    batch.keep(complete)
    for name in names:
        column = batch.columns[name]
        if not isinstance(column, Vectors | Numbers) or column.valid is None:
            continue
        batch.columns[name] = replace(column, valid=None)


# What text of real numbers Java makes.
_REAL = re.compile(
    r"-?(?:0|[1-9][0-9]*)\.(?:0|[0-9]*[1-9])|-?[1-9]\.(?:0|[0-9]*[1-9])E-?[1-9][0-9]*"
    r"|NaN|-?Infinity"
)


@dataclass(frozen=True)
class StringIndexer:
    """Places of labels; see `pyspark.ml.feature.StringIndexerModel`.

    Attributes:
        inputs: columns of text or numbers. Those that are not there are passed over, as Spark does.
        outputs: the columns to add.
        labels: the labels of each, in their order.
        handle_invalid: what becomes of null and other labels: ``"error"``, ``"skip"`` the row, or
            ``"keep"`` it with the number after the last.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    labels: tuple[tuple[str, ...], ...]
    handle_invalid: str

    @property
    def adds(self) -> tuple[str, ...]:
        return self.outputs

    @cached_property
    def _tables(self) -> list[dict[str, int]]:
        return [{label: place for place, label in enumerate(one)} for one in self.labels]

    @cached_property
    def _bits(self) -> dict[tuple[int, str], dict[Hashable, int]]:
        return {}

    def __call__(self, batch: Batch) -> None:
        indices = {}
        for number, (name, output) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            if name in batch.columns:
                column = batch.columns[name]
                places = self._places(number, column)
                if self.handle_invalid == SKIP:
                    places = _without_nan(column, places)
                elif self.handle_invalid == ERROR:
                    batch.check(name, places >= 0, "it is none of the labels in the fitted data")
                indices[output] = places
        keep = np.ones(len(batch), bool)
        for number, output in enumerate(self.outputs):
            if output not in indices:
                continue
            places = indices[output]
            if self.handle_invalid == SKIP:
                keep &= places >= 0
            categories = np.where(places < 0, len(self.labels[number]), places)
            batch.columns[output] = Numbers(categories.astype(np.float64))
        batch.keep(keep)

    def _places(self, number: int, column: Column) -> np.ndarray:
        """Return the place of each row's label; -1 where it has none."""
        if isinstance(column, Vectors) or (isinstance(column, Words) and column.lists):
            raise DataError(f"column {self.inputs[number]!r} holds neither text nor numbers")
        table = self._tables[number]
        if isinstance(column, Words):
            return _looked_up(table, column.data)
        if column.data.dtype.kind == "f":
            places = self._real(number, column.data)
        else:
            places = _looked_up(table, [str(value) for value in column.data.tolist()])
        return places if column.valid is None else np.where(column.valid, places, -1)

    def _real(self, number: int, data: np.ndarray) -> np.ndarray:
        """Look real numbers up by their bits, which avoids Java's text form of them."""
        key = number, data.dtype.name
        if key not in self._bits:
            table: dict[Hashable, int] = {}
            for place, label in enumerate(self.labels[number]):
                value = real_of(label, data.dtype)
                if value is not None:
                    table[_bits(np.array([value], data.dtype))[0].item()] = place
            self._bits[key] = table
        return _looked_up(self._bits[key], _bits(data).tolist())


def real_of(label: str, dtype: np.dtype) -> float | None:
    """Return the number whose text in Java is a label; ``None`` if there is none.

    Args:
        label: such as ``"1.0"``; ``"1"`` and ``"1e3"`` are the text of no real number.
        dtype: the type of the number.
    """
    if not _REAL.fullmatch(label):
        return None
    value = float(label)
    plain = value == 0 or not math.isfinite(value) or 1e-3 <= abs(value) < 1e7
    digits = len(label.partition("E")[0].replace(".", "").strip("-0"))
    if plain == ("E" in label) or (dtype.itemsize == 4 and digits > 9):
        return None
    with np.errstate(all="ignore"):
        held = float(np.array(value, dtype))
    # A float may hold it as infinity or 0 only.
    return None if math.isinf(held) != math.isinf(value) or (held == 0) != (value == 0) else held


def _looked_up(table: Mapping[Any, int], keys: Sequence[Any]) -> np.ndarray:
    find = table.get
    return np.fromiter((find(key, -1) for key in keys), np.int64, len(keys))


def _bits(data: np.ndarray) -> np.ndarray:
    plain = np.where(np.isnan(data), np.array(np.nan, data.dtype), data)
    return plain.view(f"int{8 * data.dtype.itemsize}")


def _without_nan(column: Column, places: np.ndarray) -> np.ndarray:
    """Spark drops NaN together with null, also where it is a label."""
    if isinstance(column, Numbers) and column.data.dtype.kind == "f":
        return np.where(np.isnan(column.data), -1, places)
    return places


@dataclass(frozen=True)
class IndexToString:
    """Labels by their places; see `pyspark.ml.feature.IndexToString`.

    Attributes:
        input: column of places.
        output: the column to add.
        labels: the labels.
    """

    input: str
    output: str
    labels: tuple[str, ...]

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    def __call__(self, batch: Batch) -> None:
        data, valid = batch.numbers(self.input)
        places = np.trunc(data)
        right = (places >= 0) & (places < len(self.labels))
        right = right if valid is None else right & valid
        batch.check(self.input, right, f"there are labels for 0 to {len(self.labels) - 1}")
        words = [self.labels[place] for place in places.astype(np.int64).tolist()]
        batch.columns[self.output] = Words(words)


@dataclass(frozen=True)
class OneHotEncoder:
    """A vector with a one at the place of the category; see `pyspark.ml.feature.OneHotEncoder`.

    Attributes:
        inputs: columns of places.
        outputs: the columns to add.
        sizes: categories of each.
        drop_last: whether the last category is a vector of zeros.
        handle_invalid: what becomes of other numbers: ``"error"``, or ``"keep"`` as a category.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: tuple[int, ...]
    drop_last: bool
    handle_invalid: str

    @property
    def adds(self) -> tuple[str, ...]:
        return self.outputs

    def __call__(self, batch: Batch) -> None:
        keep = self.handle_invalid == KEEP
        for name, output, size in zip(self.inputs, self.outputs, self.sizes, strict=True):
            data, valid = batch.numbers(name)
            right = (data >= 0) & (data < size)
            if not keep:
                accepted = right if valid is None else right | ~valid
                batch.check(name, accepted, f"there are the categories 0 to {size - 1}")
            width = size + keep - self.drop_last
            places = np.where(right, data, size)
            if valid is not None:
                places = np.where(valid, places, width)
            ones = np.flatnonzero(places < width)
            batch.columns[output] = vectors_of(
                width, len(data), ones, places[ones].astype(np.int64), np.ones(len(ones)), valid
            )
