"""`TFTransformer`: a trained model as a Spark ML transformer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import cloudpickle
from pyspark.ml import Transformer

from ..data.columns import SPARK_TYPES, Source, expression, sources_of_features
from ..data.decode import Transform
from ..data.manifest import Column
from ..data.schema import quote_all
from ..errors import DataError, RunDirectoryError
from ..launch.restart import Attempt
from ..launch.topology import RankPlacement
from ..serialize import dumps
from ..session import classic_context, use_own_python
from ..storage.run_directory import RunDirectory
from ..training.spec import Binding, ModelSource, OutputSpec
from .inference import Predictor, is_scalar

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class TrainedModel:
    """A trained model as it lies in a run directory, and how to build it.

    Attributes:
        source: builds it.
        weights: contents of its weights file; ``None`` if the source has them.
        inputs: which column feeds which input.
        columns: the feature columns as they were trained on.
        outputs: what it gives.
        transforms: what to do with decoded images, by column.
    """

    source: ModelSource
    weights: bytes | None = field(repr=False)
    inputs: Binding
    columns: tuple[Column, ...]
    outputs: tuple[OutputSpec, ...]
    transforms: Mapping[str, Transform] = field(default_factory=dict)


class TFTransformer(Transformer):  # type: ignore[misc]
    """Adds a trained Keras model's predictions to a DataFrame; all other columns stay.

    A model with one output adds the column ``prediction_col``: a number if the output is one
    number per row, else an array of numbers. A model with several adds one column per output,
    called by the output's name.

    Attributes:
        history: metrics of each epoch, over all ranks.
        run_dir: the run directory.
        placement: where the ranks ran; empty if loaded from a run directory.
        timings: seconds per phase of the run; empty if loaded from a run directory.
        attempts: the attempts the run took, as `horovod_spark_runner.launch.restart.Attempt`;
            empty if loaded from a run directory.
    """

    def __init__(
        self,
        model: TrainedModel,
        *,
        run_dir: str,
        history: Sequence[Mapping[str, float]] = (),
        placement: Sequence[RankPlacement] = (),
        timings: Mapping[str, float] | None = None,
        prediction_col: str = "prediction",
        batch_size: int = 1024,
        attempts: Sequence[Attempt] = (),
    ) -> None:
        super().__init__()
        self._model = model
        self._payload = dumps((model.source, model.weights, dict(model.transforms)))
        self._digest = hashlib.sha256(self._payload).hexdigest()
        self._broadcast: Any = None
        self.run_dir = run_dir
        self.history = [dict(logs) for logs in history]
        self.placement = tuple(placement)
        self.timings = dict(timings or {})
        self.attempts = tuple(attempts)
        self.prediction_col = prediction_col
        self.batch_size = batch_size

    @classmethod
    def from_run(
        cls,
        run_dir: str,
        *,
        custom_objects: Mapping[str, Any] | None = None,
        transforms: Mapping[str, Transform] | None = None,
        prediction_col: str = "prediction",
        batch_size: int = 1024,
    ) -> TFTransformer:
        """Return the transformer of a finished run.

        Args:
            run_dir: its run directory.
            custom_objects: the model's own classes and functions by name, if it has some.
            transforms: the functions its image columns were trained with.
            prediction_col: column to add for a model with one output.
            batch_size: rows per call of the model.

        Raises:
            RunDirectoryError: it holds no finished model, or one that Keras could not write.
        """
        directory = RunDirectory(run_dir)
        model = read_trained_model(directory, None, custom_objects or {}, transforms or {})
        history = []
        if directory.metrics.exists():
            history = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
            for logs in history:
                logs.pop("epoch")
        return cls(
            model,
            run_dir=str(directory.location),
            history=history,
            prediction_col=prediction_col,
            batch_size=batch_size,
        )

    def _transform(self, dataset: DataFrame) -> DataFrame:
        names = tuple(column.name for column in self._model.columns)
        sources = sources_of_features(dataset, names)
        added = self._added_columns()
        taken = [name for name in added if name in dataset.columns]
        if taken:
            raise DataError(
                f"the DataFrame already has a column {', '.join(map(repr, taken))}; drop it, or "
                "give another prediction_col"
            )
        spark = dataset.sparkSession
        use_own_python(spark)
        arguments = [_argument(s, c) for s, c in zip(sources, self._model.columns, strict=True)]
        predicted = _udf(self._predictor(spark), self._return_type())(*arguments)
        if len(added) == 1:
            return dataset.withColumn(added[0], predicted)
        # One call of the model for all outputs: the struct is made once, then taken apart.
        helper = "__horovod_outputs"
        frame = dataset.withColumn(helper, predicted)
        return frame.select(
            *(f"`{name}`" for name in dataset.columns),
            *(frame[helper][name].alias(name) for name in added),
        )

    def _added_columns(self) -> list[str]:
        outputs = self._model.outputs
        return [self.prediction_col] if len(outputs) == 1 else [o.name for o in outputs]

    def _return_type(self) -> str:
        types = [_spark_type(output) for output in self._model.outputs]
        if len(types) == 1:
            return types[0]
        pairs = zip(self._model.outputs, types, strict=True)
        return "struct<" + ",".join(f"`{o.name}`:{kind}" for o, kind in pairs) + ">"

    def _predictor(self, spark: SparkSession) -> Predictor:
        context = classic_context(spark)
        payload: Any = _Inline(self._payload)
        if context is not None:
            if self._broadcast is None:
                self._broadcast = context.broadcast(self._payload)
            payload = self._broadcast
        return Predictor(
            digest=self._digest,
            load=_Load(payload),
            inputs=self._model.inputs,
            columns=self._model.columns,
            outputs=self._model.outputs,
            batch_size=self.batch_size,
        )


@dataclass(frozen=True)
class _Inline:
    """Stands in for a broadcast on Spark Connect, which has none."""

    value: bytes = field(repr=False)


@dataclass(frozen=True)
class _Load:
    """Unpacks the model on a worker, when it is needed for the first time."""

    payload: Any

    def __call__(self) -> tuple[ModelSource, bytes | None, Mapping[str, Transform]]:
        source, weights, transforms = cloudpickle.loads(self.payload.value)
        return source, weights, transforms


def read_trained_model(
    directory: RunDirectory,
    source: ModelSource | None,
    custom_objects: Mapping[str, Any],
    transforms: Mapping[str, Transform],
) -> TrainedModel:
    """Return the finished model in ``directory``.

    Args:
        directory: a run directory.
        source: what the model was built from; by default, the archive in the directory.
        custom_objects: the model's own classes and functions, for the archive.
        transforms: what to do with decoded images, by column.

    Raises:
        RunDirectoryError: there is no finished model, or only its weights.
        DataError: a transform that the model was trained with lacks.
    """
    if not directory.signature.exists():
        raise RunDirectoryError(
            f"{directory.location} holds no finished model ({directory.signature} is missing)"
        )
    signature = json.loads(directory.signature.read_text())
    weights: bytes | None = None
    if source is not None:
        weights = directory.model.join("weights.npz").read_bytes()
    elif not signature["archive"]:
        raise RunDirectoryError(
            f"{directory.location} holds the model's weights only, because Keras could not write "
            "it; its layers need get_config()"
        )
    else:
        archive = directory.model.join("model.keras").read_bytes()
        source = ModelSource(archive=archive, custom_objects=custom_objects)
    lacking = [name for name in signature.get("transforms", []) if name not in transforms]
    if lacking:
        raise DataError(
            f"the model in {directory.location} was trained with transforms of column "
            f"{quote_all(lacking)}; functions are not kept in storage: give them, transforms={{…}}"
        )
    names = signature["inputs"]["names"]
    return TrainedModel(
        source=source,
        weights=weights,
        inputs=Binding(
            tuple(signature["inputs"]["columns"]), None if names is None else tuple(names)
        ),
        columns=tuple(Column(**{**c, "shape": tuple(c["shape"])}) for c in signature["columns"]),
        outputs=tuple(
            OutputSpec(**{**o, "shape": tuple(o["shape"])}) for o in signature["outputs"]
        ),
        transforms=transforms,
    )


def _argument(source: Source, column: Column) -> SparkColumn:
    bytes_wanted = column.encoding != ""
    if (source.kind == "binary") != bytes_wanted or (
        not bytes_wanted and (source.kind == "scalar") != (column.shape == ())
    ):
        raise DataError(
            f"column {source.name!r} is a {source.kind}, but the model was trained on "
            + column.describe()
        )
    return expression(replace(source, dtype=column.dtype))


def _spark_type(output: OutputSpec) -> str:
    element = {**SPARK_TYPES, "bool": "boolean"}.get(output.dtype, "float")
    return element if is_scalar(output) else f"array<{element}>"


def _udf(predictor: Predictor, return_type: str) -> Any:
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
