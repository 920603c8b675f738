"""What an ONNX file makes of rows that are none, and of NaN and infinity, whatever the framework.

Given no rows, onnxruntime's LSTM ends the process, so that a file computes a blank row then and
gives none of it. Given NaN or infinity, some operators (LSTM, poolings, ReLU) give numbers where
the framework gives NaN, or the other way round. Whether a file does so is found out before it is
written; if it does, such rows are blank to its network, and what it gives for them is no number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..data.manifest import Column
from ..errors import DataError, ModelError
from ..scoring.onnx_session import NON_FINITE, OnnxSession
from .likeness import check_close
from .onnx_facts import add_facts

Arrays = Mapping[str, np.ndarray]
# Places in a row that are tried, besides all of them at once.
_PLACES = 8
# Kinds of values that are not finite.
NAN, INFINITE = "nan", "infinite"
_VALUES = {NAN: (np.nan,), INFINITE: (np.inf, -np.inf)}
_INNER = "model "


class Nodes(Protocol):
    """A graph while it is made."""

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; return the name of what it gives."""
        ...

    def constant(self, value: np.ndarray) -> str:
        """Return the name of an array that does not change."""
        ...


def completed(
    model: Any,
    columns: Sequence[Column],
    given: Arrays,
    predict: Callable[[Arrays], Arrays],
    *,
    rows: int | None,
) -> bytes:
    """Return a file that is safe for no rows, and gives nothing else than the framework does.

    Args:
        model: the ``onnx.ModelProto``, with its facts; it is changed.
        columns: its inputs, by their names in the file.
        given: rows of finite numbers.
        predict: what the framework gives for rows, by the names in the file.
        rows: how many rows the file takes; ``None`` for any number.

    Raises:
        ModelError: onnxruntime cannot load it, or an output has no value that stands for none.
    """
    hostile = {kind: non_finite_rows(given, kind) for kind in _VALUES}
    blank = [
        kind
        for kind, some in hostile.items()
        if not all(_agree(model, piece, predict) for piece in _pieces(some, rows))
    ]
    if NAN in blank:
        # Infinities make NaN inside, as inf - inf, wherever they meet, which no row tried here may
        # show.
        blank = list(_VALUES)
    if rows is None or blank:
        _wrap(model, columns, any_number=rows is None, blank=blank)
    counts = {kind: _count(some) for kind, some in hostile.items()}
    add_facts(model, {NON_FINITE: {"compared": counts, "blank": blank}})
    return bytes(model.SerializeToString())


def non_finite_rows(given: Arrays, kind: str) -> dict[str, np.ndarray]:
    """Return rows like those given, each with such a value in one or all places of one input.

    Nothing, if no input is of real numbers.

    Args:
        given: rows of finite numbers, by input.
        kind: `NAN` or `INFINITE`.
    """
    real = [name for name, values in given.items() if values.dtype.kind == "f"]
    found: dict[str, list[np.ndarray]] = {name: [] for name in given}
    for name in real:
        width = given[name][0].size
        several = np.linspace(0, width - 1, min(width, _PLACES)).astype(int)
        choices = [np.array([place]) for place in several]
        for places in [*choices, np.arange(width)]:
            for value in _VALUES[kind]:
                number = len(found[name]) % len(given[name])
                for other, values in given.items():
                    row = values[number].copy()
                    if other == name:
                        flat = np.array(row).reshape(-1)
                        flat[places] = value
                        row = flat.reshape(np.shape(row))
                    found[other].append(row)
    return {name: np.stack(parts) for name, parts in found.items()} if real else {}


def _pieces(hostile: Arrays, rows: int | None) -> Iterator[Arrays]:
    """Yield rows in as many at once as a file takes; the last ones may come twice."""
    count = _count(hostile)
    size = count if rows is None else rows
    for begin in range(0, count, max(size, 1)):
        places = np.arange(begin, begin + size) % count
        yield {name: values[places] for name, values in hostile.items()}


def _count(given: Arrays) -> int:
    return len(next(iter(given.values()))) if given else 0


def _agree(model: Any, given: Arrays, predict: Callable[[Arrays], Arrays]) -> bool:
    """Tell whether a file gives what the framework gives."""
    session = OnnxSession(bytes(model.SerializeToString()))
    try:
        expected = predict(given)
    except Exception:  # the user's own call may fail in any way, and a file in another
        return False
    try:
        found = session(given)
        for name, value in expected.items():
            check_close(value, found[name])
    except (AssertionError, DataError, ModelError):
        return False
    return True


def _wrap(
    model: Any, columns: Sequence[Column], *, any_number: bool, blank: Collection[str]
) -> None:
    """Put nodes between a graph and its inputs and outputs.

    Args:
        model: the ``onnx.ModelProto``.
        columns: its inputs.
        any_number: whether it is to give nothing for no rows.
        blank: kinds of values, whose rows are to be blank, and their outputs no numbers.
    """
    import onnx

    graph = model.graph
    outer = [value.name for value in (*graph.input, *graph.output)]
    rename(graph, {name: _INNER + name for name in outer})
    before = _Nodes()
    shapes = {column.name: column.shape for column in columns}
    for value in (*graph.input, *graph.output):
        value.name = value.name.removeprefix(_INNER)
    count = before.add("Shape", graph.input[0].name, start=0, end=1)
    least = before.add("Max", count, before.constant(np.array([1], np.int64)))
    start = before.constant(np.array([0], np.int64))
    given = {}
    for value in graph.input:
        given[value.name] = value.name
        if any_number:
            row = before.constant(_blank(value, (1, *shapes[value.name])))
            more = before.add("Concat", value.name, row, axis=0)
            given[value.name] = before.add("Slice", more, start, least, start)
    finite: str | None = None
    if blank:
        for value in graph.input:
            if _dtype(value).kind == "f":
                width = len(shapes[value.name])
                right = without(before, given[value.name], _dtype(value), width, blank)
                finite = right if finite is None else before.add("And", finite, right)
    for value in graph.input:
        data = given[value.name]
        if finite is not None and _dtype(value).kind == "f":
            mask = before.ranked(finite, len(shapes[value.name]))
            data = before.add("Where", mask, data, before.constant(_blank(value, ())))
        before.give(data, _INNER + value.name)
    after = _Nodes(before)
    for value in graph.output:
        data = _INNER + value.name
        if finite is not None:
            mask = after.ranked(finite, len(value.type.tensor_type.shape.dim) - 1)
            data = after.add("Where", mask, data, after.constant(_none(value)))
        if any_number:
            data = after.add("Slice", data, start, count, start)
        after.give(data, value.name)
    inner = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    del graph.node[:]
    graph.node.extend([*before.nodes, *inner, *after.nodes])
    graph.initializer.extend([*before.constants, *after.constants])


class _Nodes:
    """Nodes and constants, under names that no model's have.

    Args:
        others: nodes whose names are taken.
    """

    def __init__(self, others: _Nodes | None = None) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._first = 0 if others is None else others.known

    @property
    def known(self) -> int:
        return self._first + len(self.nodes) + len(self.constants)

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"\u00b7{self.known}"
        self._append(operator, inputs, name, attributes)
        return name

    def give(self, data: str, name: str) -> None:
        self._append("Identity", [data], name, {})

    def _append(
        self, operator: str, inputs: Sequence[str], name: str, attributes: Mapping[str, Any]
    ) -> None:
        import onnx

        self.nodes.append(onnx.helper.make_node(operator, inputs, [name], name, **attributes))

    def constant(self, value: np.ndarray) -> str:
        import onnx

        name = f"\u00b7{self.known}"
        self.constants.append(onnx.numpy_helper.from_array(value, name))
        return name

    def ranked(self, mask: str, more: int) -> str:
        """Return a value per row with so many more dimensions, of one each."""
        if not more:
            return mask
        return self.add("Unsqueeze", mask, self.constant(np.arange(1, more + 1)))


def without(
    nodes: Nodes, data: str, dtype: np.dtype, dimensions: int, kinds: Collection[str]
) -> str:
    """Return which rows hold no such value.

    Args:
        nodes: the graph.
        data: real numbers, rows first.
        dtype: NumPy's type of them.
        dimensions: how many dimensions a row has.
        kinds: `NAN`, `INFINITE` or both.
    """
    import onnx

    if dtype.itemsize < np.dtype(np.float32).itemsize:
        data, dtype = nodes.add("Cast", data, to=onnx.TensorProto.FLOAT), np.dtype(np.float32)
    wrong = None
    if INFINITE in kinds:
        greatest = nodes.constant(np.array(np.finfo(dtype).max, dtype))
        wrong = nodes.add("Greater", nodes.add("Abs", data), greatest)  # which NaN is not
    if NAN in kinds:
        nan = nodes.add("IsNaN", data)
        wrong = nan if wrong is None else nodes.add("Or", wrong, nan)
    assert wrong is not None
    if dimensions:
        number = nodes.add("Cast", wrong, to=onnx.TensorProto.FLOAT)
        axes = nodes.constant(np.arange(1, dimensions + 1))
        most = nodes.add("ReduceMax", number, axes, keepdims=0)
        wrong = nodes.add("Cast", most, to=onnx.TensorProto.BOOL)
    return nodes.add("Not", wrong)


def _dtype(value: Any) -> np.dtype[Any]:
    """Return NumPy's type of an input or output; that of objects for text."""
    import onnx

    kind: np.dtype[Any] = np.dtype(
        onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    )
    return kind


def _blank(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    dtype = _dtype(value)
    return np.full(shape, "", object) if dtype.kind in "OU" else np.zeros(shape, dtype)


def _none(value: Any) -> np.ndarray:
    """Return what stands for no value: NaN, the least whole number, or no text."""
    dtype = _dtype(value)
    if dtype.kind == "f":
        return np.array(np.nan, dtype)
    if dtype.kind == "i":
        return np.array(np.iinfo(dtype).min, dtype)
    if dtype.kind in "OU":
        return np.array("", object)
    raise ModelError(
        f"onnxruntime gives something else than the model for inputs that are NaN or infinite, and "
        f"output {value.name!r}, of {dtype}, has no value to tell so; make it a real number"
    )


def rename(graph: Any, called: Mapping[str, str]) -> None:
    """Give inputs and outputs of a graph other names; what else has one of these gets another.

    Args:
        graph: the ``onnx.GraphProto``.
        called: the new names by the old ones.
    """
    taken = set(called.values())

    def name(old: str) -> str:
        if old in called:
            return called[old]
        return f"inner {old}" if old in taken else old

    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = name(value.name)
    for node in graph.node:
        node.input[:] = [name(one) for one in node.input]
        node.output[:] = [name(one) for one in node.output]
        for attribute in node.attribute:  # what branches and loops see of it
            for inner in (attribute.g, *attribute.graphs):
                rename(inner, called)
