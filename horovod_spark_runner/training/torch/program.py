"""Modules as programs of torch.export: graphs with weights, which need no code of the user's."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils import _pytree

from ...errors import ModelError, on_one_line
from ...quiet import quiet_imports
from .feeding import Feed

_ARCHIVE = "archive_format"
# Files that PyTorch's loader would unpickle, or run as machine code.
_PICKLED = (".pt",)
_OBJECTS = ("custom_obj", "opaque_obj")
# PyTorch treats batches of no row and of one apart, and says so in a range that begins here.
_FEW, _MANY = 2, 2**31


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

    Args:
        program: what torch.export has made or read.
        device: where it is computed.

    Attributes:
        module: PyTorch's own module of it.
        names: the names of its inputs, in their order.
    """

    def __init__(self, program: ExportedProgram, device: torch.device) -> None:
        super().__init__()
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        self.names = _names(program)
        self.module = program.module()
        self._structure = program.call_spec.in_spec

    def forward(self, *values: Tensor, **named: Tensor) -> Any:
        """Return what the program gives."""
        ordered = [*values, *(named[name] for name in self.names[len(values) :])]
        args, kwargs = _pytree.tree_unflatten(ordered, self._structure)
        return self.module(*args, **kwargs)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep to themselves what torch.export tells of modules it cannot hold: errors are raised."""
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
    """Return the contents of a program's file."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def load_program(data: bytes, where: str) -> ExportedProgram:
    """Return the program in a file; nothing is unpickled but tensors.

    Args:
        data: contents of the file.
        where: its place, for messages.

    Raises:
        ModelError: there is no program in it, or more than graphs and tensors.
    """
    try:
        _check_plain(data, where)
        with silent():
            return torch.export.load(io.BytesIO(data))
    except ModelError:
        raise
    except Exception as error:  # whatever PyTorch comes across
        told = on_one_line(error, 300)
        raise ModelError(
            f"{where} is no program of torch.export that PyTorch {torch.__version__} reads: "
            f"{type(error).__name__}: {told}"
        ) from error


def _check_plain(data: bytes, where: str) -> None:
    """Check that PyTorch's loader will not unpickle objects, or load machine code."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        inside = {name.partition("/")[2]: name for name in archive.namelist()}
        if _ARCHIVE not in inside:
            raise ModelError(
                f"{where} is no .pt2 archive; write it by torch.export.save(program, path)"
            )
        for name, whole in inside.items():
            wrong = ""
            if name.startswith("data/aotinductor/"):
                wrong = "machine code of one computer"
            elif name.startswith("data/sample_inputs/"):
                torch.load(io.BytesIO(archive.read(whole)), weights_only=True)
            elif name.endswith(_PICKLED):
                wrong = "pickled weights, as earlier versions of PyTorch wrote them"
            elif name.endswith("_config.json"):
                entries = json.loads(archive.read(whole))["config"].values()
                if any(_is_pickled(entry) for entry in entries):
                    wrong = "pickled objects"
            if wrong:
                raise ModelError(
                    f"{where} holds {wrong} ({name}), which is not loaded; export the module "
                    "again: torch.export.save(torch.export.export(module, …), path)"
                )


def _is_pickled(entry: dict[str, Any]) -> bool:
    return bool(entry["use_pickle"]) or entry["path_name"].startswith(_OBJECTS)


def taken_by(program: ExportedProgram) -> list[Taken]:
    """Return what a program takes.

    Raises:
        ModelError: something else than tensors with a value for each row.
    """
    found = []
    for name, node in zip(_names(program), _user_inputs(program), strict=True):
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.shape:
            raise ModelError(
                f"input {name!r} of the program is no tensor with a value for each row"
            )
        if not all(isinstance(size, int) for size in value.shape[1:]):
            raise ModelError(
                f"input {name!r} of the program has the shape {tuple(value.shape)}; only the "
                "number of rows may vary"
            )
        found.append(Taken(name, tuple(value.shape[1:]), value.dtype))
    if not found:
        raise ModelError("the program takes no inputs")
    return found


def fixed_rows(program: ExportedProgram) -> int | None:
    """Return the number of rows a program takes; ``None`` for any number.

    Raises:
        ModelError: it takes some numbers of rows only.
    """
    sizes = {str(s): s for s in (n.meta["val"].shape[0] for n in _user_inputs(program))}
    if len(sizes) > 1:
        raise ModelError(f"the program's inputs take different numbers of rows: {', '.join(sizes)}")
    (size,) = sizes.values()
    if isinstance(size, int):
        return size
    bounds = program.range_constraints.get(size.node.expr)
    if bounds is None or bounds.lower > _FEW or bounds.upper < _MANY:
        raise ModelError(
            f"the program takes {size} rows, in {bounds}; export it for any number of rows, "
            "dynamic_shapes with torch.export.Dim.DYNAMIC for the first dimension of each input"
        )
    return None


def _names(program: ExportedProgram) -> list[str]:
    """Return the names of a program's inputs, in its order, those of keywords as they are given."""
    names = [node.name for node in _user_inputs(program)]
    positional, named = program.call_spec.in_spec.children()
    if named.num_leaves == len(named.context or ()):
        names[positional.num_leaves :] = named.context or ()
    return names


def _user_inputs(program: ExportedProgram) -> Iterator[Any]:
    """Yield the nodes of the inputs that are given in a call."""
    specs = program.graph_signature.input_specs
    names = [
        spec.arg.name
        for spec in specs
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
    ]
    given = [spec for spec in specs if spec.kind is InputKind.USER_INPUT]
    if len(names) < len(given):
        raise ModelError("the program takes inputs that are no tensors")
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for name in names:
        yield nodes[name]
