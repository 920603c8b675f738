"""Settings of how data are prepared and read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from ..errors import DataError, InvalidInputError, brief
from .fields import Settings, from_table, setting
from .importable import explain_misfit
from .validators import (
    FLAG,
    PLACE,
    TEXT,
    Kind,
    as_integer,
    choice,
    count,
    optional,
)

Materializer = Literal["petastorm", "spark"]
# Memory of the shuffle window, by default.
WINDOW_BYTES = 256 * 1024 * 1024
# Called with one row's value (a separate array; images decoded and resized) and a random generator
# (``None`` outside training). Returns an array of the column's shape that fits its type, or for a
# column of single values a plain number.
Transform = Callable[[np.ndarray, np.random.Generator | None], Any]


def _check_shape(column: str, shape: Any) -> tuple[int, ...]:
    entries = shape if isinstance(shape, (Sequence, np.ndarray)) else (shape,)
    sizes = [as_integer(size) for size in entries]
    positive = [size for size in sizes if size is not None and size > 0]
    if isinstance(shape, str) or len(positive) < len(sizes):
        raise DataError(
            f"shapes gives column {column!r} the shape {brief(shape)}; it must consist of "
            "integers of at least 1, such as (8, 8, 1), without the rows"
        )
    return tuple(positive)


def _check_dtype(column: str, dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    try:
        if dtype is None:  # NumPy would take it for float64
            raise TypeError
        return "string" if dtype is str else str(np.dtype(dtype).name)
    except TypeError as error:
        raise DataError(
            f"dtypes gives column {column!r} the type {brief(dtype)}; it must be the name of a "
            "NumPy type, such as 'float32'; leave out columns that keep their default"
        ) from error


def _check_transform(column: str, transform: Any) -> Transform:
    meant = "it must be a function of a value and a random generator"
    if not callable(transform):
        raise DataError(f"transforms gives column {column!r} {brief(transform)}; {meant}")
    wrong = explain_misfit(transform, None, None)
    if wrong:
        raise DataError(f"transforms gives column {column!r} a function, but {wrong}; {meant}")
    checked: Transform = transform
    return checked


def _by_column(words: str, check_one: Callable[[str, object], object]) -> Kind[Mapping[str, Any]]:
    def check(name: str, value: object) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise InvalidInputError(f"{name} must be a dictionary by column, got {brief(value)}")
        return MappingProxyType({column: check_one(column, one) for column, one in value.items()})

    return Kind(f"dictionary from column to {words}", check)


@from_table
@dataclass(frozen=True, kw_only=True)
class DataOptions(Settings):
    """Options of preparing and reading data."""

    shapes: Mapping[str, Any] = setting(
        {},
        _by_column("integers", _check_shape),
        'shapes of columns, such as ``{"image": (8, 8, 1)}``; by default that of the (nested) '
        "arrays. Encoded images are resized to it, (height, width, channels).",
    )
    dtypes: Mapping[str, Any] = setting(
        {},
        _by_column("NumPy dtype", _check_dtype),
        'NumPy dtypes to train columns in, such as ``{"price": "float64"}``. By default floats are '
        "float32, integers keep their size, strings stay strings and bytes are uint8; grey images "
        "of 16 bits are uint16, those of floats float32. Values are never scaled.",
    )
    transforms: Mapping[str, Transform] = setting(
        {},
        _by_column("function", _check_transform),
        "functions that transform a column's values, such as images, by column: called in threads, "
        "once per row, with the value (a separate NumPy array in the column's shape, ``()`` for a "
        "single number or string; booleans are int8, 0 and 1) and a ``numpy.random.Generator`` "
        "(``None`` in validation and prediction) that depends on seed, epoch and the row's "
        "position in the epoch's order, which is the same on any number of ranks with the same "
        "global batch. All columns of a row get equal ones. The result must have the column's "
        "shape and fit its type: to turn an image of uint8 into floats, also set "
        '``dtypes={"image": "float32"}``.',
    )
    allow_nan: bool = setting(
        False,
        FLAG,
        "allow NaN and infinite values, also those that ``transforms`` return (refused by "
        "default).",
    )
    stratify: str | None = setting(
        None,
        optional(TEXT),
        "column whose values get the same proportions in training and validation rows, if "
        "``validation`` is a fraction: of each value, that fraction within one row.",
    )
    window_bytes: int = setting(
        WINDOW_BYTES,
        count(),
        "memory of the shuffle window of one rank, in bytes (256 MiB). Rows that take no more than "
        "this in all are read from storage only once.",
    )
    materializer: Materializer = setting(
        "petastorm",
        choice(*get_args(Materializer)),
        '``"petastorm"`` (default), or ``"spark"`` for Spark\'s own Parquet writer; on Spark '
        "Connect always that.",
    )
    data_dir: str | os.PathLike[str] | None = setting(
        None,
        optional(PLACE),
        "cache directory of the materialized rows, which later runs on the same data reuse; by "
        "default Spark's setting ``spark.horovod.dataDir``, else inside ``run_dir``.",
    )
    keep_data: bool | None = setting(
        None,
        optional(FLAG),
        "whether the rows are kept after the run: by default they are in a cache directory (see "
        "``horovod-spark-runner data``), and in ``run_dir`` until the run has succeeded. Rows that "
        "several maps of one ``fit`` share are deleted after the last of their runs, whether or "
        "not all have succeeded. A few rows of the features, 8 at most, are kept with the trained "
        "model, to try it with, unless this is ``False``.",
    )
