"""A trained PyTorch module for other programs, whose inputs are the columns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ...data.manifest import Column
from ...errors import DataError, ModelError, on_one_line
from ...storage.arrays import Arrays
from ...storage.filesystem import Location
from ...training.engine import ONNX
from ...training.onnx import OnnxSession
from ...training.sample_rows import check_close, finite_rows, repeat_rows
from ...training.spec import OutputSpec
from ...training.trained_model import Recipe
from .feeding import Feed, joined
from .loading import CPU, ROWS, Predicting, make_predicting, to_numpy
from .onnx_file import need_onnx, onnx_contents
from .outputs import pick
from .program import Program, dump_program, load_program, make_program, silent
from .source import check_exportable

# Rows that an export is compared on.
_SIZES = (1, 17)


class _ColumnModule(nn.Module):
    """A module whose inputs are columns, by names, and whose outputs have names.

    Args:
        called: the module.
        columns: its feature columns.
        names: what they are called here.
        outputs: what the module gives.
        added: what its outputs are called here.
    """

    def __init__(
        self,
        called: Predicting,
        columns: Sequence[Column],
        names: Sequence[str],
        outputs: Sequence[OutputSpec],
        added: Sequence[str],
    ) -> None:
        super().__init__()
        self.module = called.module
        self._feed, self._added = called.feed, list(added)
        self._names = {column.name: name for column, name in zip(columns, names, strict=True)}
        self._paths = [output.path for output in outputs]
        blank = {column.name: column.blank() for column in columns}
        self._dtypes = [_to_dtype(joined(blank, slot)) for slot in called.feed.slots]

        def forward(**inputs: Tensor) -> dict[str, Tensor]:
            return self._of(inputs)

        # PyTorch calls the inputs of a program as the parameters are.
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, kind) for name in names]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward

    def _of(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = [
            self._joined([inputs[self._names[name]] for name in slot], dtype)
            for slot, dtype in zip(self._feed.slots, self._dtypes, strict=True)
        ]
        outputs = self._feed.call(self.module, values)
        leaves = [pick(outputs, path) for path in self._paths]
        plain = [leaf.float() if leaf.dtype is torch.bfloat16 else leaf for leaf in leaves]
        # Two outputs may be one tensor.
        return {name: leaf.clone() for name, leaf in zip(self._added, plain, strict=True)}

    def _joined(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        ranked = [part[:, None] if part.dim() == 1 else part for part in parts]
        return torch.cat([part.to(dtype) for part in ranked], -1)


def _to_dtype(array: np.ndarray) -> torch.dtype:
    """Return PyTorch's type of an array's elements."""
    return torch.from_numpy(array).dtype


def export_recipe(
    recipe: Recipe, format: str, columns: Sequence[str], outputs: Sequence[str], target: Location
) -> None:
    """Write the model of a recipe; see `Engine.export`."""
    check_exportable(format, columns, tuple(recipe.transforms))
    if len({*columns, *outputs}) < len(columns) + len(outputs):
        raise ModelError(
            f"an export names inputs and outputs once: inputs {list(columns)}, outputs "
            f"{list(outputs)}"
        )
    inputs = [replace(c, name=n, encoding="") for c, n in zip(recipe.columns, columns, strict=True)]
    if format == ONNX:
        need_onnx()
        # PyTorch calls them by names of Python's; the file need not.
        names, added = _numbered("column", columns), _numbered("output", outputs)
    else:
        names, added = list(columns), list(outputs)
    called = make_predicting(recipe, CPU)
    sample = recipe.sample_rows().inputs
    rows = dict(zip(columns, (sample[column.name] for column in recipe.columns), strict=True))
    program = _program(called, recipe, names, added, list(rows.values()))
    if format == ONNX:
        size = max(_SIZES) if recipe.batch_size is None else recipe.batch_size
        predict = functools.partial(_predicted, called, recipe, inputs, outputs)
        rows = finite_rows(rows, size, lambda some: [*predict(some).values()])
        data = onnx_contents(program, recipe, inputs, list(outputs))
        _compare(called, recipe, inputs, outputs, rows, OnnxSession(data))
    else:
        data = dump_program(program)
        again = load_program(data, str(target))
        _compare(called, recipe, inputs, outputs, rows, functools.partial(_run, again))
    target.write_bytes(data)


def _numbered(kind: str, names: Sequence[str]) -> list[str]:
    return [f"{kind}{number}" for number in range(len(names))]


def _program(
    called: Predicting,
    recipe: Recipe,
    names: Sequence[str],
    added: Sequence[str],
    sample: Sequence[np.ndarray],
) -> ExportedProgram:
    """Return the module with columns as inputs as a program.

    Raises:
        ModelError: torch.export cannot hold it.
    """
    module = _ColumnModule(called, recipe.columns, names, recipe.outputs, added)
    rows = recipe.batch_size
    batch = repeat_rows(dict(zip(names, sample, strict=True)), ROWS if rows is None else rows)
    feed = Feed(tuple((name,) for name in batch), tuple(batch))
    values = [torch.from_numpy(array) for array in batch.values()]
    try:
        with silent():
            return make_program(module, feed, values, any_rows=rows is None)
    except Exception as error:  # whatever torch.export or the module's forward raises
        reason = on_one_line(error)
        raise ModelError(
            f"torch.export cannot hold {type(called.module).__name__}: {type(error).__name__}: "
            f"{reason}"
        ) from error


def _run(program: Program, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    with torch.inference_mode():
        outputs = program(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    return {name: to_numpy(tensor) for name, tensor in outputs.items()}


def _predicted(
    called: Predicting,
    recipe: Recipe,
    inputs: Sequence[Column],
    outputs: Sequence[str],
    batch: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return the module's outputs, by the names of the export."""
    pairs = zip(recipe.columns, inputs, strict=True)
    made = called.of({column.name: batch[outside.name] for column, outside in pairs})
    specs = zip(recipe.outputs, outputs, strict=True)
    return {name: to_numpy(pick(made, spec.path)) for spec, name in specs}


def _compare(
    called: Predicting,
    recipe: Recipe,
    inputs: Sequence[Column],
    outputs: Sequence[str],
    sample: Arrays,
    run: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]],
) -> None:
    """Check that an export's outputs equal the module's.

    Raises:
        ModelError: it does not.
    """
    kind = type(called.module).__name__
    for rows in _SIZES if recipe.batch_size is None else (recipe.batch_size,):
        batch = repeat_rows(sample, rows)
        expected = _predicted(called, recipe, inputs, outputs, batch)
        try:
            exported = run(batch)
            for name, value in expected.items():
                check_close(value, exported[name])
        except (AssertionError, DataError, ModelError, RuntimeError) as error:
            raise ModelError(
                f"the export of {kind} is not written: for {rows} rows it does not give what the "
                f"module gives: {on_one_line(error)}"
            ) from error
