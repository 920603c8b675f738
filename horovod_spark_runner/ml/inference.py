"""Predicting inside Spark's Python workers: Arrow in, Arrow out.

A worker process loads a model once and keeps it, by the hash of its contents, for all tasks and
all calls of ``transform`` it serves.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from ..data.manifest import Column
from ..data.read.arrow_to_numpy import column_to_numpy
from ..data.read.decode import RowDecoder, UndecodableRow
from ..errors import DataError, ModelError
from ..spark.python_worker import keep_to_task
from ..training.spec import OutputSpec
from ..training.trained_model import Model, Recipe
from .loading import describe_outputs, load_model
from .rows import valid_in_all, with_nulls

# Models a Python worker keeps loaded.
_CACHE_SIZE = 4
_models: OrderedDict[str, Model] = OrderedDict()

# What becomes of rows with invalid values: an error, no row, or a row without prediction.
ERROR, SKIP, KEEP = "error", "skip", "keep"

# dtype of an output -> Spark's type for it and the NumPy dtype of that, where Spark has it not.
_TYPES = {
    "bool": ("boolean", None),
    "int8": ("tinyint", None),
    "int16": ("smallint", None),
    "int32": ("int", None),
    "int64": ("bigint", None),
    "uint8": ("smallint", "int16"),
    "uint16": ("int", "int32"),
    "uint32": ("bigint", "int64"),
    "uint64": ("double", "float64"),
    "float16": ("float", "float32"),
    "bfloat16": ("float", "float32"),
    "float32": ("float", None),
    "float64": ("double", None),
    "string": ("string", None),
}


@dataclass(frozen=True)
class Predictor:
    """The body of the prediction UDF.

    Attributes:
        digest: identity of the model and its weights.
        load: gives the model's recipe; called at most once per worker.
        columns: the feature columns, in the order of the UDF's arguments.
        outputs: the model's outputs.
        batch_size: rows per call of the model.
        handle_invalid: what becomes of rows with invalid values; ``"skip"`` gives nulls as
            ``"keep"`` does, for the caller to leave out.
        names: what the DataFrame calls these columns, for messages.
    """

    digest: str
    load: Callable[[], Recipe] = field(repr=False)
    columns: tuple[Column, ...]
    outputs: tuple[OutputSpec, ...]
    batch_size: int
    handle_invalid: str = ERROR
    names: tuple[str, ...] = ()

    def __call__(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        model = self._model()
        for arrays in batches:
            valid = self._valid(arrays)
            try:
                if valid is None:
                    yield self._predict(model, arrays)
                else:
                    mask = pa.array(valid)
                    rows = tuple(array.filter(mask) for array in arrays)
                    yield with_nulls(self._predict(model, rows), valid)
            except UndecodableRow as error:
                row = error.row if valid is None else int(np.flatnonzero(valid)[error.row])
                place = f"row {row} of a batch of {len(arrays[0])} (counted from 0)"
                raise DataError(f"{place}: {error.cause}") from error.cause

    def _valid(self, arrays: tuple[pa.Array, ...]) -> np.ndarray | None:
        """Return which rows are valid; ``None`` if all are."""
        names = self.names or tuple(column.name for column in self.columns)
        columns = [replace(c, name=name) for c, name in zip(self.columns, names, strict=True)]
        advice = "handle_invalid='skip' leaves such rows out, 'keep' gives them null as prediction"
        return valid_in_all(arrays, columns, advice if self.handle_invalid == ERROR else None)

    def _predict(self, model: Model, arrays: tuple[pa.Array, ...]) -> pa.Array:
        values = {
            column.name: column_to_numpy(pa.chunked_array([array]), column)
            for column, array in zip(self.columns, arrays, strict=True)
        }
        rows = len(arrays[0])
        parts: list[list[pa.Array]] = [[_nothing(output)] for output in self.outputs]
        for begin in range(0, rows, self.batch_size):
            some = {name: v[begin : begin + self.batch_size] for name, v in values.items()}
            try:
                given = model(some)
            except UndecodableRow as error:
                raise UndecodableRow(begin + error.row, error.cause) from None
            for part, value, output in zip(parts, given, self.outputs, strict=True):
                _check_rows(value, output, min(self.batch_size, rows - begin))
                part.append(array_of(value, output))
        outputs = [part[1] if len(part) == 2 else pa.concat_arrays(part) for part in parts]
        if len(outputs) == 1:
            return outputs[0]
        return pa.StructArray.from_arrays(outputs, names=field_names(len(outputs)))

    def _model(self) -> Model:
        if self.digest not in _models:
            keep_to_task()
            recipe = replace(self.load(), outputs=self.outputs)
            _models[self.digest] = _decoding(recipe, load_model(recipe))
            if len(_models) > _CACHE_SIZE:
                _models.popitem(last=False)
        _models.move_to_end(self.digest)
        return _models[self.digest]


def _decoding(recipe: Recipe, model: Model) -> Model:
    decode = RowDecoder(recipe.columns, recipe.transforms, allow_nan=True)
    return lambda values: model(decode(values))


def _check_rows(value: np.ndarray, output: OutputSpec, rows: int) -> None:
    if value.ndim == 0 or len(value) != rows:
        raise ModelError(
            f"output {output.name!r} has the shape {value.shape} for {rows} rows; each output must "
            "have one entry per row"
        )


def describing(load: Callable[[], Recipe]) -> Callable[[], str]:
    """Return the question to a worker what a model gives, or why it gives nothing.

    The answer is a JSON list: the outputs, why there are none, and why it is the wrong model.
    """

    def describe() -> str:
        try:
            told: list[Any] = [*describe_outputs(load()), ""]
        except ModelError as error:
            told = [[], "", str(error)]
        return json.dumps(told)

    return describe


def field_names(outputs: int) -> list[str]:
    """Return what outputs are called inside the UDF's result; their own names may be anything."""
    return [f"output{number}" for number in range(outputs)]


def is_scalar(spec: OutputSpec) -> bool:
    """Tell whether an output is one number per row, in a column of numbers."""
    return spec.shape in ((), (1,))


def spark_type(spec: OutputSpec) -> str:
    """Return Spark's type of an output's column.

    Raises:
        ModelError: Spark has none.
    """
    if spec.dtype not in _TYPES:
        raise ModelError(
            f"output {spec.name!r} is of type {spec.dtype}, for which Spark has no column type"
        )
    element = _TYPES[spec.dtype][0]
    return element if is_scalar(spec) else f"array<{element}>"


def _nothing(spec: OutputSpec) -> pa.Array:
    dtype = object if spec.dtype == "string" else _TYPES[spec.dtype][1] or spec.dtype
    return array_of(np.empty((0, *(size or 0 for size in spec.shape)), dtype), spec)


def array_of(values: np.ndarray, spec: OutputSpec) -> pa.Array:
    """Return an output as an Arrow array: numbers, or one flat list of numbers per row."""
    rows = len(values)
    if spec.dtype == "string":
        flat = pa.array(values.reshape(-1).tolist(), pa.binary()).cast(pa.string())
    else:
        dtype = _TYPES[spec.dtype][1] or spec.dtype
        flat = pa.array(np.ascontiguousarray(values, dtype).reshape(-1))
    if is_scalar(spec):
        return flat
    width = values.size // rows if rows else 0
    offsets = np.arange(rows + 1, dtype=np.int32) * width
    return pa.ListArray.from_arrays(pa.array(offsets), flat)
