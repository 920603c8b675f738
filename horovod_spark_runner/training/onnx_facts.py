"""What is written into ONNX files of what is known of a model, whatever the framework."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .._version import __version__
from ..data.manifest import Column
from ..scoring.onnx_session import METADATA
from .spec import OutputSpec

FORMAT = 1
# What the first dimension of all that goes in and out is called.
ROWS = "rows"
# Protocol buffers hold less than 2 GiB; the graph itself needs little beside the weights.
MOST_BYTES = 2**31 - 2**24


def tell_facts(
    model: Any, columns: Sequence[Column], outputs: Sequence[OutputSpec], added: Sequence[str]
) -> None:
    """Write into an ONNX model what its columns hold and what it gives.

    Args:
        model: the ``onnx.ModelProto``.
        columns: the inputs, by their names in the file.
        outputs: what the model gives.
        added: the names of the outputs in the file.
    """
    import onnx

    facts = {
        "format": FORMAT,
        "version": __version__,
        "columns": [asdict(column) for column in columns],
        "outputs": [
            {
                "name": name,
                "shape": spec.shape,
                "dtype": spec.dtype,
                "activation": spec.activation,
            }
            for name, spec in zip(added, outputs, strict=True)
        ],
    }
    onnx.helper.set_model_props(model, {METADATA: json.dumps(facts)})


def add_facts(model: Any, more: Mapping[str, Any]) -> None:
    """Write more into an ONNX model that `tell_facts` has written into."""
    import onnx

    known = {one.key: one.value for one in model.metadata_props}
    facts = {**json.loads(known[METADATA]), **more}
    onnx.helper.set_model_props(model, {**known, METADATA: json.dumps(facts)})


def name_rows(graph: Any) -> None:
    """Say that the first dimension of all that goes into a graph and out of it is the rows."""
    for value in (*graph.input, *graph.output):
        first = value.type.tensor_type.shape.dim
        if first:
            first[0].Clear()
            first[0].dim_param = ROWS
