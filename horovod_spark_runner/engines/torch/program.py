"""Programs of torch.export: graphs with weights, which need no code of the user's."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import json
import math
import operator
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from ...errors import ModelError, brief, on_one_line
from ...frameworks import quiet_imports
from ...typed_json import load_json
from .binding import InputBinding

_CPU = torch.device("cpu")
# PyTorch treats batches of no row and of one apart, and says so in a range that begins here.
_FEW, _MANY = 2, 2**31
# Version of the format; PyTorch raises it where readers of an earlier one would fail.
_SCHEMA = 8
_GRAPH = "models/model.json"
_AGAIN = "torch.export.save(torch.export.export(module, …), path)"
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
# The types that the format counts.
_DTYPES = dict(
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


def make_program(
    module: nn.Module, feed: InputBinding, values: Sequence[Tensor], *, any_rows: bool = True
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
        self._graph = _read_graph(content["graph"], device)
        # Parts of the module are held by their names, of which no attribute here is to be one.
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


def taken_by(program: Program) -> tuple[_Input, ...]:
    """Return a program's inputs."""
    return program._taken


def fixed_rows(program: Program) -> int | None:
    """Return the number of rows a program takes; ``None`` for any number."""
    return program._rows


@dataclass(frozen=True)
class _Input:
    """An input of a program.

    Attributes:
        name: its name.
        shape: shape of one row's value.
        dtype: PyTorch's type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


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


def _taken(inputs: Sequence[tuple[str, Mapping[str, Any]]], structure: str) -> tuple[_Input, ...]:
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
        taken.append(_Input(name, shape, _DTYPES[meta["dtype"]]))
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


class ProgramFile:
    """A file of torch.export.

    Args:
        data: its contents.
        where: its place, for messages.

    Raises:
        ModelError: it is none.
    """

    def __init__(self, data: bytes, where: str) -> None:
        self._where = where
        with self.reading():
            self._archive = zipfile.ZipFile(io.BytesIO(data))
            entries = self._archive.infolist()
            self._entries = {entry.filename.partition("/")[2]: entry for entry in entries}
            if "archive_format" not in self._entries:
                raise ModelError(f"{where} is no .pt2 archive; write it by {_AGAIN}")
            # Readers differ in which of two entries they take; PyTorch compresses none.
            size = sum(entry.file_size for entry in entries)
            if len(self._entries) < len(entries) or size > len(data):
                raise ModelError(f"{where} is damaged: its entries overlap, or are there twice")

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Raise errors of the file's contents as one that names the file.

        Raises:
            ModelError: instead of any error.
        """
        try:
            yield
        except ModelError as error:
            if self._where in str(error):
                raise
            raise ModelError(f"{self._where}: {error}") from error
        except Exception as error:  # of Python's, of the archive, or of PyTorch
            raise ModelError(
                f"{self._where} is no program of torch.export that can be read here: "
                f"{type(error).__name__}: {on_one_line(error, 300)}; write it anew: {_AGAIN}"
            ) from error

    def program(self) -> dict[str, Any]:
        """Return the fields of the program.

        Raises:
            ModelError: there is none, or it is of another version of the format.
        """
        fields: dict[str, Any] = self._json(_GRAPH)
        version = fields["schema_version"]["major"]
        if version != _SCHEMA:
            raise ModelError(
                f"{self._where} is of version {version} of torch.export's format, and {_SCHEMA} is "
                f"read here; write it anew by another PyTorch: {_AGAIN}"
            )
        return fields

    def tensors(self, kind: str, device: torch.device) -> dict[str, Tensor]:
        """Return tensors by name; those that share memory in the file share it.

        Args:
            kind: ``"weights"`` (of the module's ``state_dict``), or ``"constants"``.
            device: where they are to be.

        Raises:
            ModelError: there are objects among them, or they are damaged.
        """
        stored: dict[tuple[str, torch.dtype], Tensor] = {}
        loaded: dict[str, Tensor] = {}
        with self.reading():
            for name, entry in self._json(f"data/{kind}/model_{kind}_config.json")[
                "config"
            ].items():
                path, meta = f"data/{kind}/{entry['path_name']}", entry["tensor_meta"]
                if entry["use_pickle"] or meta is None:
                    raise ModelError(
                        f"{self._where} holds a pickled object ({path}), which is not loaded"
                    )
                key = path, _DTYPES[meta["dtype"]]
                if key not in stored:
                    stored[key] = self._tensor(*key).to(device)
                tensor = torch.as_strided(
                    stored[key],
                    [size["as_int"] for size in meta["sizes"]],
                    [stride["as_int"] for stride in meta["strides"]],
                    meta["storage_offset"]["as_int"],
                )
                if entry["is_param"]:
                    tensor = nn.Parameter(tensor, meta["requires_grad"])
                loaded[name] = tensor
        return loaded

    def _tensor(self, path: str, dtype: torch.dtype) -> Tensor:
        data = bytearray(self._read(path))
        # In memory of PyTorch's own, which is aligned.
        return torch.frombuffer(data, dtype=dtype).clone() if data else torch.empty(0, dtype=dtype)

    def _json(self, name: str) -> Any:
        return load_json(self._read(name))

    def _read(self, name: str) -> bytes:
        if name not in self._entries:
            raise ModelError(f"{self._where} holds no {name}; write it anew: {_AGAIN}")
        return self._archive.read(self._entries[name])


@dataclass(frozen=True)
class _Value:
    """A value that is computed when a graph is, by its name there."""

    name: str


@dataclass(frozen=True)
class _Graph:
    """The computation of a program, or of a part of one.

    Attributes:
        inputs: names of its inputs.
        outputs: its outputs, as `_Step.args` are.
        single: whether it gives one tensor, and no tuple of one.
        steps: the calls, in their order.
    """

    inputs: list[str]
    outputs: list[Any]
    single: bool
    steps: list[_Step]

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


@dataclass(frozen=True)
class _Step:
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


def _read_graph(fields: Mapping[str, Any], device: torch.device) -> _Graph:
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
    return _Graph(inputs, outputs, fields["is_single_tensor_return"], steps[::-1])


def _read_step(node: Mapping[str, Any], device: torch.device) -> _Step:
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
    return _Step(target, args, named, outputs, [])


# By the kind of an argument, how its value in JSON is read.
_READERS: dict[str, Callable[[Any], Any]] = {
    "as_none": lambda value: None,
    **dict.fromkeys(("as_int", "as_bool", "as_string"), lambda value: value),
    "as_float": float,  # JSON has no number for infinity
    "as_tensor": lambda value: _Value(str(value["name"])),
    "as_name": lambda value: _Value(str(value)),
    "as_scalar_type": _DTYPES.__getitem__,
    "as_memory_format": lambda value: _FORMATS[value - 1],
    "as_layout": {_STRIDED: torch.strided}.__getitem__,
    "as_complex": lambda value: complex(value["real"], value["imag"]),
}


def _read(argument: Mapping[str, Any], device: torch.device) -> Any:
    """Return an argument: a constant, or a `_Value` for a computed one."""
    ((kind, value),) = argument.items()
    if kind in _READERS:
        return _READERS[kind](value)
    if kind == "as_device":
        return device
    if kind == "as_graph":
        return _read_graph(value["graph"], device)
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


def _set_gradients(enabled: bool, graph: _Graph, *values: Any) -> Any:
    with torch.set_grad_enabled(enabled):
        return graph(*values)


def _set_autocast(kind: str, dtype: Any, enabled: Any, cached: Any, graph: _Graph, *of: Any) -> Any:
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
