"""A trained PyTorch module for other programs, whose inputs are the columns."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ...data.manifest import Column
from ...errors import DataError, EnvironmentProblem, ModelError, on_one_line
from ...frameworks import quiet_imports
from ...storage.arrays import Arrays
from ...storage.filesystem import Location
from ...training.engine import ONNX
from ...training.onnx import MOST_BYTES, OnnxSession, import_onnxruntime, write_facts
from ...training.onnx import ROWS as ONNX_ROWS
from ...training.sample_rows import check_close, finite_rows, repeat_rows
from ...training.spec import OutputSpec
from ...training.trained_model import Recipe
from .binding import InputBinding, join_columns
from .engine import check_exportable
from .loading import CPU, ROWS, Predictor, make_predictor
from .model import pick, to_numpy
from .program import dump_program, load_program, make_program, silent

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
        called: Predictor,
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
        self._dtypes = [_to_dtype(join_columns(blank, slot)) for slot in called.feed.slots]

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
        _need_onnx()
        # PyTorch calls them by names of Python's; the file need not.
        names, added = _numbered("column", columns), _numbered("output", outputs)
    else:
        names, added = list(columns), list(outputs)
    called = make_predictor(recipe, CPU)
    sample = recipe.sample_rows().inputs
    rows = dict(zip(columns, (sample[column.name] for column in recipe.columns), strict=True))
    program = _program(called, recipe, names, added, list(rows.values()))
    if format == ONNX:
        size = max(_SIZES) if recipe.batch_size is None else recipe.batch_size
        predict = functools.partial(_predicted, called, recipe, inputs, outputs)
        rows = finite_rows(rows, size, lambda some: [*predict(some).values()])
        data = _onnx_contents(program, recipe, inputs, list(outputs))
        _compare(called, recipe, inputs, outputs, rows, OnnxSession(data))
    else:
        data = dump_program(program)
        again = load_program(data, str(target))
        _compare(called, recipe, inputs, outputs, rows, functools.partial(_run, again))
    target.write_bytes(data)


def _numbered(kind: str, names: Sequence[str]) -> list[str]:
    return [f"{kind}{number}" for number in range(len(names))]


def _program(
    called: Predictor,
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
    feed = InputBinding(tuple((name,) for name in batch), tuple(batch))
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


def _run(program: nn.Module, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    with torch.inference_mode():
        outputs = program(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    return {name: to_numpy(tensor) for name, tensor in outputs.items()}


def _predicted(
    called: Predictor,
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
    called: Predictor,
    recipe: Recipe,
    inputs: Sequence[Column],
    outputs: Sequence[str],
    sample: Arrays,
    run: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]],
) -> None:
    """Check that an export's outputs equal the module's.

    Raises:
        ModelError: an output of the two differs.
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


def _need_onnx() -> None:
    """Check that the packages that write and run ONNX files are installed.

    Raises:
        EnvironmentProblem: a package is not installed.
    """
    import_onnxruntime()
    try:
        with quiet_imports(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import onnx
            import onnxscript

            assert onnx, onnxscript
    except ImportError as error:
        raise EnvironmentProblem(
            "ONNX files of PyTorch modules need onnx, onnxscript and onnxruntime, of which one is "
            f"not installed: pip install 'horovod_spark_runner[onnx]' ({error})"
        ) from error


def _onnx_contents(
    program: ExportedProgram,
    recipe: Recipe,
    inputs: Sequence[Column],
    added: list[str],
) -> bytes:
    """Return the contents of an ONNX file of a program.

    Args:
        program: takes the columns, and gives the outputs.
        recipe: the model.
        inputs: the columns, by their names in the file.
        added: the names of the outputs in the file.

    Raises:
        ModelError: the format cannot hold the program.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    if size >= MOST_BYTES:
        raise ModelError(
            "an ONNX file of one piece holds less than 2 GiB, and the module's weights are "
            f"{size:,} bytes; export it as 'torch_export'"
        )
    try:
        with silent():
            made = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=[column.name for column in inputs],
                output_names=added,
            )
        assert made is not None
        model = made.model_proto
        if recipe.batch_size is None:
            _name_rows(model.graph)
        # As `_ColumnModule` gives them.
        specs = [
            replace(one, dtype="float32") if one.dtype == "bfloat16" else one
            for one in recipe.outputs
        ]
        write_facts(model, inputs, specs, added, {})
        return bytes(model.SerializeToString())
    except Exception as error:  # whatever PyTorch's exporter comes across
        reason = on_one_line(error)
        raise ModelError(
            f"an ONNX file cannot hold the module: {type(error).__name__}: {reason}. A program "
            "(format='torch_export') may"
        ) from error


def _name_rows(graph: Any) -> None:
    """Mark the first dimension of a graph's inputs and outputs as the rows."""
    for value in (*graph.input, *graph.output):
        first = value.type.tensor_type.shape.dim
        if first:
            first[0].Clear()
            first[0].dim_param = ONNX_ROWS
