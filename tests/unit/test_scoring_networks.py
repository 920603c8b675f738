"""What reaches the network of an exported pipeline, and what comes of it; no Spark."""

from __future__ import annotations

import copy
import io
import json
import pickle
import zipfile
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from horovod_spark_runner import DataError
from horovod_spark_runner.export.onnx_model import onnx_inputs, onnx_of
from horovod_spark_runner.scoring.bundle import Bundle
from horovod_spark_runner.scoring.columns import Input
from horovod_spark_runner.scoring.network import MODEL_FILE, ONNX, Network
from horovod_spark_runner.scoring.scorer import Scorer
from horovod_spark_runner.training.onnx import BOUNDS, METADATA, OnnxSession


def pipeline(
    taken: Input, dtype: str, made: str, handle: str, bounds: tuple[int, int] | None = None
) -> Bundle:
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
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(MODEL_FILE, model.SerializeToString())
    network = Network(
        inputs=(taken.name,),
        arguments=("column0",),
        dtypes=(dtype,),
        shapes=((width,),),
        outputs=("output0",),
        added=(("p", 0, "plain", False, not taken.size, made, made),),
        handle_invalid=handle,
        batch_size=2,
        format=ONNX,
        contents=packed.getvalue(),
    )
    return Bundle((taken,), (network,))


def in_one_file(bundle: Bundle, values: list[Any]) -> tuple[list[Any], list[int]]:
    """Return the predictions of a pipeline's ONNX file, and what became of each row."""
    found = OnnxSession(onnx_of(bundle))(onnx_inputs(bundle.inputs, {"x": values}))
    return found["p"].tolist(), found["row_state"].tolist()


# As int8: two that fit, one too large, one too small, none, and of another size.
ARRAYS = [[1, 2], [-128, 127], [300, 1], [0, -129], None, [1]]


@pytest.mark.parametrize("handle", ["error", "skip", "keep"])
def test_arrays_of_whole_numbers_that_the_network_does_not_hold_are_null(handle: str) -> None:
    """As Spark's cast of them is; NumPy's would wrap them around."""
    bundle = pipeline(Input("x", "array", 2), "int8", "float32", handle)
    scorer = Scorer(bundle)
    assert np.stack(scorer.score({"x": ARRAYS[:2]})["p"]).tolist() == ARRAYS[:2]
    scorer = copy.deepcopy(pickle.loads(pickle.dumps(scorer)))  # also one that has scored
    made, states = in_one_file(bundle, ARRAYS)
    assert made[:2] == ARRAYS[:2]
    assert np.isnan(made[2:]).all()
    if handle == "error":
        assert states[:2] == [0, 0]
        assert min(states[2:]) > 0
        with pytest.raises(DataError, match=r"'x'.*array\(\[300.*row 2"):
            scorer.score({"x": ARRAYS})
        return
    assert states == [0, 0, *[-1 if handle == "skip" else 0] * 4]
    found = [None if one is None else one.tolist() for one in scorer.score({"x": ARRAYS})["p"]]
    assert found == [*ARRAYS[:2], *([] if handle == "skip" else [None] * 4)]


@pytest.mark.parametrize("scores", [False, True])
def test_what_is_no_probability_is_told_with_column_and_row(scores: bool) -> None:
    bundle = pipeline(Input("x", "array", 2), "float32", "float32", "keep")
    added = (("share", 0, "probability", scores, False, "float64", "float32"),)
    bundle = Bundle(bundle.inputs, (replace(bundle.stages[0], added=added),))
    values = [[0.5, 0.5], None, [float("nan"), 0.5]]
    with pytest.raises(DataError, match=r"'share'.*row 2\b.*'output0'.*\[nan 0\.5\]"):
        Scorer(bundle).score({"x": values})
    session = OnnxSession(onnx_of(bundle))
    made = session(onnx_inputs(bundle.inputs, {"x": values}))
    assert made["row_state"].tolist()[:2] == [0, 0]
    error = session.facts["errors"][made["row_state"][2] - 1]
    assert "'share'" in error


@pytest.mark.parametrize("value", [2.5, float("nan")])
def test_an_array_of_whole_numbers_holds_no_others(value: float) -> None:
    bundle = pipeline(Input("x", "array", 2), "int32", "float32", "keep")
    with pytest.raises(DataError, match="'x'.*row 1.*(whole|integer)"):
        Scorer(bundle).score({"x": [[1, 2], [value, 1]]})
    made, states = in_one_file(bundle, [[1, 2], [value, 1]])
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
    bundle = pipeline(Input("x", kind), dtype, made, "keep")
    wanted = [None if one is None else np.array(one).astype(made).item() for one in expected]
    assert Scorer(bundle).score({"x": values})["p"].tolist() == wanted
    blank = {"bool": False, "int16": -(2**15), "float64": np.nan}[made]
    found, states = in_one_file(bundle, values)
    np.testing.assert_array_equal(found, [blank if one is None else one for one in wanted])
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
    bundle = pipeline(taken, "int16", "float32", handle, bounds=(0, 255))
    scorer = Scorer(bundle)
    asked = [*right, *wrong, None]
    made, states = in_one_file(bundle, asked)
    assert states[:2] == [0, 0]
    assert min(states[2:4]) > 0
    assert made[:2] == right
    assert np.isnan(np.asarray(made[2:])).all()
    assert np.stack(scorer.score({"x": right})["p"]).tolist() == right
    for value in wrong:
        with pytest.raises(DataError, match=r"'x'.*row 1.*\b0\b.*\b255"):
            scorer.score({"x": [right[0], value]})
    if handle == "keep":  # a row with null is not asked about
        assert scorer.score({"x": [None, right[0]]})["p"][0] is None
