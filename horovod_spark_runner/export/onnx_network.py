"""A network's graph as a part of a pipeline's, and the columns from its outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import ModelError
from ..training.onnx import BOUNDS, CLASS, METADATA, PLAIN, PROBABILITY, TOLERANCE, VECTOR
from ..typed_json import load_json
from .onnx_builder import TEXT, Rows, Values
from .stages import ERROR, SKIP, Stage


@dataclass(frozen=True)
class NetworkColumn:
    """How a column is made that a network adds.

    Attributes:
        result: the number of the result that it is made of.
        holds: what it holds: the result as it is, or a class, say.
        scores: whether the result is scores of classes, and not their probabilities.
        scalar: whether the result is one number per row.
        dtype: NumPy's type of the column; ``"string"`` for text.
        computed: name of the type that the model computes the result in.
    """

    result: int
    holds: str
    scores: bool
    scalar: bool
    dtype: str
    computed: str


@dataclass(frozen=True)
class _Output:
    """One output of the network's graph.

    Attributes:
        subject: its name in errors.
        data: the tensor.
        dtype: NumPy's type of it, or ``"string"``.
        width: elements per row.
        made: how the column is made of it.
        others: the rows that the network does not score, if any.
    """

    subject: str
    data: str
    dtype: str
    width: int
    made: NetworkColumn
    others: str | None


@dataclass(frozen=True)
class Network(Stage):
    """A trained model; see `TFTransformer`.

    Attributes:
        arguments: what the network calls each input.
        dtypes: NumPy's type of each, as the model was trained; ``"string"`` for text.
        shapes: shape of one row's value of each.
        results: what the network calls its outputs.
        added: how each column is made that it adds.
        handle_invalid: what becomes of rows with null, or values that do not fit: ``"error"``,
            ``"skip"`` the row, or ``"keep"`` it with null.
        contents: the network as an ONNX file.
    """

    arguments: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    results: tuple[str, ...]
    added: tuple[NetworkColumn, ...]
    handle_invalid: str
    contents: bytes = field(repr=False)

    def add_nodes(self, rows: Rows) -> None:
        import onnx

        graph = rows.graph
        valid: str | None = None
        for name, dtype, shape in zip(self.inputs, self.dtypes, self.shapes, strict=True):
            right = _fitting(rows, name, dtype, math.prod(shape))
            if self.handle_invalid == ERROR:
                rows.check(f"column {name!r}", right, "there is no prediction for it")
            else:
                valid = graph.both(valid, right)
        if self.handle_invalid == SKIP:
            rows.keep(valid)
            valid = None
        whole = onnx.load_model_from_string(self.contents)
        _check_bounds(rows, self, whole, valid)
        # What is not scored is replaced: it may be nothing that the network takes.
        scored = graph.both(rows.live, valid)
        assert scored is not None
        arguments = [
            _argument(rows, name, dtype, shape, scored)
            for name, dtype, shape in zip(self.inputs, self.dtypes, self.shapes, strict=True)
        ]
        results = _merge(rows, self, whole, arguments)
        others = graph.add("Not", scored) if valid is not None else None
        for name, made in zip(self.outputs, self.added, strict=True):
            output = _Output(f"column {name!r}", *results[made.result], made, others)
            column = _plain(rows, output) if made.holds == PLAIN else _of_scores(rows, output)
            rows.columns[name] = replace(column, valid=valid)


def _fitting(rows: Rows, name: str, dtype: str, width: int) -> str | None:
    """Return the mask of rows that the model can take; ``None`` if it takes all."""
    graph, column = rows.graph, rows.columns[name]
    if column.size is not None:
        if column.size != width:
            raise ModelError(
                f"column {name!r} holds {column.size} numbers, and the network takes {width}"
            )
        if np.dtype(dtype).kind != "i" or column.dtype == dtype:
            return column.valid
        return _whole(rows, name, column, np.dtype(dtype))
    if (column.dtype == TEXT) != (dtype == TEXT):
        raise ModelError(f"column {name!r} holds {column.dtype}, and the network takes {dtype}")
    if dtype == TEXT or np.dtype(dtype).kind != "i" or column.dtype == dtype:
        return column.valid
    bounds = np.iinfo(dtype)
    column_dtype = np.dtype(column.dtype)
    if column_dtype.kind == "i" and np.iinfo(column_dtype).bits <= bounds.bits:
        return column.valid
    kind = "int64" if column_dtype.kind == "i" else "float64"
    data = graph.cast(column.data, kind)
    low = graph.add("GreaterOrEqual", data, graph.constant(np.array(bounds.min, kind)))
    high = graph.add("LessOrEqual", data, graph.constant(np.array(bounds.max, kind)))
    return graph.both(column.valid, low, high)


def _whole(rows: Rows, name: str, column: Values, dtype: np.dtype) -> str | None:
    """Return which arrays hold nothing but numbers that a whole type has."""
    graph, bounds = rows.graph, np.iinfo(dtype)
    data = column.data if column.dtype == "float64" else graph.cast(column.data, "float64")
    axis = graph.constant(np.array([1], np.int64))
    whole = graph.add("Equal", data, graph.truncated(data))
    others = graph.cast(graph.add("Not", whole), "float64")
    count = graph.add("ReduceSum", others, axis, keepdims=0)
    right = graph.add("Equal", count, graph.constant(0.0))
    rows.check(
        f"column {name!r}", graph.either_not(right, column.valid), "it must hold whole numbers"
    )
    least = graph.add("ReduceMin", data, axis, keepdims=0)
    largest = graph.add("ReduceMax", data, axis, keepdims=0)
    if dtype == "int64":
        above = graph.add("Greater", least, graph.constant(-(2.0**53)))
        exact = graph.both(above, graph.add("Less", largest, graph.constant(2.0**53)))
        assert exact is not None
        advice = "it must hold whole numbers below 2**53: larger ones are not held exactly"
        rows.check(f"column {name!r}", graph.either_not(exact, column.valid), advice)
    low = graph.add("GreaterOrEqual", least, graph.constant(float(bounds.min)))
    high = graph.add("LessOrEqual", largest, graph.constant(float(bounds.max)))
    return graph.both(column.valid, low, high)


def _argument(rows: Rows, name: str, dtype: str, shape: tuple[int, ...], scored: str) -> str:
    """Return the network's argument, with blanks for rows that are not scored."""
    graph, column = rows.graph, rows.columns[name]
    mask = scored if column.size is None else graph.column(scored)
    data = graph.where(mask, column.data, "" if column.dtype == TEXT else 0, column.dtype)
    if column.dtype != dtype:
        data = graph.cast(data, dtype)
    # A scalar may be taken as a row of one.
    return graph.shaped(data, 0, *shape) if shape or column.size is not None else data


def _facts(whole: Any) -> dict[str, Any]:
    """Return the metadata of the network's file."""
    properties = {one.key: one.value for one in whole.metadata_props}
    facts: dict[str, Any] = load_json(properties[METADATA])
    return facts


def _check_bounds(rows: Rows, stage: Network, whole: object, valid: str | None) -> None:
    """Report rows with integers that the network's inputs do not hold.

    Args:
        rows: the rows.
        stage: the network.
        whole: its file.
        valid: which rows it predicts on, others get null; ``None`` if it is all that are left.
    """
    graph, bounds = rows.graph, _facts(whole).get(BOUNDS, {})
    for name, argument in zip(stage.inputs, stage.arguments, strict=True):
        if argument not in bounds:
            continue
        column, (low, high) = rows.columns[name], bounds[argument]
        least = largest = data = graph.cast(column.data, "float64")
        if column.size is not None:
            axis = graph.constant(np.array([1], np.int64))
            least = graph.add("ReduceMin", data, axis, keepdims=0)
            largest = graph.add("ReduceMax", data, axis, keepdims=0)
        right = graph.both(
            graph.add("GreaterOrEqual", least, graph.constant(float(low))),
            graph.add("LessOrEqual", largest, graph.constant(float(high))),
        )
        assert right is not None
        advice = f"the network's input holds {low} to {high}"
        rows.check(f"column {name!r}", graph.either_not(right, valid), advice)


def _merge(
    rows: Rows, stage: Network, whole: Any, arguments: list[str]
) -> list[tuple[str, str, int]]:
    """Add the network's graph; return its outputs, their types and their sizes."""
    import onnx

    if whole.functions:
        whole = onnx.inliner.inline_local_functions(whole)
    graph = rows.graph
    opset = next(one.version for one in whole.opset_import if one.domain in ("", "ai.onnx"))
    if graph.opset not in (None, opset):
        raise ModelError(
            f"the networks of one ONNX file must be of one version of ONNX's operators, and these "
            f"are of {graph.opset} and {opset}, of different frameworks: export a pipeline of each"
        )
    graph.opset, graph.ir_version = opset, max(graph.ir_version, whole.ir_version)
    # A name that no other network's nodes have.
    prefix = f"{graph.new_name()} "
    inner = onnx.compose.add_prefix(whole, prefix).graph
    for argument, data in zip(stage.arguments, arguments, strict=True):
        name = prefix + argument
        graph.nodes.append(onnx.helper.make_node("Identity", [data], [name], name))
    graph.nodes.extend(inner.node)
    graph.constants.extend(inner.initializer)
    types = {value.name: value.type.tensor_type for value in inner.output}
    outputs = []
    for output in stage.results:
        kind = types[prefix + output]
        sizes = [one.dim_value for one in kind.shape.dim][1:]
        if 0 in sizes:
            raise ModelError(
                f"output {output!r} of the network is of another size for other rows, which a "
                "column of vectors cannot be"
            )
        dtype = (
            TEXT
            if kind.elem_type == onnx.TensorProto.STRING
            else onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
        )
        outputs.append((prefix + output, dtype, math.prod(sizes)))
    return outputs


def _plain(rows: Rows, output: _Output) -> Values:
    """Return an output as it is."""
    graph, scalar, dtype = rows.graph, output.made.scalar, output.made.dtype
    if dtype == TEXT and not scalar:
        raise ModelError(f"{output.subject} holds lists of strings, which ONNX does not have")
    data = graph.shaped(output.data, -1) if scalar else graph.shaped(output.data, 0, output.width)
    if dtype != output.dtype:
        data = graph.cast(data, dtype)
    return Values(data, dtype, None if scalar else output.width)


def _of_scores(rows: Rows, output: _Output) -> Values:
    """Return an output as a vector, the likeliest class, or probabilities or scores of classes."""
    graph, holds = rows.graph, output.made.holds
    data = graph.cast(graph.shaped(output.data, 0, output.width), "float64")
    if holds == VECTOR:
        return Values(data, "float64", output.width)
    if output.made.scalar:
        classes, count = _of_two(rows, output, data), 2
    else:
        classes, count = _of_several(rows, output, data), output.width
    if holds == CLASS:
        best = graph.add("ArgMax", classes, axis=1, keepdims=0)
        return Values(graph.cast(best, "float64"), "float64")
    return Values(classes, "float64", count)


def _of_two(rows: Rows, output: _Output, value: str) -> str:
    """Return the values of both classes from an output that describes class 1."""
    graph, scores = rows.graph, output.made.scores
    one = graph.constant(1.0)
    if scores:
        right = graph.add("Not", graph.add("IsNaN", value))
    else:
        low = graph.add("GreaterOrEqual", value, graph.constant(0.0))
        right = graph.add("And", low, graph.add("LessOrEqual", value, one))
    _check(rows, output, graph.shaped(right, -1))
    if scores and output.made.holds != PROBABILITY:
        return graph.add("Concat", graph.add("Neg", value), value, axis=1)
    if scores:
        power = graph.add("Exp", graph.add("Neg", value))
        value = graph.add("Div", one, graph.add("Add", one, power))
    return graph.add("Concat", graph.add("Sub", one, value), value, axis=1)


def _of_several(rows: Rows, output: _Output, data: str) -> str:
    """Return an output's value of each class."""
    graph, scores = rows.graph, output.made.scores
    axis = graph.constant(np.array([1], np.int64))
    if scores:
        nan = graph.cast(graph.add("IsNaN", data), "float64")
        count = graph.add("ReduceSum", nan, axis, keepdims=0)
        right = graph.add("Equal", count, graph.constant(0.0))
    else:
        tolerance = TOLERANCE[output.made.computed]
        least = graph.add("ReduceMin", data, axis, keepdims=0)
        low = graph.add("GreaterOrEqual", least, graph.constant(-tolerance))
        total = graph.add("ReduceSum", data, axis, keepdims=0)
        apart = graph.add("Abs", graph.add("Sub", total, graph.constant(1.0)))
        near = graph.add("LessOrEqual", apart, graph.constant(tolerance))
        right = graph.add("And", low, near)
    _check(rows, output, right)
    if not scores or output.made.holds != PROBABILITY:
        return data
    largest = graph.add("ReduceMax", data, axis, keepdims=1)
    powers = graph.add("Exp", graph.add("Sub", data, largest))
    return graph.add("Div", powers, graph.add("ReduceSum", powers, axis, keepdims=1))


def _check(rows: Rows, output: _Output, right: str) -> None:
    """Make rows errors for which the network gives NaN as a score, or invalid probabilities."""
    problem = "the model gives " + ("a score of NaN" if output.made.scores else "no probabilities")
    if output.others is not None:
        right = rows.graph.add("Or", right, output.others)
    rows.check(output.subject, right, problem)
