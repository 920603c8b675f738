"""Builder of an ONNX graph: nodes, constants, and the rows that pass through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import ModelError

OPSET, ML_OPSET, _IR_VERSION = 18, 4, 8
ML = "ai.onnx.ml"
TEXT = "string"
# ONNX holds vectors with their zeros: up to so many elements.
DENSE_SIZE = 4096
# Types of columns that onnxruntime chooses between values of.
_CHOSEN = (TEXT, "float32", "float64", "int32", "int64")
# Those whose values an int32 holds.
_IN_INT32 = ("bool", "int8", "int16")


class Graph:
    """Nodes and constants, each under a unique name.

    Attributes:
        nodes: the nodes, in an order in which they can be computed.
        constants: the constants.
        opset: the version of ONNX's operators that a network is of; ``None`` if there is none.
        ir_version: the version of ONNX's files that all of it can be written as.
    """

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.opset: int | None = None
        self.ir_version = _IR_VERSION
        self._constant_names: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def add(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        import onnx

        name = self.new_name()
        node = onnx.helper.make_node(operator, inputs, [name], name, domain=domain, **attributes)
        self.nodes.append(node)
        return name

    def new_name(self) -> str:
        """Return a name that nothing has yet; no column's begins so."""
        return f"\u00b7{len(self.nodes)}"

    def constant(self, value: object) -> str:
        """Return the name of an array, a number or a text that does not change."""
        import onnx

        array = np.asarray(value)
        if array.dtype.kind in "OU":
            array = array.astype(object)
            # A separator that is no part of UTF-8.
            content = b"\xff".join(text.encode() for text in array.reshape(-1).tolist())
        else:
            content = array.tobytes()
        key = (array.dtype.str, array.shape, content)
        if key not in self._constant_names:
            name = f"\u00b7c{len(self.constants)}"
            self.constants.append(onnx.numpy_helper.from_array(array, name))
            self._constant_names[key] = name
        return self._constant_names[key]

    def cast(self, data: str, dtype: str) -> str:
        """Return values as those of another type of NumPy's."""
        return self.add("Cast", data, to=element_type(dtype))

    def shaped(self, data: str, *shape: int) -> str:
        """Return values in another shape; 0 keeps a dimension, -1 takes the remainder."""
        return self.add("Reshape", data, self.constant(np.array(shape, np.int64)))

    def column(self, data: str) -> str:
        """Return a value per row as rows of one value."""
        return self.add("Unsqueeze", data, self.constant(np.array([1], np.int64)))

    def truncated(self, data: str) -> str:
        """Return numbers truncated to integers."""
        negative = self.add("Less", data, self.constant(0.0))
        return self.add("Where", negative, self.add("Ceil", data), self.add("Floor", data))

    def where(self, mask: str, data: str, other: object, dtype: str) -> str:
        """Return values where a mask is true, and one value elsewhere.

        Args:
            mask: the mask.
            data: the values.
            other: the value elsewhere.
            dtype: the type of both.
        """
        if dtype in _CHOSEN:
            blank = other if dtype == TEXT else np.array(other, dtype)
            return self.add("Where", mask, data, self.constant(blank))
        assert dtype in _IN_INT32, dtype
        return self.cast(self.where(mask, self.cast(data, "int32"), other, "int32"), dtype)

    def both(self, *masks: str | None) -> str | None:
        """Return where all masks are true; ``None`` stands for one that is true everywhere."""
        whole: str | None = None
        for mask in masks:
            if mask is not None:
                whole = mask if whole is None else self.add("And", whole, mask)
        return whole

    def either_not(self, right: str, valid: str | None) -> str:
        """Return where a value is right, or null."""
        return right if valid is None else self.add("Or", right, self.add("Not", valid))


def element_type(dtype: str) -> int:
    """Return ONNX's number of a type of NumPy's, or of text."""
    import onnx

    if dtype == TEXT:
        return int(onnx.TensorProto.STRING)
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


@dataclass(frozen=True)
class Values:
    """A column in a graph.

    Attributes:
        data: the tensor: a value per row, or a row of them.
        dtype: NumPy's type of its elements, or ``"string"``.
        size: elements of a vector; ``None`` for one value per row.
        valid: a boolean per row, whether it is not null; ``None`` if none is.
    """

    data: str
    dtype: str
    size: int | None = None
    valid: str | None = None


class Rows:
    """Rows on their way through the stages.

    A graph can neither drop rows nor raise errors, so it has a state for each: 0 for a row that is
    scored, -1 for one that is left out, otherwise the number of the error.

    Args:
        graph: the graph.
        columns: the columns by name.
        count: a tensor of one number, how many rows there are.

    Attributes:
        graph: the graph.
        columns: the columns there are now.
        errors: what the errors 1, 2, … say.
        state: the tensor of what became of each row.
    """

    def __init__(self, graph: Graph, columns: dict[str, Values], count: str) -> None:
        self.graph = graph
        self.columns = columns
        self.errors: list[str] = []
        self._count = count
        self.state = self.all_of(0)

    def all_of(self, value: int) -> str:
        """Return the same whole number for every row."""
        import onnx

        single = onnx.numpy_helper.from_array(np.array([value], np.int64))
        return self.graph.add("ConstantOfShape", self._count, value=single)

    @property
    def live(self) -> str:
        """Mask of the rows still to be scored."""
        return self.graph.add("Equal", self.state, self.graph.constant(np.int64(0)))

    def check(self, subject: str, right: str | None, advice: str) -> None:
        """Make rows that are not right errors.

        Args:
            subject: what is wrong there, such as ``"column 'x'"``.
            right: where they are; ``None`` for everywhere.
            advice: why, or what is to be done.
        """
        if right is not None:
            self.errors.append(f"{subject}: {advice}")
            self._end(right, len(self.errors))

    def keep(self, mask: str | None) -> None:
        """Leave out all rows but these; ``None`` keeps all."""
        if mask is not None:
            self._end(mask, -1)

    def _end(self, right: str, state: int) -> None:
        graph = self.graph
        ended = graph.add("And", self.live, graph.add("Not", right))
        self.state = graph.add("Where", ended, graph.constant(np.int64(state)), self.state)

    def numbers(self, name: str) -> tuple[str, str | None]:
        """Return a column of numbers as float64, and where they are not null."""
        column = self._of(name, vectors=False)
        if column.dtype == TEXT:
            raise ModelError(f"column {name!r} holds no numbers")
        if column.dtype == "float64":
            return column.data, column.valid
        return self.graph.cast(column.data, "float64"), column.valid

    def vectors(self, name: str, size: int | None = None) -> Values:
        """Return a column of vectors of float64; null is an error of its row."""
        column = self._of(name, vectors=True)
        if size is not None and column.size != size:
            raise ModelError(
                f"column {name!r} holds vectors of {column.size} elements, not {size}, which the "
                "stage was fitted on"
            )
        self.check(f"column {name!r}", column.valid, "it must be a vector")
        if column.dtype != "float64":
            column = replace(column, data=self.graph.cast(column.data, "float64"), dtype="float64")
        return replace(column, valid=None)

    def _of(self, name: str, *, vectors: bool) -> Values:
        column = self.columns[name]
        if (column.size is not None) != vectors:
            raise ModelError(f"column {name!r} holds {'no vectors' if vectors else 'vectors'}")
        return column

    def add_numbers(self, name: str, data: str, valid: str | None = None) -> None:
        """Add a column of float64."""
        self.columns[name] = Values(data, "float64", None, valid)

    def add_vectors(self, name: str, data: str, size: int, valid: str | None = None) -> None:
        """Add a column of vectors.

        Raises:
            ModelError: they are too large to be held with their zeros.
        """
        if size > DENSE_SIZE:
            raise ModelError(
                f"column {name!r} holds vectors of {size:,} elements, mostly zeros; ONNX holds "
                f"them all, so up to {DENSE_SIZE:,} are taken"
            )
        self.columns[name] = Values(data, "float64", size, valid)

    def drop_missing(self, names: Sequence[str]) -> None:
        """Leave out rows with a null or NaN, as ``DataFrame.na.drop`` does: not NaN in vectors."""
        for name in names:
            column = self.columns[name]
            self.keep(column.valid)
            if column.size is None and column.dtype.startswith("float"):
                self.keep(self.graph.add("Not", self.graph.add("IsNaN", column.data)))
            self.columns[name] = replace(column, valid=None)
