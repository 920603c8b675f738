"""The prediction UDF: Arrow to Arrow where this Spark has it, else through pandas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .inference import Predictor


def prediction_udf(predictor: Predictor, return_type: str) -> Any:
    """Return the UDF: Arrow to Arrow where this Spark has it (4.1), else through pandas."""
    from pyspark.sql import functions as F

    if hasattr(F, "arrow_udf"):
        import pyarrow as pa

        def predict_arrow(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
            yield from predictor(_tuples(batches))

        predict_arrow.__annotations__ = _annotations(pa.Array, len(predictor.columns))
        return F.arrow_udf(predict_arrow, return_type)
    return pandas_udf_of(predictor, return_type)


def pandas_udf_of(predictor: Predictor, return_type: str) -> Any:
    """Return the UDF for Spark before 4.1."""
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import functions as F

    def predict_pandas(batches: Iterator[Any]) -> Iterator[Any]:
        arrow = (tuple(pa.Array.from_pandas(s) for s in batch) for batch in _tuples(batches))
        for array in predictor(arrow):
            if pa.types.is_struct(array.type):
                yield pa.Table.from_struct_array(array).to_pandas()
            else:
                yield array.to_pandas()

    single = pd.DataFrame if return_type.startswith("struct") else pd.Series
    predict_pandas.__annotations__ = _annotations(pd.Series, len(predictor.columns), single)
    return F.pandas_udf(predict_pandas, return_type)


def _annotations(kind: Any, arguments: int, result: Any = None) -> dict[str, Any]:
    """Return the type hints by which PySpark tells the kinds of UDF apart."""
    given: Any = kind if arguments == 1 else tuple[(kind, ...)]
    returned: Any = result or kind
    return {"batches": Iterator[given], "return": Iterator[returned]}


def _tuples(batches: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield every batch as a tuple of columns; Spark gives a single column bare."""
    for batch in batches:
        yield batch if isinstance(batch, tuple) else (batch,)
