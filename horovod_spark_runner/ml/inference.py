"""Predicting inside Spark's Python workers: Arrow in, Arrow out.

A worker process loads a model once and keeps it, by the hash of its contents, for all tasks and
all calls of ``transform`` it serves.
"""

from __future__ import annotations

import functools
import json
import os
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
from ..training.spec import OutputSpec
from ..training.trained_model import Model, Recipe
from .ahead import Prepared
from .batching import Batch, Piece, cut
from .loading import describe_outputs, load_model
from .rows import describe_fault, valid_rows, with_nulls

# Models a Python worker keeps loaded.
_CACHE_SIZE = 4
_models: OrderedDict[str, Model] = OrderedDict()

# What becomes of rows with invalid values: an error, no row, or a row without prediction.
ERROR, SKIP, KEEP = "error", "skip", "keep"
HANDLE_INVALID = (ERROR, SKIP, KEEP)

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
    """

    digest: str
    load: Callable[[], Recipe] = field(repr=False)
    columns: tuple[Column, ...]
    outputs: tuple[OutputSpec, ...]
    batch_size: int
    handle_invalid: str = ERROR

    def __call__(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Yield the predictions for all rows, in their order; in other batches than they came."""
        model = self._model()
        pieces = (Piece(a, self._valid(a), 0, len(a[0])) for a in batches)
        with Prepared(
            functools.partial(self._prepare, model), ahead=_prepares_ahead(model)
        ) as made:
            for group in cut(pieces, self.batch_size):
                yield _joined([self._predict(model, *pair) for pair in made.each(group)])

    def _valid(self, arrays: tuple[pa.Array, ...]) -> np.ndarray | None:
        """Return which rows are valid; ``None`` if all are."""
        valid: np.ndarray | None = None
        for array, column in zip(arrays, self.columns, strict=True):
            mask = valid_rows(array, column)
            if mask is None:
                continue
            if self.handle_invalid == ERROR:
                row = int(np.argmin(mask))
                raise DataError(
                    f"{describe_fault(array, column, row)} in row {row} of a batch of {len(array)} "
                    "(counted from 0); handle_invalid='skip' leaves such rows out, 'keep' gives "
                    "them null as prediction"
                )
            valid = mask if valid is None else valid & mask
        return valid

    def _prepare(self, model: Model, batch: Batch) -> Any:
        """Return what the model computes with; ``None`` where there is no row for it."""
        arrays = batch.arrays()
        if not len(arrays[0]):
            return None
        values = {
            column.name: column_to_numpy(pa.chunked_array([array]), column)
            for column, array in zip(self.columns, arrays, strict=True)
        }
        try:
            return model.prepare(values)
        except UndecodableRow as error:
            raise DataError(f"{batch.place(error.row)}: {error.cause}") from error.cause

    def _predict(self, model: Model, batch: Batch, prepared: Any) -> pa.Array:
        valid = batch.valid
        rows = batch.rows if valid is None else int(np.count_nonzero(valid))
        outputs = [_nothing(output) for output in self.outputs]
        if prepared is not None:
            given = model.compute(prepared)
            for value, output in zip(given, self.outputs, strict=True):
                _check_rows(value, output, rows)
            outputs = [array_of(v, output) for v, output in zip(given, self.outputs, strict=True)]
        single = len(outputs) == 1
        names = field_names(len(outputs))
        array = outputs[0] if single else pa.StructArray.from_arrays(outputs, names=names)
        return array if valid is None else with_nulls(array, valid)

    def _model(self) -> Model:
        if self.digest not in _models:
            _prepare_process()
            recipe = replace(self.load(), outputs=self.outputs)
            _models[self.digest] = _decoding(recipe, load_model(recipe))
            if len(_models) > _CACHE_SIZE:
                _models.popitem(last=False)
        _models.move_to_end(self.digest)
        return _models[self.digest]


def _decoding(recipe: Recipe, model: Model) -> Model:
    decode = RowDecoder(recipe.columns, recipe.transforms, allow_nan=True)
    decodes = bool(recipe.transforms) or any(column.is_encoded for column in recipe.columns)
    return Model(lambda values: model.prepare(decode(values)), model.compute, slow=decodes)


def _prepares_ahead(model: Model) -> bool:
    """Tell whether to prepare a batch while the one before it is computed.

    Where preparing is work, or computing leaves the processor idle; else it is one more thread on
    the cores that are to compute.
    """
    return model.slow or bool(os.environ.get("CUDA_VISIBLE_DEVICES"))


def _joined(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _check_rows(value: np.ndarray, output: OutputSpec, rows: int) -> None:
    if value.ndim == 0 or len(value) != rows:
        raise ModelError(
            f"output {output.name!r} has the shape {value.shape} for {rows} rows; each output must "
            "have one entry per row"
        )


def describing(load: Callable[[], Recipe]) -> Callable[[Iterator[Any]], Iterator[pa.RecordBatch]]:
    """Return the body of a job that tells what a model gives, or why it gives nothing.

    It gives one JSON list: the outputs, why there are none, and why it is the wrong model.
    """

    def describe(batches: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            _prepare_process()
            try:
                told: list[Any] = [*describe_outputs(load()), ""]
            except ModelError as error:
                told = [[], "", str(error)]
            yield pa.RecordBatch.from_pydict({"text": [json.dumps(told)]})

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


def _prepare_process() -> None:
    """Keep the framework to this task's cores and devices; before it is imported."""
    from pyspark import TaskContext

    context = TaskContext.get()
    cpus = str(context.cpus() if context is not None else 1)
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ.setdefault(name, cpus)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Workers may share a GPU, whose memory the first one would take whole.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    gpus = context.resources().get("gpu") if context is not None else None
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses) if gpus is not None else ""
