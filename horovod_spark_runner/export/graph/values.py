"""Stages on single numbers, as `horovod_spark_runner.scoring.values` computes them."""

from __future__ import annotations

import math

import numpy as np

from ...scoring.columns import KEEP, SKIP
from ...scoring.values import Binarizer, Bucketizer, Imputer
from .builder import Rows, Values


def imputer(rows: Rows, stage: Imputer) -> None:
    """Add numbers in place of null and a missing value."""
    graph = rows.graph
    added = {}  # together, as an output may have the name of another's input
    for name, output, surrogate in zip(stage.inputs, stage.outputs, stage.surrogates, strict=True):
        data, valid = rows.numbers(name)
        dtype = rows.columns[name].dtype
        if math.isnan(stage.missing_value):
            missing = graph.add("IsNaN", data)
        else:
            missing = graph.add("Equal", data, graph.constant(stage.missing_value))
        if valid is not None:
            missing = graph.add("Or", missing, graph.add("Not", valid))
        whole = graph.add("Where", missing, graph.constant(float(surrogate)), data)
        if np.dtype(dtype).kind in "iu":
            whole = _as_whole(rows, name, whole, dtype)
        elif dtype != "float64":
            whole = graph.cast(whole, dtype)
        added[output] = Values(whole, dtype)
    rows.columns.update(added)


def _as_whole(rows: Rows, name: str, whole: str, dtype: str) -> str:
    """Return numbers as a whole type's; those that it does not hold are errors."""
    graph, largest = rows.graph, np.iinfo(dtype).max
    bound = float(largest)  # of 64 bits the next one, which Spark takes for the largest
    cut = graph.truncated(whole)
    low = graph.add("GreaterOrEqual", cut, graph.constant(-bound - 1))
    high = graph.add("LessOrEqual", cut, graph.constant(bound))
    fits = graph.add("And", low, high)
    rows.check(f"column {name!r}", fits, f"imputed, it does not fit {dtype} any more")
    if bound < 2**53:
        return graph.cast(graph.add("Where", fits, cut, graph.constant(0.0)), dtype)
    below = graph.add("And", low, graph.add("Less", cut, graph.constant(bound)))
    held = graph.cast(graph.add("Where", below, cut, graph.constant(0.0)), dtype)
    return graph.add("Where", below, held, graph.constant(np.array(largest, dtype)))


def bucketizer(rows: Rows, stage: Bucketizer) -> None:
    """Add the buckets of numbers."""
    graph = rows.graph
    if stage.handle_invalid == SKIP:
        rows.drop_missing(stage.inputs)
    for name, output, bounds in zip(stage.inputs, stage.outputs, stage.splits, strict=True):
        data, valid = rows.numbers(name)
        splits = np.array(bounds)
        nan = graph.add("IsNaN", data)
        buckets = _buckets(rows, data, splits)
        last = graph.add("Equal", data, graph.constant(splits[-1]))
        buckets = graph.add("Where", last, graph.constant(len(splits) - 2.0), buckets)
        # -0.0 lies below a first bound of 0.0, and is equal to it.
        low = graph.add("GreaterOrEqual", buckets, graph.constant(0.0))
        right = graph.add("And", low, graph.add("LessOrEqual", data, graph.constant(splits[-1])))
        if stage.handle_invalid == KEEP:
            right = graph.add("Or", right, nan)
        right = graph.either_not(right, valid)
        advice = f"the buckets are from {bounds[0]} to {bounds[-1]}"
        rows.check(f"column {name!r}", right, advice)
        buckets = graph.add("Where", nan, graph.constant(len(splits) - 1.0), buckets)
        rows.add_numbers(output, buckets, valid)


def _buckets(rows: Rows, data: str, splits: np.ndarray) -> str:
    """Return how many bounds but one numbers have reached, -0.0 before 0.0 as in Java."""
    graph = rows.graph
    reached = graph.add("GreaterOrEqual", graph.column(data), graph.constant(splits))
    plus = (splits == 0) & ~np.signbit(splits)
    if plus.any():
        inverse = graph.add("Div", graph.constant(1.0), data)
        minus = graph.add("Equal", inverse, graph.constant(-math.inf))
        other = graph.add("And", graph.column(minus), graph.constant(plus))
        reached = graph.add("And", reached, graph.add("Not", other))
    axis = graph.constant(np.array([1], np.int64))
    total = graph.add("ReduceSum", graph.cast(reached, "float64"), axis, keepdims=0)
    return graph.add("Sub", total, graph.constant(1.0))


def binarizer(rows: Rows, stage: Binarizer) -> None:
    """Add whether numbers, or elements of vectors, are above a threshold."""
    graph = rows.graph
    for name, output, threshold in zip(stage.inputs, stage.outputs, stage.thresholds, strict=True):
        limit = graph.constant(float(threshold))
        if (size := rows.columns[name].size) is not None:
            data = rows.vectors(name).data
            if threshold >= 0:
                made = graph.cast(graph.add("Greater", data, limit), "float64")
            else:  # NaN counts as above
                below = graph.cast(graph.add("LessOrEqual", data, limit), "float64")
                made = graph.add("Sub", graph.constant(1.0), below)
            rows.add_vectors(output, made, size)
            continue
        data, valid = rows.numbers(name)
        above = graph.both(graph.add("Greater", data, limit), valid)
        assert above is not None
        rows.add_numbers(output, graph.cast(above, "float64"))
