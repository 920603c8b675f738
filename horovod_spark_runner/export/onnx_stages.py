"""Stages on values and vectors as ONNX nodes; see `horovod_spark_runner.scoring`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ModelError
from ..scoring.columns import ERROR, KEEP, SKIP
from ..scoring.values import (
    Binarizer,
    Bucketizer,
    Imputer,
    IndexToString,
    OneHotEncoder,
    StringIndexer,
    real_of,
)
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
from .onnx_builder import ML, TEXT, Graph, Rows, Values, element_type


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


# Where a label has no place.
_NOWHERE = -1


def string_indexer(rows: Rows, stage: StringIndexer) -> None:
    """Add the places of labels."""
    graph, indices, mask = rows.graph, {}, None
    nowhere = graph.constant(np.int64(_NOWHERE))
    for name, output, labels in zip(stage.inputs, stage.outputs, stage.labels, strict=True):
        if name not in rows.columns:
            continue
        column = rows.columns[name]
        places = _places(rows, name, column, labels)
        if column.valid is not None:
            places = graph.add("Where", column.valid, places, nowhere)
        if stage.handle_invalid == SKIP and column.dtype.startswith("float"):
            # Spark drops NaN together with null, also where it is a label.
            places = graph.add("Where", graph.add("IsNaN", column.data), nowhere, places)
        there = graph.add("Greater", places, nowhere)
        if stage.handle_invalid == ERROR:
            advice = "it is none of the labels in the fitted data"
            rows.check(f"column {name!r}", there, advice)
        elif stage.handle_invalid == SKIP:
            mask = graph.both(mask, there)
        categories = graph.add("Where", there, places, graph.constant(np.int64(len(labels))))
        indices[output] = graph.cast(categories, "float64")
    for output, data in indices.items():
        rows.add_numbers(output, data)
    rows.keep(mask)


def _places(rows: Rows, name: str, column: Values, labels: Sequence[str]) -> str:
    if column.size is not None:
        raise ModelError(f"column {name!r} holds neither text nor numbers")
    if column.dtype == TEXT:
        return _looked_up(rows, column.data, TEXT, {label: n for n, label in enumerate(labels)})
    if np.dtype(column.dtype).kind == "f":
        return _real(rows, column, labels)
    table = {int(label): n for n, label in enumerate(labels) if _is_whole(label)}
    return _looked_up(rows, rows.graph.cast(column.data, "int64"), "int64", table)


def _is_whole(label: str) -> bool:
    """Return whether a label is the text of an integer."""
    try:
        return str(int(label)) == label and -(2**63) <= int(label) < 2**63
    except ValueError:
        return False


def _real(rows: Rows, column: Values, labels: Sequence[str]) -> str:
    """Return the places of real numbers, of which NaN is one, and 0.0 and -0.0 are two."""
    graph, table = rows.graph, {}
    odd = {"nan": _NOWHERE, "plus": _NOWHERE, "minus": _NOWHERE}
    for place, label in enumerate(labels):
        value = real_of(label, np.dtype(column.dtype))
        if value is None:
            continue
        if math.isnan(value):
            odd["nan"] = place
        elif value == 0:
            odd["minus" if math.copysign(1.0, value) < 0 else "plus"] = place
        else:
            table[value] = place
    at = {name: graph.constant(np.int64(place)) for name, place in odd.items()}
    data = column.data if column.dtype == "float64" else graph.cast(column.data, "float64")
    places = _looked_up(rows, data, "float64", table)
    inverse = graph.add("Div", graph.constant(1.0), data)
    minus = graph.add("Equal", inverse, graph.constant(-math.inf))
    zero = graph.add("Equal", data, graph.constant(0.0))
    zeros = graph.add("Where", minus, at["minus"], at["plus"])
    places = graph.add("Where", zero, zeros, places)
    return graph.add("Where", graph.add("IsNaN", data), at["nan"], places)


def _looked_up(rows: Rows, data: str, dtype: str, table: Mapping[Any, int]) -> str:
    """Return the places that a table has for values."""
    import onnx

    graph = rows.graph
    if not table:
        return rows.all_of(_NOWHERE)

    def tensor(name: str, kind: str, values: Sequence[Any]) -> Any:
        made = [value.encode() for value in values] if kind == TEXT else list(values)
        return onnx.helper.make_tensor(name, element_type(kind), [len(made)], made)

    return graph.add(
        "LabelEncoder",
        data,
        domain=ML,
        keys_tensor=tensor("keys", dtype, list(table)),
        values_tensor=tensor("values", "int64", list(table.values())),
        default_tensor=tensor("default", "int64", [_NOWHERE]),
    )


def index_to_string(rows: Rows, stage: IndexToString) -> None:
    """Add labels by their places."""
    graph = rows.graph
    data, valid = rows.numbers(stage.input)
    places = graph.truncated(data)
    low = graph.add("GreaterOrEqual", places, graph.constant(0.0))
    high = graph.add("Less", places, graph.constant(float(len(stage.labels))))
    right = graph.both(low, high, valid)
    assert right is not None
    advice = f"there are labels for 0 to {len(stage.labels) - 1}"
    rows.check(f"column {stage.input!r}", right, advice)
    place = graph.cast(graph.add("Where", right, places, graph.constant(0.0)), "int64")
    labels = graph.constant(np.array(stage.labels, object))
    rows.columns[stage.output] = Values(graph.add("Gather", labels, place), TEXT)


def one_hot_encoder(rows: Rows, stage: OneHotEncoder) -> None:
    """Add vectors with a one at the place of the category."""
    graph, keep = rows.graph, stage.handle_invalid == KEEP
    for name, output, size in zip(stage.inputs, stage.outputs, stage.sizes, strict=True):
        data, valid = rows.numbers(name)
        low = graph.add("GreaterOrEqual", data, graph.constant(0.0))
        high = graph.add("Less", data, graph.constant(float(size)))
        right = graph.add("And", low, high)
        if not keep:
            advice = f"there are the categories 0 to {size - 1}"
            rows.check(f"column {name!r}", graph.either_not(right, valid), advice)
        width = size + keep - stage.drop_last
        other = graph.constant(float(size))
        places = graph.add("Where", right, graph.add("Floor", data), other)
        at = graph.constant(np.arange(width, dtype=np.float64))
        ones = graph.cast(graph.add("Equal", graph.column(places), at), "float64")
        rows.add_vectors(output, ones, width, valid)


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
