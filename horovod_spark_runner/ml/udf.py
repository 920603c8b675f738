"""The prediction UDF: Arrow to Arrow where this Spark has it, else through pandas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ..data.manifest import Column
from .inference import Predictor
from .rows import is_whole

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
        return pandas_udf_of(predictor, return_type, deterministic=deterministic)

    def predict_arrow(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        yield from predictor(_tuples(batches))

    predict_arrow.__annotations__ = _annotations(pa.Array, len(predictor.columns))
    udf: Any = F.arrow_udf(predict_arrow, return_type)
    made: Callable[..., SparkColumn] = udf if deterministic else udf.asNondeterministic()
    return made


def pandas_udf_of(
    predictor: Predictor, return_type: str, *, deterministic: bool
) -> Callable[..., SparkColumn]:
    """Return the UDF for Spark before 4.1; see `prediction_udf`."""
    import pandas as pd
    from pyspark.sql import functions as F

    columns = predictor.columns

    def predict_pandas(batches: Iterator[Any]) -> Iterator[Any]:
        arrow = (tuple(map(_from_pandas, batch, columns)) for batch in _tuples(batches))
        for array in predictor(arrow):
            if pa.types.is_struct(array.type):
                yield pa.Table.from_struct_array(array).to_pandas()
            else:
                yield array.to_pandas()

    single = pd.DataFrame if return_type.startswith("struct") else pd.Series
    predict_pandas.__annotations__ = _annotations(pd.Series, len(columns), single)
    udf: Any = F.pandas_udf(predict_pandas, return_type)
    if not deterministic:
        udf = udf.asNondeterministic()

    def call(*arguments: SparkColumn) -> SparkColumn:
        # Beside a null, pandas holds whole numbers as real ones, which cuts those above 2**53;
        # inside an array they stay what they are.
        pairs = zip(arguments, columns, strict=True)
        called: SparkColumn = udf(*(F.array(a) if _is_whole_number(c) else a for a, c in pairs))
        return called

    return call


def _is_whole_number(column: Column) -> bool:
    return is_whole(column) and not column.shape


def _from_pandas(series: Any, column: Column) -> pa.Array:
    if _is_whole_number(column):
        return pa.Array.from_pandas(series, type=pa.list_(pa.int64())).values
    return pa.Array.from_pandas(series)


def _annotations(kind: Any, arguments: int, result: Any = None) -> dict[str, Any]:
    """Return the type hints by which PySpark tells the kinds of UDF apart."""
    given: Any = kind if arguments == 1 else tuple[(kind, ...)]
    returned: Any = result or kind
    return {"batches": Iterator[given], "return": Iterator[returned]}


def _tuples(batches: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield every batch as a tuple of columns; Spark gives a single column bare."""
    for batch in batches:
        yield batch if isinstance(batch, tuple) else (batch,)
