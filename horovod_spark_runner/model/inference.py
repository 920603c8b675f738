"""Predict inside Spark's Python workers: Arrow in, Arrow out, and the UDF around it.

A worker process loads a model once and keeps it, by the hash of its contents, for all tasks and
all calls of ``transform`` it serves.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..cluster.spark.tasks import apply_task_limits, exclude_from_gc
from ..data.manifest import Column
from ..data.read.arrow_to_numpy import column_to_numpy
from ..data.read.decode import RowDecoder, UndecodableRow
from ..errors import DataError, ModelError
from ..training.engine import engine_named
from ..training.spec import OutputSpec
from ..training.trained_model import Model, Recipe
from .shipping import load_model

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import Column as SparkColumn

# Models a Python worker keeps loaded.
_CACHE_SIZE = 4
_models: OrderedDict[str, Model] = OrderedDict()
# Bytes of predictions that are given to Spark at once, unless a single batch has more.
_MESSAGE_BYTES = 64 * 1024 * 1024
# Elements of all lists in one Arrow array: their places are numbers of 32 bits.
_MOST = 2**31 - 1
# What becomes of rows with invalid values: an error, no row, or a row without prediction.
ERROR, SKIP, KEEP = "error", "skip", "keep"
# dtype of an output -> Spark's type for it and the NumPy dtype of that, where Spark has it not.
SPARK_DTYPES = {
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


def _valid_rows(array: pa.Array, column: Column) -> np.ndarray | None:
    """Return which rows hold a value as the model takes it.

    Args:
        array: the rows of a feature column.
        column: what the model was trained on.

    Returns:
        A boolean per row; ``None`` if all are valid.
    """
    valid = array.is_valid() if array.null_count else None
    if column.encoding == "raw":
        valid = _sized(pc.binary_length(array), column.size)
    elif not column.encoding and column.shape:
        valid = _sized(pc.list_value_length(array), column.width)
        elements = array.flatten()
        if elements.null_count:
            mask: np.ndarray = _to_numpy(valid).copy()
            parents = pc.list_parent_indices(array).filter(elements.is_null())
            mask[parents.to_numpy(zero_copy_only=False)] = False
            return mask
    if valid is None:
        return None
    valid_mask = _to_numpy(valid)
    return None if bool(np.all(valid_mask)) else valid_mask


def valid_in_all(
    arrays: Sequence[pa.Array], columns: Sequence[Column], advice: str | None
) -> np.ndarray | None:
    """Return which rows hold a value in every column.

    Args:
        arrays: the rows, by column.
        columns: what the model was trained on.
        advice: what else may become of rows without, for the error; ``None`` if they are no error.

    Returns:
        A boolean per row; ``None`` if all are valid.

    Raises:
        DataError: a row is not valid, and that is an error.
    """
    valid: np.ndarray | None = None
    for array, column in zip(arrays, columns, strict=True):
        mask = _valid_rows(array, column)
        if mask is None:
            continue
        if advice is not None:
            row = int(np.argmin(mask))
            raise DataError(
                f"{_describe_fault(array, column, row)} in row {row} of a batch of {len(array)} "
                f"(counted from 0); {advice}"
            )
        valid = mask if valid is None else valid & mask
    return valid


def _describe_fault(array: pa.Array, column: Column, row: int) -> str:
    """Describe the fault of an invalid row."""
    value = array[row]
    if not value.is_valid:
        return f"column {column.name!r} is null" + _or_what_became_null(column)
    if column.encoding == "raw":
        return f"column {column.name!r} holds {len(value.as_py())} bytes, not {column.size}"
    size = len(value)
    if size != column.width:
        return f"column {column.name!r} holds an array of {size} elements, not {column.width}"
    if _is_whole(column):
        return (
            f"column {column.name!r} holds an array with elements that are null or too large for "
            f"{column.dtype}"
        )
    return f"column {column.name!r} holds an array with null elements"


def _or_what_became_null(column: Column) -> str:
    """Return the further causes of null: values that do not fit the type or shape."""
    if len(column.shape) > 1 and not column.encoding:
        return ", or holds nested arrays of other sizes,"
    if not column.shape and _is_whole(column):
        return f", or too large for {column.dtype},"
    return ""


def _is_whole(column: Column) -> bool:
    """Return whether a column holds integers."""
    return not column.encoding and not column.is_text and column.numpy_dtype.kind in "iu"


def _with_nulls(values: pa.Array, valid: np.ndarray) -> pa.Array:
    """Return the values of the valid rows in their places, and null in all others."""
    places = np.cumsum(valid) - 1
    return values.take(pa.array(places, pa.int64(), mask=~valid))


def _sized(lengths: pa.Array, wanted: int) -> pa.Array:
    return pc.equal(lengths, wanted).fill_null(False)


def _to_numpy(mask: pa.Array) -> np.ndarray:
    array: np.ndarray = mask.to_numpy(zero_copy_only=False)
    return array


@dataclass(frozen=True)
class _Piece:
    """Rows of one Arrow batch.

    Attributes:
        arrays: the feature columns.
        valid: which of the rows can be predicted on; ``None`` if all can.
        begin: where they begin in the Arrow batch.
        whole: rows of the Arrow batch.
    """

    arrays: tuple[pa.Array, ...]
    valid: np.ndarray | None
    begin: int
    whole: int

    @property
    def rows(self) -> int:
        return len(self.arrays[0])

    def part(self, begin: int, end: int) -> _Piece:
        """Return some of the rows, without a copy."""
        arrays = tuple(array.slice(begin, end - begin) for array in self.arrays)
        valid = None if self.valid is None else self.valid[begin:end]
        return replace(self, arrays=arrays, valid=valid, begin=self.begin + begin)


@dataclass(frozen=True)
class _Batch:
    """Rows for one call of the model.

    Attributes:
        pieces: what they are made of; one, unless Arrow's batches end within.
    """

    pieces: tuple[_Piece, ...]

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def valid(self) -> np.ndarray | None:
        """Rows that can be predicted on; ``None`` if all can."""
        if all(piece.valid is None for piece in self.pieces):
            return None
        masks = [np.ones(p.rows, bool) if p.valid is None else p.valid for p in self.pieces]
        return np.concatenate(masks)

    def arrays(self) -> tuple[pa.Array, ...]:
        """Return the feature columns of the rows that can be predicted on."""
        pairs = zip(*(piece.arrays for piece in self.pieces), strict=True)
        joined = tuple(p[0] if len(p) == 1 else pa.concat_arrays(p) for p in pairs)
        valid = self.valid
        return joined if valid is None else tuple(a.filter(pa.array(valid)) for a in joined)

    def place(self, row: int) -> str:
        """Describe the origin of a row of `arrays`."""
        valid = self.valid
        number = row if valid is None else int(np.flatnonzero(valid)[row])
        for piece in self.pieces:
            if number < piece.rows:
                break
            number -= piece.rows
        return f"row {piece.begin + number} of a batch of {piece.whole} (counted from 0)"


def _cut(pieces: Iterator[_Piece], size: int) -> Iterator[list[_Batch]]:
    """Yield batches of ``size`` rows; only the very last one may have fewer.

    All batches that an Arrow batch makes full come together, as soon as it has come: nothing is
    asked for that is not needed.
    """
    open_pieces: list[_Piece] = []
    wanted = size
    for piece in pieces:
        full: list[_Batch] = []
        begin = 0
        while begin < piece.rows:
            end = min(begin + wanted, piece.rows)
            open_pieces.append(piece.part(begin, end))
            wanted -= end - begin
            begin = end
            if not wanted:
                full.append(_Batch(tuple(open_pieces)))
                open_pieces, wanted = [], size
        if full:
            yield full
    if open_pieces:
        yield [_Batch(tuple(open_pieces))]


def _each_prepared(
    prepare: Callable[[_Batch], object], batches: Sequence[_Batch], pool: ThreadPoolExecutor | None
) -> Iterator[tuple[_Batch, object]]:
    """Yield each batch and its prepared form: one ahead of its use, where there is a thread.

    Raises:
        Exception: whatever ``prepare`` raised, at the turn of what it could not prepare.
    """
    if pool is None:
        for batch in batches:
            yield batch, prepare(batch)
        return
    coming = pool.submit(prepare, batches[0])
    for batch, follower in zip(batches, (*batches[1:], None), strict=True):
        prepared = coming.result()
        if follower is not None:
            coming = pool.submit(prepare, follower)
        yield batch, prepared


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
        names: what the DataFrame or the files call these columns; by default as in training.
    """

    digest: str
    load: Callable[[], Recipe] = field(repr=False)
    columns: tuple[Column, ...]
    outputs: tuple[OutputSpec, ...]
    batch_size: int
    handle_invalid: str = ERROR
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", tuple(column.name for column in self.columns))

    def __call__(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Yield the predictions for all rows, in their order; in other batches than they came."""
        loads = self.digest not in _models
        drops = len(_models) == _CACHE_SIZE
        model = self._model()
        pieces = (_Piece(a, self._valid(a), 0, len(a[0])) for a in batches)
        prepare = functools.partial(self._prepare, model)
        pool = ThreadPoolExecutor(1, "hsr-prepare") if _prepares_ahead(model) else None
        with pool or contextlib.nullcontext():
            for group in _cut(pieces, self.batch_size):
                prepared = _each_prepared(prepare, group, pool)
                each = (self._predict(model, *pair) for pair in prepared)
                for predicted in _join_small_arrays(each):
                    if loads:  # once it has been called, as a graph is made then
                        exclude_from_gc(dropped=drops)
                        loads = False
                    yield predicted

    def _valid(self, arrays: tuple[pa.Array, ...]) -> np.ndarray | None:
        """Return which rows are valid; ``None`` if all are."""
        named = zip(self.columns, self.names, strict=True)
        columns = [replace(column, name=name) for column, name in named]
        advice = "handle_invalid='skip' leaves such rows out, 'keep' gives them null as prediction"
        return valid_in_all(arrays, columns, advice if self.handle_invalid == ERROR else None)

    def _prepare(self, model: Model, batch: _Batch) -> object:
        """Return the model's inputs; ``None`` if there is no row."""
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

    def _predict(self, model: Model, batch: _Batch, prepared: object) -> pa.Array:
        valid = batch.valid
        rows = batch.rows if valid is None else int(np.count_nonzero(valid))
        outputs = [_nothing(output) for output in self.outputs]
        if prepared is not None:
            results = model.compute(prepared)
            for value, output in zip(results, self.outputs, strict=True):
                _check_rows(value, output, rows)
            outputs = list(map(_output_array, results, self.outputs))
        single = len(outputs) == 1
        names = field_names(len(outputs))
        array = outputs[0] if single else pa.StructArray.from_arrays(outputs, names=names)
        return array if valid is None else _with_nulls(array, valid)

    def _model(self) -> Model:
        apply_task_limits()
        if self.digest not in _models:
            recipe = replace(self.load(), outputs=self.outputs)
            _models[self.digest] = _with_decoder(recipe, load_model(recipe))
            if len(_models) > _CACHE_SIZE:
                _models.popitem(last=False)
        _models.move_to_end(self.digest)
        return _models[self.digest]


def _with_decoder(recipe: Recipe, model: Model) -> Model:
    decode = RowDecoder(recipe.columns, recipe.transforms, allow_nan=True)
    decodes = bool(recipe.transforms) or any(column.is_encoded for column in recipe.columns)
    return Model(
        lambda values: model.prepare(decode(values)), model.compute, slow=decodes or model.slow
    )


def _prepares_ahead(model: Model) -> bool:
    """Return whether to prepare a batch while the one before it is computed.

    Where preparing is work, or computing leaves the processor idle; else it is one more thread on
    the cores that are to compute.
    """
    return model.slow or bool(os.environ.get("CUDA_VISIBLE_DEVICES"))


def _join_small_arrays(arrays: Iterable[pa.Array]) -> Iterator[pa.Array]:
    """Yield arrays, small ones put together: each is a message to Spark, and held until it is."""
    held: list[pa.Array] = []
    size = 0
    for array in arrays:
        held.append(array)
        size += array.nbytes
        if size >= _MESSAGE_BYTES:
            yield _one(held)
            held, size = [], 0
    if held:
        yield _one(held)


def _one(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _check_rows(value: np.ndarray, output: OutputSpec, rows: int) -> None:
    if value.ndim == 0 or len(value) != rows:
        raise ModelError(
            f"output {output.name!r} has the shape {value.shape} for {rows} rows; each output must "
            "have one entry per row"
        )


def describing(load: Callable[[], Recipe]) -> Callable[[], str]:
    """Return a query for a worker: a model's outputs, or the reason why it has none.

    The answer is a JSON list: the outputs, why there are none, and why it is the wrong model.
    """

    def describe() -> str:
        try:
            recipe = load()
            answer: list[object] = [*engine_named(recipe.engine).describe_outputs(recipe), ""]
        except ModelError as error:
            answer = [[], "", str(error)]
        return json.dumps(answer)

    return describe


def field_names(outputs: int) -> list[str]:
    """Return the names of outputs inside the UDF's result; their own names may be anything."""
    return [f"output{number}" for number in range(outputs)]


def is_scalar(spec: OutputSpec) -> bool:
    """Return whether an output is one number per row, in a column of numbers."""
    return spec.shape in ((), (1,))


def spark_type(spec: OutputSpec) -> str:
    """Return Spark's type of an output's column.

    Raises:
        ModelError: Spark has none.
    """
    if spec.dtype not in SPARK_DTYPES:
        raise ModelError(
            f"output {spec.name!r} is of type {spec.dtype}, for which Spark has no column type"
        )
    element = SPARK_DTYPES[spec.dtype][0]
    return element if is_scalar(spec) else f"array<{element}>"


def _nothing(spec: OutputSpec) -> pa.Array:
    dtype = object if spec.dtype == "string" else SPARK_DTYPES[spec.dtype][1] or spec.dtype
    return _output_array(np.empty((0, *(size or 0 for size in spec.shape)), dtype), spec)


def _output_array(values: np.ndarray, spec: OutputSpec) -> pa.Array:
    """Return an output as an Arrow array: numbers, or one flat list of numbers per row.

    Raises:
        ModelError: it has more numbers than Arrow's lists can count.
    """
    rows = len(values)
    if values.size > _MOST:
        raise ModelError(
            f"output {spec.name!r} has {values.size} numbers for {rows} rows, more than Arrow's "
            f"lists hold ({_MOST}): predict on fewer rows at once, with a smaller predictBatchSize"
        )
    if spec.dtype == "string":
        flat = pa.array(values.reshape(-1).tolist(), pa.binary()).cast(pa.string())
    else:
        dtype = SPARK_DTYPES[spec.dtype][1] or spec.dtype
        flat = pa.array(np.ascontiguousarray(values, dtype).reshape(-1))
    return flat if is_scalar(spec) else lists_of(flat, rows)


def lists_of(flat: pa.Array, rows: int) -> pa.Array:
    """Return an equal share of ``flat`` for each row."""
    offsets = np.arange(rows + 1, dtype=np.int32) * (len(flat) // rows if rows else 0)
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def prediction_udf(
    predictor: Predictor, return_type: str, *, deterministic: bool
) -> Callable[..., SparkColumn]:
    """Return the UDF: Arrow to Arrow where this Spark has it (4.1), else through pandas.

    Args:
        predictor: what it does.
        return_type: Spark type of the predictions.
        deterministic: whether Spark may compute it again.
    """
    from pyspark.sql import functions as F

    if not hasattr(F, "arrow_udf"):
        return _pandas_udf_of(predictor, return_type, deterministic=deterministic)

    def predict_arrow(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        yield from predictor(_tuples(batches))

    predict_arrow.__annotations__ = _annotations(pa.Array, len(predictor.columns))
    udf: Any = F.arrow_udf(predict_arrow, return_type)
    made: Callable[..., SparkColumn] = udf if deterministic else udf.asNondeterministic()
    return made


def _pandas_udf_of(
    predictor: Predictor, return_type: str, *, deterministic: bool
) -> Callable[..., SparkColumn]:
    """Return the UDF for Spark before 4.1; see `prediction_udf`."""
    import pandas as pd
    from pyspark.sql import functions as F

    columns = predictor.columns
    reals = [number for number, column in enumerate(columns) if _is_real(column)]

    def predict_pandas(batches: Iterator[object]) -> Iterator[pd.DataFrame | pd.Series]:
        for array in predictor(_from_pandas(_tuples(batches), columns, reals)):
            if pa.types.is_struct(array.type):
                yield pa.Table.from_struct_array(array).to_pandas(types_mapper=_nullable)
            else:
                yield array.to_pandas(types_mapper=_nullable)

    single = pd.DataFrame if return_type.startswith("struct") else pd.Series
    taken = len(columns) + len(reals)
    predict_pandas.__annotations__ = _annotations(pd.Series, taken, single)
    udf: Any = F.pandas_udf(predict_pandas, return_type)
    if not deterministic:
        udf = udf.asNondeterministic()

    def call(*arguments: SparkColumn) -> SparkColumn:
        # Beside a null, pandas holds whole numbers as real ones, which cuts those above 2**53;
        # inside an array they stay what they are. Real numbers are told where they are null, for
        # which pandas has nothing but NaN.
        pairs = list(zip(arguments, columns, strict=True))
        inputs = [F.array(a) if _is_whole_number(c) else a for a, c in pairs]
        nulls = [_has_null(*pairs[number]) for number in reals]
        called: SparkColumn = udf(*inputs, *nulls)
        return called

    return call


def _is_whole_number(column: Column) -> bool:
    return _is_whole(column) and not column.shape


def _is_real(column: Column) -> bool:
    return not column.encoding and not column.is_text and column.numpy_dtype.kind == "f"


def _has_null(argument: SparkColumn, column: Column) -> SparkColumn:
    from pyspark.sql import functions as F

    if not column.shape:
        return argument.isNull()
    return F.coalesce(F.exists(argument, F.isnull), F.lit(True))


def _from_pandas(
    batches: Iterator[tuple[pd.Series, ...]], columns: Sequence[Column], reals: Sequence[int]
) -> Iterator[tuple[pa.Array, ...]]:
    """Yield batches as Arrow has them.

    Args:
        batches: a series of each column, and of those of real numbers, whether a row has a null.
        columns: the feature columns.
        reals: which of them are of real numbers.
    """
    for batch in batches:
        nulls = dict(zip(reals, batch[len(columns) :], strict=True))
        series = zip(batch, columns, strict=False)
        yield tuple(_array_of(one, column, nulls.get(n)) for n, (one, column) in enumerate(series))


def _array_of(series: pd.Series, column: Column, nulls: pd.Series | None) -> pa.Array:
    if _is_whole_number(column):
        return pa.Array.from_pandas(series, type=pa.list_(pa.int64())).values
    if nulls is None:
        return pa.Array.from_pandas(series)
    mask, values = nulls.to_numpy(bool), series.to_numpy()
    if not column.shape:
        return pa.array(values, mask=mask)
    kind = pa.list_(pa.from_numpy_dtype(column.numpy_dtype))
    exact = pa.array(values, kind, from_pandas=False)
    if not mask.any():
        return exact
    return pc.if_else(pa.array(mask), pa.array(values, kind, from_pandas=True), exact)


def _nullable(kind: pa.DataType) -> pd.api.extensions.ExtensionDtype | None:
    """Return pandas' nullable type of numbers, which separates null from NaN and keeps integers."""
    import pandas as pd

    if pa.types.is_boolean(kind):
        return pd.BooleanDtype()
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        name = np.dtype(kind.to_pandas_dtype()).name.capitalize()
        dtype: pd.api.extensions.ExtensionDtype = getattr(pd, f"{name}Dtype")()
        return dtype
    return None


def _annotations(kind: Any, arguments: int, result: Any = None) -> dict[str, Any]:
    """Return the type hints by which PySpark distinguishes the kinds of UDF."""
    argument_types: Any = kind if arguments == 1 else tuple[(kind, ...)]
    returned: Any = result or kind
    return {"batches": Iterator[argument_types], "return": Iterator[returned]}


def _tuples(batches: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield every batch as a tuple of columns; Spark gives a single column bare."""
    for batch in batches:
        yield batch if isinstance(batch, tuple) else (batch,)
