"""The network of an exported pipeline: a SavedModel for TensorFlow, or an ONNX file."""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import DataError, EnvironmentProblem
from ..frameworks import quiet_imports
from ..storage.contents import read_entry, unpack
from ..training.onnx import BOUNDS, CLASS, PLAIN, PROBABILITY, TOLERANCE, VECTOR, OnnxSession
from .columns import ERROR, SKIP, Batch, Column, Mask, Numbers, Vectors, Words

# What a network may be.
SAVED_MODEL, ONNX = "saved_model", "onnx"
# The file in the archive that an ONNX network is.
MODEL_FILE = "model.onnx"
_SIGNATURE = "serving_default"
# What an error says of arrays that stand for Spark's whole numbers of 64 bits.
INEXACT = "it must hold whole numbers below 2**53: larger ones are not held exactly"


def beyond(low: int, high: int) -> str:
    """Return the error text for numbers that an input of the network cannot hold."""
    return f"the network's input holds {low} to {high}"


_Call = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Network:
    """A trained model as a stage; see `TFTransformer`.

    Attributes:
        inputs: columns that feed it.
        arguments: what the network calls each of them.
        dtypes: NumPy's type of each, as the model was trained; ``"string"`` for text.
        shapes: shape of one row's value of each.
        outputs: what the network calls its outputs.
        added: the columns to add, each with the output it is made of, and how: what it holds,
            whether that is of scores, one number per row, its type, and the type computed in.
        handle_invalid: what becomes of rows with null, or values that do not fit: ``"error"``,
            ``"skip"`` the row, or ``"keep"`` it with null.
        batch_size: rows per call.
        format: ``"saved_model"`` or ``"onnx"``.
        contents: the network's files, as one archive.
    """

    inputs: tuple[str, ...]
    arguments: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    outputs: tuple[str, ...]
    added: tuple[tuple[str, int, str, bool, bool, str, str], ...]
    handle_invalid: str
    batch_size: int
    format: str
    contents: bytes = field(repr=False)

    @property
    def adds(self) -> tuple[str, ...]:
        return tuple(name for name, *_ in self.added)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the loaded model, which can be neither pickled nor copied."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @cached_property
    def _call(self) -> _Call:
        """The function from arrays to arrays, by name."""
        if self.format == SAVED_MODEL:
            return self._tensorflow()
        return OnnxSession(
            read_entry(io.BytesIO(self.contents), MODEL_FILE, "an ONNX file, packed")
        )

    def _tensorflow(self) -> _Call:
        try:
            with quiet_imports():
                import tensorflow as tf
        except ImportError as error:
            raise EnvironmentProblem(
                "the network of this pipeline needs TensorFlow, which is not installed: "
                "pip install tensorflow (or tensorflow-cpu)"
            ) from error
        with tempfile.TemporaryDirectory() as folder:
            unpack(io.BytesIO(self.contents), folder, "a SavedModel's files")
            loaded = tf.saved_model.load(folder)

        def call(inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
            # Also the loaded model is kept: the function alone does not hold the variables.
            function = loaded.signatures[_SIGNATURE]
            tensors = {name: tf.constant(array) for name, array in inputs.items()}
            try:
                outputs = function(**tensors)
            except tf.errors.InvalidArgumentError as error:
                whole = " ".join(str(error.message).split()).replace("\\'", "'")
                # What an assertion of the graph says, before TensorFlow's name of it.
                message = whole.partition("assertion failed: ")[2].partition(" [[{{")[0] or whole
                for name, argument in zip(self.inputs, self.arguments, strict=True):
                    message = message.replace(f"column {argument} ", f"column {name!r} ")
                raise DataError(f"the network does not take the rows: {message:.500}") from error
            return {name: tensor.numpy() for name, tensor in outputs.items()}

        return call

    @cached_property
    def _bounds(self) -> Mapping[str, tuple[int, int]]:
        """Bounds of an ONNX file's inputs; a SavedModel checks them itself."""
        call = self._call
        return call.facts.get(BOUNDS, {}) if isinstance(call, OnnxSession) else {}

    def _check_bounds(self, batch: Batch, valid: Mask) -> None:
        """Check that the network's inputs can hold the numbers of all scored rows.

        Raises:
            DataError: one does not; the message names column, row and value.
        """
        for name, argument in zip(self.inputs, self.arguments, strict=True):
            column = batch.column(name)
            if argument not in self._bounds or isinstance(column, Words):
                continue
            data = column.dense() if isinstance(column, Vectors) else column.data[:, None]
            low, high = self._bounds[argument]
            right = np.asarray(((data >= low) & (data <= high)).all(axis=1))
            batch.check(name, right if valid is None else right | ~valid, beyond(low, high))

    def __call__(self, batch: Batch) -> None:
        valid: Mask = None
        for name, dtype, shape in zip(self.inputs, self.dtypes, self.shapes, strict=True):
            right = _fitting(batch, name, dtype, math.prod(shape))
            if self.handle_invalid == ERROR:
                batch.check(name, right, "there is no prediction for it; see handleInvalid")
            elif right is not None:
                valid = right if valid is None else valid & right
        if self.handle_invalid == SKIP:
            batch.keep(valid)
            valid = None
        self._check_bounds(batch, valid)
        whole = batch
        if valid is not None:
            whole = Batch(batch.columns, len(batch))
            whole.keep(valid)
        values = self._predict(whole)
        numbers = np.arange(len(batch)) if batch.rows is None else np.asarray(batch.rows)
        numbers = numbers if valid is None else numbers[valid]
        for name, number, holds, scores, scalar, dtype, computed in self.added:
            output = _Output(self.outputs[number], dtype, scalar, scores, holds, computed, name)
            column = (
                _column_of_plain(values[number], output)
                if holds == PLAIN
                else _column_of_scores(values[number], output, numbers)
            )
            batch.columns[name] = column if valid is None else _spread(column, valid)

    def _predict(self, batch: Batch) -> list[np.ndarray]:
        """Return the outputs for all rows; for no rows, empty outputs of the right shape."""
        arguments = {
            argument: _argument(batch, name, dtype, shape)
            for argument, name, dtype, shape in zip(
                self.arguments, self.inputs, self.dtypes, self.shapes, strict=True
            )
        }
        if not len(batch):  # which end the process in onnxruntime's LSTM
            arguments = {name: _blank_row(values) for name, values in arguments.items()}
            outputs = self._call(arguments)
            return [outputs[name][:0] for name in self.outputs]
        parts = []
        for begin in range(0, len(batch), self.batch_size):
            piece = {n: v[begin : begin + self.batch_size] for n, v in arguments.items()}
            parts.append(self._call(piece))
        return [np.concatenate([part[name] for part in parts]) for name in self.outputs]


def _fitting(batch: Batch, name: str, dtype: str, width: int) -> Mask:
    """Return the mask of rows that the model can take; ``None`` if it takes all."""
    column = batch.column(name)
    valid = column.valid
    if isinstance(column, Vectors):
        if column.size != width:
            return np.zeros(len(column), bool)
        if np.dtype(dtype).kind != "i" or column.data.dtype == dtype:
            return valid
        return _whole(batch, name, column, np.dtype(dtype))
    if isinstance(column, Numbers) and np.dtype(dtype).kind == "i" and column.data.dtype != dtype:
        bounds = np.iinfo(dtype)
        inside = (column.data >= bounds.min) & (column.data <= bounds.max)
        return inside if valid is None else valid & inside
    return valid


def _whole(batch: Batch, name: str, column: Vectors, dtype: np.dtype) -> np.ndarray:
    """Return which arrays hold nothing but numbers that a whole type has.

    Raises:
        DataError: one holds others than whole numbers, which its column in Spark cannot.
    """
    data, bounds = column.dense(), np.iinfo(dtype)
    valid = np.ones(len(data), bool) if column.valid is None else column.valid
    right = (data == np.trunc(data)).all(axis=1)
    batch.check(name, right | ~valid, "it must hold whole numbers")
    if dtype.itemsize == 8:
        batch.check(name, (abs(data) < 2.0**53).all(axis=1) | ~valid, INEXACT)
    inside = (data >= bounds.min) & (data <= bounds.max)
    return np.asarray(inside.all(axis=1)) & valid


def _argument(batch: Batch, name: str, dtype: str, shape: tuple[int, ...]) -> Any:
    column = batch.column(name)
    if isinstance(column, Words):
        return np.array(column.data, object)
    data = column.dense() if isinstance(column, Vectors) else column.data
    return data.astype(dtype).reshape(len(data), *shape)


def _blank_row(values: np.ndarray) -> np.ndarray:
    """Return one row of zeros or empty strings, of the shape and type of ``values``."""
    return np.full((1, *values.shape[1:]), "" if values.dtype == object else 0, values.dtype)


def _spread(column: Column, valid: np.ndarray) -> Column:
    """Return the rows of a column in the places of ``valid``, and null in all others."""
    places = np.cumsum(valid) - 1
    if isinstance(column, Words):
        data = [column.data[p] if v else None for p, v in zip(places, valid, strict=True)]
        return Words(data, column.lists)
    if not len(column):
        shape = (len(valid), *column.data.shape[1:])
        return replace(column, data=np.zeros(shape, column.data.dtype), valid=valid)
    return replace(column.take(np.maximum(places, 0)), valid=valid)


@dataclass(frozen=True)
class _Output:
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


def _column_of_plain(values: np.ndarray, output: _Output) -> Column:
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


def _column_of_scores(values: np.ndarray, output: _Output, numbers: np.ndarray) -> Column:
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


def _of_two(value: np.ndarray, output: _Output, numbers: np.ndarray) -> np.ndarray:
    """Return the values of both classes from an output that describes class 1."""
    if not output.scores:
        _check((value >= 0) & (value <= 1), value, output, numbers)
        return np.stack([1.0 - value, value], axis=1)
    _check(~np.isnan(value), value, output, numbers)
    if output.holds == PROBABILITY:
        share = 1.0 / (1.0 + np.exp(-value))
        return np.stack([1.0 - share, share], axis=1)
    return np.stack([-value, value], axis=1)


def _of_several(rows: np.ndarray, output: _Output, numbers: np.ndarray) -> np.ndarray:
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


def _check(right: np.ndarray, values: np.ndarray, output: _Output, numbers: np.ndarray) -> None:
    if right.all():
        return
    what = "has scores that are no numbers" if output.scores else "is no probabilities"
    row = int(np.argmin(right))
    raise DataError(
        f"column {output.column!r} cannot be made in row {numbers[row]} (counted from 0): output "
        f"{output.name!r} of the model {what}: {values[row]!s:.200}"
    )
