"""Programs of torch.export: graphs with weights, which need no code of the user's."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.passes import move_to_device_pass

from ...errors import ModelError, on_one_line
from ...frameworks import quiet_imports
from .binding import InputBinding

_CPU = torch.device("cpu")
# PyTorch treats batches of no row and of one apart, and says so in a range that begins here.
_FEW, _MANY = 2, 2**31


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


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    """Raise errors of PyTorch as one that names the file.

    Raises:
        ModelError: instead of any error.
    """
    try:
        with silent():
            yield
    except Exception as error:  # of Python's, of the archive, or of PyTorch
        raise ModelError(
            f"torch.export.load cannot read {where}: {type(error).__name__}: "
            f"{on_one_line(error, 300)}; write it anew with this PyTorch, "
            "torch.export.save(torch.export.export(module, …), path)"
        ) from error


def read_program(data: bytes, where: str) -> ExportedProgram:
    """Read a program by torch.export.load, which runs code that the file may hold.

    Args:
        data: contents of a file that is trusted.
        where: its place, for messages.

    Raises:
        ModelError: torch.export.load fails, or the file has no example of its inputs.
    """
    with _reading(where):
        program = torch.export.load(io.BytesIO(data))
    if program.example_inputs is None:
        raise ModelError(f"{where} has no example of its inputs; write it anew")
    return program


def load_program(data: bytes, where: str, device: torch.device = _CPU) -> nn.Module:
    """Return the module of a program, which takes inputs in their order or by name.

    Args:
        data: see `read_program`.
        where: see `read_program`.
        device: where it is to be computed.

    Raises:
        ModelError: see `read_program`.
    """
    program = read_program(data, where)
    names = input_names(program)
    by_position = len(program.example_inputs[0])

    def arrange(_: nn.Module, values: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = {**dict(zip(names, values, strict=False)), **named}
        ordered = [given[name] for name in names if name in given]
        return tuple(ordered[:by_position]), dict(
            zip(names[by_position:], ordered[by_position:], strict=False)
        )

    with _reading(where):
        module = (program if device == _CPU else move_to_device_pass(program, device)).module()
    # Before PyTorch's own hook, which compares the call with the one that was captured.
    module.register_forward_pre_hook(arrange, with_kwargs=True, prepend=True)
    return module


def input_names(program: ExportedProgram) -> list[str]:
    """Return the names of a program's inputs: first those that it takes by position."""
    by_position, named = program.example_inputs
    return [*map(str, program.graph_signature.user_inputs[: len(by_position)]), *named]


def describe_inputs(
    program: ExportedProgram,
) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], int | None]:
    """Return shape and type of a row of each input, and the rows that the program takes.

    The rows are ``None`` for a program that takes any number of them.

    Raises:
        ModelError: an input is not a tensor of rows of one shape, or the program takes only some
            numbers of rows.
    """
    names, values = input_names(program), program.graph_signature.user_inputs
    held = {node.name: node.meta.get("val") for node in program.graph.nodes}
    tensors = [held.get(str(value)) for value in values]
    if not names or len(names) != len(values):
        raise ModelError("the program takes no inputs, or nested ones; let it take tensors")
    inputs, sizes = {}, []
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, Tensor) or not tensor.ndim:
            raise ModelError(f"input {name!r} of the program is not a tensor of rows")
        if not all(isinstance(size, int) for size in tensor.shape[1:]):
            raise ModelError(
                f"input {name!r} of the program has dimensions of any size; only the number of "
                "rows may vary"
            )
        inputs[name] = tuple(tensor.shape[1:]), tensor.dtype
        sizes.append(tensor.shape[0])
    return inputs, _rows(sizes, program.range_constraints)


def _rows(sizes: Sequence[Any], ranges: Mapping[Any, Any]) -> int | None:
    """Return the number of rows a program takes; ``None`` for any number.

    Raises:
        ModelError: the program takes only some numbers of rows.
    """
    fixed = {size for size in sizes if isinstance(size, int)}
    if len(fixed) > 1 or (fixed and not all(isinstance(size, int) for size in sizes)):
        raise ModelError("the program's inputs take different numbers of rows")
    by_name = {str(symbol): bounds for symbol, bounds in ranges.items()}
    for size in () if fixed else map(str, sizes):
        bounds = by_name.get(size)
        if bounds is None or bounds.lower > _FEW or bounds.upper < _MANY:
            raise ModelError(
                f"the program takes {size} rows, in {bounds}; export it for any number of rows, "
                "dynamic_shapes with torch.export.Dim.DYNAMIC for the first dimension of each input"
            )
    return next(iter(fixed), None)
