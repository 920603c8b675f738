"""Stages on categories, as `horovod_spark_runner.scoring.values` computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ModelError
from ...scoring.columns import ERROR, KEEP, SKIP
from ...scoring.values import IndexToString, OneHotEncoder, StringIndexer, real_of
from .builder import ML, TEXT, Rows, Values, element_type

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
