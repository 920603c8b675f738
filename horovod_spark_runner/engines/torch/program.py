"""Modules as programs of torch.export: graphs with weights, which need no code of the user's."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from ...errors import ModelError, brief, on_one_line
from ...quiet import quiet_imports
from .feeding import Feed
from .graph import DTYPES, read_graph
from .program_file import ProgramFile

_CPU = torch.device("cpu")
# PyTorch treats batches of no row and of one apart, and says so in a range that begins here.
_FEW, _MANY = 2, 2**31
# Where the specification of an input has the name of the tensor that is held for it.
_HELD = {
    "parameter": "parameter_name",
    "buffer": "buffer_name",
    "tensor_constant": "tensor_constant_name",
}
# A dimension of any size, as a symbol alone.
_SYMBOL = re.compile(r"Symbol\('(\w+)'(?:, \w+=(?:True|False))*\)")
_TUPLES = ("builtins.tuple", "collections.namedtuple")
# What is required of inputs, where that is nothing but as many rows of each.
_ROWS_OF = r"L(\[[^\[\]]*\])+\.size\(\)\[0\]"
_SAME_ROWS = re.compile(f"{_ROWS_OF} == {_ROWS_OF}")


@dataclass(frozen=True)
class Taken:
    """An input of a program.

    Attributes:
        name: its name.
        shape: shape of one row's value.
        dtype: PyTorch's type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Program(nn.Module):
    """A program, called by the order of its inputs or by their names.

    Its ``state_dict`` has the names that weights had in the module which was exported.

    Args:
        fields: the program, as JSON gave it back.
        weights: parameters and buffers, by name.
        constants: the other tensors that it holds.
        device: where it is computed.

    Raises:
        ModelError: it is more than a computation of tensors, or not of any number of rows, or of
            one number of rows.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        super().__init__()
        content = fields["graph_module"]
        called = content["module_call_graph"][0]["signature"]
        held = {name: _hold(self, name, tensor) for name, tensor in weights.items()}
        for name, tensor in constants.items():
            held[name] = _hold(self, name, tensor, persistent=False)
        self._graph = read_graph(content["graph"], device)
        # Where what the graph is called with is held, and where what it gives replaces it.
        self._inputs, self._outputs = list[Any](), list[Any]()
        user_inputs = []
        for name, spec in zip(self._graph.inputs, content["signature"]["input_specs"], strict=True):
            ((kind, argument),) = spec.items()
            if kind not in (*_HELD, "user_input") or not name:
                raise ModelError("the program takes inputs that are no tensors")
            self._inputs.append(held[argument[_HELD[kind]]] if kind in _HELD else None)
            if kind == "user_input":
                user_inputs.append((name, content["graph"]["tensor_values"][name]))
        for spec in content["signature"]["output_specs"]:
            ((kind, argument),) = spec.items()
            if kind not in ("user_output", "buffer_mutation"):
                raise ModelError(f"the program has an output of the kind {brief(kind)}")
            self._outputs.append(None if kind == "user_output" else held[argument["buffer_name"]])
        self._taken = _taken(user_inputs, called["in_spec"])
        self._rows = _rows(
            [meta["sizes"][0] for _, meta in user_inputs], fields["range_constraints"]
        )
        for required in fields["guards_code"]:
            if not _SAME_ROWS.fullmatch(required):
                raise ModelError(f"the program takes some inputs only: {on_one_line(required)}")
        _, self._structure = json.loads(called["out_spec"])
        _structured(self._structure, itertools.repeat(None))

    def forward(self, *values: Tensor, **named: Tensor) -> Any:
        """Return the program's outputs."""
        names = [one.name for one in self._taken]
        ordered = [*values, *(named[name] for name in names[len(values) :])]
        for value, one in zip(ordered, self._taken, strict=True):
            rows = ordered[0].shape[0] if self._rows is None else self._rows
            if tuple(value.shape[1:]) != one.shape or value.shape[0] != rows:
                raise ModelError(
                    f"input {one.name!r} of the program takes {rows} rows of shape {one.shape}, "
                    f"and was given a tensor of shape {tuple(value.shape)}"
                )
        arguments = iter(ordered)
        made = self._graph(*(getattr(*at) if at else next(arguments) for at in self._inputs))
        for at, value in zip(self._outputs, made, strict=True):
            if at:
                getattr(*at).copy_(value)
        user_outputs = (value for at, value in zip(self._outputs, made, strict=True) if not at)
        return _structured(self._structure, user_outputs)


def _hold(
    module: nn.Module, path: str, tensor: Tensor, *, persistent: bool = True
) -> tuple[nn.Module, str]:
    """Make a tensor a part of a module, and return the module that has it and its name there."""
    *folders, name = path.split(".")
    for folder in folders:
        if folder not in module._modules:
            module.add_module(folder, nn.Module())
        module = module.get_submodule(folder)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor, persistent)
    return module, name


def _taken(inputs: Sequence[tuple[str, Mapping[str, Any]]], structure: str) -> tuple[Taken, ...]:
    """Return a program's inputs, from their graph names and the calling convention.

    Raises:
        ModelError: something else than tensors with a value for each row.
    """
    names = [name for name, _ in inputs]
    _, passed = json.loads(structure)
    positional, named = passed["children_spec"]
    keywords = json.loads(named["context"])
    if _leaves(named) == len(keywords):
        names[_leaves(positional) :] = keywords
    taken = []
    for name, (_, meta) in zip(names, inputs, strict=True):
        if not meta["sizes"]:
            raise ModelError(
                f"input {name!r} of the program is no tensor with a value for each row"
            )
        if not all("as_int" in size for size in meta["sizes"][1:]):
            raise ModelError(
                f"input {name!r} of the program has dimensions of any size; only the number of "
                "rows may vary"
            )
        shape = tuple(size["as_int"] for size in meta["sizes"][1:])
        taken.append(Taken(name, shape, DTYPES[meta["dtype"]]))
    if not taken:
        raise ModelError("the program takes no inputs")
    return tuple(taken)


def _rows(sizes: Sequence[Mapping[str, Any]], ranges: Mapping[str, Any]) -> int | None:
    """Return the number of rows a program takes; ``None`` for any number.

    Raises:
        ModelError: it takes some numbers of rows only.
    """
    first, *others = sizes
    if any(other.keys() != first.keys() for other in others):
        raise ModelError("the program's inputs take different numbers of rows")
    if "as_int" in first:
        if any(other != first for other in others):
            raise ModelError("the program's inputs take different numbers of rows")
        return int(first["as_int"])
    for size in sizes:
        expression = size["as_expr"]["expr_str"]
        symbol = _SYMBOL.fullmatch(expression)
        bounds = ranges.get(symbol[1]) if symbol else None
        least, most = (bounds["min_val"], bounds["max_val"]) if bounds else (_MANY, None)
        if (least or 0) > _FEW or (most is not None and most < _MANY):
            raise ModelError(
                f"the program takes {brief(expression)} rows, in {bounds}; export it for any "
                "number of rows, dynamic_shapes with torch.export.Dim.DYNAMIC for the first "
                "dimension of each input"
            )
    return None


def _leaves(structure: Mapping[str, Any]) -> int:
    if structure["type"] is None:
        return 1
    return sum(_leaves(child) for child in structure["children_spec"])


def _structured(structure: Mapping[str, Any], values: Iterator[Any]) -> Any:
    """Return values nested by PyTorch's description of a structure.

    Raises:
        ModelError: it is of something else than tuples, lists and dictionaries.
    """
    kind = structure["type"]
    if kind is None:
        return next(values)
    made = [_structured(child, values) for child in structure["children_spec"]]
    if kind in _TUPLES:
        return tuple(made)
    if kind == "builtins.list":
        return made
    keys = json.loads(structure["context"])
    if not isinstance(keys, list) or not all(isinstance(key, (str, int)) for key in keys):
        raise ModelError(f"the program gives {brief(kind)}; let it give tensors by name")
    return dict(zip(keys, made, strict=True))


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Silence torch.export's reports on modules it cannot hold; errors are still raised."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), quiet_imports():
        warnings.simplefilter("ignore")
        failed = None
        try:
            yield
        except Exception as error:  # is no notice of an import's
            failed = error
    if failed is not None:
        raise failed


def make_program(
    module: nn.Module, feed: Feed, values: Sequence[Tensor], *, any_rows: bool = True
) -> ExportedProgram:
    """Return a module as a program, on the CPU, as it predicts.

    Args:
        module: the module, which stays as it is.
        feed: how it is called.
        values: its inputs for a few rows.
        any_rows: whether the program takes any number of rows, or as many as ``values``.

    Raises:
        Exception: of any kind, where torch.export cannot hold the module.
    """
    module = copy.deepcopy(module).cpu().eval()
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for value in values:
        shapes[value] = {0: Dim.DYNAMIC if any_rows else Dim.STATIC}
    args = () if feed.names is not None else tuple(values)
    named = {} if feed.names is None else dict(zip(feed.names, values, strict=True))
    with torch.no_grad():
        return torch.export.export(module, args, named, dynamic_shapes=shapes)


def dump_program(program: ExportedProgram) -> bytes:
    """Return the contents of a program's file, without the rows that it was made with."""
    program.example_inputs = torch.utils._pytree.tree_map(torch.zeros_like, program.example_inputs)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def load_program(data: bytes, where: str, device: torch.device = _CPU) -> Program:
    """Return the program in a file; see `program_file`.

    Args:
        data: contents of the file.
        where: its place, for messages.
        device: where it is to be computed.

    Raises:
        ModelError: there is no program in it, or more than a graph of operators and tensors.
    """
    file = ProgramFile(data, where)
    weights, constants = (file.tensors(kind, device) for kind in ("weights", "constants"))
    with file.reading():
        return Program(file.program(), weights, constants, device)


def taken_by(program: Program) -> tuple[Taken, ...]:
    """Return a program's inputs."""
    return program._taken


def fixed_rows(program: Program) -> int | None:
    """Return the number of rows a program takes; ``None`` for any number."""
    return program._rows
