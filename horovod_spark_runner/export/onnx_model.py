"""A pipeline as one ONNX file, from raw columns to the columns that its last stage adds.

What Spark has and ONNX has not is told beside the values: null by a boolean input ``NAME.null`` of
each column, which may be left out; rows that are left out or errors by the output ``row_state``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .._version import __version__
from ..errors import InvalidInputError, ModelError
from ..training.onnx import METADATA, ROWS
from .columns import NULL, Input
from .onnx_builder import ML, ML_OPSET, OPSET, TEXT, Graph, Rows, Values, element_type
from .onnx_network import Network
from .stages import Stage, StringIndexer

_FORMAT = 1
STATE = "row_state"


def _wanted_columns(stages: Sequence[Stage], columns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns that a file is to give.

    Raises:
        InvalidInputError: no stage adds one of them, or there is none.
    """
    made = [name for stage in stages for name in stage.outputs]
    if columns is None:
        return stages[-1].outputs if stages else ()
    unknown = [name for name in columns if name not in made]
    if isinstance(columns, str) or unknown or not columns:
        raise InvalidInputError(
            f"columns={columns!r}: there is no column {unknown or columns!r}; the pipeline adds "
            f"{sorted(made)}"
        )
    return tuple(dict.fromkeys(columns))


def _needed_stages(
    inputs: Sequence[Input], stages: Sequence[Stage], wanted: Sequence[str]
) -> tuple[list[Stage], set[str]]:
    """Return the stages that run for columns, and the inputs that these take.

    A column that nothing but StringIndexers take, and that no wanted column is made of, such as a
    label, is passed over, as Spark passes it over where it is not there.
    """
    last = max(
        (n for n, stage in enumerate(stages) if set(stage.outputs) & set(wanted)), default=-1
    )
    stages = stages[: last + 1]
    made_of = set(wanted)
    for stage in reversed(stages):
        for name, source in _sources(stage):
            if name in made_of:
                made_of.update(source)
    absent = {one.name for one in inputs if not one.needed and one.name not in made_of}
    there = {one.name for one in inputs} - absent
    left: list[Stage] = []
    for stage in stages:
        if not isinstance(stage, StringIndexer) and absent & set(stage.inputs):
            absent |= set(stage.outputs)
            continue
        absent |= {name for name, source in _sources(stage) if set(source) & absent}
        left.append(stage)
    taken = {name for stage in left for name in stage.inputs}
    return left, there & taken


def _sources(stage: Stage) -> list[tuple[str, tuple[str, ...]]]:
    """Return each column that a stage adds, and its source columns."""
    if len(stage.inputs) == len(stage.outputs) and not isinstance(stage, Network):
        return [(name, (source,)) for name, source in zip(stage.outputs, stage.inputs, strict=True)]
    return [(name, stage.inputs) for name in stage.outputs]


def build_onnx(
    inputs: Sequence[Input], stages: Sequence[Stage], columns: Sequence[str] | None = None
) -> bytes:
    """Return a pipeline as an ONNX file.

    Args:
        inputs: the columns that it takes.
        stages: its stages.
        columns: the columns it is to give; by default those that the last stage adds.

    Raises:
        ModelError: a stage or a column has no form in ONNX; the message names it.
        InvalidInputError: ``columns`` names what the pipeline does not add.
    """
    import onnx

    wanted = _wanted_columns(stages, columns)
    stages, taken = _needed_stages(inputs, stages, wanted)
    inputs = [one for one in inputs if one.name in taken]
    _check_names(inputs, wanted)
    graph = Graph()
    values, tensors = _graph_inputs(graph, inputs)
    shape = graph.add("Shape", inputs[0].name, start=0, end=1)
    rows = Rows(graph, values, shape)
    for stage in stages:
        stage.add_nodes(rows)
    results = [_result(rows, name) for name in wanted]
    graph.nodes.append(onnx.helper.make_node("Identity", [rows.state], [STATE], STATE))
    state = onnx.helper.make_tensor_value_info(STATE, onnx.TensorProto.INT64, [ROWS])
    made = onnx.helper.make_graph(
        graph.nodes, "pipeline", tensors, [*results, state], initializer=graph.constants
    )
    model = onnx.helper.make_model(
        made,
        producer_name="horovod_spark_runner",
        producer_version=__version__,
        ir_version=graph.ir_version,
        opset_imports=[
            onnx.helper.make_opsetid("", graph.opset or OPSET),
            onnx.helper.make_opsetid(ML, ML_OPSET),
        ],
    )
    facts = {
        "format": _FORMAT,
        "version": __version__,
        "inputs": [asdict(one) for one in inputs],
        "outputs": list(wanted),
        "stages": [type(stage).__name__ for stage in stages],
        "errors": rows.errors,
    }
    onnx.helper.set_model_props(model, {METADATA: json.dumps(facts)})
    return _checked(model)


def _checked(model: Any) -> bytes:
    import onnx

    try:
        onnx.checker.check_model(model)
        return bytes(model.SerializeToString())
    except Exception as error:  # of 2 GiB and more, or a network's graph of another kind
        raise ModelError(f"the pipeline does not fit into one ONNX file: {error!s:.300}") from error


def _check_names(inputs: Sequence[Input], wanted: Sequence[str]) -> None:
    if not inputs:
        raise ModelError("the pipeline takes no columns, so there is nothing to score")
    replaced = sorted({one.name for one in inputs} & set(wanted))
    if replaced:
        raise ModelError(
            f"the pipeline replaces {replaced}, and an ONNX file cannot give under a name what it "
            "takes under it: name the output columns of that stage otherwise, or choose others "
            "with columns=[…]"
        )
    names = [*(one.name for one in inputs), *(one.name + NULL for one in inputs), *wanted, STATE]
    double = {name for name in names if names.count(name) > 1 or name.startswith("\u00b7")}
    if double:
        raise ModelError(
            f"an ONNX file cannot have the names {sorted(double)}: each column's {NULL!r} and "
            f"{STATE!r} have a meaning of their own there; rename them"
        )


def _graph_inputs(graph: Graph, inputs: Sequence[Input]) -> tuple[dict[str, Values], list[Any]]:
    """Return the columns of a file's inputs, and the inputs, with those of null."""
    import onnx

    values, tensors, flags = {}, [], []
    for one in inputs:
        shape: list[Any] = [ROWS, one.size] if one.holds_vectors else [ROWS]
        kind = element_type(one.dtype)
        tensors.append(onnx.helper.make_tensor_value_info(one.name, kind, shape))
        null = one.name + NULL
        # Where it is not given, one value is meant for all rows.
        graph.constants.append(onnx.numpy_helper.from_array(np.array([False]), null))
        flags.append(onnx.helper.make_tensor_value_info(null, onnx.TensorProto.BOOL, [null]))
        rows = graph.add("Shape", one.name, start=0, end=1)
        valid = graph.add("Expand", graph.add("Not", null), rows)
        size = one.size if one.holds_vectors else None
        values[one.name] = Values(one.name, one.dtype, size, valid)
    return values, [*tensors, *flags]


def _result(rows: Rows, name: str) -> Any:
    """Add an output: NaN, the least whole number or "" where a row has no value."""
    import onnx

    graph, column = rows.graph, rows.columns[name]
    there = graph.both(rows.live, column.valid)
    assert there is not None
    blank: Any = ""
    if column.dtype != TEXT:
        kind = np.dtype(column.dtype)
        least = np.iinfo(kind).min if kind.kind == "i" else 0
        blank = np.nan if kind.kind == "f" else least
    mask = there if column.size is None else graph.column(there)
    data = graph.where(mask, column.data, blank, column.dtype)
    graph.nodes.append(onnx.helper.make_node("Identity", [data], [name], f"result {name}"))
    shape: list[Any] = [ROWS] if column.size is None else [ROWS, column.size]
    return onnx.helper.make_tensor_value_info(name, element_type(column.dtype), shape)
