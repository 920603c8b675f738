"""The prediction UDF: Arrow to Arrow where this Spark has it, else through pandas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..data.manifest import Column
from .inference import Predictor, is_whole

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn


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

    def predict_pandas(batches: Iterator[Any]) -> Iterator[Any]:
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
    return is_whole(column) and not column.shape


def _is_real(column: Column) -> bool:
    return not column.encoding and not column.is_text and column.numpy_dtype.kind == "f"


def _has_null(argument: SparkColumn, column: Column) -> SparkColumn:
    from pyspark.sql import functions as F

    if not column.shape:
        return argument.isNull()
    return F.coalesce(F.exists(argument, F.isnull), F.lit(True))


def _from_pandas(
    batches: Iterator[tuple[Any, ...]], columns: Sequence[Column], reals: Sequence[int]
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


def _array_of(series: Any, column: Column, nulls: Any | None) -> pa.Array:
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


def _nullable(kind: pa.DataType) -> Any:
    """Return pandas' nullable type of numbers, which separates null from NaN and keeps integers."""
    import pandas as pd

    if pa.types.is_boolean(kind):
        return pd.BooleanDtype()
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        name = np.dtype(kind.to_pandas_dtype()).name.capitalize()
        return getattr(pd, f"{name}Dtype")()
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
