"""Stages of Spark ML on single numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .columns import Batch, Numbers, Vectors
from .stage import KEEP, SKIP


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
