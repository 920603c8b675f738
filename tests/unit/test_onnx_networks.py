"""What reaches the network in a pipeline's ONNX file, and what comes of it; no Spark."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from horovod_spark_runner.export.columns import Input, onnx_inputs
from horovod_spark_runner.export.onnx_model import build_onnx
from horovod_spark_runner.export.onnx_network import Network, NetworkColumn
from horovod_spark_runner.training.onnx import BOUNDS, METADATA, OnnxSession


def network(
    taken: Input, dtype: str, made: str, handle: str, bounds: tuple[int, int] | None = None
) -> Network:
    """Return one whose network gives each row's numbers back, as another type."""
    kinds = [helper.np_dtype_to_tensor_dtype(np.dtype(one)) for one in (dtype, made)]
    width = taken.size or 1
    ends = [
        [helper.make_tensor_value_info(name, kind, [None, width])]
        for name, kind in zip(("column0", "output0"), kinds, strict=True)
    ]
    cast = helper.make_node("Cast", ["column0"], ["output0"], to=kinds[1])
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(
        helper.make_graph([cast], "network", *ends), ir_version=8, opset_imports=opsets
    )
    facts = {BOUNDS: {} if bounds is None else {"column0": bounds}}
    helper.set_model_props(model, {METADATA: json.dumps(facts)})
    return Network(
        inputs=(taken.name,),
        outputs=("p",),
        arguments=("column0",),
        dtypes=(dtype,),
        shapes=((width,),),
        results=("output0",),
        added=(NetworkColumn(0, "plain", False, not taken.size, made, made),),
        handle_invalid=handle,
        contents=model.SerializeToString(),
    )


def run(taken: Input, stage: Network, values: list[Any]) -> tuple[list[Any], list[int]]:
    """Return the predictions of a pipeline's ONNX file, and what became of each row."""
    found = OnnxSession(build_onnx([taken], [stage]))(onnx_inputs([taken], {"x": values}))
    return found["p"].tolist(), found["row_state"].tolist()


# As int8: two that fit, one too large, one too small, none, and of another size.
ARRAYS = [[1, 2], [-128, 127], [300, 1], [0, -129], None, [1]]


@pytest.mark.parametrize("handle", ["error", "skip", "keep"])
def test_arrays_of_whole_numbers_that_the_network_does_not_hold_are_null(handle: str) -> None:
    """As Spark's cast of them is; NumPy's would wrap them around."""
    taken = Input("x", "array", 2)
    made, states = run(taken, network(taken, "int8", "float32", handle), ARRAYS)
    assert made[:2] == ARRAYS[:2]
    assert np.isnan(made[2:]).all()
    assert states[:2] == [0, 0]
    if handle == "error":
        assert min(states[2:]) > 0
    else:
        assert states[2:] == [-1 if handle == "skip" else 0] * 4


@pytest.mark.parametrize("scores", [False, True])
def test_what_is_no_probability_is_an_error_that_names_the_column(scores: bool) -> None:
    taken = Input("x", "array", 2)
    added = (NetworkColumn(0, "probability", scores, False, "float64", "float32"),)
    stage = replace(network(taken, "float32", "float32", "keep"), outputs=("share",), added=added)
    session = OnnxSession(build_onnx([taken], [stage]))
    values = [[0.5, 0.5], None, [float("nan"), 0.5]]
    states = session(onnx_inputs([taken], {"x": values}))["row_state"].tolist()
    assert states[:2] == [0, 0]
    assert "'share'" in session.facts["errors"][states[2] - 1]


@pytest.mark.parametrize("value", [2.5, float("nan")])
def test_an_array_of_whole_numbers_holds_no_others(value: float) -> None:
    taken = Input("x", "array", 2)
    made, states = run(taken, network(taken, "int32", "float32", "keep"), [[1, 2], [value, 1]])
    assert made[0] == [1, 2]
    assert np.isnan(made[1]).all()
    assert states == [0, 1]


@pytest.mark.parametrize(
    ("kind", "dtype", "values", "expected"),
    [
        ("boolean", "int8", [True, False, None], [1, 0, None]),
        ("tinyint", "float32", [1, -128, None], [1, -128, None]),
        ("smallint", "int8", [1, 300, -129, None], [1, None, None, None]),
        ("bigint", "int32", [1, 2**40, None], [1, None, None]),
    ],
)
@pytest.mark.parametrize("made", ["bool", "int16", "float64"])
def test_numbers_of_all_types_go_through_one_file(
    kind: str, dtype: str, values: list[Any], expected: list[Any], made: str
) -> None:
    taken = Input("x", kind)
    found, states = run(taken, network(taken, dtype, made, "keep"), values)
    blank = {"bool": False, "int16": -(2**15), "float64": np.nan}[made]
    wanted = [blank if one is None else np.array(one).astype(made).item() for one in expected]
    np.testing.assert_array_equal(found, wanted)
    assert states == [0] * len(values)


@pytest.mark.parametrize("handle", ["error", "skip", "keep"])
@pytest.mark.parametrize(
    ("taken", "right", "wrong"),
    [
        (Input("x", "smallint"), [0, 255], [256, -1]),
        (Input("x", "array", 2), [[0, 255], [3, 3]], [[256, 1], [0, -1]]),
    ],
)
def test_numbers_that_an_input_does_not_hold_are_errors(
    handle: str, taken: Input, right: list[Any], wrong: list[Any]
) -> None:
    """As an uint8 fed from a column of int16, which Keras would cast, 256 to 0."""
    stage = network(taken, "int16", "float32", handle, bounds=(0, 255))
    made, states = run(taken, stage, [*right, *wrong, None])
    assert states[:2] == [0, 0]
    assert min(states[2:4]) > 0
    assert np.sign(states[4]) == {"error": 1, "skip": -1, "keep": 0}[handle]
    assert made[:2] == right
    assert np.isnan(np.asarray(made[2:])).all()
