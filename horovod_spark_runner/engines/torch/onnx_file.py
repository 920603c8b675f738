"""A trained PyTorch module as one ONNX file, whose inputs are the columns."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram

from ...data.manifest import Column
from ...errors import EnvironmentProblem, ModelError, on_one_line
from ...quiet import quiet_imports
from ...training.onnx import MOST_BYTES, ROWS, import_onnxruntime, write_facts
from ...training.trained_model import Recipe
from .program import silent


def need_onnx() -> None:
    """Check that the packages that write and run ONNX files are installed.

    Raises:
        EnvironmentProblem: it is not.
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


def onnx_contents(
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
            first[0].dim_param = ROWS
