"""Conversion of a network's outputs to added columns: numbers, vectors, classes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..errors import DataError
from ..training.onnx import CLASS, PROBABILITY, TOLERANCE, VECTOR
from .columns import Column, Numbers, Vectors, Words


@dataclass(frozen=True)
class Output:
    """An output of a network, and its column.

    Attributes:
        name: the output's name.
        dtype: NumPy's type of the column; ``"string"`` for text.
        scalar: whether it is one number per row.
        scores: whether it is scores of classes, and not their probabilities.
        holds: what the added column holds.
        computed: name of the type that the model computes it in.
        column: the column that is added.
    """

    name: str
    dtype: str
    scalar: bool
    scores: bool
    holds: str
    computed: str
    column: str


def column_of_plain(values: np.ndarray, output: Output) -> Column:
    """Return an output as it is: a number per row, or all its numbers in one row of an array."""
    rows = values.reshape(len(values), math.prod(values.shape[1:]))
    if output.dtype == "string":
        texts = [[_text(text) for text in row] for row in rows.tolist()]
        return Words([row[0] for row in texts]) if output.scalar else Words(texts, lists=True)
    if output.scalar:
        return Numbers(rows[:, 0].astype(output.dtype))
    return Vectors(rows.shape[1], rows.astype(output.dtype))


def _text(value: bytes | str) -> str:
    """Return text, which TensorFlow gives as bytes."""
    return value if isinstance(value, str) else value.decode()


def column_of_scores(values: np.ndarray, output: Output, numbers: np.ndarray) -> Column:
    """Return an output as a vector, the likeliest class, or probabilities or scores of classes.

    Args:
        values: what the network gives.
        output: what it is.
        numbers: what each row is called.

    Raises:
        DataError: it is none of classes; the message names column, row and value.
    """
    rows = values.reshape(len(values), math.prod(values.shape[1:])).astype(np.float64)
    if output.holds == VECTOR:
        return Vectors(rows.shape[1], rows)
    split = _of_two if output.scalar else _of_several
    classes = split(rows[:, 0] if output.scalar else rows, output, numbers)
    if output.holds == CLASS:
        return Numbers(np.argmax(classes, axis=1).astype(np.float64))
    return Vectors(classes.shape[1], classes)


def _of_two(value: np.ndarray, output: Output, numbers: np.ndarray) -> np.ndarray:
    """Return the values of both classes from an output that describes class 1."""
    if not output.scores:
        _check((value >= 0) & (value <= 1), value, output, numbers)
        return np.stack([1.0 - value, value], axis=1)
    _check(~np.isnan(value), value, output, numbers)
    if output.holds == PROBABILITY:
        share = 1.0 / (1.0 + np.exp(-value))
        return np.stack([1.0 - share, share], axis=1)
    return np.stack([-value, value], axis=1)


def _of_several(rows: np.ndarray, output: Output, numbers: np.ndarray) -> np.ndarray:
    """Return an output's value of each class."""
    if not output.scores:
        tolerance = TOLERANCE[output.computed]
        right = (rows.min(axis=1) >= -tolerance) & (abs(rows.sum(axis=1) - 1.0) <= tolerance)
        _check(right, rows, output, numbers)
        return rows
    _check(~np.isnan(rows).any(axis=1), rows, output, numbers)
    if output.holds != PROBABILITY:
        return rows
    powers = np.exp(rows - rows.max(axis=1, keepdims=True))
    shares: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return shares


def _check(right: np.ndarray, values: np.ndarray, output: Output, numbers: np.ndarray) -> None:
    if right.all():
        return
    what = "has scores that are no numbers" if output.scores else "is no probabilities"
    row = int(np.argmin(right))
    raise DataError(
        f"column {output.column!r} cannot be made in row {numbers[row]} (counted from 0): output "
        f"{output.name!r} of the model {what}: {values[row]!s:.200}"
    )
