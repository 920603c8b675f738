"""Evaluating inside Spark's Python workers: every task gives sums, one task their results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from ..cluster.spark.tasks import apply_task_limits, exclude_from_gc
from ..config.data import Transform
from ..data.manifest import Column
from ..data.read.arrow_to_numpy import column_to_numpy
from ..data.read.decode import RowDecoder, UndecodableRow
from ..errors import DataError, HorovodSparkError, InvalidInputError
from ..formatting import quote_all
from ..storage.arrays import Arrays, dump_arrays, load_arrays
from ..training.engine import engine_named
from ..training.trainee import EvaluationRequest, Evaluator, merged_sums
from .inference import SKIP, Predictor, lists_of, valid_in_all

# What a task tells: of all its rows (``sums``), and of each, where Spark evaluates them, too.
SCHEMA = "task int, rows bigint, skipped bigint, sums binary"
ROW_SCHEMA = "output array<double>, label array<double>, weight double"
_FIELDS = pa.schema(
    [("task", pa.int32()), ("rows", pa.int64()), ("skipped", pa.int64()), ("sums", pa.binary())]
)
_ROW_FIELDS = pa.schema(
    [
        *_FIELDS,
        ("output", pa.list_(pa.float64())),
        ("label", pa.list_(pa.float64())),
        ("weight", pa.float64()),
    ]
)
_Batches = Iterator[pa.RecordBatch]
_ADVICE = "handle_invalid='skip' leaves such rows out of the evaluation"
# The evaluator a worker has used last, by the hash of its model and request.
_cached: tuple[str, Evaluator, Mapping[str, Transform]] | None = None


@dataclass(frozen=True)
class Evaluation:
    """Plan of an evaluation, for its tasks.

    Attributes:
        predictor: the model, its feature columns, which are first in every batch, and whether rows
            with invalid values are left out.
        targets: the columns after them: labels and sample weights.
        names: what the DataFrame calls these.
        request: the pickled `EvaluationRequest`.
        weight: the column of sample weights, if there is one.
        label: the label column, where each row's output, label and weight are wanted, too.
    """

    predictor: Predictor
    targets: tuple[Column, ...]
    names: tuple[str, ...]
    request: bytes = field(repr=False)
    weight: str | None = None
    label: str | None = None

    def name_of(self, target: str) -> str:
        """Return the DataFrame's name for one of ``targets``."""
        return self.names[[column.name for column in self.targets].index(target)]

    def describe(self) -> str:
        """Return an error of the request, before any row is read, as JSON."""
        answer = {"error": "", "message": ""}
        try:
            self._loaded()
        except HorovodSparkError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        return json.dumps(answer)

    def add_up(self, batches: _Batches) -> _Batches:
        """Yield the sums over a task's rows, and each row's output where wanted."""
        evaluator, transforms = self._loaded()
        evaluator.begin()
        with (
            closing(RowDecoder(self.predictor.columns, transforms, allow_nan=True)) as features,
            closing(RowDecoder(self.targets, transforms, allow_nan=True)) as labels,
        ):
            yield from self._added_up(batches, evaluator, features, labels)

    def _added_up(
        self, batches: _Batches, evaluator: Evaluator, features: RowDecoder, labels: RowDecoder
    ) -> _Batches:
        from pyspark import TaskContext

        columns = (*self.predictor.columns, *self.targets)
        named = zip(columns, (*self.predictor.names, *self.names), strict=True)
        renamed = [replace(column, name=name) for column, name in named]
        advice = None if self.predictor.handle_invalid == SKIP else _ADVICE
        sums: list[np.ndarray] = []
        rows = skipped = 0
        for batch in batches:
            valid = valid_in_all(batch.columns, renamed, advice)
            usable = batch if valid is None else batch.filter(pa.array(valid))
            skipped += batch.num_rows - usable.num_rows
            if not usable.num_rows:
                continue
            # What is decoded takes more memory than what Spark gives at once.
            for begin in range(0, usable.num_rows, self.predictor.batch_size):
                part = usable.slice(begin, self.predictor.batch_size)
                try:
                    x, y = self._arrays(part, features, labels)
                except UndecodableRow as error:
                    row = begin + error.row
                    row = row if valid is None else int(np.flatnonzero(valid)[row])
                    place = f"row {row} of a batch of {batch.num_rows} (counted from 0)"
                    raise DataError(f"{place}: {error.cause}") from error.cause
                output = evaluator.update(x, y)
                if self.label is not None:
                    yield self._each(output, y)
            rows += usable.num_rows
            added = evaluator.take_sums()
            sums = merged_sums([sums, added]) if sums else added
        if rows or skipped:
            context = TaskContext.get()
            task = 0 if context is None else context.partitionId()
            data = dump_arrays({f"{n:05d}": array for n, array in enumerate(sums)})
            values = {"task": [task], "rows": [rows], "skipped": [skipped], "sums": [bytes(data)]}
            yield _batch(1, _FIELDS if self.label is None else _ROW_FIELDS, values)

    def conclude(self, batches: _Batches) -> _Batches:
        """Yield the results from the sums of all tasks, as JSON."""
        parts: list[tuple[int, list[np.ndarray]]] = []
        rows = skipped = 0
        for batch in batches:
            for part in batch.to_pylist():
                rows, skipped = rows + part["rows"], skipped + part["skipped"]
                arrays = load_arrays(part["sums"])
                if part["rows"]:
                    parts.append((part["task"], [arrays[name] for name in sorted(arrays)]))
        results: dict[str, Any] = {}
        if parts:
            # In one order, whichever task was first: the last bits are the same every time.
            ordered = [sums for _, sums in sorted(parts, key=lambda part: part[0])]
            results = self._loaded()[0].results(merged_sums(ordered))
        summary = {"rows": rows, "skipped": skipped, "results": results}
        yield pa.RecordBatch.from_pydict({"text": [json.dumps(summary)]})

    def _arrays(
        self, batch: pa.RecordBatch, features: RowDecoder, labels: RowDecoder
    ) -> tuple[Arrays, Arrays]:
        decoded: list[Arrays] = []
        begin = 0
        for columns, decode in ((self.predictor.columns, features), (self.targets, labels)):
            arrays = batch.columns[begin : begin + len(columns)]
            begin += len(columns)
            decoded.append(
                decode(
                    {
                        column.name: column_to_numpy(pa.chunked_array([array]), column)
                        for column, array in zip(columns, arrays, strict=True)
                    }
                )
            )
        x, y = decoded
        if self.weight is not None and (negative := np.flatnonzero(y[self.weight] < 0)).size:
            cause = DataError(f"a sample weight is negative: {y[self.weight][negative[0]]}")
            raise UndecodableRow(int(negative[0]), cause)
        return x, y

    def _each(self, outputs: np.ndarray, labels: Arrays) -> pa.RecordBatch:
        rows = len(outputs)
        assert self.label is not None
        weight = np.ones(rows) if self.weight is None else labels[self.weight]
        values = {
            "output": _lists(outputs),
            "label": _lists(labels[self.label]),
            "weight": pa.array(weight.reshape(-1), pa.float64()),
        }
        return _batch(rows, _ROW_FIELDS, values)

    def _load_request(self) -> EvaluationRequest:
        try:
            request: EvaluationRequest = cloudpickle.loads(self.request)
        except Exception as error:  # a metric of the user's own may fail in any way
            raise InvalidInputError(
                f"the metrics cannot be made again on a worker: {type(error).__name__}: {error}; "
                "give what can be pickled and unpickled: a function, or a keras.metrics.Metric "
                "with a get_config()"
            ) from error
        return request

    def _loaded(self) -> tuple[Evaluator, Mapping[str, Transform]]:
        global _cached
        apply_task_limits()
        key = hashlib.sha256(self.predictor.digest.encode() + self.request).hexdigest()
        if _cached is None or _cached[0] != key:
            recipe = self.predictor.load()
            request = self._load_request()
            missing = [n for n in request.targets.transforms if n not in recipe.transforms]
            if missing:
                raise DataError(
                    f"the model was trained with transforms of label column {quote_all(missing)}; "
                    "functions are not kept in storage: give them, from_run(…, transforms={…})"
                )
            evaluator = engine_named(recipe.engine).evaluator(recipe, request)
            drops = _cached is not None
            _cached = key, evaluator, recipe.transforms
            exclude_from_gc(dropped=drops)
        return _cached[1], _cached[2]


def _batch(rows: int, fields: pa.Schema, values: Mapping[str, object]) -> pa.RecordBatch:
    """Return a batch of such ``fields``; those without values are null."""
    columns = {one.name: values.get(one.name, pa.nulls(rows, one.type)) for one in fields}
    return pa.RecordBatch.from_pydict(columns, fields)


def _lists(values: np.ndarray) -> pa.Array:
    return lists_of(pa.array(np.ascontiguousarray(values, np.float64).reshape(-1)), len(values))
