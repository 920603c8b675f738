"""Stages on vectors, as `horovod_spark_runner.scoring.vectors` computes them."""

from __future__ import annotations

import math

import numpy as np

from ..errors import ModelError
from ..scoring.columns import ERROR, KEEP, SKIP
from ..scoring.vectors import (
    Interaction,
    MinMaxScaler,
    Normalizer,
    PolynomialExpansion,
    Projection,
    Scaler,
    VectorAssembler,
    VectorSlicer,
)
from .onnx_builder import Graph, Rows


def vector_assembler(rows: Rows, stage: VectorAssembler) -> None:
    """Add numbers and vectors joined into one vector."""
    graph = rows.graph
    if stage.handle_invalid == SKIP:
        rows.drop_missing(stage.inputs)
    parts, size = [], 0
    for name in stage.inputs:
        column = rows.columns[name]
        nan = None
        if column.size is None:
            data, valid = rows.numbers(name)
            nan = graph.add("IsNaN", data)
            data, width = graph.column(data), 1
        else:
            width, valid = column.size, column.valid
            data = column.data
            if column.dtype != "float64":
                data = graph.cast(data, "float64")
        if stage.handle_invalid == ERROR:
            right = graph.both(valid, None if nan is None else graph.add("Not", nan))
            advice = "handleInvalid of the VectorAssembler is 'error'"
            rows.check(f"column {name!r}", right, advice)
        elif stage.handle_invalid == KEEP and valid is not None:
            data = graph.add("Where", graph.column(valid), data, graph.constant(math.nan))
        parts.append(data)
        size += width
    whole = graph.add("Concat", *parts, axis=1)
    # Zeros are not kept, so the sign of one is lost.
    zero = graph.add("Equal", whole, graph.constant(0.0))
    rows.add_vectors(stage.output, graph.add("Where", zero, graph.constant(0.0), whole), size)


def vector_slicer(rows: Rows, stage: VectorSlicer) -> None:
    """Add some elements of vectors."""
    indices = rows.graph.constant(np.asarray(stage.indices, np.int64))
    vectors = rows.vectors(stage.input)
    if vectors.size is not None and (stage.indices >= vectors.size).any():
        raise ModelError(
            f"column {stage.input!r} holds vectors of {vectors.size} elements, and element "
            f"{stage.indices.max()} (counted from 0) is taken"
        )
    data = rows.graph.add("Gather", vectors.data, indices, axis=1)
    rows.add_vectors(stage.output, data, len(stage.indices))


def scaler(rows: Rows, stage: Scaler) -> None:
    """Add elements moved and multiplied."""
    graph = rows.graph
    data = rows.vectors(stage.input, stage.size).data
    if len(stage.shift):
        data = graph.add("Sub", data, graph.constant(stage.shift))
    if len(stage.factors):
        data = graph.add("Mul", data, graph.constant(stage.factors))
    rows.add_vectors(stage.output, data, stage.size)


def min_max_scaler(rows: Rows, stage: MinMaxScaler) -> None:
    """Add elements brought into a range."""
    graph, size = rows.graph, len(stage.lows)
    data = rows.vectors(stage.input, size).data
    moved = graph.add("Sub", data, graph.constant(stage.lows))
    moved = graph.add("Mul", moved, graph.constant(stage.factors))
    moved = graph.add("Add", moved, graph.constant(stage.lower))
    same = graph.constant(stage.factors == 0)
    moved = graph.add("Where", same, graph.constant(stage.middle), moved)
    moved = graph.add("Where", graph.add("IsNaN", data), data, moved)
    rows.add_vectors(stage.output, moved, size)


def normalizer(rows: Rows, stage: Normalizer) -> None:
    """Add vectors divided by their norms."""
    graph = rows.graph
    vectors = rows.vectors(stage.input)
    size = vectors.size or 0
    if not size:
        rows.add_vectors(stage.output, vectors.data, 0)
        return
    norms = _norms(graph, vectors.data, size, stage.p)
    none = graph.add("Equal", norms, graph.constant(0.0))
    divisors = graph.column(graph.add("Where", none, graph.constant(1.0), norms))
    rows.add_vectors(stage.output, graph.add("Div", vectors.data, divisors), size)


def _norms(graph: Graph, data: str, size: int, p: float) -> str:
    sizes = graph.add("Abs", data)
    if p == math.inf:
        nan = graph.add("IsNaN", sizes)
        plain = graph.add("Where", nan, graph.constant(0.0), sizes)
        axis = graph.constant(np.array([1], np.int64))
        return graph.add("ReduceMax", plain, axis, keepdims=0)
    if p == 1:
        powers = sizes
    elif p == 2:
        powers = graph.add("Mul", data, data)
    else:
        powers = graph.add("Pow", sizes, graph.constant(p))
    # One after the other, as Spark adds.
    sums = graph.add("CumSum", powers, graph.constant(np.int64(1)))
    total = graph.add("Gather", sums, graph.constant(np.int64(size - 1)), axis=1)
    if p == 1:
        return total
    return graph.add("Sqrt", total) if p == 2 else graph.add("Pow", total, graph.constant(1.0 / p))


def projection(rows: Rows, stage: Projection) -> None:
    """Add vectors times a matrix."""
    size, count = stage.components.shape
    data = rows.vectors(stage.input, size).data
    components = rows.graph.constant(stage.components)
    rows.add_vectors(stage.output, rows.graph.add("MatMul", data, components), count)


def polynomial_expansion(rows: Rows, stage: PolynomialExpansion) -> None:
    """Add products of elements."""
    graph = rows.graph
    vectors = rows.vectors(stage.input)
    size = vectors.size or 0
    made: list[tuple[int, ...]] = []
    _expand(size - 1, stage.degree, (), made)
    products = made[1:]
    # Column ``size`` of ones fills up products of fewer elements.
    pad = graph.constant(np.array([0, 0, 0, 1], np.int64))
    data = graph.add("Pad", vectors.data, pad, graph.constant(1.0))
    whole = ""
    for step in range(stage.degree):
        places = [one[step] if step < len(one) else size for one in products]
        factor = graph.add("Gather", data, graph.constant(np.array(places, np.int64)), axis=1)
        if not whole:
            whole = factor
            continue
        # A product that is zero stays so, also times infinity.
        zero = graph.add("Equal", whole, graph.constant(0.0))
        times = graph.add("Mul", whole, factor)
        whole = graph.add("Where", zero, graph.constant(0.0), times)
    zero = graph.add("Equal", whole, graph.constant(0.0))  # of either sign
    whole = graph.add("Where", zero, graph.constant(0.0), whole)
    rows.add_vectors(stage.output, whole, len(products))


def _expand(last: int, degree: int, so_far: tuple[int, ...], made: list[tuple[int, ...]]) -> None:
    """Add the products of ``so_far`` and the elements up to ``last``, in Spark's order."""
    if degree == 0 or last < 0:
        made.append(so_far)
        return
    for left in range(degree, -1, -1):
        _expand(last - 1, left, so_far, made)
        so_far = (*so_far, last)


def interaction(rows: Rows, stage: Interaction) -> None:
    """Add products of the elements of several columns."""
    graph = rows.graph
    product, active, width = "", "", 0
    for number in reversed(range(len(stage.inputs))):
        values, there, count = _encoded(rows, stage, number)
        if not product:
            product, active, width = values, there, count
            continue
        outer, inner = np.array([2], np.int64), np.array([1], np.int64)
        both = graph.add(
            "And",
            graph.add("Unsqueeze", there, graph.constant(outer)),
            graph.add("Unsqueeze", active, graph.constant(inner)),
        )
        times = graph.add(
            "Mul",
            graph.add("Unsqueeze", values, graph.constant(outer)),
            graph.add("Unsqueeze", product, graph.constant(inner)),
        )
        times = graph.add("Where", both, times, graph.constant(0.0))
        width *= count
        product, active = graph.shaped(times, 0, width), graph.shaped(both, 0, width)
    product = graph.add("Where", active, product, graph.constant(0.0))
    rows.add_vectors(stage.output, product, width)


def _encoded(rows: Rows, stage: Interaction, number: int) -> tuple[str, str, int]:
    """Return a column's elements, categories as ones, which of them count, and how many."""
    graph, name, counts = rows.graph, stage.inputs[number], stage.categories[number]
    subject = f"column {name!r}"
    if rows.columns[name].size is None:
        single, valid = rows.numbers(name)
        rows.check(subject, valid, "what interacts cannot be null")
        data = graph.column(single)
    else:
        data = rows.vectors(name, len(counts)).data
    values, there = [], []
    for place, count in enumerate(counts):
        one = graph.add("Gather", data, graph.constant(np.array([place], np.int64)), axis=1)
        if not count:
            values.append(one)
            there.append(graph.add("Or", graph.add("IsNaN", one), graph.add("Equal", one, one)))
            continue
        at = graph.add("Equal", one, graph.constant(np.arange(count, dtype=np.float64)))
        axis = graph.constant(np.array([1], np.int64))
        share = graph.cast(at, "float64")
        total = graph.add("ReduceSum", share, axis, keepdims=0)
        right = graph.add("Greater", total, graph.constant(0.0))
        rows.check(subject, right, f"it must be one of {count} categories")
        values.append(share)
        there.append(at)
    width = sum(max(count, 1) for count in counts)
    return graph.add("Concat", *values, axis=1), graph.add("Concat", *there, axis=1), width
