"""A pipeline as one ONNX file, from raw columns to the columns that its last stage adds.

What Spark has and ONNX has not is told beside the values: null by a boolean input ``NAME.null`` of
each column, which may be left out; rows that are left out or errors by the output ``row_state``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from .._version import __version__
from ..errors import DataError, InvalidInputError, ModelError
from ..scoring.bundle import Bundle
from ..scoring.columns import (
    ARRAY,
    DTYPES,
    TEXT,
    VECTOR,
    WORDS,
    Column,
    Input,
    Numbers,
    Stage,
    Vectors,
    Words,
    inputs_of,
)
from ..scoring.network import Network
from ..scoring.scorer import Scorer
from ..scoring.values import StringIndexer
from ..training.onnx import METADATA, OnnxSession
from .onnx_builder import ML, ML_OPSET, OPSET, Graph, Rows, Values, element_type
from .onnx_network import network
from .onnx_stages import (
    binarizer,
    bucketizer,
    imputer,
    index_to_string,
    interaction,
    min_max_scaler,
    normalizer,
    one_hot_encoder,
    polynomial_expansion,
    projection,
    scaler,
    string_indexer,
    vector_assembler,
    vector_slicer,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FORMAT = 1
STATE, NULL, ROWS = "row_state", ".null", "rows"
WRITERS: dict[str, Callable[[Rows, Any], None]] = {
    "Binarizer": binarizer,
    "Bucketizer": bucketizer,
    "Imputer": imputer,
    "IndexToString": index_to_string,
    "Interaction": interaction,
    "MinMaxScaler": min_max_scaler,
    "Network": network,
    "Normalizer": normalizer,
    "OneHotEncoder": one_hot_encoder,
    "Projection": projection,
    "PolynomialExpansion": polynomial_expansion,
    "Scaler": scaler,
    "StringIndexer": string_indexer,
    "VectorAssembler": vector_assembler,
    "VectorSlicer": vector_slicer,
}
# Why the others have no form there.
WITHOUT = {
    "CountVectorizer": "ONNX has no lists of words",
    "FeatureHasher": "ONNX has no Murmur hash",
    "HashingTF": "ONNX has no Murmur hash",
    "NGram": "ONNX has no lists of words",
    "RegexTokenizer": "ONNX has no regular expressions that split text",
    "StopWordsRemover": "ONNX has no lists of words",
    "Tokenizer": "ONNX has no lists of words, and no lower case as Java's",
}


def _check_has_form(stages: Iterable[Stage]) -> None:
    """Check that every stage has a form in ONNX.

    Raises:
        ModelError: one has none; the message names it.
    """
    for stage in stages:
        kind = type(stage).__name__
        if kind not in WRITERS:
            raise ModelError(
                f"stage {kind} (column {stage.adds[0]!r}) cannot be part of an ONNX file: "
                f"{WITHOUT[kind]}. format='bundle' takes it"
            )


def _wanted_columns(bundle: Bundle, columns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns that a file is to give.

    Raises:
        InvalidInputError: no stage adds one of them, or there is none.
    """
    made = [name for stage in bundle.stages for name in stage.adds]
    if columns is None:
        return bundle.stages[-1].adds if bundle.stages else ()
    unknown = [name for name in columns if name not in made]
    if isinstance(columns, str) or unknown or not columns:
        raise InvalidInputError(
            f"columns={columns!r}: there is no column {unknown or columns!r}; the pipeline adds "
            f"{sorted(made)}"
        )
    return tuple(dict.fromkeys(columns))


def _needed_stages(bundle: Bundle, wanted: Sequence[str]) -> tuple[list[Stage], set[str]]:
    """Return the stages that run for columns, and the inputs that these take.

    A column that nothing but StringIndexers take, and that no wanted column is made of, such as a
    label, is passed over, as Spark passes it over where it is not there.
    """
    last = max(
        (n for n, stage in enumerate(bundle.stages) if set(stage.adds) & set(wanted)), default=-1
    )
    stages = list(bundle.stages[: last + 1])
    made_of = set(wanted)
    for stage in reversed(stages):
        for name, source in _sources(stage):
            if name in made_of:
                made_of.update(source)
    absent = {one.name for one in bundle.inputs if not one.needed and one.name not in made_of}
    there = {one.name for one in bundle.inputs} - absent
    left: list[Stage] = []
    for stage in stages:
        if not isinstance(stage, StringIndexer) and absent & set(inputs_of(stage)):
            absent |= set(stage.adds)
            continue
        absent |= {name for name, source in _sources(stage) if set(source) & absent}
        left.append(stage)
    taken = {name for stage in left for name in inputs_of(stage)}
    return left, there & taken


def _sources(stage: Stage) -> list[tuple[str, tuple[str, ...]]]:
    """Return each column that a stage adds, and its source columns."""
    inputs = inputs_of(stage)
    if len(inputs) == len(stage.adds) and not isinstance(stage, Network):
        return [(name, (source,)) for name, source in zip(stage.adds, inputs, strict=True)]
    return [(name, inputs) for name in stage.adds]


def onnx_of(bundle: Bundle, columns: Sequence[str] | None = None) -> bytes:
    """Return a pipeline as an ONNX file.

    Args:
        bundle: the pipeline; its networks must be ONNX.
        columns: the columns it is to give; by default those that the last stage adds.

    Raises:
        ModelError: a stage or a column has no form in ONNX; the message names it.
        InvalidInputError: ``columns`` names what the pipeline does not add.
    """
    import onnx

    wanted = _wanted_columns(bundle, columns)
    stages, taken = _needed_stages(bundle, wanted)
    _check_has_form(stages)
    inputs = [one for one in bundle.inputs if one.name in taken]
    _check_names(inputs, wanted)
    graph = Graph()
    values, tensors = _graph_inputs(graph, inputs)
    shape = graph.add("Shape", inputs[0].name, start=0, end=1)
    rows = Rows(graph, values, shape)
    for stage in stages:
        WRITERS[type(stage).__name__](rows, stage)
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
    for one in inputs:
        if one.kind == WORDS:
            raise ModelError(f"column {one.name!r} holds lists of words, which ONNX has not")


def _graph_inputs(graph: Graph, inputs: Sequence[Input]) -> tuple[dict[str, Values], list[Any]]:
    """Return the columns of a file's inputs, and the inputs, with those of null."""
    import onnx

    values, tensors, flags = {}, [], []
    for one in inputs:
        dtype = "string" if one.kind == TEXT else DTYPES.get(one.kind, "float64")
        size = one.size if one.kind in (VECTOR, ARRAY) else None
        shape: list[Any] = [ROWS] if size is None else [ROWS, size]
        tensors.append(onnx.helper.make_tensor_value_info(one.name, element_type(dtype), shape))
        null = one.name + NULL
        # Where it is not given, one value is meant for all rows.
        graph.constants.append(onnx.numpy_helper.from_array(np.array([False]), null))
        flags.append(onnx.helper.make_tensor_value_info(null, onnx.TensorProto.BOOL, [null]))
        rows = graph.add("Shape", one.name, start=0, end=1)
        valid = graph.add("Expand", graph.add("Not", null), rows)
        values[one.name] = Values(one.name, dtype, size, valid)
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


_ROWS = 50
# Sums of vectors' elements may be made in another order; networks are of float32.
_TOLERANCE, _NETWORK = 1e-9, 1e-4


def pipeline_file(bundle: Bundle, frame: DataFrame, columns: Sequence[str] | None) -> bytes:
    """Return a pipeline as an ONNX file with the scorer's results.

    Args:
        bundle: the pipeline; its networks must be ONNX.
        frame: a DataFrame with rows to compare by.
        columns: the columns it is to give; by default those that the last stage adds.

    Raises:
        ModelError: a stage has no form in ONNX, or a row's values differ; the message names it.
        InvalidInputError: ``columns`` names what the pipeline does not add.
    """
    contents = onnx_of(bundle, columns)
    session = OnnxSession(contents)
    wanted = _wanted_columns(bundle, columns)
    taken = {one["name"] for one in session.facts["inputs"]}
    names = [one.name for one in bundle.inputs if one.needed or one.name in taken]
    quoted = ["`" + name.replace("`", "``") + "`" for name in names]
    sampled = frame.select(*quoted).limit(_ROWS).collect()
    if not sampled:
        return contents
    rows = [dict(zip(names, row, strict=True)) for row in sampled]
    _compare(bundle, session, rows, wanted)
    return contents


def _compare(
    bundle: Bundle, session: OnnxSession, rows: list[dict[str, Any]], wanted: Sequence[str]
) -> None:
    scorer = Scorer(bundle)
    try:
        made = _made(bundle, session, rows)
    except DataError:  # which ends the whole call
        rows = [row for row in rows if not _neither_takes(bundle, session, scorer, row)]
        if not rows:
            return
        made = _made(bundle, session, rows)
    networks = any(isinstance(stage, Network) for stage in bundle.stages)
    tolerance = _NETWORK if networks else _TOLERANCE
    for number, row in enumerate(rows):
        state = int(made[STATE][number])
        try:
            expected = scorer.score_row(row, wanted)
        except DataError as error:
            if state <= 0:
                raise _differs(row, f"row_state is {state}", f"the error {error}") from error
            continue
        if expected is None or state:
            if (expected is None) != (state == -1):
                raise _differs(row, f"row_state is {state}", expected)
            continue
        for name in wanted:
            if not same(made[name][number], expected[name], tolerance):
                raise _differs(row, f"{name!r} is {made[name][number]!r:.300}", expected[name])


def _made(
    bundle: Bundle, session: OnnxSession, rows: list[dict[str, Any]]
) -> dict[str, np.ndarray]:
    """Run the file on rows."""
    taken = {one["name"] for one in session.facts["inputs"]}
    inputs = {one.name: one for one in bundle.inputs if one.name in taken}
    return session(onnx_inputs(inputs.values(), {n: [row[n] for row in rows] for n in inputs}))


def _neither_takes(
    bundle: Bundle, session: OnnxSession, scorer: Scorer, row: dict[str, Any]
) -> bool:
    """Return whether file and scorer both refuse a row; raise the error of only one."""
    try:
        _made(bundle, session, [row])
        return False
    except DataError as error:
        try:
            expected = scorer.score_row(row)
        except DataError:
            return True
        raise _differs(row, f"call is the error {error}", expected) from error


def same(ours: object, expected: object, tolerance: float) -> bool:
    """Return whether file and scorer give equal values; null is NaN, or the least integer."""
    if expected is None:
        whole = np.asarray(ours)
        if whole.dtype.kind == "f":
            return bool(np.isnan(whole).all())
        return whole.dtype.kind != "i" or bool((whole == np.iinfo(whole.dtype).min).all())
    if isinstance(expected, str):
        return bool(ours == expected)
    one, other = np.asarray(ours, np.float64), np.asarray(expected, np.float64)
    return one.shape == other.shape and bool(
        np.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    )


def _differs(row: Mapping[str, object], difference: str, expected: object) -> ModelError:
    return ModelError(
        f"the ONNX file does not give what the pipeline gives: for the row {row!r:.500} its "
        f"{difference}, and the pipeline's is {expected!r:.300}"
    )


def onnx_inputs(inputs: Any, values: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    """Return the inputs of a pipeline's ONNX file from columns of Python values.

    Args:
        inputs: the columns it takes.
        values: their values; ``None`` for null.

    Raises:
        DataError: a value is of another type than the column.
    """
    fed: dict[str, np.ndarray] = {}
    for one in inputs:
        column = one.convert(list(values[one.name]))
        fed[one.name], valid = _array(one, column), column.valid
        if valid is not None:
            fed[one.name + NULL] = ~valid
    return fed


def _array(one: Input, column: Column) -> np.ndarray:
    if isinstance(column, Words):
        return np.array(["" if text is None else text for text in column.data], object)
    if isinstance(column, Vectors):
        return column.dense()
    assert isinstance(column, Numbers)
    return column.data.astype(DTYPES[one.kind])
