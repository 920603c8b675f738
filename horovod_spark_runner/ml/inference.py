"""Predicting inside Spark's Python workers: Arrow in, Arrow out.

A worker process loads a model once and keeps it, by the hash of its contents, for all tasks and
all calls of ``transform`` it serves.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from ..data.arrow_to_numpy import column_to_numpy
from ..data.decode import RowDecoder, Transform, UndecodableRow
from ..data.manifest import Column, Manifest
from ..errors import DataError
from ..quiet import quiet_imports
from ..storage.arrays import load_arrays
from ..training.spec import Binding, ModelSource, OutputSpec

# Models a Python worker keeps loaded.
_CACHE_SIZE = 4
_models: OrderedDict[str, Callable[[dict[str, np.ndarray]], list[np.ndarray]]] = OrderedDict()


# Source, contents of the weights file, and what to do with decoded images.
Payload = tuple[ModelSource, bytes | None, Mapping[str, Transform]]


@dataclass(frozen=True)
class Predictor:
    """The body of the prediction UDF.

    Attributes:
        digest: identity of the model and its weights.
        load: gives (source, weights file or ``None``, transforms); called at most once per worker.
        inputs: which column feeds which input.
        columns: the feature columns, in the order of the UDF's arguments.
        outputs: the model's outputs.
        batch_size: rows per call of the model.
    """

    digest: str
    load: Callable[[], tuple[ModelSource, bytes | None, Mapping[str, Transform]]] = field(
        repr=False
    )
    inputs: Binding
    columns: tuple[Column, ...]
    outputs: tuple[OutputSpec, ...]
    batch_size: int

    def __call__(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        predict = self._model()
        for arrays in batches:
            values = {
                column.name: column_to_numpy(pa.chunked_array([array]), column)
                for column, array in zip(self.columns, arrays, strict=True)
            }
            yield self._to_arrow(self._predict(predict, values, len(arrays[0])))

    def _predict(
        self,
        predict: Callable[[dict[str, np.ndarray]], list[np.ndarray]],
        values: dict[str, np.ndarray],
        rows: int,
    ) -> list[np.ndarray]:
        parts = [
            predict({name: v[begin : begin + self.batch_size] for name, v in values.items()})
            for begin in range(0, rows, self.batch_size)
        ]
        if not parts:
            return [np.empty((0, *_sizes(o)), o.dtype) for o in self.outputs]
        return [np.concatenate(output) for output in zip(*parts, strict=True)]

    def _to_arrow(self, values: list[np.ndarray]) -> pa.Array:
        arrays = [array_of(value, spec) for value, spec in zip(values, self.outputs, strict=True)]
        if len(arrays) == 1:
            return arrays[0]
        return pa.StructArray.from_arrays(arrays, names=[spec.name for spec in self.outputs])

    def _model(self) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
        if self.digest not in _models:
            _prepare_process()
            source, weights, transforms = self.load()
            decode = RowDecoder(self.columns, transforms)
            model = load_model(source, weights, self.inputs, self.columns)
            _models[self.digest] = functools.partial(_decode_and_predict, decode, model)
            if len(_models) > _CACHE_SIZE:
                _models.popitem(last=False)
        _models.move_to_end(self.digest)
        return _models[self.digest]


def _decode_and_predict(
    decode: RowDecoder,
    model: Callable[[dict[str, np.ndarray]], list[np.ndarray]],
    values: dict[str, np.ndarray],
) -> list[np.ndarray]:
    try:
        return model(decode(values, _no_generator))
    except UndecodableRow as error:
        rows = len(next(iter(values.values())))
        raise DataError(f"{error.cause} (row {error.row} of a batch of {rows})") from None


def _no_generator(row: int) -> None:
    """Give no random generator: predictions are not varied."""


def _sizes(spec: OutputSpec) -> tuple[int, ...]:
    return tuple(size or 0 for size in spec.shape)


def is_scalar(spec: OutputSpec) -> bool:
    """Tell whether an output is one number per row, in a column of numbers."""
    return spec.shape in ((), (1,))


def array_of(values: np.ndarray, spec: OutputSpec) -> pa.Array:
    """Return an output as an Arrow array: numbers, or one flat list of numbers per row."""
    rows = len(values)
    if values.dtype not in (np.float32, np.float64) and values.dtype.kind not in "iub":
        values = values.astype(np.float32)  # half precision has no Spark type
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    if is_scalar(spec):
        return flat
    width = values.size // rows if rows else 0
    offsets = np.arange(rows + 1, dtype=np.int32) * width
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def load_model(
    source: ModelSource, weights: bytes | None, inputs: Binding, columns: tuple[Column, ...]
) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    """Return a compiled function from feature columns to the model's outputs."""
    with quiet_imports():
        import tensorflow as tf

        from ..training.model import InputBinding, build_model, flatten_outputs

    model = build_model(source)
    bind = InputBinding(model, inputs, Manifest("", (), columns, (), ""))
    if weights is not None:
        if not model.built:
            model(bind({c.name: np.zeros((1, *c.shape), c.dtype) for c in columns}))
        arrays = load_arrays(weights)
        model.set_weights([arrays[name] for name in sorted(arrays)])

    forward = tf.function(functools.partial(model, training=False), reduce_retracing=True)

    def predict(values: dict[str, np.ndarray]) -> list[np.ndarray]:
        tensors = tf.nest.map_structure(tf.convert_to_tensor, bind(values))
        return [output.numpy() for output in flatten_outputs(forward(tensors))]

    return predict


def _prepare_process() -> None:
    """Keep the framework to this task's cores and devices; before it is imported."""
    from pyspark import TaskContext

    context = TaskContext.get()
    cpus = str(context.cpus() if context is not None else 1)
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ.setdefault(name, cpus)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    gpus = context.resources().get("gpu") if context is not None else None
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses) if gpus is not None else ""
