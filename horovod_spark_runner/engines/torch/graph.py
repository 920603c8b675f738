"""Graphs of torch.export, read from JSON and computed operator by operator."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ModelError, brief

# The types that the format counts.
DTYPES = dict(
    enumerate(
        (
            *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
            *(torch.float16, torch.float32, torch.float64),
            *(torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.bfloat16),
        ),
        start=1,
    )
)
_FORMATS = (
    *(torch.contiguous_format, torch.channels_last, torch.channels_last_3d),
    torch.preserve_format,
)
_STRIDED = 7
_OPERATOR = re.compile(r"torch\.ops\.(aten|prims)\.(\w+)\.(\w+)")
# The one among them that reads and writes files.
_FILES = "from_file"


@dataclass(frozen=True)
class _Value:
    """A value that is computed when a graph is, by its name there."""

    name: str


@dataclass(frozen=True)
class Step:
    """A call of an operator.

    Attributes:
        target: the operator, see `_find_operator`.
        args: its arguments, in which each `_Value` stands for what was computed before.
        named: its keyword arguments.
        outputs: names of what it gives, nested as that is; ``None`` for what nothing reads.
        ended: names of values that no later step reads.
    """

    target: str
    args: list[Any]
    named: dict[str, Any]
    outputs: Any
    ended: list[str]


@dataclass(frozen=True)
class Graph:
    """The computation of a program, or of a part of one.

    Attributes:
        inputs: names of its inputs.
        outputs: its outputs, as `Step.args` are.
        single: whether it gives one tensor, and no tuple of one.
        steps: the calls, in their order.
    """

    inputs: list[str]
    outputs: list[Any]
    single: bool
    steps: list[Step]

    def __call__(self, *values: Any) -> Any:
        computed = dict(zip(self.inputs, values, strict=True))
        for step in self.steps:
            args = [_filled(value, computed) for value in step.args]
            named = {name: _filled(value, computed) for name, value in step.named.items()}
            _store(step.outputs, _find_operator(step.target)(*args, **named), computed)
            for name in step.ended:
                computed.pop(name, None)
        made = tuple(_filled(self.outputs, computed))
        return made[0] if self.single else made


def _filled(value: Any, computed: Mapping[str, Any]) -> Any:
    if isinstance(value, _Value):
        return computed[value.name]
    return [_filled(one, computed) for one in value] if isinstance(value, list) else value


def _store(names: Any, results: Any, computed: dict[str, Any]) -> None:
    if isinstance(names, str):
        computed[names] = results
    elif names is not None:
        for name, one in zip(names, results, strict=True):
            _store(name, one, computed)


@functools.cache
def _find_operator(target: str) -> Callable[..., Any]:
    """Return an operator that computes tensors or numbers, and does nothing else.

    Raises:
        ModelError: ``target`` names none.
    """
    if target in _OTHERS:
        return _OTHERS[target]
    match = _OPERATOR.fullmatch(target)
    if match:
        space, name, overload = match.groups()
        # PyTorch finds TorchScript's as well, of which one writes files.
        full = f"{space}::{name}" + ("" if overload == "default" else f".{overload}")
        if name != _FILES and full in _operators():
            made: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), name), overload)
            return made
    raise ModelError(
        f"the program calls {brief(target)}, which is none of PyTorch's operators on tensors"
    )


@functools.cache
def _operators() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


def _set_gradients(enabled: bool, graph: Graph, *values: Any) -> Any:
    with torch.set_grad_enabled(enabled):
        return graph(*values)


def _set_autocast(kind: str, dtype: Any, enabled: Any, cached: Any, graph: Graph, *of: Any) -> Any:
    with torch.autocast(kind, dtype, enabled, cached):
        return graph(*of)


_OTHERS: dict[str, Callable[..., Any]] = {
    **{
        f"_operator.{name}": getattr(operator, name)
        for name in (
            *("eq", "ne", "le", "ge", "lt", "gt", "neg", "pos", "and_", "or_"),
            *("mul", "add", "sub", "floordiv", "truediv", "mod", "pow"),
        )
    },
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_not", "sym_int", "sym_float", "sym_ite", "sym_max", "sym_min")
    },
    "math.trunc": math.trunc,
    "torch.ops.higher_order.wrap_with_set_grad_enabled": _set_gradients,
    "torch.ops.higher_order.wrap_with_autocast": _set_autocast,
    "torch.ops.higher_order.cond": torch.ops.higher_order.cond,
}


def read_graph(fields: Mapping[str, Any], device: torch.device) -> Graph:
    """Build the graph from its fields in JSON.

    Args:
        fields: as PyTorch's schema of the format has them.
        device: where it is computed, whatever devices it names.

    Raises:
        ModelError: something in it is more than a computation of tensors and numbers.
        LookupError: or another error of Python's: it is damaged.
    """
    inputs = [_name(one, device) for one in fields["inputs"]]
    outputs = [_read(one, device) for one in fields["outputs"]]
    later = {value.name for value in _values(outputs)}
    steps = []
    for node in reversed(fields["nodes"]):
        step = _read_step(node, device)
        ended = {value.name for value in _values([*step.args, *step.named.values()])}
        ended.update(_names(step.outputs))
        step.ended.extend(ended - later)
        later |= ended
        steps.append(step)
    return Graph(inputs, outputs, fields["is_single_tensor_return"], steps[::-1])


def _read_step(node: Mapping[str, Any], device: torch.device) -> Step:
    target = node["target"]
    _find_operator(target)
    args, named = [], {}
    for argument in node["inputs"]:
        value = _read(argument["arg"], device)
        if argument["kind"] == 1 or not argument["name"]:
            args.append(value)
        else:
            named[argument["name"]] = value
    outputs: Any = [_name(one, device) for one in node["outputs"]]
    in_tuple = node["is_hop_single_tensor_return"] is False
    if len(outputs) < 2 and not in_tuple:
        outputs = outputs[0] if outputs else None
    return Step(target, args, named, outputs, [])


def _read(argument: Mapping[str, Any], device: torch.device) -> Any:
    """Return an argument: a constant, or a `_Value` for a computed one."""
    ((kind, value),) = argument.items()
    if kind == "as_none":
        return None
    if kind in ("as_int", "as_bool", "as_string"):
        return value
    if kind == "as_float":  # JSON has no number for infinity
        return float(value)
    if kind == "as_tensor":
        return _Value(str(value["name"]))
    if kind == "as_name":
        return _Value(str(value))
    if kind == "as_scalar_type":
        return DTYPES[value]
    if kind == "as_memory_format":
        return _FORMATS[value - 1]
    if kind == "as_layout" and value == _STRIDED:
        return torch.strided
    if kind == "as_device":
        return device
    if kind == "as_complex":
        return complex(value["real"], value["imag"])
    if kind == "as_graph":
        return read_graph(value["graph"], device)
    if kind in ("as_sym_int", "as_sym_float", "as_sym_bool", "as_optional_tensor"):
        return _read(value, device)
    if kind in ("as_sym_ints", "as_sym_floats", "as_sym_bools", "as_optional_tensors"):
        return [_read(one, device) for one in value]
    if kind in ("as_ints", "as_bools", "as_strings", "as_floats", "as_tensors"):
        return [_read({kind[:-1]: one}, device) for one in value]
    raise ModelError(f"the program has an argument of the kind {brief(kind)}, which is not read")


def _name(output: Mapping[str, Any], device: torch.device) -> Any:
    def named(value: Any) -> Any:
        if isinstance(value, list):
            return [named(one) for one in value]
        return value.name if isinstance(value, _Value) else None

    return named(_read(output, device))


def _values(value: Any) -> Iterator[_Value]:
    if isinstance(value, _Value):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _values(one)


def _names(names: Any) -> Iterator[str]:
    if isinstance(names, str):
        yield names
    elif names is not None:
        for one in names:
            yield from _names(one)
