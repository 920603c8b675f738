"""What an ONNX file makes of indices that its tables do not have, whatever the framework.

ONNX's lookups count a negative index from the end of a table, as an embedding's. TensorFlow's, and
most of PyTorch's, raise an error for it, and so does the file then. TensorFlow's one-hot vector of
it is zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np

# What looks numbers up, and which of its inputs they are.
_LOOKUPS = {"Gather": 1, "GatherElements": 1, "GatherND": 1, "OneHot": 0}
# What gives each of a tensor's numbers in another place, or another type.
_SAME = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
# What Keras' Embedding makes of indices: those below 0 count from the end. Casts are left out.
_WRAPS = (
    Counter({"Add": 2, "Mul": 2, "Less": 1, "Not": 1}),
    Counter({"Where": 1, "Add": 1, "Less": 1}),
)
_NAME = "index\u00b7"
# An index that no table has.
_BEYOND = np.array(np.iinfo(np.int32).max, np.int64)

Bounds = Mapping[str, tuple[int, int]]


def check_indices(model: Any, refuses: Callable[[Any], bool]) -> dict[str, tuple[int, int]]:
    """Let no negative index count from a table's end; say what inputs may hold.

    Args:
        model: the ``onnx.ModelProto``, without functions of its own; it is changed.
        refuses: tells of a node that looks something up whether the framework's takes no negative
            index.

    Returns:
        The least and the largest index by input, of those inputs whose numbers all are looked up
        as they are.
    """
    bounds: dict[str, tuple[int, int]] = {}
    for name, low, high in _found(model.graph, refuses):
        before = bounds.get(name, (low, high))
        bounds[name] = (max(low, before[0]), min(high, before[1]))
    _guard(model.graph, refuses, frozenset(), count())
    return bounds


def narrowed(bounds: Bounds, others: Bounds) -> dict[str, tuple[int, int]]:
    """Return what inputs hold by both."""
    both = {**bounds, **others}
    for name in bounds.keys() & others.keys():
        one, other = bounds[name], others[name]
        both[name] = (max(one[0], other[0]), min(one[1], other[1]))
    return both


def _guard(
    graph: Any, refuses: Callable[[Any], bool], outside: frozenset[str], number: Iterator[int]
) -> None:
    """Put nodes before lookups that make a negative index one that no table has.

    Args:
        graph: the ``onnx.GraphProto``, or one inside a node of it.
        refuses: see `check_indices`.
        outside: names that do not depend on what is given.
        number: numbers for names.
    """
    from onnx import TensorProto, helper, numpy_helper

    fixed = {*outside, *(one.name for one in graph.initializer)}
    nodes: list[Any] = []
    for node in graph.node:
        inner = [g for one in node.attribute for g in (one.g, *one.graphs) if g.node]
        if not inner and all(name in fixed for name in node.input if name):
            fixed.update(node.output)
        for part in inner:
            _guard(part, refuses, frozenset(fixed), number)
        place = _LOOKUPS.get(node.op_type)
        if place is not None and node.input[place] not in fixed and refuses(node):
            given = node.input[place]
            zero, beyond, index, low, safe, made = (f"{_NAME}{next(number)}" for _ in range(6))
            graph.initializer.append(numpy_helper.from_array(np.array(0), zero))
            graph.initializer.append(numpy_helper.from_array(_BEYOND, beyond))
            nodes += [
                helper.make_node("Cast", [given], [index], index, to=TensorProto.INT64),
                helper.make_node("Less", [index, zero], [low], low),
                helper.make_node("Where", [low, beyond, index], [safe], safe),
                helper.make_node("CastLike", [safe, given], [made], made),
            ]
            node.input[place] = made
        nodes.append(node)
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _found(graph: Any, refuses: Callable[[Any], bool]) -> Iterator[tuple[str, int, int]]:
    """Yield inputs whose numbers are looked up in a table, the least index and the largest."""
    from onnx import helper, numpy_helper

    made = {name: node for node in graph.node for name in node.output}
    tables = {one.name: one for one in graph.initializer}
    types = {
        one.name: np.dtype(helper.tensor_dtype_to_np_dtype(one.type.tensor_type.elem_type))
        for one in graph.input
    }
    small = {
        name: numpy_helper.to_array(one).item()
        for name, one in tables.items()
        if list(one.dims) in ([], [1])
    }
    for node in graph.node:
        if node.op_type != "Gather" or node.input[0] not in tables or not refuses(node):
            continue
        axis = next((one.i for one in node.attribute if one.name == "axis"), 0)
        size = tables[node.input[0]].dims[axis]
        index, casts = _source(node.input[1], made)
        inside = _unwrapped(index, made, small, size)
        if inside is not None:
            index, more = _source(inside, made)
            casts += more
        held = types.get(index)
        # Unsigned, Keras makes int32 of them, which need not hold them.
        if held is None or not (held.kind == "i" or (held.kind == "u" and inside is None)):
            continue
        if all(np.can_cast(held, helper.tensor_dtype_to_np_dtype(to)) for to in casts):
            yield index, 0 if inside is None else -size, size - 1


def _source(name: str, made: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Return the tensor that one's numbers are, and the types they have been cast to."""
    casts = []
    while name in made and made[name].op_type in _SAME:
        node = made[name]
        casts += [one.i for one in node.attribute if one.name == "to"]
        name = node.input[0]
    return name, casts


def _unwrapped(
    name: str, made: Mapping[str, Any], small: Mapping[str, float], size: int
) -> str | None:
    """Return the tensor whose numbers below 0 are counted from a table's end; ``None`` if none are.

    Args:
        name: the indices into the table.
        made: nodes by what they give.
        small: constants of one number.
        size: how many rows the table has.
    """
    used: Counter[str] = Counter()
    numbers, sources, seen, left = set(), set(), set(), [name]
    while left:
        one = left.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in small:
            numbers.add(small[one])
        elif one in made and made[one].op_type in {"Cast", *(k for w in _WRAPS for k in w)}:
            used[made[one].op_type] += 1
            left += made[one].input
        else:
            sources.add(one)
    del used["Cast"]
    return sources.pop() if used in _WRAPS and numbers == {0, size} and len(sources) == 1 else None
